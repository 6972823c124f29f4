//! Where a disk's data is: in one file, or in several that are read only.

use std::fs::File;
use std::io;

use rustix::fs::{OFlags, fcntl_getfl};

use super::request::Extent;
use super::{BlockError, MAX_PARTS, PART_ALIGNMENT, SECTOR};

/// A file that is a part of a read-only disk.
#[derive(Debug)]
pub struct DiskPart {
    /// Where on the disk it begins, a multiple of [`PART_ALIGNMENT`].
    pub offset: u64,
    /// The part has the size that the file has when the disk is made.
    pub file: File,
}

/// Where a disk's data is.
#[derive(Debug)]
pub enum Backing {
    /// In a file, whose size is the disk's.
    File(File),
    /// In several files. The disk ends with the last one, at a multiple of [`PART_ALIGNMENT`]. What is in none of them is
    /// zeros.
    Parts(Vec<DiskPart>),
}

impl From<File> for Backing {
    fn from(file: File) -> Self {
        Self::File(file)
    }
}

impl From<Vec<DiskPart>> for Backing {
    fn from(parts: Vec<DiskPart>) -> Self {
        Self::Parts(parts)
    }
}

/// A disk's data, checked.
#[derive(Debug)]
pub(super) enum Data {
    File(File),
    Parts(Parts),
}

impl Data {
    /// Also returns the disk's size in bytes.
    pub(super) fn new(backing: Backing, read_only: bool) -> Result<(Self, u64), BlockError> {
        match backing {
            Backing::File(file) => {
                let bytes = length(&file)?;
                if !bytes.is_multiple_of(SECTOR) {
                    return Err(BlockError::Size(bytes));
                }
                let flags = fcntl_getfl(&file).map_err(|e| BlockError::File(e.into()))?;
                if !read_only && flags & OFlags::RWMODE != OFlags::RDWR {
                    return Err(BlockError::NotWritable);
                }
                Ok((Self::File(file), bytes))
            }
            Backing::Parts(_) if !read_only => Err(BlockError::NotWritable),
            Backing::Parts(parts) => {
                let parts = Parts::new(parts)?;
                let end = parts.0.last().map_or(0, |part| part.end);
                let bytes =
                    end.checked_next_multiple_of(PART_ALIGNMENT).ok_or(BlockError::Part { offset: end })?;
                Ok((Self::Parts(parts), bytes))
            }
        }
    }

    /// The file of a disk that can be written.
    pub(super) fn file(&self) -> io::Result<&File> {
        match self {
            Self::File(file) => Ok(file),
            Self::Parts(_) => Err(io::ErrorKind::ReadOnlyFilesystem.into()),
        }
    }

    /// How many bytes its files occupy on the host.
    pub(super) fn occupied(&self) -> u64 {
        match self {
            Self::File(file) => occupied(file),
            Self::Parts(Parts(parts)) => {
                parts.iter().fold(0, |sum, part| sum.saturating_add(occupied(&part.file)))
            }
        }
    }
}

fn length(file: &File) -> Result<u64, BlockError> {
    Ok(file.metadata().map_err(BlockError::File)?.len())
}

fn occupied(file: &File) -> u64 {
    // Not through std, which would ask with a call that the keeper's filter does not know.
    let blocks = rustix::fs::fstat(file).map_or(0, |data| data.st_blocks);
    u64::try_from(blocks).unwrap_or(0).saturating_mul(512)
}

/// Files that follow one another on a disk.
#[derive(Debug)]
pub(super) struct Parts(Vec<Placed>);

#[derive(Debug)]
struct Placed {
    start: u64,
    end: u64,
    file: File,
}

/// Bytes of a disk that are next to each other in one file, or in none.
#[derive(Debug)]
pub(super) struct Run<'a> {
    pub(super) bytes: u64,
    /// The file, and where in it they are.
    pub(super) source: Option<(&'a File, u64)>,
}

impl Parts {
    fn new(parts: Vec<DiskPart>) -> Result<Self, BlockError> {
        if parts.len() > MAX_PARTS {
            return Err(BlockError::Parts(parts.len()));
        }
        let mut placed: Vec<Placed> = Vec::with_capacity(parts.len());
        for DiskPart { offset, file } in parts {
            let follows = placed.last().is_none_or(|before| before.end <= offset);
            match offset.checked_add(length(&file)?) {
                Some(end) if follows && offset.is_multiple_of(PART_ALIGNMENT) => {
                    placed.push(Placed { start: offset, end, file });
                }
                _ => return Err(BlockError::Part { offset }),
            }
        }
        Ok(Self(placed))
    }

    /// The runs that make up `extent`, in order: at most two for each part, and one more.
    pub(super) fn runs(&self, extent: Extent) -> impl Iterator<Item = Run<'_>> {
        let end = extent.offset.saturating_add(extent.bytes);
        let mut at = extent.offset;
        let mut parts = self.0[self.0.partition_point(|part| part.end <= at)..].iter().peekable();
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let (until, source) = match parts.peek() {
                Some(part) if part.start <= at => (part.end, Some((&part.file, at - part.start))),
                Some(part) => (part.start, None),
                None => (end, None),
            };
            // An empty part holds nothing.
            if source.is_some() {
                parts.next();
            }
            let bytes = until.min(end).saturating_sub(at);
            at = at.saturating_add(bytes);
            Some(Run { bytes, source })
        })
    }
}
