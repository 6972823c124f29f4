//! The guest kernel's own output. The last lines are held in memory for error messages; a persistent sandbox logs all of it.
//!
//! A wedged guest can write gigabytes here. Reading is limited to a fixed rate; the guest then waits for
//! the keeper, which affects no other sandbox (attacks R4, U4).

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use bathy_logs::{CONSOLE, Meta, Ring};
use bathy_protocol::unix_ns;
use rustix::io::Errno;

/// How much of the output is held in memory.
const TAIL_BYTES: usize = 16 * 1024;
/// How much is read in one [`PERIOD`] at the most.
const PER_PERIOD: usize = 64 * 1024;
const PERIOD: Duration = Duration::from_millis(100);
/// More than a pipe holds, unless it was made larger.
const PIPE: usize = 128 * 1024;
/// How many lines an error shows.
const SHOWN_LINES: usize = 20;
/// What a kernel writes before the reason for its panic, and how many lines before that are shown as well.
const PANIC: &str = "Kernel panic - not syncing";
const BEFORE_PANIC: usize = 4;

/// The end of the guest's console output.
pub struct ConsoleLog {
    pipe: OwnedFd,
    /// The log of all output, if the sandbox is persistent.
    ring: Option<Ring>,
    tail: VecDeque<u8>,
    period_started: Instant,
    in_period: usize,
}

/// What a round of reading found.
#[derive(Debug, PartialEq, Eq)]
pub enum Reading {
    /// Nothing more for now.
    Empty,
    /// The guest writes too fast: read again after this long.
    Pause(Duration),
    /// The guest closed its console, or has exited, which its process descriptor reports.
    Ended,
}

impl ConsoleLog {
    /// Reads from the non-blocking `pipe`.
    pub fn new(pipe: OwnedFd, ring: Option<Ring>) -> Self {
        Self { pipe, ring, tail: VecDeque::new(), period_started: Instant::now(), in_period: 0 }
    }

    /// The pipe to wait for.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }

    /// Reads what is there, within the rate.
    pub fn read(&mut self) -> Reading {
        let mut buffer = [0u8; 4096];
        loop {
            let elapsed = self.period_started.elapsed();
            if elapsed >= PERIOD {
                self.period_started = Instant::now();
                self.in_period = 0;
            } else if self.in_period >= PER_PERIOD {
                return Reading::Pause(PERIOD.saturating_sub(elapsed));
            }
            match rustix::io::read(&self.pipe, &mut buffer) {
                Ok(count @ 1..) => {
                    self.in_period += count;
                    self.append(buffer.get(..count).unwrap_or_default());
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Reading::Empty,
                Ok(0) | Err(_) => return Reading::Ended,
            }
        }
    }

    /// Reads all that is left in the pipe, whatever the rate: the guest writes no more, and a pipe is small.
    pub fn read_rest(&mut self) {
        let mut buffer = [0u8; 4096];
        for _ in 0..PIPE / buffer.len() {
            match rustix::io::read(&self.pipe, &mut buffer) {
                Ok(count @ 1..) => self.append(buffer.get(..count).unwrap_or_default()),
                Err(Errno::INTR) => {}
                _ => return,
            }
        }
    }

    fn append(&mut self, bytes: &[u8]) {
        if let Some(ring) = &mut self.ring {
            // A log that cannot be written is no reason to end a sandbox; the ring counts what it dropped.
            let _ = ring.write(&Meta { unix_ns: unix_ns(), source: 0, channel: CONSOLE }, bytes);
        }
        self.tail.extend(bytes);
        let excess = self.tail.len().saturating_sub(TAIL_BYTES);
        self.tail.drain(..excess);
    }

    /// The last lines. After a panic they begin with its reason: the stack behind it is often longer than what is shown.
    pub fn tail(&self) -> String {
        let bytes: Vec<u8> = self.tail.iter().copied().filter(|byte| *byte != b'\r').collect();
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        let last = lines.len().saturating_sub(SHOWN_LINES);
        let reason = lines.iter().rposition(|line| line.contains(PANIC));
        let first = reason.map_or(last, |at| at.saturating_sub(BEFORE_PANIC).min(last));
        lines
            .get(first..)
            .unwrap_or_default()
            .iter()
            .take(SHOWN_LINES)
            .copied()
            .collect::<Vec<_>>()
            .join("\n")
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    fn log() -> (ConsoleLog, std::fs::File) {
        let (read, write) = pipe_with(PipeFlags::NONBLOCK).unwrap();
        (ConsoleLog::new(read, None), std::fs::File::from(write))
    }

    #[test]
    fn r4_a_flood_is_slowed_down_and_only_its_end_is_held() {
        let (mut log, mut guest) = log();
        let line = [b'x'; 1023].iter().copied().chain([b'\n']).collect::<Vec<_>>();
        let mut paused = false;
        for _ in 0..2 * PER_PERIOD / line.len() {
            // A full pipe is the point: the guest would wait here.
            let _ = guest.write(&line);
            paused |= matches!(log.read(), Reading::Pause(_));
        }
        assert!(paused, "twice the rate was read without a pause");
        assert!(log.tail.len() <= TAIL_BYTES);
    }

    #[test]
    fn u4_a_closed_console_is_told_from_an_empty_one() {
        let (mut log, guest) = log();
        assert_eq!(log.read(), Reading::Empty);
        drop(guest);
        assert_eq!(log.read(), Reading::Ended);
    }

    #[test]
    fn the_tail_is_the_last_lines_without_empty_ones() {
        let (mut log, mut guest) = log();
        for number in 0..50 {
            write!(guest, "line {number}\r\n\r\n").unwrap();
        }
        assert_eq!(log.read(), Reading::Empty);
        let tail = log.tail();
        assert!(tail.starts_with("line 30\n") && tail.ends_with("line 49"), "{tail}");
    }
    #[test]
    fn the_reason_for_a_panic_is_shown_however_long_its_stack_is() {
        let (mut log, mut guest) = log();
        for number in 0..30 {
            writeln!(guest, "line {number}").unwrap();
        }
        writeln!(guest, "[ 1.0] Kernel panic - not syncing: Out of memory").unwrap();
        for number in 0..100 {
            writeln!(guest, "[ 1.1]  ? frame {number}").unwrap();
        }
        assert_eq!(log.read(), Reading::Empty);
        let tail = log.tail();
        assert!(tail.starts_with("line 26\n") && tail.contains("Out of memory"), "{tail}");
        assert_eq!(tail.lines().count(), SHOWN_LINES);
    }
}
