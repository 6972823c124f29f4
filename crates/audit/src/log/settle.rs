//! What a writer finds under the lock, and what to do about it before it writes.
//!
//! Almost always the file is as long as the head says, and nothing has to be read. Everything else is the work of a writer
//! that was killed, or of somebody who should not write here. Both are put down in the log, and nothing is removed or
//! changed: verification decides which one it was.

use std::fs::File;
use std::io;

use rustix::fs::OFlags;

use super::{ends_a_line, open_current, recovered};
use crate::chain::Step;
use crate::event::{RecoveredFrom, What};
use crate::files::{CURRENT, Folder, Lines, rotated_name};
use crate::head::{Found, Head};
use crate::line::{self, GENESIS, Shape};

/// A log that can be appended to.
pub(super) struct Settled {
    /// The file that is written.
    pub file: File,
    /// Its size.
    pub size: u64,
    /// Whether its last line lacks the line break.
    pub unended: bool,
    /// The head as it should be: from here the chain goes on.
    pub head: Head,
    /// What has to be said about it.
    pub repairs: Vec<What>,
    /// What the file before is called, if this one has just begun.
    pub rotated: Option<String>,
}

impl Settled {
    /// Puts the file aside, and begins a new one.
    pub fn rotate(&mut self, folder: &Folder) -> io::Result<()> {
        let name = rotated_name(self.head.first);
        // Whoever comes after a kill here finds the old file by this head, under its new name.
        self.head.write(folder)?;
        folder.rename(CURRENT, &name)?;
        self.file = open_current(folder)?;
        self.begin_file(name);
        Ok(())
    }

    fn begin_file(&mut self, previous: String) {
        self.head.first = self.head.seq + 1;
        self.head.bytes = 0;
        self.size = 0;
        self.unended = false;
        self.rotated = Some(previous);
    }
}

/// Finds out where the chain goes on.
pub(super) fn settle(folder: &Folder) -> io::Result<Settled> {
    let (head, lost) = match Head::read(folder)? {
        Found::Head(head) => (head, None),
        Found::Nothing if is_new(folder)? => {
            let head = Head::genesis();
            head.create(folder)?;
            (head, None)
        }
        Found::Nothing => (rebuild(folder)?, Some("There was no head.json")),
        Found::Damaged => (rebuild(folder)?, Some("head.json was damaged")),
    };
    let file = open_current(folder)?;
    let size = file.metadata()?.len();
    let unended = !ends_a_line(&file, size)?;
    let mut settled = Settled { file, size, unended, head, repairs: vec![], rotated: None };
    if let Some(lost) = lost {
        let detail = format!("{lost}: lines after {} may have been removed", settled.head.seq);
        settled.repairs.push(recovered(RecoveredFrom::LostHead, detail, None));
        settled.head.bytes = size;
        return Ok(settled);
    }
    let aside = rotated_name(settled.head.first);
    if folder.size(&aside)? == Some(settled.head.bytes) && settled.head.bytes > 0 {
        // A writer was killed between putting the file aside and saying so.
        settled.begin_file(aside);
        settled.size = size;
        settled.unended = unended;
    }
    if size > settled.head.bytes {
        settled.adopt()?;
    } else if size < settled.head.bytes {
        let detail = format!(
            "{CURRENT} had {size} bytes instead of {}: it should have ended with line {}",
            settled.head.bytes, settled.head.seq
        );
        settled.repairs.push(recovered(RecoveredFrom::LostLines, detail, None));
    }
    Ok(settled)
}

impl Settled {
    /// Looks at what is in the file behind the place that the head knows.
    fn adopt(&mut self) -> io::Result<()> {
        let mut lines = Lines::new(self.file.try_clone()?, self.head.bytes, self.size)?;
        let mut chain = self.head.chain();
        let mut foreign = false;
        let mut whole_but_unended = false;
        while let Some(piece) = lines.next()? {
            match chain.step(&piece.bytes) {
                Ok(Step::Next) => {
                    whole_but_unended = !piece.ended;
                    // The file has begun already, and said so.
                    self.rotated = None;
                }
                Ok(Step::Torn) => {}
                Err(_) => {
                    foreign = true;
                    break;
                }
            }
        }
        let behind = self.size - self.head.bytes;
        if foreign {
            let detail = format!("{behind} bytes at the end of {CURRENT} are not ours, or not whole");
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
        self.head.bytes = self.size;
        Ok(())
    }
}

/// Whether there never was a line here.
fn is_new(folder: &Folder) -> io::Result<bool> {
    Ok(folder.size(CURRENT)?.unwrap_or(0) == 0 && folder.rotated()?.is_empty())
}

/// The best head that the files give: it goes on from the last line that is whole.
fn rebuild(folder: &Folder) -> io::Result<Head> {
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

/// The first and the last whole line of a file.
fn ends(folder: &Folder, name: &str) -> io::Result<Option<(line::Link, line::Link)>> {
    let Some(file) = folder.file(name, OFlags::RDONLY)? else { return Ok(None) };
    let mut lines = Lines::new(file, 0, u64::MAX)?;
    let mut ends: Option<(line::Link, line::Link)> = None;
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
