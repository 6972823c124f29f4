//! Events on their way into the audit log. While it cannot be written they are kept in memory, in order, and tried again: what
//! has happened is not forgotten because a disk is full. The owner of a spool takes nothing new while something waits in it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bathy_audit::{Event, Log, LogError};

/// How many are recorded at once.
const AT_ONCE: usize = 256;
/// When so many wait, what produces them is not taken any more.
const MOST_WAITING: usize = 2048;
/// No more are kept than these: the ends of as many connections as a sandbox may have, and some more. Only a sandbox that ends
/// comes this far, since all of its events are taken at once then.
const MOST_KEPT: usize = 24 * 1024;
/// How long it takes until the log is tried again, the first time and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const MOST_PAUSE: Duration = Duration::from_secs(2);

/// Where events are recorded.
pub trait Sink {
    /// Records all of these events, or none.
    ///
    /// # Errors
    /// When none was recorded.
    fn append(&self, events: &[Event]) -> Result<(), LogError>;

    /// The same for what has happened whether or not it is recorded: also with space that is held in reserve for that.
    ///
    /// # Errors
    /// When none was recorded.
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

/// Events that are recorded as soon as that is possible.
#[derive(Debug)]
pub struct Spool<S = Log> {
    sink: S,
    waiting: VecDeque<Event>,
    /// When the log is tried again, and how long it was waited for.
    retry: Option<(Instant, Duration)>,
    /// Events that have no form in the log, or that were more than can be kept.
    lost: u64,
    failure: Option<String>,
}

/// How many events of one sandbox are recorded with reserved space when it has ended.
const MOST_RESERVED: usize = 256;

impl<S: Sink> Spool<S> {
    /// One that has recorded everything so far.
    pub fn new(sink: S) -> Self {
        Self { sink, waiting: VecDeque::new(), retry: None, lost: 0, failure: None }
    }

    /// Records events, or keeps them if that is not possible now.
    pub fn record(&mut self, events: impl IntoIterator<Item = Event>, now: Instant) {
        for event in events {
            if self.waiting.len() < MOST_KEPT {
                self.waiting.push_back(event);
            } else {
                self.lost += 1;
            }
        }
        if self.retry.is_none() {
            self.write(now);
        }
    }

    /// Records events of something that is not done if they cannot be recorded.
    ///
    /// # Errors
    /// When none of them was recorded.
    pub fn append_now(&mut self, events: &[Event]) -> Result<(), LogError> {
        self.write_some(AT_ONCE, S::append)?;
        self.sink.append(events)
    }

    /// Tries again what is kept, if it is time.
    pub fn retry(&mut self, now: Instant) {
        if self.retry.is_some_and(|(at, _)| at <= now) {
            self.write(now);
        }
    }

    /// When it is time.
    pub fn due(&self) -> Option<Instant> {
        self.retry.map(|(at, _)| at)
    }

    /// Whether everything is recorded.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether more may be taken of what has to be recorded.
    pub fn has_room(&self) -> bool {
        self.waiting.len() < MOST_WAITING
    }

    /// Why the log could not be written the last time, in one line.
    pub fn failure(&self) -> &str {
        self.failure.as_deref().unwrap_or("the log takes no such event")
    }

    /// Records everything that can be recorded, of a sandbox that has ended: also with space that is held in reserve. How many
    /// events are not recorded. What is kept stays so, and may be tried once more.
    pub fn finish(&mut self) -> u64 {
        // What there is free space for takes none of the reserve. It is shared with other sandboxes, and a guest can have many events
        // wait: of the others, the newest go, and are counted.
        if self.write_some(AT_ONCE, S::append).is_err() && self.waiting.len() > MOST_RESERVED {
            self.lost += u64::try_from(self.waiting.len() - MOST_RESERVED).unwrap_or(u64::MAX);
            self.waiting.truncate(MOST_RESERVED);
        }
        let mut most = AT_ONCE;
        while let Err(error) = self.write_some(most, S::append_last) {
            match error {
                // Fewer may still fit.
                LogError::Full(_) if most > 1 => most /= 2,
                error => {
                    self.failure = Some(bathy_protocol::chain(&error));
                    break;
                }
            }
        }
        self.lost + u64::try_from(self.waiting.len()).unwrap_or(u64::MAX)
    }

    fn write(&mut self, now: Instant) {
        self.retry = match self.write_some(AT_ONCE, S::append) {
            Ok(()) => None,
            Err(error) => {
                self.failure = Some(bathy_protocol::chain(&error));
                let pause = self.retry.map_or(FIRST_PAUSE, |(_, pause)| (pause * 2).min(MOST_PAUSE));
                Some((now + pause, pause))
            }
        };
    }

    /// Writes what waits, at most so many at once, until nothing is left or the log fails.
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
                // One of them has no form in the log: the others have.
                Err(LogError::Line(_)) if count > 1 => most = 1,
                Err(LogError::Line(_)) => {
                    self.waiting.pop_front();
                    self.lost += 1;
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

    /// A log with room for so many events.
    #[derive(Default)]
    struct Disk {
        room: Cell<usize>,
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
            self.take(events, &self.room)
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
            _ => unreachable!("only these are made"),
        }
    }

    #[test]
    fn f1_events_that_cannot_be_recorded_are_kept_in_order() {
        let disk = Disk::default();
        let mut spool = Spool::new(&disk);
        let now = Instant::now();
        disk.room.set(1);
        spool.record([event(0)], now);
        assert!(spool.is_empty() && spool.due().is_none());
        spool.record([event(1), event(2)], now);
        spool.record([event(3)], now);
        assert!(!spool.is_empty() && spool.failure().contains("full"), "{}", spool.failure());
        // What comes later does not overtake what waits, also when there is room for it.
        disk.room.set(1000);
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
    fn f1_no_more_are_kept_than_there_is_room_for_and_the_others_are_counted() {
        let disk = Disk::default();
        let mut spool = Spool::new(&disk);
        let now = Instant::now();
        let most = u64::try_from(MOST_WAITING).unwrap();
        spool.record((0..most - 1).map(event), now);
        assert!(spool.has_room());
        spool.record([event(most - 1)], now);
        assert!(!spool.has_room());
        let most = u64::try_from(MOST_KEPT).unwrap();
        spool.record((0..most).map(event), now);
        assert_eq!(spool.waiting.len(), MOST_KEPT);
        let lost = u64::try_from(MOST_WAITING).unwrap();
        assert_eq!(spool.finish(), most + lost);
        // The reserve is there for other sandboxes, too.
        disk.reserve.set(usize::MAX);
        assert_eq!(spool.finish(), most + lost - u64::try_from(MOST_RESERVED).unwrap());
        assert_eq!(disk.recorded.borrow().len(), MOST_RESERVED);
        let mut spool = Spool::new(&disk);
        spool.record((0..1000).map(event), now);
        disk.room.set(usize::MAX);
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
    fn an_event_that_no_log_takes_does_not_keep_the_others_from_it() {
        let disk = Disk::default();
        disk.room.set(1000);
        disk.reserve.set(1000);
        let mut spool = Spool::new(&disk);
        spool.record([event(0), event(UNWRITABLE), event(2)], Instant::now());
        assert_eq!(*disk.recorded.borrow(), [0, 2]);
        assert_eq!((spool.is_empty(), spool.finish()), (true, 1));
    }
}
