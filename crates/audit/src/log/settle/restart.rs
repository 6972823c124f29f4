//! Recovers a log after the machine was restarted.
//!
//! Writers do not wait for each flush. So a power failure can lose the newest lines, and a file system may
//! preserve the length of a file but not its content. Therefore everything that was not certainly flushed is
//! read again: the chain continues after the last line that follows from the one before, the rest is removed,
//! and the log records that.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

use super::Settled;
use crate::chain::{Chain, Step};
use crate::event::{RecoveredFrom, What};
use crate::files::Lines;
use crate::line::{self, Shape};

/// What a restart left of the current file.
struct Survivors {
    /// The last line that follows from the one before, if any.
    last: Option<(u64, String)>,
    /// The end position of that line.
    end: u64,
    /// Whether it lacks its line break.
    unended: bool,
}

impl Settled {
    /// Removes partially written lines. False if flushed lines are missing, which a power failure does not
    /// explain.
    pub(super) fn recover_from_power_loss(&mut self) -> io::Result<bool> {
        let found = survivors(&self.file, self.size, self.head.first)?;
        let last = found.last.as_ref().map_or_else(|| self.head.first.saturating_sub(1), |(seq, _)| *seq);
        if last < self.head.disk_seq {
            return Ok(false);
        }
        let lost = (last < self.head.seq).then_some(last + 1);
        if lost.is_some() || found.end < self.size {
            let (torn_bytes, torn_digest) = cut(&self.file, found.end, self.size)?;
            let detail = match lost {
                Some(first) => format!(
                    "The machine stopped before the lines {first} to {} were on its disk",
                    self.head.seq
                ),
                None => format!("The machine stopped before everything after line {last} was on its disk"),
            };
            let from = RecoveredFrom::PowerLoss;
            self.repairs.push(What::Recovered { from, detail, torn_bytes, torn_digest, lost_from: lost });
        }
        match found.last {
            Some((seq, hash)) => {
                if seq > self.head.seq {
                    (self.head.seq, self.head.hash) = (seq, hash);
                }
                // The new file has begun already and records the rotation.
                self.rotated = None;
            }
            None => self.head.first = self.head.seq + 1,
        }
        (self.size, self.head.bytes, self.unended) = (found.end, found.end, found.unended);
        Ok(true)
    }
}

/// Follows the chain from the beginning of a file whose first line has at least this number.
fn survivors(file: &File, size: u64, first: u64) -> io::Result<Survivors> {
    let mut lines = Lines::new(file.try_clone()?, 0, size)?;
    let mut found = Survivors { last: None, end: 0, unended: false };
    let mut chain: Option<Chain> = None;
    let mut at = 0;
    while let Some(piece) = lines.next()? {
        at += u64::try_from(piece.bytes.len()).unwrap_or(u64::MAX) + u64::from(piece.ended);
        let begun = chain.take().or_else(|| match line::shape(&piece.bytes) {
            Shape::Whole(link) if link.seq >= first => {
                Some(Chain::after(link.seq.wrapping_sub(1), link.prev))
            }
            _ => None,
        });
        let Some(mut begun) = begun else { break };
        match begun.step(&piece.bytes) {
            Ok(Step::Next) => {
                found =
                    Survivors { last: Some((begun.seq, begun.hash.clone())), end: at, unended: !piece.ended };
            }
            Ok(Step::Torn) => {}
            Err(_) => break,
        }
        chain = Some(begun);
    }
    Ok(found)
}

/// Removes the end of a file. Returns its length and digest.
fn cut(mut file: &File, from: u64, to: u64) -> io::Result<(Option<u64>, Option<String>)> {
    if from >= to {
        return Ok((None, None));
    }
    file.seek(SeekFrom::Start(from))?;
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(file.take(to - from))?;
    file.set_len(from)?;
    Ok((Some(to - from), Some(hasher.finalize().to_hex().to_string())))
}
