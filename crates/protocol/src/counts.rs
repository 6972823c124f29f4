//! The byte counts of a gateway's open connections and flows, in memory that outlives the gateway: its owner
//! allocates the memory and reads it when the gateway has died, so that open connections end in the log with
//! their counts.
//!
//! There is one slot for each connection that may be open at once. A slot is three words in the host's byte
//! order: the number of the connection in events, bytes from the guest, bytes to the guest. The number is
//! written last, and a slot without one is empty. A slot is only reused when another connection needs it,
//! because the event of the connection's end may not have been sent yet.

use crate::network::NEVER_BEGAN;

/// The number of words in a slot.
pub const WORDS: usize = 3;
const WORD: usize = size_of::<u64>();

/// The content of a slot. A compromised gateway can write anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    /// The number of the connection in events.
    pub number: u64,
    /// Bytes from the guest.
    pub sent: u64,
    /// Bytes to the guest.
    pub received: u64,
}

/// The size in bytes of so many slots.
pub fn size(connections: u32) -> usize {
    usize::try_from(connections).unwrap_or(usize::MAX).saturating_mul(WORDS * WORD)
}

/// The slots that are not empty, in order. A truncated slot is ignored.
pub fn read(bytes: &[u8]) -> impl Iterator<Item = Count> {
    let (words, _) = bytes.as_chunks::<WORD>();
    let (slots, _) = words.as_chunks::<WORDS>();
    let count = |slot: &[[u8; WORD]; WORDS]| {
        let [number, sent, received] = slot.map(u64::from_ne_bytes);
        Count { number, sent, received }
    };
    slots.iter().map(count).filter(|count| count.number != NEVER_BEGAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn n9_slots_are_read_as_they_are_and_empty_ones_are_not() {
        assert_eq!((size(0), size(2), size(16_384)), (0, 48, 393_216));
        let slots = bytes(&[4, 10, 20, NEVER_BEGAN, 1, 2, u64::MAX, u64::MAX, u64::MAX]);
        let expected = [
            Count { number: 4, sent: 10, received: 20 },
            Count { number: u64::MAX, sent: u64::MAX, received: u64::MAX },
        ];
        assert_eq!(read(&slots).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn n9_any_bytes_can_be_read() {
        let slots = bytes(&[4, 10, 20, 6, 30, 40]);
        for length in 0..=slots.len() {
            assert_eq!(read(&slots[..length]).count(), length / 24, "{length}");
        }
    }
}
