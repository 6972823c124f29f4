//! A queue of events for the audit log. While the log cannot be written, events are queued in order and
//! retried: a full disk must not lose them. The owner throttles the sources of events while the queue is not
//! empty.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bathy_audit::{Event, Log, LogError};

/// How many are recorded at once.
const AT_ONCE: usize = 256;
/// At this length the sources of events are no longer read (backpressure).
const THROTTLE_AT: usize = 2048;
/// The most queued events: the ends of as many connections as a sandbox may have, and some more. Only an
/// ending sandbox reaches this, because all of its events are read at once then.
const MAX_QUEUED: usize = 24 * 1024;
/// The first and the longest interval between retries.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const MAX_PAUSE: Duration = Duration::from_secs(2);

/// Where events are recorded.
pub trait Sink {
    /// Records all of these events or none.
    ///
    /// # Errors
    /// None was recorded.
    fn append(&self, events: &[Event]) -> Result<(), LogError>;

    /// Like [`Self::append`], for events that have already happened: uses reserved space if necessary.
    ///
    /// # Errors
    /// None was recorded.
    fn append_last(&self, events: &[Event]) -> Result<(), LogError>;
}

impl Sink for Log {
    fn append(&self, events: &[Event]) -> Result<(), LogError> {
        Self::append(self, events)
    }

    fn append_last(&self, events: &[Event]) -> Result<(), LogError> {
        Self::append_last(self, events)
    }
}

#[derive(Debug)]
pub(crate) struct Spool<S = Log> {
    sink: S,
    waiting: VecDeque<Event>,
    /// When the log is retried, and the present interval.
    retry: Option<(Instant, Duration)>,
    /// Events that have no valid form, or that did not fit into the queue.
    dropped: u64,
    failure: Option<String>,
}

/// The most events of one ended sandbox that use the reserved space.
const MAX_RESERVED: usize = 256;

impl<S: Sink> Spool<S> {
    pub fn new(sink: S) -> Self {
        Self { sink, waiting: VecDeque::new(), retry: None, dropped: 0, failure: None }
    }

    /// Records events, or queues them if that is not possible now.
    pub fn record(&mut self, events: impl IntoIterator<Item = Event>, now: Instant) {
        for event in events {
            if self.waiting.len() < MAX_QUEUED {
                self.waiting.push_back(event);
            } else {
                self.dropped += 1;
            }
        }
        if self.retry.is_none() {
            self.write(now);
        }
    }

    /// Records the events of an operation that is only done if this succeeds.
    ///
    /// # Errors
    /// None was recorded.
    pub(crate) fn append_now(&mut self, events: &[Event]) -> Result<(), LogError> {
        self.write_some(AT_ONCE, S::append)?;
        self.sink.append(events)?;
        if self.waiting.is_empty() {
            self.retry = None;
        }
        Ok(())
    }

    /// Retries queued events when it is time.
    pub fn retry(&mut self, now: Instant) {
        if self.retry.is_some_and(|(at, _)| at <= now) {
            self.write(now);
        }
    }

    /// When the next retry is due.
    pub fn due(&self) -> Option<Instant> {
        self.retry.map(|(at, _)| at)
    }

    /// Whether everything is recorded.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether the queue accepts more events. If not, their sources are throttled.
    pub fn has_capacity(&self) -> bool {
        self.waiting.len() < THROTTLE_AT
    }

    /// Why the log could not be written the last time, in one line.
    pub fn failure(&self) -> &str {
        self.failure.as_deref().unwrap_or("the event has no valid form")
    }

    /// Records what can be recorded of a sandbox that has ended, with reserved space if necessary. Returns
    /// how many events are not recorded. They stay queued, so it may be called again.
    pub fn finish(&mut self) -> u64 {
        // Free space is used before the reserve, which is shared with other sandboxes. A guest can cause many
        // queued events: of those beyond the limit, the newest are dropped and counted.
        if self.write_some(AT_ONCE, S::append).is_err() && self.waiting.len() > MAX_RESERVED {
            self.dropped += u64::try_from(self.waiting.len() - MAX_RESERVED).unwrap_or(u64::MAX);
            self.waiting.truncate(MAX_RESERVED);
        }
        let mut most = AT_ONCE;
        while let Err(error) = self.write_some(most, S::append_last) {
            match error {
                // A smaller batch may still fit.
                LogError::Full(_) if most > 1 => most /= 2,
                error => {
                    self.failure = Some(bathy_protocol::chain(&error));
                    break;
                }
            }
        }
        self.dropped + u64::try_from(self.waiting.len()).unwrap_or(u64::MAX)
    }

    /// Records the final events of a sandbox that has ended behind its queued events, and without those that
    /// cannot be recorded. Returns how many events are not recorded.
    pub fn finish_with(&mut self, last: impl IntoIterator<Item = Event>) -> u64 {
        self.finish();
        self.dropped += u64::try_from(self.waiting.len()).unwrap_or(u64::MAX);
        self.waiting = last.into_iter().collect();
        self.finish()
    }

    fn write(&mut self, now: Instant) {
        self.retry = match self.write_some(AT_ONCE, S::append) {
            Ok(()) => None,
            Err(error) => {
                self.failure = Some(bathy_protocol::chain(&error));
                let pause = self.retry.map_or(FIRST_PAUSE, |(_, pause)| (pause * 2).min(MAX_PAUSE));
                Some((now + pause, pause))
            }
        };
    }

