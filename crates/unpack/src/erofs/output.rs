//! Writes the file of the index.

use std::io::{self, BufWriter, Seek, SeekFrom, Write};

use super::format::{self, Superblock};

/// How much of the head is remembered: as much as the superblock's checksum can be of.
const HEAD: usize = 4096;
const SUPER_OFFSET: usize = 1024;

/// A file that is written in order. Its superblock is written last.
pub(super) struct Output<W: Write + Seek> {
    out: BufWriter<W>,
    position: u64,
    head: Vec<u8>,
}

impl<W: Write + Seek> Output<W> {
    pub(super) fn new(out: W) -> Self {
        Self { out: BufWriter::new(out), position: 0, head: Vec::new() }
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let missing = HEAD.saturating_sub(self.head.len()).min(bytes.len());
        self.head.extend(&bytes[..missing]);
        self.out.write_all(bytes)?;
        self.position += bytes.len() as u64;
        Ok(())
    }

    /// Fills up with zeros.
    pub(super) fn pad_to(&mut self, position: u64) -> io::Result<()> {
        while self.position < position {
            let missing = usize::try_from(position - self.position).unwrap_or(usize::MAX);
            self.write(&[0; HEAD][..missing.min(HEAD)])?;
        }
        Ok(())
    }

    /// Writes the superblock, whose checksum is that of the rest of its block, which was written before.
    pub(super) fn finish(mut self, superblock: &Superblock) -> io::Result<()> {
        let end = (1_usize << superblock.block_bits).max(SUPER_OFFSET + (1 << 9));
        let block = self.head.get_mut(SUPER_OFFSET..end).ok_or(io::ErrorKind::UnexpectedEof)?;
        let encoded = superblock.encode();
        block[..encoded.len()].copy_from_slice(&encoded);
        let checksum = format::checksum(block).to_le_bytes();
        block[format::CHECKSUM].copy_from_slice(&checksum);
        self.out.seek(SeekFrom::Start(format::SUPER_OFFSET))?;
        self.out.write_all(&block[..encoded.len()])?;
        self.out.flush()
    }
}
