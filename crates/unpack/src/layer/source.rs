//! The decompressed bytes of a layer, counted, hashed and written while they are read.

use std::cell::Cell;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::rc::Rc;

use ring::digest::{Context, SHA256, SHA256_OUTPUT_LEN};

use super::{Compression, LayerError, Options, Refusal};
use crate::limits::Limits;
use crate::tree::Layout;

/// Blocks of an archive.
pub(crate) const BLOCK: usize = 512;

const BUFFER: usize = 64 << 10;

/// The largest window of a zstd frame, as a power of two: the limit of the `zstd` program.
const ZSTD_WINDOW: u32 = 27;

/// The digest of a layer's archive, and the size of its file.
pub(crate) type Finished = ([u8; 32], u64);

pub(crate) struct Source<'a, W: Write> {
    input: Box<dyn Read + 'a>,
    compressed: Rc<Cell<u64>>,
    output: BufWriter<W>,
    layout: Layout,
    limits: &'a Limits,
    digest: Context,
    buffer: Vec<u8>,
    /// What of the buffer was not consumed yet.
    start: usize,
    end: usize,
    /// Bytes that were decompressed, and bytes that were consumed.
    decompressed: u64,
    position: u64,
    written: u64,
}

/// Counts what a decompressor reads.
struct Counted<R> {
    input: R,
    count: Rc<Cell<u64>>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(buffer)?;
        self.count.set(self.count.get().saturating_add(read as u64));
        Ok(read)
    }
}

impl<'a, W: Write> Source<'a, W> {
    pub(crate) fn new(input: impl Read + 'a, output: W, options: &'a Options) -> Result<Self, LayerError> {
        let compressed = Rc::new(Cell::new(0));
        let input = BufReader::with_capacity(BUFFER, Counted { input, count: Rc::clone(&compressed) });
        let input: Box<dyn Read + 'a> = match options.compression {
            Compression::None => Box::new(input),
            Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(input)),
            Compression::Zstd => {
                let mut decoder =
                    zstd::stream::read::Decoder::with_buffer(input).map_err(LayerError::Read)?;
                decoder.window_log_max(ZSTD_WINDOW).map_err(LayerError::Read)?;
                Box::new(decoder)
            }
        };
        Ok(Self {
            input,
            compressed,
            output: BufWriter::with_capacity(BUFFER, output),
            layout: options.layout,
            limits: &options.limits,
            digest: Context::new(&SHA256),
            buffer: vec![0; BUFFER],
            start: 0,
            end: 0,
            decompressed: 0,
            position: 0,
            written: 0,
        })
    }

    /// The size of the image's blocks.
    pub(crate) fn block_size(&self) -> u64 {
        self.layout.block_size()
    }

    /// The next block of the archive, or none at its end.
    pub(crate) fn block(&mut self) -> Result<Option<[u8; BLOCK]>, Refusal> {
        let mut block = [0; BLOCK];
        let mut filled = 0;
        while filled < BLOCK {
            let piece = self.piece(BLOCK - filled)?;
            if piece.is_empty() {
                return if filled == 0 { Ok(None) } else { Err(Refusal::Truncated) };
            }
            block[filled..filled + piece.len()].copy_from_slice(piece);
            filled += piece.len();
        }
        Ok(Some(block))
    }

    /// The next `size` bytes, and the padding behind them. The caller has checked `size` against a limit.
    pub(crate) fn bytes(&mut self, size: usize) -> Result<Vec<u8>, Refusal> {
        let mut bytes = Vec::new();
        while bytes.len() < size {
            let piece = self.piece(size - bytes.len())?;
            if piece.is_empty() {
                return Err(Refusal::Truncated);
            }
            bytes.extend_from_slice(piece);
        }
        self.skip_padding()?;
        Ok(bytes)
    }

    /// Passes over data that is not part of a file, and the padding behind it.
    pub(crate) fn skip(&mut self, size: u64) -> Result<(), Refusal> {
        self.each_piece(size, |_, _| Ok(()))?;
        self.skip_padding()
    }

    /// Skips a file's data, and returns its offset in the layer's file.
    pub(crate) fn data(&mut self, size: u64) -> Result<u64, Refusal> {
        if self.layout == Layout::Tar {
            let offset = self.position;
            self.each_piece(size, |_, _| Ok(()))?;
            return Ok(offset);
        }
        let offset = self.written.next_multiple_of(self.layout.block_size());
        if size > 0 {
            let padding = io::repeat(0).take(offset - self.written);
            io::copy(&mut { padding }, &mut self.output).map_err(Refusal::Write)?;
            self.written = offset.saturating_add(size);
        }
        self.each_piece(size, |output, piece| output.write_all(piece).map_err(Refusal::Write))?;
        Ok(offset)
    }

    /// Passes over what fills the last block of a file.
    pub(crate) fn skip_padding(&mut self) -> Result<(), Refusal> {
        let padding = self.position.next_multiple_of(BLOCK as u64) - self.position;
        self.each_piece(padding, |_, _| Ok(()))
    }

    /// Reads what follows the archive: it is part of what the diff-id is of.
    pub(crate) fn finish(mut self) -> Result<Finished, Refusal> {
        while !self.piece(BUFFER)?.is_empty() {}
        self.output.flush().map_err(Refusal::Write)?;
        let digest = self.digest.finish();
        let mut diff_id = [0; SHA256_OUTPUT_LEN];
        diff_id.copy_from_slice(digest.as_ref());
        Ok((diff_id, self.written))
    }

    fn each_piece(
        &mut self,
        size: u64,
        mut pass: impl FnMut(&mut BufWriter<W>, &[u8]) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        // What cannot be there is not looked for: the limit is named rather than a truncated archive.
        if size > self.limits.bytes.saturating_sub(self.position) {
            return Err(Refusal::TooLarge(self.limits.bytes));
        }
        let mut rest = size;
        while rest > 0 {
            let range = self.available(usize::try_from(rest).unwrap_or(usize::MAX))?;
            if range.is_empty() {
                return Err(Refusal::Truncated);
            }
            rest -= range.len() as u64;
            pass(&mut self.output, &self.buffer[range])?;
        }
        Ok(())
    }

    fn piece(&mut self, most: usize) -> Result<&[u8], Refusal> {
        let range = self.available(most)?;
        Ok(&self.buffer[range])
    }

    /// Consumes at most `most` bytes, and returns their range in the buffer. None at the end.
    fn available(&mut self, most: usize) -> Result<std::ops::Range<usize>, Refusal> {
        if self.start == self.end {
            self.fill()?;
        }
        let taken = self.start..self.end.min(self.start.saturating_add(most));
        self.start = taken.end;
        self.position += taken.len() as u64;
        Ok(taken)
    }

    fn fill(&mut self) -> Result<(), Refusal> {
        let read = loop {
            match self.input.read(&mut self.buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => break result.map_err(Refusal::Read)?,
            }
        };
        (self.start, self.end) = (0, read);
        self.decompressed = self.decompressed.saturating_add(read as u64);
        if self.decompressed > self.limits.bytes {
            return Err(Refusal::TooLarge(self.limits.bytes));
        }
        let counted = self.decompressed.saturating_sub(self.limits.ratio_free);
        if counted > self.compressed.get().saturating_mul(self.limits.ratio) {
            return Err(Refusal::Ratio(self.limits.ratio));
        }
        self.digest.update(&self.buffer[..read]);
        if self.layout == Layout::Tar {
            self.output.write_all(&self.buffer[..read]).map_err(Refusal::Write)?;
            self.written = self.decompressed;
        }
        Ok(())
    }
}
