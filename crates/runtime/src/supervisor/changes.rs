//! Who waits for a new network policy to take effect. A gateway answers policies in the order in which they were sent.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How long a gateway may take to apply a policy.
const CHANGE_PATIENCE: Duration = Duration::from_secs(5);

/// What became of a policy change.
#[derive(Debug, PartialEq, Eq)]
pub struct Settled<W> {
    /// What waited for it.
    pub waiter: W,
    /// How many connections the policy closed, or why it may not hold yet.
    pub result: Result<u32, String>,
}

/// Policy changes that were sent to the present gateway.
#[derive(Debug)]
pub struct Changes<W>(VecDeque<Change<W>>);

/// One that has waited for too long keeps its entry without a waiter: the gateway's answer to it may still come, and
/// must not be taken for the answer to the next one.
#[derive(Debug)]
struct Change<W> {
    waiter: Option<W>,
    until: Instant,
}

impl<W> Changes<W> {
    pub fn new() -> Self {
        Self(VecDeque::new())
    }

    /// Whether answers are outstanding.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// When the first waiter has waited for too long.
    pub fn due(&self) -> Option<Instant> {
        self.0.iter().filter(|change| change.waiter.is_some()).map(|change| change.until).min()
    }

    /// A policy was sent.
    pub fn sent(&mut self, waiter: W, now: Instant) {
        self.0.push_back(Change { waiter: Some(waiter), until: now + CHANGE_PATIENCE });
    }

    /// The gateway has answered the oldest one. Its waiter, if that still waits.
    pub fn answered(&mut self) -> Option<W> {
        self.0.pop_front()?.waiter
    }

    /// Waiters that have waited for too long.
    pub fn take_late(&mut self, now: Instant) -> Vec<W> {
        self.0
            .iter_mut()
            .filter(|change| change.until <= now)
            .filter_map(|change| change.waiter.take())
            .collect()
    }

    /// The gateway is lost and answers nothing more. Those who wait for it.
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
        let late = now + CHANGE_PATIENCE;
        assert_eq!(changes.take_late(late), ["first"]);
        changes.sent("second", late);
        assert_eq!(changes.due(), Some(late + CHANGE_PATIENCE), "the first one waits no more");
        assert_eq!(changes.answered(), None, "the answer to the first one, which has left");
        assert_eq!(changes.answered(), Some("second"));
        assert_eq!(changes.answered(), None, "a gateway that answers more than it was sent");
    }

    #[test]
    fn a_lost_gateway_owes_no_answers() {
        let now = Instant::now();
        let mut changes = Changes::new();
        changes.sent("first", now);
        drop(changes.take_late(now + CHANGE_PATIENCE));
        changes.sent("second", now + CHANGE_PATIENCE);
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
