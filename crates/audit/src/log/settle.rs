//! What a writer does under the lock before it writes.
//!
//! Usually the file has the length in the head, and nothing has to be read. Anything else is caused by a
//! killed writer, a power failure or a foreign program. It is recorded in the log, and no complete line on
//! the disk is removed or changed: verification decides what the cause was.

mod restart;

use std::fs::File;
use std::io;

use rustix::fs::OFlags;

use super::{ends_a_line, open_current, recovered, reserve};
use crate::chain::Step;
use crate::event::{RecoveredFrom, What};
use crate::files::{CURRENT, Lines, LogFolder, NEXT, rotated_name, since_boot_ns};
use crate::head::{Head, HeadState};
use crate::line::{self, GENESIS, Shape};

/// A log that is ready for appending.
pub(super) struct Settled {
    pub file: File,
    pub size: u64,
    /// Whether its last line lacks the line break.
    pub unended: bool,
    /// The corrected head, from which the chain continues.
    pub head: Head,
    /// Events about what was found.
    pub repairs: Vec<What>,
    /// The new name of the previous file, if this one has just begun.
    pub rotated: Option<String>,
    /// Whether the machine was restarted since the last line.
    pub restarted: bool,
}

/// Determines where the chain continues, in this boot of the machine.
pub(super) fn settle(folder: &LogFolder, boot: &str) -> io::Result<Settled> {
    let (head, lost) = match Head::read(folder)? {
        HeadState::Head(head) => (head, None),
        HeadState::Nothing if is_new(folder)? => {
            let mut head = Head::genesis();
            boot.clone_into(&mut head.boot);
            head.synced(since_boot_ns());
            head.create(folder)?;
            (head, None)
        }
        HeadState::Nothing => (rebuild(folder)?, Some("There was no head.json")),
        HeadState::Damaged => (rebuild(folder)?, Some("head.json was damaged")),
    };
    let restarted = head.is_of_another_boot(boot);
    let file = open_current(folder)?;
    let size = file.metadata()?.len();
    let unended = !ends_a_line(&file, size)?;
    let mut settled = Settled { file, size, unended, head, repairs: vec![], rotated: None, restarted };
    if let Some(lost) = lost {
        let detail = format!("{lost}: lines after {} may have been removed", settled.head.seq);
        settled.repairs.push(recovered(RecoveredFrom::LostHead, detail, None));
        settled.head.bytes = size;
        return Ok(settled);
    }
    settled.follow_rotations(folder)?;
    if restarted && settled.recover_from_power_loss()? {
        return Ok(settled);
    }
    if settled.size > settled.head.bytes {
        let file = settled.file.try_clone()?;
        settled.adopt(file, settled.size, CURRENT)?;
    } else if settled.size < settled.head.bytes {
        let detail = format!(
            "{CURRENT} had {} bytes instead of {}: it should have ended with line {}",
            settled.size, settled.head.bytes, settled.head.seq
        );
        settled.repairs.push(recovered(RecoveredFrom::LostLines, detail, None));
    }
    Ok(settled)
}

impl Settled {
    /// Rotates the file. If there is no space for the reserve of a new file, the old one continues.
    ///
    /// Every step is durable before the next one: if it is interrupted by a kill or a power failure, the next
    /// writer finds the old file by the head, under its old or new name.
    pub fn rotate(&mut self, folder: &LogFolder) -> io::Result<()> {
        let name = rotated_name(self.head.first);
        if folder.size(&name)?.is_some() {
            // A foreign file. Verification reports it; recording continues.
            return Ok(());
        }
        let flags = OFlags::RDWR | OFlags::APPEND | OFlags::CREATE | OFlags::TRUNC;
        let next = folder.file(NEXT, flags)?.ok_or(io::ErrorKind::NotFound)?;
        if reserve::keep(&next, 0, 0).is_err() {
            return folder.remove(NEXT);
        }
        // The old file no longer needs its reserve.
        self.file.set_len(self.size)?;
        self.file.sync_all()?;
        self.head.synced(since_boot_ns());
        self.head.write_synced(folder)?;
        folder.rename(CURRENT, &name)?;
        folder.rename(NEXT, CURRENT)?;
        folder.sync()?;
        self.file = next;
        (self.size, self.unended) = (0, false);
        self.begin_file(name);
        Ok(())
    }