    /// Writes queued events in batches of at most `most`, until the queue is empty or the log fails.
    fn write_some(
        &mut self,
        most: usize,
        append: impl Fn(&S, &[Event]) -> Result<(), LogError>,
    ) -> Result<(), LogError> {
        let mut most = most;
        while !self.waiting.is_empty() {
            let count = self.waiting.len().min(most);
            let events = self.waiting.make_contiguous().get(..count).unwrap_or_default();
            match append(&self.sink, events) {
                Ok(()) => drop(self.waiting.drain(..count)),
                // One of them has no valid form: the others are recorded one by one.
                Err(LogError::Line(_)) if count > 1 => most = 1,
                Err(LogError::Line(_)) => {
                    self.waiting.pop_front();
                    self.dropped += 1;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::path::PathBuf;

    use bathy_audit::{Actor, What};

    use super::*;

    /// A log with space for so many events.
    #[derive(Default)]
    struct Disk {
        space: Cell<usize>,
        reserve: Cell<usize>,
        tries: Cell<usize>,
        recorded: RefCell<Vec<u64>>,
    }

    impl Disk {
        fn take(&self, events: &[Event], from: &Cell<usize>) -> Result<(), LogError> {
            self.tries.set(self.tries.get() + 1);
            let numbers = events.iter().map(number);
            if numbers.clone().any(|number| number == UNWRITABLE) {
                return Err(LogError::Line(bathy_audit::LineError::TooLong(1)));
            }
            let left = from.get().checked_sub(events.len()).ok_or(LogError::Full(PathBuf::new()))?;
            from.set(left);
            self.recorded.borrow_mut().extend(numbers);
            Ok(())
        }
    }

    impl Sink for &Disk {
        fn append(&self, events: &[Event]) -> Result<(), LogError> {
            self.take(events, &self.space)
        }

        fn append_last(&self, events: &[Event]) -> Result<(), LogError> {
            self.take(events, &self.reserve)
        }
    }

    const UNWRITABLE: u64 = u64::MAX;

    fn event(number: u64) -> Event {
        Event::now(Actor::this_process("test"), What::NetDropped { reason: String::new(), count: number })
    }

    fn number(event: &Event) -> u64 {
        match event.what {
            What::NetDropped { count, .. } => count,
            _ => unreachable!("only these events are used"),
        }
    }

    #[test]
    fn f1_events_that_cannot_be_recorded_are_queued_in_order() {
        let disk = Disk::default();
        let mut spool = Spool::new(&disk);
        let now = Instant::now();
        disk.space.set(1);
        spool.record([event(0)], now);
        assert!(spool.is_empty() && spool.due().is_none());
        spool.record([event(1), event(2)], now);
        spool.record([event(3)], now);
        assert!(!spool.is_empty() && spool.failure().contains("full"), "{}", spool.failure());
        // Later events do not overtake queued ones, even when there is space.
        disk.space.set(1000);
        spool.record([event(4)], now);
        assert_eq!(*disk.recorded.borrow(), [0]);
        spool.retry(now + FIRST_PAUSE);
        assert_eq!(*disk.recorded.borrow(), [0, 1, 2, 3, 4]);
        assert!(spool.is_empty() && spool.due().is_none());
        spool.record([event(5)], now);
        assert_eq!(disk.recorded.borrow().last(), Some(&5));
    }

    #[test]
    fn the_log_is_tried_again_less_and_less_often() {
        let disk = Disk::default();
        let mut spool = Spool::new(&disk);
        let mut now = Instant::now();
        spool.record([event(0)], now);
        let mut pauses = Vec::new();
        for _ in 0..6 {
            let due = spool.due().unwrap();
            spool.retry(due - Duration::from_millis(1));
            pauses.push((due - now).as_millis());
            now = due;
            spool.retry(now);
        }
        assert_eq!(pauses, [200, 400, 800, 1600, 2000, 2000]);
        assert_eq!(disk.tries.get(), 7, "not before it is time");
    }

    #[test]
    fn f1_the_queue_is_bounded_and_dropped_events_are_counted() {
        let disk = Disk::default();
        let mut spool = Spool::new(&disk);
        let now = Instant::now();
        let most = u64::try_from(THROTTLE_AT).unwrap();
        spool.record((0..most - 1).map(event), now);
        assert!(spool.has_capacity());
        spool.record([event(most - 1)], now);
        assert!(!spool.has_capacity());
        let most = u64::try_from(MAX_QUEUED).unwrap();
        spool.record((0..most).map(event), now);
        assert_eq!(spool.waiting.len(), MAX_QUEUED);
        let dropped = u64::try_from(THROTTLE_AT).unwrap();
        assert_eq!(spool.finish(), most + dropped);
        // The reserve is shared with other sandboxes.
        disk.reserve.set(usize::MAX);
        assert_eq!(spool.finish(), most + dropped - u64::try_from(MAX_RESERVED).unwrap());
        assert_eq!(disk.recorded.borrow().len(), MAX_RESERVED);
        let mut spool = Spool::new(&disk);
        spool.record((0..1000).map(event), now);
        disk.space.set(usize::MAX);
        assert_eq!(spool.finish(), 0, "what there is space for needs no reserve");
    }

    #[test]
    fn f1_at_the_end_as_much_as_fits_is_recorded_from_the_reserve() {
        let disk = Disk::default();
        let mut spool = Spool::new(&disk);
        spool.record((0..100).map(event), Instant::now());
        disk.reserve.set(37);
        assert_eq!(spool.finish(), 63);
        assert_eq!(*disk.recorded.borrow(), (0..37).collect::<Vec<_>>());
    }

    #[test]
    fn an_invalid_event_does_not_block_the_others() {
        let disk = Disk::default();
        disk.space.set(1000);
        disk.reserve.set(1000);
        let mut spool = Spool::new(&disk);
        spool.record([event(0), event(UNWRITABLE), event(2)], Instant::now());
        assert_eq!(*disk.recorded.borrow(), [0, 2]);
        assert_eq!((spool.is_empty(), spool.finish()), (true, 1));
    }
}
