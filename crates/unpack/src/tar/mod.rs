//! Reads the headers of an archive that an attacker may have written: version 7, ustar, star, GNU and PAX.
//!
//! The formats and what is lenient in them follow Go's archive/tar, with which images are made and which every other
//! runtime reads them with. No existing crate fits: here, the offsets of data, limits on every header and all sparse
//! formats are the point.

mod header;
mod numbers;
mod pax;
mod sparse;

use std::io::Write;

use crate::layer::{Refusal, Source};
use crate::limits::Limits;
use crate::tree::{Kind, Metadata, Segment};
use header::{Header, text};
use pax::Pax;
use sparse::Part;

/// An entry of the archive. Its paths are as they were written.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) path: Vec<u8>,
    pub(crate) metadata: Metadata,
    pub(crate) kind: EntryKind,
}

#[derive(Debug)]
pub(crate) enum EntryKind {
    Directory,
    /// A hard link, and its target.
    Link(Vec<u8>),
    Inode(Kind),
}

pub(crate) struct Archive<'a, W: Write> {
    source: Source<'a, W>,
    limits: &'a Limits,
    headers: u64,
    current: Vec<u8>,
}

/// The fields of extended headers, which apply to the next entry.
#[derive(Default)]
struct Ahead {
    pax: Option<Pax>,
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
}

impl<'a, W: Write> Archive<'a, W> {
    pub(crate) fn new(source: Source<'a, W>, limits: &'a Limits) -> Self {
        Self { source, limits, headers: 0, current: Vec::new() }
    }

    /// How many headers were read, also those that describe other entries.
    pub(crate) fn headers(&self) -> u64 {
        self.headers
    }

    /// The name of the entry that was read last, for messages.
    pub(crate) fn current(&self) -> &[u8] {
        &self.current
    }

    /// Reads what follows the archive; gives its digest and the size of the layer's file.
    pub(crate) fn finish(self) -> Result<crate::layer::Finished, Refusal> {
        self.source.finish()
    }

    /// The next entry; its data has been passed over.
    pub(crate) fn next(&mut self) -> Result<Option<Entry>, Refusal> {
        let mut ahead = Ahead::default();
        loop {
            let Some(header) = self.header()? else {
                let alone = ahead.pax.is_none() && ahead.path.is_none() && ahead.link.is_none();
                return if alone { Ok(None) } else { Err(Refusal::Truncated) };
            };
            self.headers += 1;
            if self.headers > self.limits.entries {
                return Err(Refusal::TooManyEntries(self.limits.entries));
            }
            self.current = header.path();
            match header.kind() {
                b'g' => self.source.skip(header.size()?)?,
                b'x' => {
                    let bytes = self.bounded(header.size()?, self.limits.pax, Refusal::PaxTooLong)?;
                    ahead.pax = Some(Pax::parse(&bytes, self.limits)?);
                }
                b'L' => ahead.path = Some(self.long_name(&header)?),
                b'K' => ahead.link = Some(self.long_name(&header)?),
                _ => return self.entry(&header, ahead).map(Some),
            }
        }
    }

    /// The next header. Two blocks of zeros end the archive, as does the end of its bytes.
    fn header(&mut self) -> Result<Option<Header>, Refusal> {
        let zeros = |block: &[u8; 512]| block.iter().all(|byte| *byte == 0);
        match self.source.block()? {
            None => Ok(None),
            Some(block) if !zeros(&block) => Header::new(block).map(Some),
            Some(_) => match self.source.block()? {
                Some(block) if !zeros(&block) => Err(Refusal::LoneZeroBlock),
                _ => Ok(None),
            },
        }
    }

    fn bounded(
        &mut self,
        size: u64,
        limit: usize,
        refusal: fn(usize) -> Refusal,
    ) -> Result<Vec<u8>, Refusal> {
        match usize::try_from(size) {
            Ok(size) if size <= limit => self.source.bytes(size),
            _ => Err(refusal(limit)),
        }
    }

    fn long_name(&mut self, header: &Header) -> Result<Vec<u8>, Refusal> {
        // With the NUL byte that ends it.
        let bytes = self.bounded(header.size()?, self.limits.path + 1, Refusal::PathTooLong)?;
        Ok(text(&bytes).to_vec())
    }