    fn begin_file(&mut self, previous: String) {
        self.head.first = self.head.seq + 1;
        self.head.bytes = 0;
        self.rotated = Some(previous);
    }

    /// The file that the head regards as current may have been rotated since.
    fn follow_rotations(&mut self, folder: &LogFolder) -> io::Result<()> {
        loop {
            let first = self.head.first;
            let aside = rotated_name(first);
            let Some(file) = folder.file(&aside, OFlags::RDONLY)? else { return Ok(()) };
            let size = file.metadata()?.len();
            if size > self.head.bytes {
                self.adopt(file, size, &aside)?;
            }
            self.begin_file(aside);
            if self.head.first == first {
                // A file without a line cannot have been rotated by us.
                return Ok(());
            }
        }
    }

    /// Reads what is in a file of this size after the position that the head records.
    fn adopt(&mut self, file: File, size: u64, name: &str) -> io::Result<()> {
        let mut lines = Lines::new(file, self.head.bytes, size)?;
        let mut chain = self.head.chain();
        let mut foreign = false;
        let mut whole_but_unended = false;
        while let Some(piece) = lines.next()? {
            match chain.step(&piece.bytes) {
                Ok(Step::Next) => {
                    whole_but_unended = !piece.ended;
                    // The new file has begun already and records the rotation.
                    self.rotated = None;
                }
                Ok(Step::Torn) => {}
                Err(_) => {
                    foreign = true;
                    break;
                }
            }
        }
        let behind = size - self.head.bytes;
        if foreign {
            let detail = format!("{behind} bytes at the end of {name} are foreign or incomplete");
            self.repairs.push(recovered(RecoveredFrom::ForeignBytes, detail, None));
        } else if let Some(torn) = chain.torn() {
            let detail = format!("A writer was killed in the middle of line {}", chain.seq + 1);
            self.repairs.push(recovered(RecoveredFrom::TornLine, detail, Some(torn)));
        } else if whole_but_unended {
            let detail = format!("A writer was killed at the very end of line {}", chain.seq);
            self.repairs.push(recovered(RecoveredFrom::MissingNewline, detail, None));
        }
        self.head.seq = chain.seq;
        self.head.hash = chain.hash;
        self.head.bytes = size;
        Ok(())
    }
}

/// Whether the log never had a line.
fn is_new(folder: &LogFolder) -> io::Result<bool> {
    Ok(folder.size(CURRENT)?.unwrap_or(0) == 0 && folder.rotated()?.is_empty())
}

/// Reconstructs the head from the files: it continues after the last complete line.
fn rebuild(folder: &LogFolder) -> io::Result<Head> {
    let mut names: Vec<String> = folder.rotated()?.into_iter().map(rotated_name).collect();
    names.push(CURRENT.to_owned());
    let mut head = Head::genesis();
    if let Some((first, _)) = ends(folder, &names[0])? {
        (head.pruned_seq, head.pruned_hash) = (first.seq.saturating_sub(1), first.prev);
    }
    for name in names.iter().rev() {
        if let Some((first, last)) = ends(folder, name)? {
            (head.seq, head.hash) = (last.seq, last.hash);
            head.first = if name == CURRENT { first.seq } else { last.seq + 1 };
            return Ok(head);
        }
    }
    head.hash = GENESIS.to_owned();
    Ok(head)
}

/// The first and the last complete line of a file.
fn ends(folder: &LogFolder, name: &str) -> io::Result<Option<(line::ChainLink, line::ChainLink)>> {
    let Some(file) = folder.file(name, OFlags::RDONLY)? else { return Ok(None) };
    let mut lines = Lines::new(file, 0, u64::MAX)?;
    let mut ends: Option<(line::ChainLink, line::ChainLink)> = None;
    while let Some(piece) = lines.next()? {
        if let Shape::Whole(link) = line::shape(&piece.bytes) {
            ends = Some(match ends {
                None => (link.clone(), link),
                Some((first, _)) => (first, link),
            });
        }
    }
    Ok(ends)
}
