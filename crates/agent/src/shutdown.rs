//! Power-off: asks all processes to end, waits, kills them, waits briefly.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::processes::Processes;
use crate::sys;

/// How long killed processes may take to exit and the last messages to be sent.
const FINAL_TIMEOUT: Duration = Duration::from_secs(1);

/// The progress of the shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Asked,
    Killed,
}

/// A shutdown in progress.
#[derive(Debug)]
pub struct Shutdown {
    phase: Phase,
    until: Instant,
}

impl Shutdown {
    /// Asks all processes to end.
    pub fn begin(grace: Duration) -> Self {
        if !grace.is_zero() {
            sys::signal_all(Signal::TERM.as_raw());
            // Stopped processes would not handle the signal.
            sys::signal_all(Signal::CONT.as_raw());
        }
        Self { phase: Phase::Asked, until: Instant::now() + grace }
    }

    /// A second request can shorten the grace period but not extend it.
    pub fn shorten_grace(&mut self, grace: Duration) {
        if self.phase == Phase::Asked {
            self.until = self.until.min(Instant::now() + grace);
        }
    }

    /// The time until the next step, if no process ends before.
    pub fn pause(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// Takes the next step when it is due. True when the power can be turned off: all processes have ended,
    /// or waiting has timed out.
    pub fn is_over(&mut self, processes: &Processes, all_sent: bool) -> bool {
        let late = Instant::now() >= self.until;
        match self.phase {
            _ if all_sent && !processes.any_left() => true,
            Phase::Asked if late => {
                sys::signal_all(Signal::KILL.as_raw());
                self.phase = Phase::Killed;
                self.until = Instant::now() + FINAL_TIMEOUT;
                false
            }
            Phase::Asked => false,
            Phase::Killed => late,
        }
    }
}
