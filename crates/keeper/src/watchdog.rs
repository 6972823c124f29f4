//! Notices a guest whose kernel or PID 1 does not run any more.
//!
//! The agent has priority over everything else in its guest and waits for no process of it, so it answers at once even when
//! the guest is busy. An agent that sends nothing for minutes while an answer is due has hung. While commands run that need
//! no answer, the keeper asks for one with a ping.

use std::time::{Duration, Instant};

use bathy_protocol::Cause;

/// How long a guest may be silent while an answer is due.
const PATIENCE: Duration = Duration::from_secs(120);

/// How long a guest in which something runs may be silent before it is pinged.
const QUIET: Duration = Duration::from_secs(60);

/// What the guest owes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Nothing: it may be silent for ever.
    Nothing,
    /// Something runs in it, which may be silent as long as the agent is alive.
    SignOfLife,
    Answer,
}

/// What the loop does about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// Nothing, until something else happens.
    Never,
    /// Looks again at this time.
    At(Instant),
    /// Pings the guest, and looks again at this time.
    Ping(Instant),
}

/// What is known about the guest's silence.
#[derive(Debug, Default)]
pub struct Watchdog {
    silent_since: Option<Instant>,
    /// What was due then.
    due: Option<Due>,
}

impl Watchdog {
    /// The guest sent something.
    pub fn on_activity(&mut self) {
        self.silent_since = None;
    }

    /// Decides when to look again, or that the guest hangs.
    pub fn look(&mut self, due: Due, now: Instant) -> Result<Look, Cause> {
        if self.due.replace(due) != Some(due) {
            // Its time begins when an answer is due.
            self.silent_since = None;
        }
        let patience = match due {
            Due::Nothing => return Ok(Look::Never),
            Due::SignOfLife => QUIET,
            Due::Answer => PATIENCE,
        };
        let until = *self.silent_since.get_or_insert(now) + patience;
        match due {
            _ if until > now => Ok(Look::At(until)),
            Due::Answer => Err(Cause::GuestCrashed(format!(
                "the guest hung: it sent nothing for {} s while a reply was due",
                PATIENCE.as_secs()
            ))),
            _ => {
                self.silent_since = Some(now);
                self.due = Some(Due::Answer);
                Ok(Look::Ping(now + PATIENCE))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOMENT: Duration = Duration::from_secs(1);

    #[test]
    fn a_guest_that_owes_nothing_may_be_silent_for_ever() {
        let (mut dog, begin) = (Watchdog::default(), Instant::now());
        assert_eq!(dog.look(Due::Nothing, begin).unwrap(), Look::Never);
        assert_eq!(dog.look(Due::Nothing, begin + 10 * PATIENCE).unwrap(), Look::Never);
        // Its time begins when an answer is due.
        let later = begin + 10 * PATIENCE;
        assert_eq!(dog.look(Due::Answer, later).unwrap(), Look::At(later + PATIENCE));
    }

    #[test]
    fn a_guest_that_says_anything_has_all_its_time_again() {
        let (mut dog, begin) = (Watchdog::default(), Instant::now());
        assert_eq!(dog.look(Due::Answer, begin).unwrap(), Look::At(begin + PATIENCE));
        dog.on_activity();
        let later = begin + PATIENCE + MOMENT;
        assert_eq!(dog.look(Due::Answer, later).unwrap(), Look::At(later + PATIENCE));
    }

    #[test]
    fn a_silent_guest_hangs_when_its_time_is_over_and_not_before() {
        let (mut dog, begin) = (Watchdog::default(), Instant::now());
        dog.look(Due::Answer, begin).unwrap();
        assert!(dog.look(Due::Answer, begin + PATIENCE - MOMENT).is_ok());
        let cause = dog.look(Due::Answer, begin + PATIENCE).unwrap_err();
        assert!(matches!(cause, Cause::GuestCrashed(how) if how.contains("sent nothing for 120 s")));
    }

    #[test]
    fn r11_a_guest_in_which_something_runs_is_pinged_and_hangs_if_it_does_not_answer() {
        let (mut dog, begin) = (Watchdog::default(), Instant::now());
        assert_eq!(dog.look(Due::SignOfLife, begin).unwrap(), Look::At(begin + QUIET));
        let pinged = begin + QUIET;
        assert_eq!(dog.look(Due::SignOfLife, pinged).unwrap(), Look::Ping(pinged + PATIENCE));
        // The ping is what is due from now on, and it has all the time of an answer.
        assert_eq!(dog.look(Due::Answer, pinged + MOMENT).unwrap(), Look::At(pinged + PATIENCE));
        assert!(dog.look(Due::Answer, pinged + PATIENCE).is_err());
    }

    #[test]
    fn a_guest_that_answers_its_pings_may_be_quiet_for_ever() {
        let (mut dog, mut now) = (Watchdog::default(), Instant::now());
        for _ in 0..10 {
            assert_eq!(dog.look(Due::SignOfLife, now).unwrap(), Look::At(now + QUIET));
            now += QUIET;
            assert!(matches!(dog.look(Due::SignOfLife, now).unwrap(), Look::Ping(_)));
            assert!(dog.look(Due::Answer, now).is_ok());
            dog.on_activity();
        }
    }
}
