//! Progress of long steps: a live line on a terminal, plain lines elsewhere.

use std::io::{IsTerminal, Write, stderr};
use std::time::Instant;

/// Shows steps on standard error.
pub struct Progress {
    started: Instant,
    live: bool,
    shown: bool,
}

impl Progress {
    /// Nothing is shown until the first step.
    pub fn new() -> Self {
        Self { started: Instant::now(), live: stderr().is_terminal(), shown: false }
    }

    /// A step begins.
    pub fn step(&mut self, text: &str) {
        let seconds = self.started.elapsed().as_secs();
        let text = crate::escape::text(text);
        // A progress line that cannot be shown is no reason to fail.
        let _ = if self.live {
            write!(stderr(), "\r\x1b[K[{seconds:>4} s] {text}").and_then(|()| stderr().flush())
        } else {
            writeln!(stderr(), "[{seconds:>4} s] {text}")
        };
        self.shown = true;
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.live && self.shown {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }
}
