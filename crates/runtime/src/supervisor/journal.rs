//! What happens to one sandbox, on its way into the audit log.

use std::fmt;
use std::time::Instant;

use bathy_audit::{Actor, Event, Log, LogError, What};

use super::spool::{Sink, Spool};

/// Who records, and about which sandbox.
#[derive(Clone, Debug)]
pub struct Subject {
    /// The name of the program, as the audit log has it.
    pub program: &'static str,
    pub id: String,
    /// Its name, if it has one.
    pub name: Option<String>,
}

impl Subject {
    /// An event of now.
    pub fn event(&self, what: What) -> Event {
        Event::now(Actor::this_process(self.program), what).in_sandbox(self.id.clone(), self.name.clone())
    }
}

/// Sees what is recorded.
pub trait Observer: Send {
    fn on_event(&mut self, event: &Event);
    /// The log cannot be written, for this reason: from now on events wait.
    fn on_backlog(&mut self, failure: &str);
}

/// Events that are not in the audit log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unrecorded {
    pub events: u64,
    pub failure: String,
}

/// The record of one sandbox.
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
    /// A journal in which nothing is recorded yet.
    pub fn new(log: S, subject: Subject, observer: Box<dyn Observer>) -> Self {
        Self { subject, spool: Spool::new(log), observer }
    }

    /// Records the beginning of something that does not happen if it cannot be recorded.
    ///
    /// # Errors
    /// When nothing was recorded.
    pub fn begin(&mut self, what: impl IntoIterator<Item = What>) -> Result<(), LogError> {
        let events: Vec<_> = what.into_iter().map(|what| self.subject.event(what)).collect();
        self.spool.append_now(&events)?;
        events.iter().for_each(|event| self.observer.on_event(event));
        Ok(())
    }

    /// Records something that happened, now or as soon as that is possible.
    pub fn note(&mut self, what: What) {
        self.note_all([what]);
    }

    /// The same for several.
    pub fn note_all(&mut self, what: impl IntoIterator<Item = What>) {
        let events: Vec<_> = what.into_iter().map(|what| self.subject.event(what)).collect();
        events.iter().for_each(|event| self.observer.on_event(event));
        let was_empty = self.spool.is_empty();
        self.spool.record(events, Instant::now());
        if was_empty && !self.spool.is_empty() {
            self.observer.on_backlog(self.spool.failure());
        }
    }

    /// Retries what waits, if it is time.
    pub fn retry(&mut self, now: Instant) {
        self.spool.retry(now);
    }

    /// When it is time.
    pub fn due(&self) -> Option<Instant> {
        self.spool.due()
    }

    /// Whether everything is recorded.
    pub fn is_empty(&self) -> bool {
        self.spool.is_empty()
    }

    /// Whether more may be taken of what has to be recorded.
    pub fn has_room(&self) -> bool {
        self.spool.has_room()
    }

    /// Why the log could not be written the last time.
    pub fn failure(&self) -> &str {
        self.spool.failure()
    }

    /// Records what waits, of a sandbox that has ended: also with space that is held in reserve. It may be tried again.
    pub fn finish(&mut self) -> Unrecorded {
        Unrecorded { events: self.spool.finish(), failure: self.spool.failure().to_owned() }
    }
}
