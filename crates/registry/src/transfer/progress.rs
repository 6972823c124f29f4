//! What a transfer reports while it goes on.

use std::sync::mpsc::SyncSender;
use std::time::Duration;

use crate::digest::Digest;
use crate::manifest::Descriptor;

/// Something that happened. Parts of an image are named by their digests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The digest that the reference leads to.
    Resolved(Digest),
    /// These are transferred, each once.
    Blobs(Vec<Descriptor>),
    /// So much of it is done. It can become less, if a server cannot continue where it was cut.
    Progress { digest: Digest, done: u64 },
    /// All of it is where it should be, and verified.
    Done(Digest),
    /// Another process is writing it.
    Waiting(Digest),
    /// It is tried again after a pause.
    Retrying { reason: String, after: Duration },
}

/// Who is told. It is called on the thread that asked for the transfer.
pub trait Progress {
    fn on_event(&mut self, event: &Event);
}

impl<F: FnMut(&Event)> Progress for F {
    fn on_event(&mut self, event: &Event) {
        self(event);
    }
}

/// How threads of a transfer report.
#[derive(Clone)]
pub struct Reporter(pub SyncSender<Event>);

impl Reporter {
    pub fn report(&self, event: Event) {
        // The receiver is dropped when the transfer has failed.
        let _ = self.0.send(event);
    }
}
