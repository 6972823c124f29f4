//! How far the log has come: a file of fixed size beside it, written in place.
//!
//! It is written after the lines, so it may be behind them when a writer is killed, and never ahead of them unless lines
//! are gone. It fits in one sector of a disk and one page of memory: there is no half of it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use crate::chain::Chain;
use crate::files::Folder;
use crate::line::GENESIS;

pub(crate) const NAME: &str = "head.json";
const NEW_NAME: &str = "head.json.new";
const SIZE: usize = 512;

/// How far the log has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Head {
    /// The number of the last line.
    pub seq: u64,
    /// Its hash.
    pub hash: String,
    /// The number of the first line of the file that is written.
    pub first: u64,
    /// The size of that file.
    pub bytes: u64,
    /// The number of the last line that was removed because only so many files are kept.
    pub pruned_seq: u64,
    /// Its hash.
    pub pruned_hash: String,
    /// A digest of the rest.
    check: String,
}

/// What there is in place of a head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Head(Head),
    Nothing,
    Damaged,
}

impl Head {
    /// Of a log without any line.
    pub fn genesis() -> Self {
        Self {
            seq: 0,
            hash: GENESIS.to_owned(),
            first: 1,
            bytes: 0,
            pruned_seq: 0,
            pruned_hash: GENESIS.to_owned(),
            check: String::new(),
        }
    }

    /// The chain goes on from here.
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
        // There is one way to write a head down: everything else is damaged, if only by a space.
        (head.encode().ok()? == *bytes).then_some(head)
    }

    pub fn read(folder: &Folder) -> io::Result<Found> {
        let Some(file) = folder.file(NAME, OFlags::RDONLY)? else { return Ok(Found::Nothing) };
        let mut bytes = [0; SIZE + 1];
        let mut length = 0;
        while length < bytes.len() {
            match file.read_at(&mut bytes[length..], u64::try_from(length).unwrap_or(u64::MAX))? {
                0 => break,
                more => length += more,
            }
        }
        Ok(Self::decode(&bytes[..length]).map_or(Found::Damaged, Found::Head))
    }

    /// Writes over the head that is there.
    pub fn write(&self, folder: &Folder) -> io::Result<()> {
        match folder.file(NAME, OFlags::WRONLY)? {
            Some(file) if file.metadata()?.len() == SIZE as u64 => file.write_all_at(&self.encode()?, 0),
            // Somebody removed or damaged it, and the lines written just now say so.
            _ => self.create(folder),
        }
    }

    /// Makes a new file, which is there whole or not at all.
    pub fn create(&self, folder: &Folder) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC;
        let file: File = folder.file(NEW_NAME, flags)?.ok_or(io::ErrorKind::NotFound)?;
        file.write_all_at(&self.encode()?, 0)?;
        folder.replace(NEW_NAME, NAME)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_head_fits_and_every_changed_byte_shows() {
        let head =
            Head { seq: u64::MAX, first: u64::MAX, bytes: u64::MAX, pruned_seq: u64::MAX, ..Head::genesis() };
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
}
