//! Notices a guest whose kernel does not run any more.
//!
//! The agent goes before everything else in its guest, so that it answers a command's start at once even when the guest
//! is busy. One that says nothing at all for minutes while a start waits for its answer is not busy.

use std::time::{Duration, Instant};

use bathy_protocol::Cause;

/// How long a guest may be silent while an answer is due.
const PATIENCE: Duration = Duration::from_secs(120);

/// What is known about the guest's silence.
#[derive(Debug, Default)]
pub struct Watchdog {
    silent_since: Option<Instant>,
}

impl Watchdog {
    /// The guest said something.
    pub fn heard(&mut self) {
        self.silent_since = None;
    }

    /// Decides when to look again, or that the guest hangs.
    pub fn look(&mut self, answer_is_due: bool, now: Instant) -> Result<Option<Instant>, Cause> {
        if !answer_is_due {
            self.silent_since = None;
            return Ok(None);
        }
        let until = *self.silent_since.get_or_insert(now) + PATIENCE;
        if until > now {
            return Ok(Some(until));
        }
        let how =
            format!("the guest hung: it said nothing for {} s while an answer was due", PATIENCE.as_secs());
        Err(Cause::GuestCrashed(how))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOMENT: Duration = Duration::from_secs(1);

    #[test]
    fn a_guest_that_owes_nothing_may_be_silent_for_ever() {
        let (mut dog, begin) = (Watchdog::default(), Instant::now());
        assert_eq!(dog.look(false, begin).unwrap(), None);
        assert_eq!(dog.look(false, begin + 10 * PATIENCE).unwrap(), None);
        // Its time begins when an answer is due.
        assert!(dog.look(true, begin + 10 * PATIENCE).unwrap().is_some());
    }

    #[test]
    fn a_guest_that_says_anything_has_all_its_time_again() {
        let (mut dog, begin) = (Watchdog::default(), Instant::now());
        assert_eq!(dog.look(true, begin).unwrap(), Some(begin + PATIENCE));
        dog.heard();
        let later = begin + PATIENCE + MOMENT;
        assert_eq!(dog.look(true, later).unwrap(), Some(later + PATIENCE));
    }

    #[test]
    fn a_silent_guest_hangs_when_its_time_is_over_and_not_before() {
        let (mut dog, begin) = (Watchdog::default(), Instant::now());
        dog.look(true, begin).unwrap();
        assert!(dog.look(true, begin + PATIENCE - MOMENT).is_ok());
        let cause = dog.look(true, begin + PATIENCE).unwrap_err();
        assert!(matches!(cause, Cause::GuestCrashed(how) if how.contains("said nothing for 120 s")));
    }
}
