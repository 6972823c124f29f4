//! The way to power-off: ask everybody to end, wait, end them, wait a little.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::processes::Processes;
use crate::sys;

/// How long processes that were killed have to be gone, and what is said last has to be sent.
const LAST_WAIT: Duration = Duration::from_secs(1);

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Asked,
    Killed,
}

/// A power-off that has begun.
#[derive(Debug)]
pub struct Shutdown {
    phase: Phase,
    until: Instant,
}

impl Shutdown {
    /// Asks every process to end.
    pub fn begin(grace: Duration) -> Self {
        if !grace.is_zero() {
            sys::signal_everybody(Signal::TERM.as_raw());
            // One that is stopped would not hear.
            sys::signal_everybody(Signal::CONT.as_raw());
        }
        Self { phase: Phase::Asked, until: Instant::now() + grace }
    }

    /// A second request may shorten the grace and never lengthens it.
    pub fn hurry(&mut self, grace: Duration) {
        if self.phase == Phase::Asked {
            self.until = self.until.min(Instant::now() + grace);
        }
    }

    /// How long nothing has to be done if nobody ends.
    pub fn pause(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// Goes on as time has. True when the power can be turned off: nobody is left, or nobody could be waited for.
    pub fn is_over(&mut self, processes: &Processes, all_said: bool) -> bool {
        let late = Instant::now() >= self.until;
        match self.phase {
            _ if all_said && !processes.any_left() => true,
            Phase::Asked if late => {
                sys::signal_everybody(Signal::KILL.as_raw());
                self.phase = Phase::Killed;
                self.until = Instant::now() + LAST_WAIT;
                false
            }
            Phase::Asked => false,
            Phase::Killed => late,
        }
    }
}
