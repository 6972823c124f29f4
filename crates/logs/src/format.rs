//! The layout of a ring file.
//!
//! ```text
//! 0      slot A of the header     a position counts all bytes ever written and never decreases;
//! 2048   slot B of the header     its offset in the file is HEADER + position % capacity
//! 4096   data, `capacity` bytes
//! ```
//!
//! According to the header, there are complete records from `start` to `end`. The writer
//!
//! 1. advances `start` past the records that are in the way,
//! 2. writes the new record into the freed space,
//! 3. advances `end` past it.
//!
//! If it is killed in between, the header is still correct. A reader that checks `start` *after* it has
//! copied a record knows whether the record was still there. The two slots are written in turn: while one is
//! being written, or is incomplete because its writer died, the other one is valid. A checksum shows which is
//! which.

use crate::Meta;

/// The offset of the data area.
pub const HEADER: u64 = 4096;
/// The same as [`HEADER`], as a size in memory.
pub(crate) const HEADER_SIZE: usize = 4096;
/// The minimum capacity in bytes.
pub const MIN_CAPACITY: u64 = 4096;
/// The maximum capacity in bytes.
pub const MAX_CAPACITY: u64 = 1 << 40;
/// The most bytes of a record. Longer writes are split into several records.
pub const MAX_CHUNK: usize = 64 * 1024;

/// The size of one slot of the header.
pub(crate) const SLOT: usize = 64;
/// The offsets of the slots.
pub(crate) const SLOT_OFFSETS: [u64; 2] = [0, 2048];
/// The size of a record's header.
pub(crate) const PREFIX: usize = 32;

const MAGIC: u64 = u64::from_le_bytes(*b"bathring");
const VERSION: u64 = 1;
/// Larger positions are invalid: no disk can be written that often. Sums of two of them cannot overflow.
const MAX_POSITION: u64 = 1 << 62;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Counts the headers written: the larger one is the newer one, and its parity selects its slot.
    pub turn: u64,
    /// The size of the data area.
    pub capacity: u64,
    /// The position of the oldest record.
    pub start: u64,
    /// The position after the newest record.
    pub end: u64,
    /// How many bytes of output were lost: overwritten, or not written because the disk was full.
    pub dropped: u64,
}

impl Header {
    pub fn new(capacity: u64) -> Self {
        Self { turn: 0, capacity, start: 0, end: 0, dropped: 0 }
    }

    /// Encodes the header for a slot.
    pub fn encode(&self) -> [u8; SLOT] {
        let mut slot = [0; SLOT];
        let fields = [MAGIC, VERSION, self.turn, self.capacity, self.start, self.end, self.dropped];
        for (offset, field) in slot.chunks_exact_mut(8).zip(fields) {
            offset.copy_from_slice(&field.to_le_bytes());
        }
        let check = checksum(&slot[..SLOT - 8]);
        slot[SLOT - 8..].copy_from_slice(&check.to_le_bytes());
        slot
    }

    /// Decodes a slot, if it is complete and plausible.
    pub fn decode(slot: &[u8]) -> Option<Self> {
        let word = |index: usize| -> Option<u64> {
            Some(u64::from_le_bytes(slot.get(index * 8..index * 8 + 8)?.try_into().ok()?))
        };
        let header =
            Self { turn: word(2)?, capacity: word(3)?, start: word(4)?, end: word(5)?, dropped: word(6)? };
        let whole = word(0)? == MAGIC && word(1)? == VERSION && word(7)? == checksum(slot.get(..SLOT - 8)?);
        (whole && header.is_plausible()).then_some(header)
    }

    fn is_plausible(&self) -> bool {
        (MIN_CAPACITY..=MAX_CAPACITY).contains(&self.capacity)
            && self.turn < MAX_POSITION
            && self.end <= MAX_POSITION
            && self.start <= self.end
            && self.end - self.start <= self.capacity
    }

    /// The offset of its slot.
    pub fn offset(&self) -> u64 {
        if self.turn.is_multiple_of(2) { SLOT_OFFSETS[0] } else { SLOT_OFFSETS[1] }
    }

