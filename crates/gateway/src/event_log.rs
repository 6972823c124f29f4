//! Events on their way to the gateway's owner. None is lost: when too many wait, or the owner cannot record them at present,
//! nothing new is decided.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use bathy_protocol::network::{FromGateway, NetEvent, Peer, encode};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use crate::frame::DropReason;

/// So many may wait before nothing new is decided.
const MAX_QUEUED: usize = 1024;
/// Alike denials, drops and limits are told once in this time, with their number.
const PERIOD: Duration = Duration::from_secs(1);
/// How many kinds of denials are told apart in one such time.
const MAX_KINDS: usize = 256;

/// A denial that was told of, and how often it came again.
#[derive(Debug)]
struct Repeated {
    rule: String,
    fix: Option<String>,
    again: u32,
}

/// What waits.
#[derive(Debug)]
pub struct EventLog {
    socket: OwnedFd,
    /// Answers to the owner. They overtake events, which an owner that cannot record them leaves where they are.
    answers: VecDeque<Vec<u8>>,
    queued: VecDeque<Vec<u8>>,
    /// The owner cannot record events at present.
    is_held: bool,
    denials: BTreeMap<String, (Peer, Repeated)>,
    /// Names that were told of as denied.
    names: BTreeSet<(String, String)>,
    drops: BTreeMap<DropReason, u64>,
    limits: BTreeMap<&'static str, u64>,
    uncounted: u32,
    next: Instant,
}

impl EventLog {
    /// To this socket.
    pub fn new(socket: OwnedFd, now: Instant) -> Self {
        Self {
            socket,
            answers: VecDeque::new(),
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

    /// What to wait on.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether the guest's frames may be taken: what is open goes on, and its end is an event.
    pub fn has_space(&self) -> bool {
        self.queued.len() < MAX_QUEUED
    }

    /// Whether something new may begin.
    pub fn may_begin(&self) -> bool {
        !self.is_held && self.has_space()
    }

    /// Whether the owner cannot record events at present.
    pub fn is_held(&self) -> bool {
        self.is_held
    }

    /// The owner says whether it cannot record events at present.
    pub fn hold(&mut self, is_held: bool) {
        self.is_held = is_held;
    }

    /// Sends an answer to the owner, before any event that waits.
    pub fn reply(&mut self, message: &FromGateway) {
        if let Ok(bytes) = encode(message) {
            self.answers.push_back(bytes);
            self.flush();
        }
    }

    /// Sends a message.
    pub fn send(&mut self, message: &FromGateway) {
        if let Ok(bytes) = encode(message) {
            self.queued.push_back(bytes);
            self.flush();
        }
    }

    /// Something happened.
    pub fn log(&mut self, event: NetEvent) {
        self.send(&FromGateway::Event(event));
    }

    /// Something was denied. The first of its kind is told at once, the others are counted for a while.
    pub fn log_denial(&mut self, peer: &Peer, rule: &str, fix: Option<&str>) {
        let kind = format!("{:?} {} {} {:?} {rule}", peer.transport, peer.address, peer.port, peer.name);
        if let Some((_, repeated)) = self.denials.get_mut(&kind) {
            repeated.again = repeated.again.saturating_add(1);
            return;
        }
        if self.denials.len() >= MAX_KINDS {
            self.uncounted = self.uncounted.saturating_add(1);
            return;
        }
        let (rule, fix) = (rule.to_owned(), fix.map(str::to_owned));
        self.log(NetEvent::Denied { peer: peer.clone(), rule: rule.clone(), cure: fix.clone(), count: 1 });
        self.denials.insert(kind, (peer.clone(), Repeated { rule, fix, again: 0 }));
    }

    /// A name was asked for. Of names that are denied each is told of once in a while: a guest can ask as often as it likes.
    pub fn log_query(&mut self, event: NetEvent) {
        if let NetEvent::Unresolved { name, kind, denied: true, .. } = &event {
            let asked = (name.clone(), kind.clone());
            if self.names.contains(&asked) {
                return self.count_limit("names that are denied, asked for again");
            }
            if self.names.len() >= MAX_KINDS {
                return self.count_limit("names that are denied");
            }
            self.names.insert(asked);
        }
        self.log(event);
    }

    /// A frame was dropped.
    pub fn count_drop(&mut self, reason: DropReason) {
        if !reason.is_usual() {
            *self.drops.entry(reason).or_default() += 1;
        }
    }

    /// Something was turned away by a limit.
    pub fn count_limit(&mut self, limit: &'static str) {
        *self.limits.entry(limit).or_default() += 1;
    }

    /// When to come back for what was only counted, if anything was.
    pub fn due(&self) -> Option<Instant> {
        let nothing = self.denials.is_empty()
            && self.names.is_empty()
            && self.drops.is_empty()
            && self.limits.is_empty();
        (!nothing && self.may_begin()).then_some(self.next)
    }

    /// Tells what was counted, once in a while.
    pub fn flush_counts_if_due(&mut self, now: Instant) {
        if now >= self.next && self.may_begin() {
            self.next = now + PERIOD;
            self.flush_counts();
        }
    }

    /// Tells what was counted.
    pub fn flush_counts(&mut self) {
        self.names.clear();
        for (peer, Repeated { rule, fix, again }) in std::mem::take(&mut self.denials).into_values() {
            if again > 0 {
                self.log(NetEvent::Denied { peer, rule, cure: fix, count: again });
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
            self.log(NetEvent::Limited { limit: "denials told apart".to_owned(), count: uncounted.into() });
        }
    }

    /// Whether everything was sent.
    pub fn is_sent(&self) -> bool {
        self.answers.is_empty() && self.queued.is_empty()
    }

    /// Sends what the reader takes now.
    pub fn flush(&mut self) {
        loop {
            let queue = if self.answers.is_empty() { &mut self.queued } else { &mut self.answers };
            let Some(message) = queue.front() else { return };
            match send(&self.socket, message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN | Errno::NOBUFS) => return,
                // A reader that is gone is noticed when it is listened to.
                _ => drop(queue.pop_front()),
            }
        }
    }
}
