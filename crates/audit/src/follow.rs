//! Reads the log and waits for new events.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use thiserror::Error;

use crate::event::Event;
use crate::files::{CURRENT, LogFolder, rotated_name};
use crate::line::{self, MAX_LINE, Shape};

/// The polling interval of [`Follower::wait`].
const POLL: Duration = Duration::from_millis(100);
/// The unit of reading.
const CHUNK: usize = 64 * 1024;
/// Clocks can be set back. A file is only skipped as too old if it was last written this long before.
const CLOCK_DOUBT: u64 = 60_000_000_000;

/// The log cannot be read.
#[derive(Debug, Error)]
pub enum FollowError {
    #[error("There is no audit log in {0}")]
    NoLog(PathBuf),
    #[error("Cannot read the audit log in {0}")]
    Io(PathBuf, #[source] io::Error),
}

/// The filter for events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogFilter {
    /// Only events of the sandbox with this id or name.
    pub sandbox: Option<String>,
    /// Only events from this time on, in nanoseconds since 1970.
    pub since_unix_ns: Option<u64>,
}

impl LogFilter {
    fn wants(&self, event: &Event) -> bool {
        let sandbox = self.sandbox.as_ref().is_none_or(|wanted| {
            event.sandbox.as_ref() == Some(wanted) || event.name.as_ref() == Some(wanted)
        });
        sandbox && self.since_unix_ns.is_none_or(|since| event.time_unix_ns >= since)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEntry {
    pub seq: u64,
    /// The event. Its texts may come from a guest: escape them before printing.
    pub event: Event,
    /// The line in the log without its line break: safe to print.
    pub line: String,
}

/// Reads a log from its oldest file on, across rotations.
///
/// This does not verify the log: unreadable lines are skipped and counted.
#[derive(Debug)]
pub struct Follower {
    folder: LogFolder,
    filter: LogFilter,
    /// The file that is being read, if any.
    file: Option<File>,
    position: u64,
    /// What was read but not returned yet, from `taken` on.
    buffer: Vec<u8>,
    taken: usize,
    /// How much of the buffer contains no line break.
    searched: usize,
    /// Files that begin at or before this number were read, or are being read.
    floor: u64,
    unreadable: u64,
}

impl Follower {
    pub fn open(folder: &Path, filter: LogFilter) -> Result<Self, FollowError> {
        let folder = match LogFolder::open(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(FollowError::NoLog(folder.to_owned()));
            }
            opened => opened.map_err(|error| FollowError::Io(folder.to_owned(), error))?,
        };
        let (buffer, taken, searched) = (vec![], 0, 0);
        Ok(Self { folder, filter, file: None, position: 0, buffer, taken, searched, floor: 0, unreadable: 0 })
    }

    /// How many lines could not be read: partial lines of a killed writer, or manipulation. Verification
    /// finds out which.
    pub fn unreadable(&self) -> u64 {
        self.unreadable
    }

    /// The next event, if there is one already.
    #[expect(clippy::should_implement_trait, reason = "it fails, and after None there may be more")]
    pub fn next(&mut self) -> Result<Option<LogEntry>, FollowError> {
        self.advance().map_err(|error| FollowError::Io(self.folder.path.clone(), error))
    }

    /// The next event, waiting for it if necessary.
    pub fn wait(&mut self, at_most: Duration) -> Result<Option<LogEntry>, FollowError> {
        let began = Instant::now();
        loop {
            if let Some(entry) = self.next()? {
                return Ok(Some(entry));
            }
            let left = at_most.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            thread::sleep(left.min(POLL));
        }
    }

    fn advance(&mut self) -> io::Result<Option<LogEntry>> {
        loop {
            while let Some(line) = self.take_line() {
                if let Some(entry) = self.entry(&line) {
                    return Ok(Some(entry));
                }
            }
            if self.fill()? {
                continue;
            }
            // The next file is looked up before the last read of this one: everything in a file is written
            // before the file is rotated.
            let Some((next, first)) = self.next_file()? else { return Ok(None) };
            if self.fill()? {
                continue;
            }
            self.unreadable += u64::from(self.taken < self.buffer.len());
            self.buffer.clear();
            (self.taken, self.searched, self.position) = (0, 0, 0);
            self.file = Some(next);
            self.floor = self.floor.max(first);
        }
    }

    /// Reads more of the present file.
    fn fill(&mut self) -> io::Result<bool> {
        let Some(file) = &self.file else { return Ok(false) };
        self.buffer.drain(..self.taken);
        self.searched -= self.taken;
        self.taken = 0;
        if self.buffer.len() > MAX_LINE {
            // No line is that long. What is dropped here is part of an unreadable line.
            self.buffer.truncate(1);
            self.searched = 1;
        }
        let old = self.buffer.len();
        self.buffer.resize(old + CHUNK, 0);
        let read = file.read_at(&mut self.buffer[old..], self.position);
        self.buffer.truncate(old + *read.as_ref().unwrap_or(&0));
        self.position += u64::try_from(read?).unwrap_or(0);
        Ok(self.buffer.len() > old)
    }

    fn take_line(&mut self) -> Option<Vec<u8>> {
        let Some(length) = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n') else {
            self.searched = self.buffer.len();
            return None;
        };
        let end = self.searched + length;
        let line = self.buffer[self.taken..end].to_vec();
        (self.taken, self.searched) = (end + 1, end + 1);
        Some(line)
    }

