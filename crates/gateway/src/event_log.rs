//! Events for the gateway's owner. None is lost: while the queue is full or the owner cannot record them, the
//! gateway fails closed and allows nothing new.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use bathy_protocol::network::{FromGateway, NetEvent, Peer, encode};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use crate::frame::DropReason;

/// How many events may be queued before the gateway stops reading frames.
const MAX_QUEUED: usize = 1024;
/// The time within which equal denials, drops and limits are counted together.
const PERIOD: Duration = Duration::from_secs(1);
/// How many different denials are distinguished within [`PERIOD`].
const MAX_KINDS: usize = 256;

/// A denial that was logged, and how often it was repeated since.
#[derive(Debug)]
struct Repeated {
    rule: String,
    hint: Option<String>,
    repetitions: u32,
}

/// The queue of events, and what is only counted.
#[derive(Debug)]
pub struct EventLog {
    socket: OwnedFd,
    /// Replies to the owner. They overtake events, which an owner that cannot record them does not receive.
    replies: VecDeque<Vec<u8>>,
    queued: VecDeque<Vec<u8>>,
    /// Whether the owner cannot record events at present.
    is_held: bool,
    denials: BTreeMap<String, (Peer, Repeated)>,
    /// Denied names and record types that were logged in this [`PERIOD`].
    names: BTreeSet<(String, String)>,
    drops: BTreeMap<DropReason, u64>,
    limits: BTreeMap<&'static str, u64>,
    uncounted: u32,
    next: Instant,
}

impl EventLog {
    pub fn new(socket: OwnedFd, now: Instant) -> Self {
        Self {
            socket,
            replies: VecDeque::new(),
            queued: VecDeque::new(),
            is_held: false,
            denials: BTreeMap::new(),
            names: BTreeSet::new(),
            drops: BTreeMap::new(),
            limits: BTreeMap::new(),
            uncounted: 0,
            next: now + PERIOD,
        }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether the guest's frames may be read. Open connections go on while held, but each end is an event.
    pub fn has_space(&self) -> bool {
        self.queued.len() < MAX_QUEUED
    }

    /// Whether anything new may be allowed.
    pub fn may_begin(&self) -> bool {
        !self.is_held && self.has_space()
    }

    pub fn is_held(&self) -> bool {
        self.is_held
    }

    pub fn hold(&mut self, is_held: bool) {
        self.is_held = is_held;
    }

    /// Sends a reply to the owner, ahead of queued events.
    pub fn reply(&mut self, message: &FromGateway) {
        if let Ok(bytes) = encode(message) {
            self.replies.push_back(bytes);
            self.flush();
        }
    }

    pub fn send(&mut self, message: &FromGateway) {
        if let Ok(bytes) = encode(message) {
            self.queued.push_back(bytes);
            self.flush();
        }
    }

    pub fn log(&mut self, event: NetEvent) {
        self.send(&FromGateway::Event(event));
    }

    /// Logs the first denial of its kind at once, and counts its repetitions.
    pub fn log_denial(&mut self, peer: &Peer, rule: &str, hint: Option<&str>) {
        let kind = format!("{:?} {} {} {:?} {rule}", peer.transport, peer.address, peer.port, peer.name);
        if let Some((_, repeated)) = self.denials.get_mut(&kind) {
            repeated.repetitions = repeated.repetitions.saturating_add(1);
            return;
        }
        if self.denials.len() >= MAX_KINDS {
            self.uncounted = self.uncounted.saturating_add(1);
            return;
        }
        let (rule, hint) = (rule.to_owned(), hint.map(str::to_owned));
        self.log(NetEvent::Denied { peer: peer.clone(), rule: rule.clone(), hint: hint.clone(), count: 1 });
        self.denials.insert(kind, (peer.clone(), Repeated { rule, hint, repetitions: 0 }));
    }

    /// Logs a DNS query. A denied name is logged once in a [`PERIOD`], because a guest can repeat it at any rate.
    pub fn log_query(&mut self, event: NetEvent) {
        if let NetEvent::Unresolved { name, kind, denied: true, .. } = &event {
            let query = (name.clone(), kind.clone());
            if self.names.contains(&query) {
                return self.count_limit("repeated queries for denied names");
            }
            if self.names.len() >= MAX_KINDS {
                return self.count_limit("denied names");
            }
            self.names.insert(query);
        }
        self.log(event);
    }

    /// Counts a dropped frame, unless every guest sends such.
    pub fn count_drop(&mut self, reason: DropReason) {
        if !reason.is_usual() {
            *self.drops.entry(reason).or_default() += 1;
        }
    }

    /// Counts what a limit rejected.
    pub fn count_limit(&mut self, limit: &'static str) {
        *self.limits.entry(limit).or_default() += 1;
    }

    /// When to flush what was only counted, if anything was.
    pub fn due(&self) -> Option<Instant> {
        let nothing = self.denials.is_empty()
            && self.names.is_empty()
            && self.drops.is_empty()
            && self.limits.is_empty();
        (!nothing && self.may_begin()).then_some(self.next)
    }

    pub fn flush_counts_if_due(&mut self, now: Instant) {
        if now >= self.next && self.may_begin() {
            self.next = now + PERIOD;
            self.flush_counts();
        }
    }

    /// Logs what was only counted.
    pub fn flush_counts(&mut self) {
        self.names.clear();
        for (peer, Repeated { rule, hint, repetitions }) in std::mem::take(&mut self.denials).into_values() {
            if repetitions > 0 {
                self.log(NetEvent::Denied { peer, rule, hint, count: repetitions });
            }
        }
        for (reason, count) in std::mem::take(&mut self.drops) {
            self.log(NetEvent::Dropped { reason: reason.to_string(), count });
        }
        for (limit, count) in std::mem::take(&mut self.limits) {
            self.log(NetEvent::Limited { limit: limit.to_owned(), count });
        }
        let uncounted = std::mem::take(&mut self.uncounted);
        if uncounted > 0 {
            self.log(NetEvent::Limited { limit: "different denials".to_owned(), count: uncounted.into() });
        }
    }

    pub fn is_sent(&self) -> bool {
        self.replies.is_empty() && self.queued.is_empty()
    }

    /// Sends as much as the socket accepts.
    pub fn flush(&mut self) {
        loop {
            let queue = if self.replies.is_empty() { &mut self.queued } else { &mut self.replies };
            let Some(message) = queue.front() else { return };
            match send(&self.socket, message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN | Errno::NOBUFS) => return,
                // An owner that has exited is detected when the socket is read.
                _ => drop(queue.pop_front()),
            }
        }
    }
}
