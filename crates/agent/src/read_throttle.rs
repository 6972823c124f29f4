//! Coalesces small pieces of output.
//!
//! Without this, a program that writes line by line would be interrupted at every line: the agent has
//! priority, and a context switch costs more than the line. The first piece is read at once.

use std::time::{Duration, Instant};

/// How long a pipe is not read after a small piece.
const DELAY: Duration = Duration::from_millis(1);
/// A piece of this size is not small: the writer is faster than the reader.
const LARGE_READ: usize = 8 * 1024;

/// Decides when an output is read again.
#[derive(Debug, Default)]
pub struct ReadThrottle {
    until: Option<Instant>,
}

impl ReadThrottle {
    /// Records how much was read.
    pub fn on_read(&mut self, bytes: usize) {
        self.until = (bytes < LARGE_READ).then(|| Instant::now() + DELAY);
    }

    /// Until when not to read the output, if that is later than `now`.
    pub fn paused_until(&self, now: Instant) -> Option<Instant> {
        self.until.filter(|until| *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_small_pieces_are_delayed() {
        let mut throttle = ReadThrottle::default();
        assert_eq!(throttle.paused_until(Instant::now()), None);
        throttle.on_read(10);
        let before = Instant::now() - DELAY;
        assert!(throttle.paused_until(before).is_some_and(|until| until > before));
        assert_eq!(throttle.paused_until(Instant::now() + DELAY), None);
        throttle.on_read(LARGE_READ);
        assert_eq!(throttle.paused_until(before), None);
    }
}
