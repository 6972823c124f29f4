//! Verifies that every line is present, in order and unchanged.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use thiserror::Error;

use crate::chain::{Break, Chain, Step};
use crate::files::{CURRENT, Lines, LogFolder, rotated_name, this_boot};
use crate::head::{self, Head, HeadState};
use crate::line::{self, Shape};

/// How often verification restarts if old files are removed meanwhile.
const ATTEMPTS: usize = 3;

/// The result of a successful verification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The number of events.
    pub lines: u64,
    /// The number of files.
    pub files: u64,
    /// The number of the first line, which is above 1 after old files were removed.
    pub first_seq: u64,
    /// The number of the last line; 0 if there is none.
    pub last_seq: u64,
    /// The hash of the last line. Stored elsewhere, it is an [`Anchor`].
    pub head_hash: String,
    /// How often a writer was killed while writing. Every byte that it left is accounted for.
    pub recovered: u64,
    /// The length of a partial line at the end that is not accounted for, because nothing was written since.
    pub torn_bytes: u64,
    /// How many lines in total were lost when the machine stopped. They were not on its disk yet, or were
    /// removed before it was restarted.
    pub lost: u64,
}

/// A line that was recorded elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Anchor {
    pub seq: u64,
    pub hash: String,
}

/// What is wrong with a line.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Fault {
    /// Its content does not match its hash.
    #[error("was changed")]
    Changed,
    /// The following line was written after a different line.
    #[error("does not follow from the line before it: one of the two was replaced or inserted")]
    Replaced,
    /// Lines before it are missing.
    #[error("follows a gap: the events {from} to {to} were removed")]
    Removed {
        /// The first missing number.
        from: u64,
        /// The last missing number.
        to: u64,
    },
    /// It should come later.
    #[error("is event {found} where event {expected} should be: the order was changed")]
    Reordered {
        found: u64,
        /// The number expected here.
        expected: u64,
    },
    /// An earlier line has its number.
    #[error("has the number {0} of an earlier line: it was inserted")]
    Inserted(u64),
    /// The log should continue after it.
    #[error(
        "is where the log ends, though it went on to event {0}: lines were removed, or lost with the machine's power"
    )]
    Truncated(u64),
    /// A writer found no valid head before it wrote this line. The log can no longer be trusted: after an
    /// investigation, move the folder away so that a new log begins.
    #[error("was written without a usable head.json: lines before it may have been removed")]
    LostHead,
    /// It is not the line that was recorded elsewhere.
    #[error("is not the one that was recorded elsewhere: the log was replaced")]
    NotTheAnchor,
}

