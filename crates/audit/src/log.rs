//! Appending to the log.

use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use thiserror::Error;

use crate::event::{Event, RecoveredFrom, What};
use crate::files::{CURRENT, Folder, Lines, rotated_name, since_boot_ns, this_boot};
use crate::head::Head;
use crate::line::{self, LineError};
use crate::verify::{self, VerifyError};

mod reserve;
mod settle;

use settle::Settled;

/// How large a file may get before the log goes on in a new one.
pub const ROTATE_AT: u64 = 64 << 20;

/// An event was not recorded.
#[derive(Debug, Error)]
pub enum LogError {
    /// The disk is full, or would be without what is reserved for the ends of sandboxes. Nothing was recorded.
    #[error("The host's disk is full: no room for the audit log in {0}")]
    Full(PathBuf),
    /// Another process holds the lock and does not let go. Nothing was recorded.
    #[error("Cannot write the audit log in {0}")]
    Busy(PathBuf, #[source] io::Error),
    /// An event has no form in the log. Nothing was recorded.
    #[error(transparent)]
    Line(#[from] LineError),
    #[error("Cannot write the audit log in {0}")]
    Io(PathBuf, #[source] io::Error),
}

/// A log that can be appended to, from any number of threads and processes.
#[derive(Debug)]
pub struct Log {
    folder: Folder,
    rotate_at: u64,
    keep: Option<usize>,
    boot: String,
}

/// What a line may be written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Space {
    /// Free space: the reserve stays whole.
    Free,
    /// The reserve as well.
    Reserved,
}

impl Log {
    /// Opens the log in `folder`, which is made if it is not there, for its owner only.
    pub fn open(folder: &Path) -> Result<Self, LogError> {
        let failed = |error| failure(folder, error);
        if !folder.is_dir() {
            DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
            if let Some(parent) = folder.parent().filter(|parent| !parent.as_os_str().is_empty()) {
                File::open(parent).and_then(|parent| parent.sync_all()).map_err(failed)?;
            }
        }
        Ok(Self {
            folder: Folder::open(folder).map_err(failed)?,
            rotate_at: ROTATE_AT,
            keep: None,
            boot: this_boot(),
        })
    }

    /// Goes on in a new file when one has this many bytes.
    #[must_use]
    pub fn rotate_at(mut self, bytes: u64) -> Self {
        self.rotate_at = bytes.max(1);
        self
    }

    /// Keeps only so many files besides the one that is written. Without it, all are kept.
    #[must_use]
    pub fn keep(mut self, files: Option<usize>) -> Self {
        self.keep = files;
        self
    }

    /// As if the machine had been started once more.
    #[cfg(test)]
    pub(crate) fn in_boot(mut self, boot: &str) -> Self {
        boot.clone_into(&mut self.boot);
        self
    }

    /// Records what is about to happen, or has: all of it, or after an error nothing.
    ///
    /// When this returns, a `kill -9` of anything loses no line; a loss of power may (see the crate's documentation).
    pub fn append(&self, events: &[Event]) -> Result<(), LogError> {
        self.write(events, Space::Free)
    }

    /// As [`Self::append`], for what has happened whether or not it is recorded, such as the end of a sandbox: on a full disk
    /// it takes space that is reserved for it.
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
        // What the log does to itself is done on behalf of who writes to it.
        let own: Vec<Event> =
            own.into_iter().map(|what| Event { sandbox: None, name: None, what, ..first.clone() }).collect();
        let (text, mut head) = put_down(&settled, own.iter().chain(events))?;
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

    /// Has the disk take the log as it is, and removes the files that are too many: not before it has the head that tells so. The
    /// lines are recorded whatever fails here.
    fn settle_on_disk(&self, file: &File, mut head: Head, now: u64, prune: &[u64]) {
        if file.sync_data().is_err() {
            return;
        }
        head.synced(now);
        if head.write_synced(&self.folder).is_err() {
            return;
        }
        for first in prune {
            // Verification passes over what is left of them, and the next rotation tries again.
            let _ = self.folder.remove(&rotated_name(*first));
        }
    }

    /// Verifies this log; see [`verify::verify`].
    pub fn verify(&self) -> Result<verify::Report, VerifyError> {
        verify::verify(&self.folder.path, None)
    }

    /// Which files are too many by now, given by their first lines. Moves the head's beginning behind them.
    fn what_to_prune(&self, head: &mut Head) -> io::Result<Vec<u64>> {
        let Some(keep) = self.keep else { return Ok(vec![]) };
        let mut old = self.folder.rotated()?;
        let kept = old.split_off(old.len().saturating_sub(keep));
        let Some(newest) = old.last() else { return Ok(vec![]) };
        // The hash of the last line that goes is in the first one that stays. If nothing stays, it is the head's.
        let (seq, hash) = match kept.first() {
            None => (head.seq, head.hash.clone()),
            Some(first) => match first_link(&self.folder, &rotated_name(*first))? {
                Some(link) if link.seq == *first => (link.seq.saturating_sub(1), link.prev),
                // Damaged: what is before it is evidence, and stays.
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

/// The place in the chain of a file's first line.
fn first_link(folder: &Folder, name: &str) -> io::Result<Option<line::Link>> {
    let Some(file) = folder.file(name, OFlags::RDONLY)? else { return Ok(None) };
    let Some(piece) = Lines::new(file, 0, u64::MAX)?.next()? else { return Ok(None) };
    Ok(match line::shape(&piece.bytes) {
        line::Shape::Whole(link) => Some(link),
        _ => None,
    })
}

/// The lines for these events, and the head after them.
fn put_down<'a>(
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

/// Writes the lines, then the head; takes the lines back if either fails.
fn write_all_or_nothing(folder: &Folder, mut file: &File, text: &[u8], head: &Head) -> io::Result<()> {
    let size = file.metadata()?.len();
    // A regular file takes all of it at once, or as much as there is room for; then the rest says why.
    let written = file.write(text).and_then(|written| file.write_all(&text[written..]));
    written.and_then(|()| head.write(folder)).inspect_err(|_| {
        // If even that fails, the next writer finds half a line and deals with it.
        let _ = file.set_len(size);
    })
}

/// Whether the last byte of a file ends a line.
fn ends_a_line(file: &File, size: u64) -> io::Result<bool> {
    let Some(last) = size.checked_sub(1) else { return Ok(true) };
    let mut byte = [0];
    file.read_exact_at(&mut byte, last)?;
    Ok(byte == *b"\n")
}

fn open_current(folder: &Folder) -> io::Result<File> {
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
