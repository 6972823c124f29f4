//! The journal of one sandbox: its events on their way into the audit log.

use std::fmt;
use std::time::Instant;

use bathy_audit::{Actor, Event, Log, LogError, What};

use super::spool::{Sink, Spool};

/// The program that records, and the sandbox.
#[derive(Clone, Debug)]
pub struct Subject {
    /// The name of the program in the audit log.
    pub program: &'static str,
    pub id: String,
    pub name: Option<String>,
}

impl Subject {
    /// An event with the present time.
    pub fn event(&self, what: What) -> Event {
        Event::now(Actor::this_process(self.program), what).in_sandbox(self.id.clone(), self.name.clone())
    }
}

/// Is notified of events when they happen, whether or not they can be recorded at once.
pub trait Observer: Send {
    fn on_event(&mut self, event: &Event);
    /// The log cannot be written, for this reason: from now on events are queued.
    fn on_backlog(&mut self, failure: &str);
}

/// Events that are not in the audit log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unrecorded {
    pub events: u64,
    pub failure: String,
}

/// The journal of one sandbox.
pub struct Journal<S = Log> {
    subject: Subject,
    spool: Spool<S>,
    observer: Box<dyn Observer>,
}

impl<S> fmt::Debug for Journal<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal").field("subject", &self.subject).finish_non_exhaustive()
    }
}

impl<S: Sink> Journal<S> {
    pub fn new(log: S, subject: Subject, observer: Box<dyn Observer>) -> Self {
        Self { subject, spool: Spool::new(log), observer }
    }

    /// Records the start of an operation.
    ///
    /// # Errors
    /// Nothing was recorded, so the operation must not be done.
    pub fn begin(&mut self, what: impl IntoIterator<Item = What>) -> Result<(), LogError> {
        let events: Vec<_> = what.into_iter().map(|what| self.subject.event(what)).collect();
        self.spool.append_now(&events)?;
        events.iter().for_each(|event| self.observer.on_event(event));
        Ok(())
    }

    /// Records an event that has happened, now or as soon as possible.
    pub fn note(&mut self, what: What) {
        self.note_all([what]);
    }

    /// Like [`Self::note`], for several events.
    pub(crate) fn note_all(&mut self, what: impl IntoIterator<Item = What>) {
        let events: Vec<_> = what.into_iter().map(|what| self.subject.event(what)).collect();
        events.iter().for_each(|event| self.observer.on_event(event));
        let was_empty = self.spool.is_empty();
        self.spool.record(events, Instant::now());
        if was_empty && !self.spool.is_empty() {
            self.observer.on_backlog(self.spool.failure());
        }
    }

    /// Retries queued events when it is time.
    pub fn retry(&mut self, now: Instant) {
        self.spool.retry(now);
    }

    /// When the next retry is due.
    pub fn due(&self) -> Option<Instant> {
        self.spool.due()
    }

    /// Whether everything is recorded.
    pub fn is_empty(&self) -> bool {
        self.spool.is_empty()
    }

    /// Whether the queue accepts more events. If not, their sources are throttled.
    pub fn has_capacity(&self) -> bool {
        self.spool.has_capacity()
    }

    /// Why the log could not be written the last time.
    pub fn failure(&self) -> &str {
        self.spool.failure()
    }

    /// Like [`Self::finish`], with the sandbox's final events behind the queued ones.
    pub(crate) fn finish_with(&mut self, last: impl IntoIterator<Item = What>) -> Unrecorded {
        let last: Vec<_> = last.into_iter().map(|what| self.subject.event(what)).collect();
        last.iter().for_each(|event| self.observer.on_event(event));
        Unrecorded { events: self.spool.finish_with(last), failure: self.spool.failure().to_owned() }
    }

    /// Records the queued events of a sandbox that has ended, with the reserved space if necessary. May be
    /// called again.
    pub fn finish(&mut self) -> Unrecorded {
        Unrecorded { events: self.spool.finish(), failure: self.spool.failure().to_owned() }
    }
}