/// A log is invalid or cannot be read.
#[derive(Debug, Error)]
pub enum VerifyError {
    #[error("There is no audit log in {0}")]
    NoLog(PathBuf),
    /// The first bad line.
    #[error("{file} line {line} {fault}")]
    Bad {
        file: String,
        /// The number of the line in the file, counted from 1. It is 0 for a fault before the first line.
        line: u64,
        fault: Fault,
    },
    /// The head is missing.
    #[error("{0} was removed: whether the newest lines are there cannot be known", head::NAME)]
    NoHead,
    /// The head is invalid.
    #[error("{0} was changed: whether the newest lines are there cannot be known", head::NAME)]
    HeadChanged,
    /// The line that was recorded elsewhere is outside the log.
    #[error("Event {0}, which was recorded elsewhere, is no longer in the log")]
    NoAnchor(u64),
    #[error("Cannot read {0}")]
    Io(PathBuf, #[source] io::Error),
}

/// Verifies the log in `folder` as it is now, while writers continue. With an `anchor`, the line of that
/// number must be the one that was recorded elsewhere.
pub fn verify(folder: &Path, anchor: Option<&Anchor>) -> Result<Report, VerifyError> {
    verify_in_boot(folder, anchor, &this_boot())
}

/// Like [`verify`], in this boot of the machine.
pub(crate) fn verify_in_boot(
    folder: &Path,
    anchor: Option<&Anchor>,
    boot: &str,
) -> Result<Report, VerifyError> {
    again_if_files_go(|| Walk::begin(folder, boot)?.finish(anchor))
}

fn again_if_files_go<T>(mut look: impl FnMut() -> Result<T, VerifyError>) -> Result<T, VerifyError> {
    let mut attempt = 1;
    loop {
        match look() {
            Err(VerifyError::Io(_, error))
                if error.kind() == io::ErrorKind::NotFound && attempt < ATTEMPTS =>
            {
                attempt += 1;
            }
            result => return result,
        }
    }
}

/// One file of the log.
struct LogFile {
    name: String,
    /// The current file is opened under the lock, with its size at that time.
    open: Option<(File, u64)>,
}

/// A pass over a log.
struct Walk {
    folder: LogFolder,
    head: Head,
    parts: Vec<LogFile>,
    /// Whether the machine was restarted since the last line was written.
    restarted: bool,
}

/// The position of a pass.
struct Position {
    part: usize,
    line: u64,
}

impl Walk {
    /// Takes a consistent snapshot under the lock.
    fn begin(path: &Path, boot: &str) -> Result<Self, VerifyError> {
        let failed = |error| VerifyError::Io(path.to_owned(), error);
        let folder = match LogFolder::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(VerifyError::NoLog(path.to_owned()));
            }
            folder => folder.map_err(failed)?,
        };
        let _lock = folder.lock(false).map_err(failed)?;
        let rotated = folder.rotated().map_err(failed)?;
        let current = folder.file(CURRENT, OFlags::RDONLY).map_err(failed)?;
        let head = match Head::read(&folder).map_err(failed)? {
            HeadState::Head(head) => head,
            HeadState::Nothing if rotated.is_empty() && current.is_none() => {
                return Err(VerifyError::NoLog(path.to_owned()));
            }
            HeadState::Nothing => return Err(VerifyError::NoHead),
            HeadState::Damaged => return Err(VerifyError::HeadChanged),
        };
        // Files that should have been removed but still exist are ignored.
        let rest = rotated.into_iter().filter(|first| *first > head.pruned_seq);
        let mut parts: Vec<LogFile> =
            rest.map(|first| LogFile { name: rotated_name(first), open: None }).collect();
        if let Some(file) = current {
            let size = file.metadata().map_err(failed)?.len();
            parts.push(LogFile { name: CURRENT.to_owned(), open: Some((file, size)) });
        }
        let restarted = head.is_of_another_boot(boot);
        Ok(Self { folder, head, parts, restarted })
    }

    fn finish(mut self, anchor: Option<&Anchor>) -> Result<Report, VerifyError> {
        let mut chain = Chain::after(self.head.pruned_seq, self.head.pruned_hash.clone());
        let mut report = Report {
            lines: 0,
            files: u64::try_from(self.parts.len()).unwrap_or(u64::MAX),
            first_seq: self.head.pruned_seq + 1,
            last_seq: 0,
            head_hash: String::new(),
            recovered: 0,
            torn_bytes: 0,
            lost: 0,
        };
        let mut anchored = anchor.is_none_or(|anchor| anchor.seq == chain.seq && anchor.hash == chain.hash);
        let mut last = Position { part: 0, line: 0 };
        for part in 0..self.parts.len() {
            let is_last = part + 1 == self.parts.len();
            let mut lines = self.lines(part)?;
            let mut at = Position { part, line: 0 };
            let mut torn_at = 0;
            let mut unended = false;
            let (mut position, mut whole) = (0, 0);
            while let Some(piece) = self.next(&mut lines, part)? {
                at.line += 1;
                unended = !piece.ended;
                position += u64::try_from(piece.bytes.len()).unwrap_or(u64::MAX) + u64::from(piece.ended);
                match chain.step(&piece.bytes) {
                    Ok(Step::Next) => {
                        report.lines += 1;
                        torn_at = 0;
                        whole = position;
                        let known = [
                            Some((self.head.seq, &self.head.hash, Fault::Changed)),
                            anchor.map(|anchor| (anchor.seq, &anchor.hash, Fault::NotTheAnchor)),
                        ];
                        for (_, hash, fault) in
                            known.into_iter().flatten().filter(|known| known.0 == chain.seq)
                        {
                            if *hash != chain.hash {
                                return Err(self.bad(&at, fault));
                            }
                        }
                        anchored |= anchor.is_some_and(|anchor| anchor.seq == chain.seq);
                    }
                    Ok(Step::Torn) if torn_at == 0 => torn_at = at.line,
                    Ok(Step::Torn) => {}
                    Err(_) if is_last && self.may_have_lost_lines_after(chain.seq) => break,
                    Err(Break::ChangedBefore) => {
                        return Err(self.bad(&Position { part, line: torn_at }, Fault::Changed));
                    }
                    Err(broken) => {
                        let fault = self.fault(broken, &chain, lines, part)?;
                        return Err(self.bad(&at, fault));
                    }
                }
            }
            if is_last && self.may_have_lost_lines_after(chain.seq) {
                report.torn_bytes = self.size(part).saturating_sub(whole);
            } else if is_last {
                report.torn_bytes =
                    chain.torn().map_or(0, |torn| u64::try_from(torn.len()).unwrap_or(u64::MAX));
                self.check_end(&chain, &at, torn_at, unended)?;
            } else if torn_at > 0 || unended {
                let line = if torn_at > 0 { torn_at } else { at.line };
                return Err(self.bad(&Position { part, line }, Fault::Changed));
            }
            last = at;
        }
        if chain.seq < self.head.seq && !self.may_have_lost_lines_after(chain.seq) {
            return Err(self.bad(&last, Fault::Truncated(self.head.seq)));
        }
        if let (Some(anchor), false) = (anchor, anchored) {
            return Err(VerifyError::NoAnchor(anchor.seq));
        }
        report.recovered = chain.recovered;
        report.lost = chain.lost + self.head.seq.saturating_sub(chain.seq);
        report.last_seq = chain.seq;
        report.head_hash = chain.hash;
        Ok(report)
    }

    /// Checks the end of the last file: what a killed writer leaves must be after everything that the head
    /// covers.
    fn check_end(
        &self,
        chain: &Chain,
        at: &Position,
        torn_at: u64,
        unended: bool,
    ) -> Result<(), VerifyError> {
        if torn_at > 0 && chain.seq < self.head.seq {
            let shorter = unended && self.size(at.part) < self.head.bytes;
            let fault = if shorter { Fault::Truncated(self.head.seq) } else { Fault::Changed };
            return Err(self.bad(&Position { part: at.part, line: torn_at }, fault));
        }
        if torn_at == 0 && unended && chain.seq <= self.head.seq {
            return Err(self.bad(at, Fault::Truncated(self.head.seq)));
        }
        Ok(())
    }

    /// Whether lines after this one can be missing because the machine stopped before they were on the disk.
    fn may_have_lost_lines_after(&self, seq: u64) -> bool {
        self.restarted && seq >= self.head.disk_seq
    }

    /// The size of the current file when it was opened.
    fn size(&self, part: usize) -> u64 {
        self.parts.get(part).and_then(|part| part.open.as_ref()).map_or(0, |(_, size)| *size)
    }

    fn bad(&self, at: &Position, fault: Fault) -> VerifyError {
        let file = self.parts.get(at.part).map_or_else(|| CURRENT.to_owned(), |part| part.name.clone());
        VerifyError::Bad { file, line: at.line, fault }
    }

    fn failed(&self, part: usize, error: io::Error) -> VerifyError {
        let name = self.parts.get(part).map_or(CURRENT, |part| &part.name);
        VerifyError::Io(self.folder.path.join(name), error)
    }

    fn lines(&mut self, part: usize) -> Result<Lines, VerifyError> {
        let opened = match self.parts.get_mut(part) {
            Some(LogFile { open: Some((file, size)), .. }) => file.try_clone().map(|file| (file, *size)),
            Some(LogFile { name, .. }) => self
                .folder
                .file(name, OFlags::RDONLY)
                .and_then(|file| Ok((file.ok_or(io::ErrorKind::NotFound)?, u64::MAX))),
            None => Err(io::ErrorKind::NotFound.into()),
        };
        opened.and_then(|(file, size)| Lines::new(file, 0, size)).map_err(|error| self.failed(part, error))
    }

    fn next(&self, lines: &mut Lines, part: usize) -> Result<Option<crate::files::Piece>, VerifyError> {
        lines.next().map_err(|error| self.failed(part, error))
    }

    /// Determines the fault of a line that is not the next one.
    fn fault(
        &mut self,
        broken: Break,
        chain: &Chain,
        rest: Lines,
        part: usize,
    ) -> Result<Fault, VerifyError> {
        let expected = chain.seq + 1;
        Ok(match broken {
            Break::Changed | Break::ChangedBefore => Fault::Changed,
            Break::Replaced => Fault::Replaced,
            Break::LostHead => Fault::LostHead,
            Break::Number(found) if found < expected => Fault::Inserted(found),
            Break::Number(found) if self.is_further_down(expected, rest, part)? => {
                Fault::Reordered { found, expected }
            }
            Break::Number(found) => Fault::Removed { from: expected, to: found.saturating_sub(1) },
        })
    }

    fn is_further_down(&mut self, seq: u64, mut rest: Lines, mut part: usize) -> Result<bool, VerifyError> {
        loop {
            while let Some(piece) = self.next(&mut rest, part)? {
                if matches!(line::shape(&piece.bytes), Shape::Whole(link) if link.seq == seq) {
                    return Ok(true);
                }
            }
            part += 1;
            if part >= self.parts.len() {
                return Ok(false);
            }
            rest = self.lines(part)?;
        }
    }
}

#[cfg(test)]
#[path = "power_tests.rs"]
mod power;
#[cfg(test)]
#[path = "verify_tests.rs"]
mod tests;
