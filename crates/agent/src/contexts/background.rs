//! What is written while no cell runs: counted, and the last of it kept.

use std::collections::VecDeque;

/// How much is kept.
const KEPT: usize = 16 * 1024;

/// How much of it is quoted when an interpreter did not start.
const QUOTED: usize = 600;

/// Output that belongs to no cell.
#[derive(Default)]
pub struct Background {
    last: VecDeque<u8>,
    total: u64,
}

impl Background {
    pub fn push(&mut self, bytes: &[u8]) {
        self.total = self.total.saturating_add(bytes.len() as u64);
        let bytes = bytes.get(bytes.len().saturating_sub(KEPT)..).unwrap_or_default();
        let excess = (self.last.len() + bytes.len()).saturating_sub(KEPT);
        self.last.drain(..excess);
        self.last.extend(bytes);
    }

    /// How much there was, and the last of it.
    pub fn take(&mut self) -> (u64, Vec<u8>) {
        let taken = std::mem::take(self);
        (taken.total, taken.last.into())
    }

    /// The last of it as a text of one line.
    pub fn take_last_words(&mut self) -> Option<String> {
        let (_, last) = self.take();
        let last = last.get(last.len().saturating_sub(QUOTED)..).unwrap_or_default();
        let words = String::from_utf8_lossy(last);
        let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
        (!words.is_empty()).then_some(words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_is_kept_and_all_of_it_is_counted() {
        let mut background = Background::default();
        background.push(&[b'a'; KEPT]);
        background.push(b"end");
        background.push(b"");
        let (total, last) = background.take();
        assert_eq!(total, KEPT as u64 + 3);
        assert_eq!(last.len(), KEPT);
        assert!(last.ends_with(b"aend"));
        background.push(&[b'b'; 3 * KEPT]);
        assert_eq!(background.take(), (3 * KEPT as u64, vec![b'b'; KEPT]));
        assert_eq!(background.take(), (0, vec![]));
    }
}