    /// Whether a record can be at this position.
    pub fn holds(&self, position: u64, size: u64) -> bool {
        position >= self.start && size <= self.capacity && position <= self.end && self.end - position >= size
    }
}

/// Both slots of the header, read at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slots {
    /// The newer valid slot.
    pub newest: Option<Header>,
    /// Whether both are valid: then neither was just being written.
    pub settled: bool,
}

impl Slots {
    /// Decodes the first [`HEADER`] bytes of a file.
    pub fn decode(page: &[u8]) -> Self {
        let slots = SLOT_OFFSETS.map(|offset| {
            let offset = usize::try_from(offset).ok()?;
            Header::decode(page.get(offset..offset + SLOT)?)
        });
        let newest = slots.iter().flatten().max_by_key(|header| header.turn).copied();
        Self { newest, settled: slots.iter().all(Option::is_some) }
    }
}

/// The header of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Prefix {
    /// The length of the record's bytes; at most [`MAX_CHUNK`].
    pub length: u32,
    pub meta: Meta,
    /// The record's own position, which distinguishes it from old bytes of an earlier round.
    pub position: u64,
}

impl Prefix {
    pub fn encode(&self) -> [u8; PREFIX] {
        let mut bytes = [0; PREFIX];
        bytes[0..4].copy_from_slice(&self.length.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.meta.source.to_le_bytes());
        bytes[8] = self.meta.channel;
        bytes[16..24].copy_from_slice(&self.meta.unix_ns.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.position.to_le_bytes());
        let check = checksum(&bytes).to_le_bytes();
        bytes[9..16].copy_from_slice(&check[..7]);
        bytes
    }

    /// Decodes the prefix, if it belongs to a record at `position`.
    pub fn decode(bytes: &[u8; PREFIX], position: u64) -> Option<Self> {
        let word =
            |at: usize| -> Option<u32> { Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?)) };
        let long =
            |at: usize| -> Option<u64> { Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?)) };
        let meta = Meta { unix_ns: long(16)?, source: word(4)?, channel: bytes[8] };
        let prefix = Self { length: word(0)?, meta, position };
        let fits = usize::try_from(prefix.length).is_ok_and(|length| length <= MAX_CHUNK);
        (fits && prefix.encode() == *bytes).then_some(prefix)
    }

    /// The size of the whole record in the data area.
    pub fn size(&self) -> u64 {
        u64::from(self.length) + PREFIX as u64
    }
}

/// FNV-1a. It detects incomplete writes and disk faults, but not manipulation.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_with_any_byte_changed_is_none() {
        let header = Header { turn: 7, capacity: 8192, start: 5, end: 99, dropped: 3 };
        let slot = header.encode();
        assert_eq!(Header::decode(&slot), Some(header));
        for at in 0..SLOT {
            let mut broken = slot;
            broken[at] ^= 0x40;
            assert_eq!(Header::decode(&broken), None, "byte {at}");
        }
    }

    #[test]
    fn an_implausible_header_is_none() {
        let good = Header { turn: 7, capacity: 8192, start: 5, end: 99, dropped: 3 };
        let bad = [
            Header { start: 100, ..good },
            Header { end: 8198, ..good },
            Header { capacity: 1, ..good },
            Header { capacity: u64::MAX, ..good },
            Header { start: u64::MAX - 1, end: u64::MAX, ..good },
        ];
        for header in bad {
            assert_eq!(Header::decode(&header.encode()), None, "{header:?}");
        }
    }

    #[test]
    fn a_prefix_is_valid_at_its_own_position_only() {
        let meta = Meta { unix_ns: 1, source: 2, channel: 3 };
        let prefix = Prefix { length: 9, meta, position: 64 };
        assert_eq!(Prefix::decode(&prefix.encode(), 64), Some(prefix));
        assert_eq!(Prefix::decode(&prefix.encode(), 65), None);
        let long = Prefix { length: 70_000, meta, position: 64 };
        assert_eq!(Prefix::decode(&long.encode(), 64), None);
    }
}
