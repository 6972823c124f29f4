//! Policy changes that wait for the gateway's confirmation. A gateway confirms policies in the order in which
//! they were sent.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How long a gateway may take to apply a policy.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(5);

/// The result of a policy change.
#[derive(Debug, PartialEq, Eq)]
pub struct SettledChange<W> {
    /// The waiter that was passed in.
    pub waiter: W,
    /// How many connections the policy closed, or why it may not be in effect.
    pub result: Result<u32, String>,
}

/// Policy changes that were sent to the present gateway.
#[derive(Debug)]
pub struct Changes<W>(VecDeque<Change<W>>);

/// A change that timed out stays in the queue without a waiter: the gateway's late answer must not be taken
/// for the answer to the next one.
#[derive(Debug)]
struct Change<W> {
    waiter: Option<W>,
    until: Instant,
}

impl<W> Changes<W> {
    pub fn new() -> Self {
        Self(VecDeque::new())
    }

    /// Whether no answers are outstanding.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// When the first waiter times out.
    pub fn due(&self) -> Option<Instant> {
        self.0.iter().filter(|change| change.waiter.is_some()).map(|change| change.until).min()
    }

    /// Adds a change that was sent.
    pub fn sent(&mut self, waiter: W, now: Instant) {
        self.0.push_back(Change { waiter: Some(waiter), until: now + CHANGE_TIMEOUT });
    }

    /// The gateway answered the oldest change. Returns its waiter, unless it timed out.
    pub fn answered(&mut self) -> Option<W> {
        self.0.pop_front()?.waiter
    }

    /// Removes the waiters that have timed out.
    pub(crate) fn take_late(&mut self, now: Instant) -> Vec<W> {
        self.0
            .iter_mut()
            .filter(|change| change.until <= now)
            .filter_map(|change| change.waiter.take())
            .collect()
    }

    /// The gateway failed: returns everything that waited for it.
    pub fn abandon(&mut self) -> Vec<W> {
        self.0.drain(..).filter_map(|change| change.waiter).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_answer_is_not_for_the_next_change() {
        let now = Instant::now();
        let mut changes = Changes::new();
        changes.sent("first", now);
        assert_eq!(changes.take_late(now), <[&str; 0]>::default());
        let late = now + CHANGE_TIMEOUT;
        assert_eq!(changes.take_late(late), ["first"]);
        changes.sent("second", late);
        assert_eq!(changes.due(), Some(late + CHANGE_TIMEOUT), "the first one has timed out");
        assert_eq!(changes.answered(), None, "the answer to the first one, which timed out");
        assert_eq!(changes.answered(), Some("second"));
        assert_eq!(changes.answered(), None, "a gateway that answers more than it was sent");
    }

    #[test]
    fn a_lost_gateway_owes_no_answers() {
        let now = Instant::now();
        let mut changes = Changes::new();
        changes.sent("first", now);
        drop(changes.take_late(now + CHANGE_TIMEOUT));
        changes.sent("second", now + CHANGE_TIMEOUT);
        assert_eq!(changes.abandon(), ["second"]);
        assert!(changes.is_empty() && changes.due().is_none());
        changes.sent("third", now);
        assert_eq!(
            changes.answered(),
            Some("third"),
            "the next gateway's first answer is for its first change"
        );
    }
}
