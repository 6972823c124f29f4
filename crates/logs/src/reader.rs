//! The reading side. The file belongs to a keeper that may have been taken over: nothing in it is believed.

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

/// How often a header that is just being written is looked at again. A slot stays half written only if its writer died.
const LOOKS: usize = 16;
/// How often [`Reader::wait`] looks for new records.
const POLL: Duration = Duration::from_millis(50);

/// The log cannot be read.
#[derive(Debug, Error)]
pub enum ReaderError {
    /// The file cannot be opened.
    #[error("Cannot open the log {0}")]
    Open(PathBuf, #[source] io::Error),
    /// It is something else.
    #[error("{0} is not a regular file")]
    NotAFile(PathBuf),
    /// It has no valid header.
    #[error("{0} is not a log, or it is damaged")]
    Damaged(PathBuf),
    #[error("Cannot read the log")]
    Read(#[source] io::Error),
}

/// A piece of output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub meta: Meta,
    /// The bytes: anything at all, straight from the guest.
    pub bytes: Vec<u8>,
    pub position: u64,
    /// Where the next one will be; see [`Reader::from`].
    pub next_position: u64,
}

/// Reads a ring, from its oldest record to its newest, also while it is written.
///
/// Every call does a bounded amount of work and stores at most one record, whatever is in the file. The position only
/// ever grows.
#[derive(Debug)]
pub struct Reader {
    file: File,
    capacity: u64,
    position: u64,
    /// Where to stop, if not at the end as it is then.
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
        let header = look(&file)?.ok_or_else(|| ReaderError::Damaged(path.to_owned()))?;
        Ok(Self { file, capacity: header.capacity, position: header.start, until: None, lost: 0 })
    }

    /// Goes on from a position that an earlier record named. One that is not there any more counts as lost.
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

    /// Where the next record will be looked for.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// How many bytes of the ring were skipped, because the writer was faster or because they were damaged. Includes the
    /// few bytes that each record takes besides its content.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// How many bytes of output the writer dropped so far, by its own account.
    pub fn dropped(&self) -> Result<u64, ReaderError> {
        Ok(self.header()?.map_or(0, |header| header.dropped))
    }

    /// The next record, if there is one by now.
    #[expect(clippy::should_implement_trait, reason = "it fails, and after None there may be more")]
    pub fn next(&mut self) -> Result<Option<Record>, ReaderError> {
        // A reader that was overtaken goes on where the ring begins now, where it may be overtaken again.
        for _ in 0..LOOKS {
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
                // Where the next record begins cannot be known.
                None if still_there => self.skip_to(header.end),
                _ => {}
            }
        }
        Ok(None)
    }

    /// The next record, waiting for it if need be.
    pub fn wait(&mut self, at_most: Duration) -> Result<Option<Record>, ReaderError> {
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

    /// The header, unless it is not this ring's any more.
    fn header(&self) -> Result<Option<Header>, ReaderError> {
        Ok(look(&self.file)?.filter(|header| header.capacity == self.capacity))
    }

    /// Copies what is at the position, which may be overwritten meanwhile.
    fn copy(&self, header: &Header) -> Result<Option<Record>, ReaderError> {
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
        Ok(Some(Record { meta: prefix.meta, bytes, position: self.position, next_position }))
    }

    /// Fills `bytes` from a position; false if the file is too short for it.
    fn read(&self, bytes: &mut [u8], position: u64) -> Result<bool, ReaderError> {
        let place = position % self.capacity;
        let until_edge = usize::try_from(self.capacity - place).unwrap_or(usize::MAX).min(bytes.len());
        let (before, behind) = bytes.split_at_mut(until_edge);
        Ok(read_all(&self.file, before, HEADER + place)? && read_all(&self.file, behind, HEADER)?)
    }
}

fn read_all(file: &File, bytes: &mut [u8], place: u64) -> Result<bool, ReaderError> {
    match file.read_exact_at(bytes, place) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(ReaderError::Read(error)),
    }
}

/// The newest header of a file.
fn look(file: &File) -> Result<Option<Header>, ReaderError> {
    let mut newest = None;
    for _ in 0..LOOKS {
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
