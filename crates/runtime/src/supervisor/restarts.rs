//! The back-off between the gateways of a sandbox.

use std::time::{Duration, Instant};

/// The first and the longest back-off.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const MAX_PAUSE: Duration = Duration::from_secs(10);
/// After serving for this long, a gateway's failure resets the back-off.
const RESET_AFTER: Duration = Duration::from_secs(60);

/// The back-off between gateways.
#[derive(Debug, Default)]
pub struct Restarts {
    /// When the next gateway is started.
    at: Option<Instant>,
    /// When the last gateway failed, and the back-off after it.
    last: Option<(Instant, Duration)>,
}

impl Restarts {
    /// A gateway failed or could not be started.
    pub(crate) fn on_failure(&mut self, now: Instant) {
        let pause = match self.last {
            Some((at, pause)) if now.saturating_duration_since(at) < RESET_AFTER => {
                (pause * 2).min(MAX_PAUSE)
            }
            _ => FIRST_PAUSE,
        };
        self.last = Some((now, pause));
        self.at = Some(now + pause);
    }

    /// Schedules a start, unless one is scheduled already.
    pub(crate) fn schedule(&mut self, at: Instant) {
        self.at.get_or_insert(at);
    }

    /// When the next gateway is started.
    pub fn due(&self) -> Option<Instant> {
        self.at
    }

    /// Whether a start is due. If so, the caller must start a gateway.
    pub(crate) fn take_due(&mut self, now: Instant) -> bool {
        self.at.take_if(|at| *at <= now).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn early_failures_increase_the_back_off() {
        let mut now = Instant::now();
        let mut restarts = Restarts::default();
        let mut pauses = Vec::new();
        for _ in 0..12 {
            restarts.on_failure(now);
            let due = restarts.due().unwrap();
            assert!(!restarts.take_due(due - Duration::from_millis(1)));
            assert!(restarts.take_due(due) && !restarts.take_due(due), "once");
            pauses.push(u64::try_from((due - now).as_millis()).unwrap());
            now = due;
        }
        assert_eq!(pauses, [20, 40, 80, 160, 320, 640, 1280, 2560, 5120, 10_000, 10_000, 10_000]);
        now += RESET_AFTER;
        restarts.on_failure(now);
        assert_eq!(restarts.due(), Some(now + FIRST_PAUSE));
        restarts.schedule(now);
        assert_eq!(restarts.due(), Some(now + FIRST_PAUSE), "a start is scheduled already");
    }
}
