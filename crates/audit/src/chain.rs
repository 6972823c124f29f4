//! The rules of the hash chain, shared by appending and verification.
//!
//! A writer that is killed leaves a partial line. The next writer ends it with a line break and records, in a
//! line of its own, the length and digest of the partial line. So partial lines are part of the log, and
//! every byte of them is accounted for. If that writer is killed too, there is one more partial line.

use crate::event::{Event, RecoveredFrom, What};
use crate::line::{self, ChainLink, MAX_LINE, Shape};

/// The most bytes of consecutive partial lines.
const MAX_TORN: usize = 4 * MAX_LINE;

/// A position in the chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chain {
    /// The number of the last line.
    pub seq: u64,
    pub hash: String,
    /// Partial lines since then, with the line breaks between them.
    torn: Option<Vec<u8>>,
    /// How many times partial lines were accounted for.
    pub recovered: u64,
    /// How many lines were lost in power failures, according to later lines.
    pub lost: u64,
}

/// The result of reading a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The line is the next one.
    Next,
    /// The line is partial and has to be accounted for.
    Torn,
}

/// Why a line is not the next one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Break {
    /// Its content does not match its hash.
    Changed,
    /// An earlier line has that fault; it could have been partial but is not accounted for.
    ChangedBefore,
    /// It has the right number but follows another line.
    Replaced,
    /// It has another number.
    Number(u64),
    /// A writer reported that the head was missing.
    LostHead,
}

impl Chain {
    pub fn after(seq: u64, hash: String) -> Self {
        Self { seq, hash, torn: None, recovered: 0, lost: 0 }
    }

    /// The partial lines that are not accounted for yet.
    pub fn torn(&self) -> Option<&[u8]> {
        self.torn.as_deref()
    }

    /// Reads the next line, without its line break.
    pub fn step(&mut self, line: &[u8]) -> Result<Step, Break> {
        match line::shape(line) {
            Shape::Whole(link) => self.whole(link, line),
            Shape::Changed => Err(self.earlier_or(Break::Changed)),
            Shape::Other => self.half(line),
        }
    }

    fn earlier_or(&self, here: Break) -> Break {
        if self.torn.is_some() { Break::ChangedBefore } else { here }
    }

    fn whole(&mut self, link: ChainLink, line: &[u8]) -> Result<Step, Break> {
        if link.seq != self.seq.wrapping_add(1) {
            return self.behind_a_gap(link, line);
        }
        if link.prev != self.hash {
            return Err(self.earlier_or(Break::Replaced));
        }
        let recovery = if self.torn.is_some() || may_be_recovery(line) {
            serde_json::from_slice::<Event>(line).ok().map(|event| event.what)
        } else {
            None
        };
        if let Some(What::Recovered { from: RecoveredFrom::LostHead, .. }) = recovery {
            return Err(Break::LostHead);
        }
        if self.torn.as_ref().is_some_and(|torn| !accounts_for(recovery.as_ref(), torn)) {
            return Err(Break::ChangedBefore);
        }
        self.torn = None;
        self.recovered += u64::from(matches!(recovery, Some(What::Recovered { .. })));
        self.seq = link.seq;
        self.hash = link.hash;
        Ok(Step::Next)
    }

    /// Lines are missing before this one. It is accepted only if it records that exactly these were lost.
    fn behind_a_gap(&mut self, link: ChainLink, line: &[u8]) -> Result<Step, Break> {
        let expected = self.seq.wrapping_add(1);
        let records = |what: What| matches!(what, What::Recovered { from: RecoveredFrom::PowerLoss, lost_from, .. } if lost_from == Some(expected));
        let event = may_be_recovery(line).then(|| serde_json::from_slice::<Event>(line).ok()).flatten();
        if self.torn.is_some() || link.seq < expected || !event.is_some_and(|event| records(event.what)) {
            return Err(self.earlier_or(Break::Number(link.seq)));
        }
        self.lost += link.seq - expected;
        self.recovered += 1;
        self.seq = link.seq;
        self.hash = link.hash;
        Ok(Step::Next)
    }

    /// A partial line must be a non-empty prefix of the line that was expected here.
    fn half(&mut self, line: &[u8]) -> Result<Step, Break> {
        let beginning = line::beginning(self.seq.wrapping_add(1), &self.hash).into_bytes();
        let fits = line.starts_with(&beginning) || beginning.starts_with(line);
        let so_far = self.torn.as_ref().map_or(0, Vec::len);
        if !fits || line.is_empty() || so_far + line.len() > MAX_TORN {
            return Err(self.earlier_or(Break::Changed));
        }
        match &mut self.torn {
            Some(torn) => {
                torn.push(b'\n');
                torn.extend_from_slice(line);
            }
            None => self.torn = Some(line.to_vec()),
        }
        Ok(Step::Torn)
    }
}

