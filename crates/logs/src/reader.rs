//! Reads a ring. The file belongs to a keeper that may be compromised, so nothing in it is trusted.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::Meta;
use crate::create::no_surprises;
use crate::format::{HEADER, HEADER_SIZE, Header, PREFIX, Prefix, Slots};

/// How often a header that is just being written is read again. A slot stays incomplete only if its writer
/// died.
const RETRIES: usize = 16;
/// The polling interval of [`Reader::wait`].
const POLL: Duration = Duration::from_millis(50);

/// The log cannot be read.
#[derive(Debug, Error)]
pub enum ReaderError {
    #[error("Cannot open the log {0}")]
    Open(PathBuf, #[source] io::Error),
    /// The path is not a regular file.
    #[error("{0} is not a regular file")]
    NotAFile(PathBuf),
    /// The file has no valid header.
    #[error("{0} is not a log, or it is damaged")]
    Damaged(PathBuf),
    #[error("Cannot read the log")]
    Read(#[source] io::Error),
}

/// A piece of output with its metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogRecord {
    pub meta: Meta,
    /// The bytes, straight from the guest: escape them before printing.
    pub bytes: Vec<u8>,
    pub position: u64,
    /// The position of the next record; see [`Reader::from`].
    pub next_position: u64,
}

/// Reads a ring from its oldest record to its newest, also while it is written.
///
/// Every call does a bounded amount of work and buffers at most one record, whatever is in the file. The
/// position never decreases.
#[derive(Debug)]
pub struct Reader {
    file: File,
    capacity: u64,
    position: u64,
    /// Where to stop; none to continue with records that are written later.
    until: Option<u64>,
    lost: u64,
}

impl Reader {
    /// Opens a ring at its oldest record.
    pub fn open(path: &Path) -> Result<Self, ReaderError> {
        let failed = |error| ReaderError::Open(path.to_owned(), error);
        let file = File::options().read(true).custom_flags(no_surprises()).open(path).map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(ReaderError::NotAFile(path.to_owned()));
        }
        let header = read_header(&file)?.ok_or_else(|| ReaderError::Damaged(path.to_owned()))?;
        Ok(Self { file, capacity: header.capacity, position: header.start, until: None, lost: 0 })
    }

    /// Continues from a position that an earlier record named. Bytes that were overwritten since count as
    /// lost.
    #[must_use]
    pub fn from(mut self, position: u64) -> Self {
        self.position = position;
        self
    }

    /// Stops at what is the newest record now, however fast the writer is.
    pub fn until_now(mut self) -> Result<Self, ReaderError> {
        self.until = Some(self.header()?.map_or(self.position, |header| header.end));
        Ok(self)
    }

    /// The position of the next record.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// How many bytes of the ring were skipped, because they were overwritten or damaged. Includes the
    /// records' headers.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// How many bytes of output the writer has dropped, as it reports.
    pub fn dropped(&self) -> Result<u64, ReaderError> {
        Ok(self.header()?.map_or(0, |header| header.dropped))
    }

    /// The next record, if there is one already.
    #[expect(clippy::should_implement_trait, reason = "it fails, and after None there may be more")]
    pub fn next(&mut self) -> Result<Option<LogRecord>, ReaderError> {
        // A reader that was overtaken continues at the oldest record, where it may be overtaken again.
        for _ in 0..RETRIES {
            let Some(header) = self.header()? else { return Ok(None) };
            if self.position < header.start {
                self.skip_to(header.start);
            }
            if self.position >= self.until.unwrap_or(u64::MAX).min(header.end) {
                return Ok(None);
            }
            let record = self.copy(&header)?;
            let still_there = self.header()?.is_some_and(|header| self.position >= header.start);
            match record {
                Some(record) if still_there => {
                    self.position = record.next_position;
                    return Ok(Some(record));
                }
                // The position of the next record is unknown.
                None if still_there => self.skip_to(header.end),
                _ => {}
            }
        }
        Ok(None)
    }

    /// The next record, waiting for it if necessary.
    pub fn wait(&mut self, at_most: Duration) -> Result<Option<LogRecord>, ReaderError> {
        let began = Instant::now();
        loop {
            if let Some(record) = self.next()? {
                return Ok(Some(record));
            }
            let left = at_most.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            thread::sleep(left.min(POLL));
        }
    }

    fn skip_to(&mut self, position: u64) {
        self.lost = self.lost.saturating_add(position.saturating_sub(self.position));
        self.position = position;
    }

    /// The header, unless it belongs to another ring now.
    fn header(&self) -> Result<Option<Header>, ReaderError> {
        Ok(read_header(&self.file)?.filter(|header| header.capacity == self.capacity))
    }

    /// Copies what is at the position, which may be overwritten meanwhile.
    fn copy(&self, header: &Header) -> Result<Option<LogRecord>, ReaderError> {
        let mut prefix = [0; PREFIX];
        if !self.read(&mut prefix, self.position)? {
            return Ok(None);
        }
        let Some(prefix) = Prefix::decode(&prefix, self.position) else { return Ok(None) };
        if !header.holds(self.position, prefix.size()) {
            return Ok(None);
        }
        let Ok(length) = usize::try_from(prefix.length) else { return Ok(None) };
        let mut bytes = vec![0; length];
        if !self.read(&mut bytes, self.position + PREFIX as u64)? {
            return Ok(None);
        }
        let next_position = self.position + prefix.size();
        Ok(Some(LogRecord { meta: prefix.meta, bytes, position: self.position, next_position }))
    }

    /// Reads from a position. False if the file is too short.
    fn read(&self, bytes: &mut [u8], position: u64) -> Result<bool, ReaderError> {
        let offset = position % self.capacity;
        let until_edge = usize::try_from(self.capacity - offset).unwrap_or(usize::MAX).min(bytes.len());
        let (before, behind) = bytes.split_at_mut(until_edge);
        Ok(read_all(&self.file, before, HEADER + offset)? && read_all(&self.file, behind, HEADER)?)
    }
}

fn read_all(file: &File, bytes: &mut [u8], offset: u64) -> Result<bool, ReaderError> {
    match file.read_exact_at(bytes, offset) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(ReaderError::Read(error)),
    }
}

/// Reads the newest header of a file.
fn read_header(file: &File) -> Result<Option<Header>, ReaderError> {
    let mut newest = None;
    for _ in 0..RETRIES {
        let mut page = [0; HEADER_SIZE];
        if !read_all(file, &mut page, 0)? {
            return Ok(None);
        }
        let slots = Slots::decode(&page);
        newest = slots.newest;
        if slots.settled {
            break;
        }
    }
    Ok(newest)
}

#[cfg(test)]
#[path = "reader_tests.rs"]
mod tests;
