//! Small pieces of output are taken together.
//!
//! A program that writes line by line would otherwise be interrupted at every line: the agent comes first, and each
//! change between processes costs more than the line. The first piece is taken at once.

use std::time::{Duration, Instant};

/// How long a pipe is left alone after a small piece.
const PAUSE: Duration = Duration::from_millis(1);
/// What is no small piece: the writer fills the pipe faster than it is emptied.
const MUCH: usize = 8 * 1024;

/// Says when an output is looked at again.
#[derive(Debug, Default)]
pub struct Breather {
    until: Option<Instant>,
}

impl Breather {
    /// So much was read.
    pub fn took(&mut self, bytes: usize) {
        self.until = (bytes < MUCH).then(|| Instant::now() + PAUSE);
    }

    /// Until when to leave the output alone, if that is later than `now`.
    pub fn rests(&self, now: Instant) -> Option<Instant> {
        self.until.filter(|until| *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_small_pieces_are_waited_for() {
        let mut breather = Breather::default();
        assert_eq!(breather.rests(Instant::now()), None);
        breather.took(10);
        let before = Instant::now() - PAUSE;
        assert!(breather.rests(before).is_some_and(|until| until > before));
        assert_eq!(breather.rests(Instant::now() + PAUSE), None);
        breather.took(MUCH);
        assert_eq!(breather.rests(before), None);
    }
}