/// A cheap check, because parsing every line would take longer than everything else.
fn may_be_recovery(line: &[u8]) -> bool {
    str::from_utf8(line).is_ok_and(|line| line.contains("\"event\":\"recovered\""))
}

fn accounts_for(recovery: Option<&What>, torn: &[u8]) -> bool {
    let Some(What::Recovered { torn_bytes: Some(bytes), torn_digest: Some(digest), .. }) = recovery else {
        return false;
    };
    u64::try_from(torn.len()) == Ok(*bytes) && *digest == blake3::hash(torn).to_hex().as_str()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line::GENESIS;
    use crate::testing::event;

    /// A prefix of the first line with this length.
    fn half(length: usize) -> Vec<u8> {
        let mut text = line::beginning(1, GENESIS).into_bytes();
        text.resize(length, b'x');
        text
    }

    #[test]
    fn halves_have_a_bound_together() {
        let mut chain = Chain::after(0, GENESIS.to_owned());
        assert_eq!(chain.step(&half(MAX_TORN - 100)), Ok(Step::Torn));
        assert_eq!(chain.step(&half(101)), Err(Break::ChangedBefore));
        assert_eq!(chain.step(&half(100)), Ok(Step::Torn), "exactly at the limit");
        assert_eq!(chain.step(b"{"), Err(Break::ChangedBefore));
        let mut chain = Chain::after(0, GENESIS.to_owned());
        assert_eq!(chain.step(&half(MAX_TORN + 1)), Err(Break::Changed));
        assert_eq!(chain.step(&half(MAX_TORN)), Ok(Step::Torn));
        let mut chain = Chain::after(0, GENESIS.to_owned());
        for _ in 0..3 {
            assert_eq!(chain.step(&half(MAX_LINE)), Ok(Step::Torn), "writers may be killed in a row");
        }
    }

    #[test]
    fn a_half_is_a_beginning_of_the_next_line_and_not_empty() {
        for (text, fits) in [(&b""[..], false), (b"{", true), (b"x", false), (b"{\"seq\":2", false)] {
            let step = Chain::after(0, GENESIS.to_owned()).step(text);
            assert_eq!(step.is_ok(), fits, "{text:?}");
        }
    }

    #[test]
    fn a_half_is_accounted_for_by_its_length_and_its_digest() {
        let torn = half(200);
        let account = |bytes: u64, digest: String| What::Recovered {
            from: RecoveredFrom::TornLine,
            detail: String::new(),
            torn_bytes: Some(bytes),
            torn_digest: Some(digest),
            lost_from: None,
        };
        let right = crate::event::digest(&torn);
        for (what, fits) in [
            (account(200, right.clone()), true),
            (account(199, right), false),
            (account(200, crate::event::digest(b"other")), false),
            (What::SandboxRemoved, false),
        ] {
            let mut chain = Chain::after(0, GENESIS.to_owned());
            chain.step(&torn).unwrap();
            let mut text = vec![];
            line::encode(&mut text, 1, GENESIS, &Event { what: what.clone(), ..event(1) }).unwrap();
            let found = chain.step(text.trim_ascii_end());
            let expected = if fits { Ok(Step::Next) } else { Err(Break::ChangedBefore) };
            assert_eq!(found, expected, "{what:?}");
            assert_eq!(chain.recovered, u64::from(fits));
        }
    }

    #[test]
    fn only_recoveries_are_counted_as_such() {
        let mut chain = Chain::after(0, GENESIS.to_owned());
        let mut text = vec![];
        // It contains the text of a recovery but is none.
        let what = What::SandboxEnded { cause: "\"event\":\"recovered\"".to_owned() };
        line::encode(&mut text, 1, GENESIS, &Event { what, ..event(1) }).unwrap();
        assert_eq!(chain.step(text.trim_ascii_end()), Ok(Step::Next));
        assert_eq!(chain.recovered, 0);
    }

    #[test]
    fn a_line_that_tells_of_a_loss_is_behind_the_last_one_and_behind_no_half() {
        let step = |chain: &mut Chain, seq| {
            let from = RecoveredFrom::PowerLoss;
            let detail = String::new();
            let what =
                What::Recovered { from, detail, torn_bytes: None, torn_digest: None, lost_from: Some(6) };
            let mut text = vec![];
            line::encode(&mut text, seq, GENESIS, &Event { what, ..event(1) }).unwrap();
            chain.step(text.trim_ascii_end())
        };
        let before = Chain::after(5, GENESIS.to_owned());
        let mut chain = before.clone();
        assert_eq!(step(&mut chain, 3), Err(Break::Number(3)), "it would come before what is lost");
        assert_eq!(chain, before);
        assert_eq!(step(&mut chain, 9), Ok(Step::Next));
        assert_eq!((chain.seq, chain.lost, chain.recovered), (9, 3, 1));
        let mut chain = before;
        chain.step(b"{").unwrap();
        assert_eq!(step(&mut chain, 9), Err(Break::ChangedBefore), "the half is not accounted for");
    }
}
