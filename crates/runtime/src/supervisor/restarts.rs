//! When a sandbox gets another gateway in place of one that is gone.

use std::time::{Duration, Instant};

/// How long it takes until there is another, the first time and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const MOST_PAUSE: Duration = Duration::from_secs(10);
/// A gateway that has served for so long has done nothing wrong.
const GOOD_LIFE: Duration = Duration::from_secs(60);

/// The back-off between gateways.
#[derive(Debug, Default)]
pub struct Restarts {
    /// When the next one is started.
    at: Option<Instant>,
    /// When the last one was lost, and how long the one after it was waited for.
    last: Option<(Instant, Duration)>,
}

impl Restarts {
    /// A gateway was lost, or could not be started.
    pub fn lost(&mut self, now: Instant) {
        let pause = match self.last {
            Some((at, pause)) if now.saturating_duration_since(at) < GOOD_LIFE => (pause * 2).min(MOST_PAUSE),
            _ => FIRST_PAUSE,
        };
        self.last = Some((now, pause));
        self.at = Some(now + pause);
    }

    /// Another one is wanted by then, if none is wanted already.
    pub fn want(&mut self, at: Instant) {
        self.at.get_or_insert(at);
    }

    /// When the next one is started.
    pub fn due(&self) -> Option<Instant> {
        self.at
    }

    /// Whether it is time to start one. It then is to be started.
    pub fn take_due(&mut self, now: Instant) -> bool {
        self.at.take_if(|at| *at <= now).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gateways_that_die_soon_are_waited_for_longer_each_time() {
        let mut now = Instant::now();
        let mut restarts = Restarts::default();
        let mut pauses = Vec::new();
        for _ in 0..12 {
            restarts.lost(now);
            let due = restarts.due().unwrap();
            assert!(!restarts.take_due(due - Duration::from_millis(1)));
            assert!(restarts.take_due(due) && !restarts.take_due(due), "once");
            pauses.push(u64::try_from((due - now).as_millis()).unwrap());
            now = due;
        }
        assert_eq!(pauses, [20, 40, 80, 160, 320, 640, 1280, 2560, 5120, 10_000, 10_000, 10_000]);
        now += GOOD_LIFE;
        restarts.lost(now);
        assert_eq!(restarts.due(), Some(now + FIRST_PAUSE));
        restarts.want(now);
        assert_eq!(restarts.due(), Some(now + FIRST_PAUSE), "one is wanted already");
    }
}