    fn entry(&mut self, header: &Header, ahead: Ahead) -> Result<Entry, Refusal> {
        let mut pax = ahead.pax.unwrap_or_default();
        let sparse_name = pax.sparse.name.take();
        let path = ahead.path.or(sparse_name).or_else(|| pax.path.take()).unwrap_or_else(|| header.path());
        self.current.clone_from(&path);
        let link = ahead.link.or_else(|| pax.link.take()).unwrap_or_else(|| header.link());
        let (seconds, nanoseconds) = match pax.time {
            Some(time) => time,
            None => (header.seconds()?, 0),
        };
        let metadata = Metadata {
            mode: header.mode()?,
            uid: owner(pax.uid.map_or_else(|| header.uid(), Ok)?, "user")?,
            gid: owner(pax.gid.map_or_else(|| header.gid(), Ok)?, "group")?,
            seconds,
            nanoseconds,
            xattrs: pax.take_xattrs(),
        };
        let kind = match header.kind() {
            b'0' | b'7' | 0 => self.file(header, &pax, &path)?,
            b'S' => EntryKind::Inode(self.gnu_sparse(header, &pax)?),
            b'1' => EntryKind::Link(link),
            b'2' => EntryKind::Inode(self.symlink(link)?),
            b'3' => {
                let (major, minor) = header.device()?;
                EntryKind::Inode(Kind::Character { major, minor })
            }
            b'4' => {
                let (major, minor) = header.device()?;
                EntryKind::Inode(Kind::Block { major, minor })
            }
            b'5' => EntryKind::Directory,
            b'6' => EntryKind::Inode(Kind::Fifo),
            unknown => return Err(Refusal::UnknownType(unknown)),
        };
        Ok(Entry { path, metadata, kind })
    }

    fn symlink(&self, target: Vec<u8>) -> Result<Kind, Refusal> {
        if target.is_empty() || target.len() > self.limits.symlink || target.contains(&0) {
            return Err(Refusal::SymlinkTarget(self.limits.symlink));
        }
        Ok(Kind::Symlink(target.into()))
    }

    fn file(&mut self, header: &Header, pax: &Pax, path: &[u8]) -> Result<EntryKind, Refusal> {
        let size = pax.size.map_or_else(|| header.size(), Ok)?;
        // Before there was a type for them, directories were files whose names end with a slash.
        if path.ends_with(b"/") {
            self.source.skip(size)?;
            return Ok(EntryKind::Directory);
        }
        let sparse = &pax.sparse;
        let kind = match (sparse.major, sparse.minor, &sparse.map) {
            (Some(1), Some(0), _) => {
                let (parts, before) = self.sparse_lines(size)?;
                self.sparse_data(parts, sparse.size.ok_or(Refusal::SparseMap)?, size - before)?
            }
            (None | Some(0), _, Some(map)) => {
                self.sparse_data(sparse::pairs(map)?, sparse.size.ok_or(Refusal::SparseMap)?, size)?
            }
            (None, None, None) => self.plain(size)?,
            _ => return Err(Refusal::SparseMap),
        };
        Ok(EntryKind::Inode(kind))
    }

    fn plain(&mut self, size: u64) -> Result<Kind, Refusal> {
        let offset = self.source.data(size)?;
        self.source.skip_padding()?;
        Ok(Kind::File { size, offset })
    }

    fn gnu_sparse(&mut self, header: &Header, pax: &Pax) -> Result<Kind, Refusal> {
        let mut parts = Vec::new();
        let (mut more, size) = sparse::gnu_header(header, &mut parts, self.limits)?;
        let mut blocks = 0;
        while more {
            // A block may have no entry. That there is a limit to the blocks is what counts.
            blocks += 1;
            if blocks > self.limits.segments {
                return Err(Refusal::TooManySegments(self.limits.segments));
            }
            let block = self.source.block()?.ok_or(Refusal::Truncated)?;
            more = sparse::gnu_parts(&block[..504], block[504], &mut parts, self.limits)?;
        }
        self.sparse_data(parts, size, pax.size.map_or_else(|| header.size(), Ok)?)
    }

    /// The map before the data of a file that takes `size` bytes, and how many bytes the map takes.
    fn sparse_lines(&mut self, size: u64) -> Result<(Vec<Part>, u64), Refusal> {
        let mut lines = sparse::Lines::default();
        let mut read = 0;
        loop {
            read += 512;
            if read > size {
                return Err(Refusal::SparseMap);
            }
            let block = self.source.block()?.ok_or(Refusal::Truncated)?;
            if lines.read(&block, self.limits)? {
                return Ok((lines.into_parts()?, read));
            }
        }
    }

    fn sparse_data(&mut self, parts: Vec<Part>, size: u64, stored: u64) -> Result<Kind, Refusal> {
        sparse::check(&parts, size, stored)?;
        let block = self.source.block_size();
        let aligned = |number: u64| number.is_multiple_of(block);
        let mut segments: Vec<Segment> = Vec::new();
        for (start, length) in parts.into_iter().filter(|(_, length)| *length > 0) {
            let offset = self.source.data(length)?;
            if !aligned(start) || !aligned(offset) {
                return Err(Refusal::SparseUnaligned(block));
            }
            match segments.last_mut() {
                Some(last) if last.start + last.length == start && last.offset + last.length == offset => {
                    last.length += length;
                }
                _ => segments.push(Segment { start, length, offset }),
            }
        }
        self.source.skip_padding()?;
        Ok(match segments[..] {
            [Segment { start: 0, length, offset }] if length == size => Kind::File { size, offset },
            _ => Kind::Sparse { size, segments: segments.into() },
        })
    }
}

/// A user or a group. The largest number means "none" to Linux.
fn owner(number: u64, name: &'static str) -> Result<u32, Refusal> {
    match u32::try_from(number) {
        Ok(u32::MAX) | Err(_) => Err(Refusal::Range(name)),
        Ok(number) => Ok(number),
    }
}
