//! Appends to the log.

use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use thiserror::Error;

use crate::event::{Event, RecoveredFrom, What};
use crate::files::{CURRENT, Lines, LogFolder, rotated_name, since_boot_ns, this_boot};
use crate::head::Head;
use crate::line::{self, LineError};
use crate::verify::{self, VerifyError};

mod reserve;
mod settle;

use settle::Settled;

/// The file size at which the log is rotated.
pub const ROTATE_AT: u64 = 64 << 20;

/// An event was not recorded.
#[derive(Debug, Error)]
pub enum LogError {
    /// The disk is full except for the reserve. Nothing was recorded.
    #[error("The host's disk is full: no space for the audit log in {0}")]
    Full(PathBuf),
    /// Another process holds the lock for too long. Nothing was recorded.
    #[error("Cannot write the audit log in {0}")]
    Busy(PathBuf, #[source] io::Error),
    /// An event has no valid form. Nothing was recorded.
    #[error(transparent)]
    Line(#[from] LineError),
    #[error("Cannot write the audit log in {0}")]
    Io(PathBuf, #[source] io::Error),
}

/// A log for appending, from any number of threads and processes.
#[derive(Debug)]
pub struct Log {
    folder: LogFolder,
    rotate_at: u64,
    keep: Option<usize>,
    boot: String,
}

/// The space that lines may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Space {
    /// Free space only: the reserve stays complete.
    Free,
    /// The reserve as well.
    Reserved,
}

impl Log {
    /// Opens the log in `folder`, which is created if necessary, for its owner only.
    pub fn open(folder: &Path) -> Result<Self, LogError> {
        let failed = |error| failure(folder, error);
        if !folder.is_dir() {
            DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
            if let Some(parent) = folder.parent().filter(|parent| !parent.as_os_str().is_empty()) {
                File::open(parent).and_then(|parent| parent.sync_all()).map_err(failed)?;
            }
        }
        Ok(Self {
            folder: LogFolder::open(folder).map_err(failed)?,
            rotate_at: ROTATE_AT,
            keep: None,
            boot: this_boot(),
        })
    }

    /// Sets the file size at which the log is rotated.
    #[must_use]
    pub fn rotate_at(mut self, bytes: u64) -> Self {
        self.rotate_at = bytes.max(1);
        self
    }

    /// Limits the number of rotated files. By default all are kept.
    #[must_use]
    pub fn keep(mut self, files: Option<usize>) -> Self {
        self.keep = files;
        self
    }

    /// Simulates another boot of the machine.
    #[cfg(test)]
    pub(crate) fn in_boot(mut self, boot: &str) -> Self {
        boot.clone_into(&mut self.boot);
        self
    }

    /// Records events: all of them, or after an error none.
    ///
    /// When this returns, no killed process loses a line, but a power failure may (see the crate's
    /// documentation).
    pub fn append(&self, events: &[Event]) -> Result<(), LogError> {
        self.write(events, Space::Free)
    }

    /// Like [`Self::append`], for what has already happened, such as the end of a sandbox: on a full disk it
    /// uses the reserved space.
    pub fn append_last(&self, events: &[Event]) -> Result<(), LogError> {
        self.write(events, Space::Reserved)
    }

    fn write(&self, events: &[Event], space: Space) -> Result<(), LogError> {
        let Some(first) = events.first() else { return Ok(()) };
        let failed = |error| failure(&self.folder.path, error);
        let _lock = self.folder.lock(true).map_err(failed)?;
        let mut settled = settle::settle(&self.folder, &self.boot).map_err(failed)?;
        let mut own = settled.repairs.split_off(0);
        let mut prune = vec![];
        if own.is_empty() && settled.head.bytes >= self.rotate_at && space == Space::Free {
            settled.rotate(&self.folder).map_err(failed)?;
        }
        if let Some(previous_file) = settled.rotated.take() {
            own.push(What::Rotated { previous_file, previous_hash: settled.head.hash.clone() });
            prune = self.what_to_prune(&mut settled.head).map_err(failed)?;
        }
        if !prune.is_empty() {
            own.push(What::Pruned {
                files: u64::try_from(prune.len()).unwrap_or(u64::MAX),
                through_seq: settled.head.pruned_seq,
                through_hash: settled.head.pruned_hash.clone(),
            });
        }
        // Events of the log itself have the writer as their actor.
        let own: Vec<Event> =
            own.into_iter().map(|what| Event { sandbox: None, name: None, what, ..first.clone() }).collect();
        let (text, mut head) = encode_lines(&settled, own.iter().chain(events))?;
        let length = u64::try_from(text.len()).unwrap_or(u64::MAX);
        match space {
            Space::Free => reserve::keep(&settled.file, settled.size, length).map_err(failed)?,
            Space::Reserved => reserve::fit(&settled.file, settled.size, length).map_err(failed)?,
        }
        head.boot.clone_from(&self.boot);
        if settled.restarted {
            head.synced_ns = 0;
        }
        write_all_or_nothing(&self.folder, &settled.file, &text, &head).map_err(failed)?;
        let now = since_boot_ns();
        if settled.restarted || !prune.is_empty() || head.is_sync_due(now) {
            self.settle_on_disk(&settled.file, head, now, &prune);
        }
        Ok(())
    }

    /// Flushes the log and removes excess files, in that order, so that the head on the disk covers the
    /// removal. The lines are recorded even if this fails.
    fn settle_on_disk(&self, file: &File, mut head: Head, now: u64, prune: &[u64]) {
        if file.sync_data().is_err() {
            return;
        }
        head.synced(now);
        if head.write_synced(&self.folder).is_err() {
            return;
        }
        for first in prune {
            // Verification ignores remaining files, and the next rotation tries again.
            let _ = self.folder.remove(&rotated_name(*first));
        }
    }

    pub fn verify(&self) -> Result<verify::Report, VerifyError> {
        verify::verify(&self.folder.path, None)
    }

    /// The excess files, by their first lines. Moves the head's first line past them.
    fn what_to_prune(&self, head: &mut Head) -> io::Result<Vec<u64>> {
        let Some(keep) = self.keep else { return Ok(vec![]) };
        let mut old = self.folder.rotated()?;
        let rest = old.split_off(old.len().saturating_sub(keep));
        let Some(newest) = old.last() else { return Ok(vec![]) };
        // The hash of the last removed line is in the first remaining one. If nothing remains, it is the
        // head's.
        let (seq, hash) = match rest.first() {
            None => (head.seq, head.hash.clone()),
            Some(first) => match first_link(&self.folder, &rotated_name(*first))? {
                Some(link) if link.seq == *first => (link.seq.saturating_sub(1), link.prev),
                // Damaged: the files before it are evidence and stay.
                _ => return Ok(vec![]),
            },
        };
        if seq < *newest {
            return Ok(vec![]);
        }
        head.pruned_seq = seq;
        head.pruned_hash = hash;
        Ok(old)
    }
}

/// The position in the chain of a file's first line.
fn first_link(folder: &LogFolder, name: &str) -> io::Result<Option<line::ChainLink>> {
    let Some(file) = folder.file(name, OFlags::RDONLY)? else { return Ok(None) };
    let Some(piece) = Lines::new(file, 0, u64::MAX)?.next()? else { return Ok(None) };
    Ok(match line::shape(&piece.bytes) {
        line::Shape::Whole(link) => Some(link),
        _ => None,
    })
}

/// Encodes these events, and the head after them.
fn encode_lines<'a>(
    settled: &Settled,
    events: impl Iterator<Item = &'a Event>,
) -> Result<(Vec<u8>, Head), LogError> {
    let mut head = settled.head.clone();
    let mut text = Vec::with_capacity(1024);
    if settled.unended {
        text.push(b'\n');
    }
    for event in events {
        head.hash = line::encode(&mut text, head.seq + 1, &head.hash, event)?;
        head.seq += 1;
    }
    head.bytes = settled.size + u64::try_from(text.len()).unwrap_or(u64::MAX);
    Ok((text, head))
}

/// Writes the lines, then the head; removes the lines again if either fails.
fn write_all_or_nothing(folder: &LogFolder, mut file: &File, text: &[u8], head: &Head) -> io::Result<()> {
    let size = file.metadata()?.len();
    // A short write on a regular file means that the disk is full; the second write returns the error.
    let written = file.write(text).and_then(|written| file.write_all(&text[written..]));
    written.and_then(|()| head.write(folder)).inspect_err(|_| {
        // If even that fails, the next writer finds a partial line and handles it.
        let _ = file.set_len(size);
    })
}

/// Whether the last byte of a file is a line break.
fn ends_a_line(file: &File, size: u64) -> io::Result<bool> {
    let Some(last) = size.checked_sub(1) else { return Ok(true) };
    let mut byte = [0];
    file.read_exact_at(&mut byte, last)?;
    Ok(byte == *b"\n")
}

fn open_current(folder: &LogFolder) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::APPEND | OFlags::CREATE;
    folder.file(CURRENT, flags)?.ok_or_else(|| io::ErrorKind::NotFound.into())
}

fn recovered(from: RecoveredFrom, detail: String, torn: Option<&[u8]>) -> What {
    What::Recovered {
        from,
        detail,
        torn_bytes: torn.and_then(|torn| u64::try_from(torn.len()).ok()),
        torn_digest: torn.map(|torn| blake3::hash(torn).to_hex().to_string()),
        lost_from: None,
    }
}

fn failure(folder: &Path, error: io::Error) -> LogError {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => LogError::Full(folder.to_owned()),
        io::ErrorKind::WouldBlock => LogError::Busy(folder.to_owned(), error),
        _ => LogError::Io(folder.to_owned(), error),
    }
}

#[cfg(test)]
#[path = "log_tests.rs"]
mod tests;