    fn entry(&mut self, line: &[u8]) -> Option<LogEntry> {
        let event = serde_json::from_slice::<Event>(line);
        let (Shape::Whole(link), Ok(event), Ok(text)) = (line::shape(line), event, str::from_utf8(line))
        else {
            self.unreadable += 1;
            return None;
        };
        self.floor = self.floor.max(link.seq);
        self.filter.wants(&event).then(|| LogEntry { seq: link.seq, event, line: text.to_owned() })
    }

    /// The file after the present one, if that was rotated, and the number in its name.
    fn next_file(&self) -> io::Result<Option<(File, u64)>> {
        let Some(present) = &self.file else { return self.first_file() };
        let current = self.folder.file(CURRENT, OFlags::RDONLY)?;
        if let Some(current) = &current
            && same(current, present)?
        {
            return Ok(None);
        }
        // Listed after the newest was opened: any file between the present one and that has its final name by
        // now.
        for first in self.rotated_since()? {
            if let Some(file) = self.folder.file(&rotated_name(first), OFlags::RDONLY)?
                && !same(&file, present)?
            {
                return Ok(Some((file, first)));
            }
        }
        Ok(current.map(|file| (file, 0)))
    }

    /// The first line numbers of rotated files that were not read yet, without a gap at the beginning.
    ///
    /// A listing may lack a file that was rotated while it was made and contain a later one. A second listing
    /// contains everything that was rotated before the files of the first.
    fn rotated_since(&self) -> io::Result<Vec<u64>> {
        let mut firsts = self.folder.rotated()?;
        if firsts.last().is_some_and(|last| *last > self.floor) {
            firsts = self.folder.rotated()?;
        }
        firsts.retain(|first| *first > self.floor);
        Ok(firsts)
    }

    fn first_file(&self) -> io::Result<Option<(File, u64)>> {
        let current = self.folder.file(CURRENT, OFlags::RDONLY)?;
        for first in self.rotated_since()? {
            if let Some(file) = self.folder.file(&rotated_name(first), OFlags::RDONLY)?
                && !self.is_too_old(&file)?
            {
                return Ok(Some((file, first)));
            }
        }
        Ok(current.map(|file| (file, 0)))
    }

    fn is_too_old(&self, file: &File) -> io::Result<bool> {
        let Some(since) = self.filter.since_unix_ns else { return Ok(false) };
        let written = u64::try_from(file.metadata()?.mtime()).unwrap_or(0).saturating_add(1);
        Ok(written.saturating_mul(1_000_000_000).saturating_add(CLOCK_DOUBT) < since)
    }
}

fn same(one: &File, other: &File) -> io::Result<bool> {
    let (one, other) = (one.metadata()?, other.metadata()?);
    Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
}

#[cfg(test)]
#[path = "follow_tests.rs"]
mod tests;
