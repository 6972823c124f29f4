//! Output that is written while no cell runs: counted, and its end buffered.

use std::collections::VecDeque;

/// How many bytes are buffered.
const CAPACITY: usize = 16 * 1024;

/// How many bytes are quoted when an interpreter did not start.
const QUOTED: usize = 600;

/// Output that belongs to no cell.
#[derive(Default)]
pub struct BackgroundOutput {
    last: VecDeque<u8>,
    total: u64,
}

impl BackgroundOutput {
    pub fn push(&mut self, bytes: &[u8]) {
        self.total = self.total.saturating_add(bytes.len() as u64);
        let bytes = bytes.get(bytes.len().saturating_sub(CAPACITY)..).unwrap_or_default();
        let excess = (self.last.len() + bytes.len()).saturating_sub(CAPACITY);
        self.last.drain(..excess);
        self.last.extend(bytes);
    }

    /// Returns and clears the byte count and the buffered end.
    pub fn take(&mut self) -> (u64, Vec<u8>) {
        let previous = std::mem::take(self);
        (previous.total, previous.last.into())
    }

    /// Takes the buffered end as a single line of text.
    pub fn take_excerpt(&mut self) -> Option<String> {
        let (_, last) = self.take();
        let last = last.get(last.len().saturating_sub(QUOTED)..).unwrap_or_default();
        let text = String::from_utf8_lossy(last);
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        (!text.is_empty()).then_some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_end_is_buffered_and_everything_is_counted() {
        let mut background = BackgroundOutput::default();
        background.push(&[b'a'; CAPACITY]);
        background.push(b"end");
        background.push(b"");
        let (total, last) = background.take();
        assert_eq!(total, CAPACITY as u64 + 3);
        assert_eq!(last.len(), CAPACITY);
        assert!(last.ends_with(b"aend"));
        background.push(&[b'b'; 3 * CAPACITY]);
        assert_eq!(background.take(), (3 * CAPACITY as u64, vec![b'b'; CAPACITY]));
        assert_eq!(background.take(), (0, vec![]));
    }
}
