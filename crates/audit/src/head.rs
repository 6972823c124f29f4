//! The head of the log: a file of fixed size that records how far the log has come, and is overwritten in
//! place.
//!
//! It is written after the lines. So it can be behind them if a writer is killed, but is never ahead unless
//! lines were removed. It fits into one disk sector and one memory page, so it is never partial.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use crate::chain::Chain;
use crate::files::LogFolder;
use crate::line::GENESIS;

pub(crate) const NAME: &str = "head.json";
const NEW_NAME: &str = "head.json.new";
const SIZE: usize = 512;

/// The content of the head.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Head {
    /// The number of the last line.
    pub seq: u64,
    pub hash: String,
    /// The number of the first line of the current file.
    pub first: u64,
    /// The size of that file.
    pub bytes: u64,
    /// The number of the last line that was removed because of the limit on files.
    pub pruned_seq: u64,
    pub pruned_hash: String,
    /// A digest of the other fields.
    check: String,
    /// The boot in which this was written; empty in a head of an earlier version.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub boot: String,
    /// The last line that is certainly on the disk.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub disk_seq: u64,
    /// When it was flushed, in nanoseconds since that boot.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub synced_ns: u64,
}

/// The interval between flushes while lines are written.
const SYNC_EVERY_NS: u64 = 10 * 1_000_000_000;

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The state of the head file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HeadState {
    Head(Head),
    Nothing,
    Damaged,
}

impl Head {
    /// The head of an empty log.
    pub fn genesis() -> Self {
        Self {
            seq: 0,
            hash: GENESIS.to_owned(),
            first: 1,
            bytes: 0,
            pruned_seq: 0,
            pruned_hash: GENESIS.to_owned(),
            check: String::new(),
            boot: String::new(),
            disk_seq: 0,
            synced_ns: 0,
        }
    }

    /// Whether the machine was restarted since this was written, so that the newest lines may have been lost.
    pub fn is_of_another_boot(&self, boot: &str) -> bool {
        !self.boot.is_empty() && !boot.is_empty() && self.boot != boot
    }

    /// Whether a flush is due at this many nanoseconds since boot.
    pub fn is_sync_due(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.synced_ns) >= SYNC_EVERY_NS
    }

    /// Records that all lines were just flushed.
    pub fn synced(&mut self, now_ns: u64) {
        (self.disk_seq, self.synced_ns) = (self.seq, now_ns);
    }

    /// The position in the chain to continue from.
    pub fn chain(&self) -> Chain {
        Chain::after(self.seq, self.hash.clone())
    }

    fn encode(&self) -> io::Result<[u8; SIZE]> {
        let unchecked = serde_json::to_vec(&Self { check: String::new(), ..self.clone() })?;
        let check = blake3::hash(&unchecked).to_hex().to_string();
        let text = serde_json::to_vec(&Self { check, ..self.clone() })?;
        let mut bytes = [b' '; SIZE];
        bytes[SIZE - 1] = b'\n';
        bytes.get_mut(..text.len()).ok_or(io::ErrorKind::InvalidData)?.copy_from_slice(&text);
        Ok(bytes)
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let head: Self = serde_json::from_slice(bytes).ok()?;
        // There is only one valid encoding: anything else is damaged, even by a single space.
        (head.encode().ok()? == *bytes).then_some(head)
    }

    pub fn read(folder: &LogFolder) -> io::Result<HeadState> {
        let Some(file) = folder.file(NAME, OFlags::RDONLY)? else { return Ok(HeadState::Nothing) };
        let mut bytes = [0; SIZE + 1];
        let mut length = 0;
        while length < bytes.len() {
            match file.read_at(&mut bytes[length..], u64::try_from(length).unwrap_or(u64::MAX))? {
                0 => break,
                more => length += more,
            }
        }
        Ok(Self::decode(&bytes[..length]).map_or(HeadState::Damaged, HeadState::Head))
    }

    /// Overwrites the head in place.
    pub fn write(&self, folder: &LogFolder) -> io::Result<()> {
        match folder.file(NAME, OFlags::WRONLY)? {
            Some(file) if file.metadata()?.len() == SIZE as u64 => file.write_all_at(&self.encode()?, 0),
            // The file was removed or damaged, which the lines written just now record.
            _ => self.create(folder),
        }
    }

    /// Like [`Self::write`], flushed to the disk.
    pub fn write_synced(&self, folder: &LogFolder) -> io::Result<()> {
        self.write(folder)?;
        folder.file(NAME, OFlags::WRONLY)?.ok_or(io::ErrorKind::NotFound)?.sync_all()
    }

    /// Creates the file atomically and durably: without its head, a log can never be trusted again.
    pub fn create(&self, folder: &LogFolder) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC;
        let file: File = folder.file(NEW_NAME, flags)?.ok_or(io::ErrorKind::NotFound)?;
        file.write_all_at(&self.encode()?, 0)?;
        file.sync_all()?;
        folder.replace(NEW_NAME, NAME)?;
        folder.sync()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_head_fits_and_every_changed_byte_shows() {
        let most = u64::MAX;
        let head = Head {
            seq: most,
            first: most,
            bytes: most,
            pruned_seq: most,
            boot: "0f41c1d2-5f0a-4a0c-9a3e-6a2f9f6f1b11".to_owned(),
            disk_seq: most,
            synced_ns: most,
            ..Head::genesis()
        };
        let bytes = head.encode().unwrap();
        let decoded = Head::decode(&bytes).unwrap();
        assert_eq!(Head { check: String::new(), ..decoded }, head);
        for at in 0..SIZE {
            for flip in [1, 0x80, b' ' ^ b'\t'] {
                let mut broken = bytes;
                broken[at] ^= flip;
                assert_eq!(Head::decode(&broken), None, "byte {at}");
            }
        }
    }

    #[test]
    fn a_head_of_an_earlier_version_is_one() {
        let text = serde_json::to_string(&Head::genesis()).unwrap();
        assert!(!text.contains("boot") && !text.contains("disk_seq") && !text.contains("synced"), "{text}");
        assert!(Head::decode(&Head::genesis().encode().unwrap()).is_some());
        assert!(
            !Head::genesis().is_of_another_boot("now"),
            "what it does not tell is not held against the log"
        );
    }

    #[test]
    fn lines_are_synced_once_in_a_while() {
        let second = 1_000_000_000;
        let mut head = Head { seq: 10, ..Head::genesis() };
        assert!(!head.is_sync_due(9 * second) && head.is_sync_due(10 * second));
        head.synced(10 * second);
        assert_eq!((head.disk_seq, head.synced_ns), (10, 10 * second));
        assert!(!head.is_sync_due(19 * second) && head.is_sync_due(20 * second));
        assert!(!head.is_sync_due(5 * second), "a clock that goes back is no reason");
    }
}
