//! One turn of a connection: what it may use, and its outcome.

use std::time::Instant;

use super::host_socket::HostSocket;
use crate::counts::Meter;
use crate::inspect::ParsedTarget;
use crate::link::Link;
use crate::stack::{Clock, Stack};

/// What the gateway has to do after a turn.
#[derive(Debug)]
pub enum TurnOutcome {
    /// Nothing: no more bytes can be moved now.
    Idle,
    /// Queue the connection for another turn, after the others.
    More,
    /// Ask the policy about this target, then accept or deny it.
    Decide(ParsedTarget),
    /// Deny: the client's bytes are ambiguous.
    Unreadable(String),
    /// Log that the connection is established.
    Opened,
    /// Resolve this DNS query.
    Query(Vec<u8>),
    /// Remove the connection, for this reason.
    Ended(String),
}

/// What a connection may use in one turn.
pub(super) struct Turn<'a> {
    pub(super) now: Instant,
    pub(super) clock: Clock,
    /// The size of each buffer of a new stack.
    pub(super) buffer_size: usize,
    pub(super) link: &'a mut Link,
    /// How many bytes may still go to the guest, by the sandbox's rate limit.
    pub(super) down: &'a mut u64,
    /// How many bytes this connection may still move, both ways together.
    pub(super) left: usize,
    pub(super) meter: &'a mut Meter,
}

impl Turn<'_> {
    pub(super) fn sent(&mut self, count: usize) {
        self.meter.add_sent(u64::try_from(count).unwrap_or(0));
        self.left = self.left.saturating_sub(count);
    }

    pub(super) fn may_receive(&self) -> bool {
        self.left > 0 && *self.down > 0
    }

    pub(super) fn most_received(&self) -> usize {
        self.left.min(usize::try_from(*self.down).unwrap_or(usize::MAX))
    }

    pub(super) fn received(&mut self, count: usize) {
        let bytes = u64::try_from(count).unwrap_or(0);
        self.meter.add_received(bytes);
        *self.down = self.down.saturating_sub(bytes);
        self.left = self.left.saturating_sub(count);
    }

    /// [`TurnOutcome::More`] if a limit cut the turn short, or if there is more to do for another reason.
    pub(super) fn idle_or_more(&self, has_more: bool) -> TurnOutcome {
        let is_cut_short = self.left == 0 || *self.down == 0;
        if is_cut_short || has_more { TurnOutcome::More } else { TurnOutcome::Idle }
    }
}

/// The end of a connection without a host socket.
pub(super) fn ended_locally(stack: &mut Stack) -> Option<TurnOutcome> {
    stack.is_over().then(|| TurnOutcome::Ended("ended".to_owned()))
}

/// The end of a connection with both sides. If the guest has reset it, the host's side is reset too, and `reset` is
/// the reason.
pub(super) fn ended(stack: &mut Stack, host: &mut HostSocket, reset: &str) -> Option<TurnOutcome> {
    if !stack.is_over() {
        return None;
    }
    let is_clean = host.is_read_closed() && host.is_write_closed();
    if !is_clean && stack.is_reset() {
        host.abort();
        return Some(TurnOutcome::Ended(reset.to_owned()));
    }
    is_clean.then(|| TurnOutcome::Ended("ended".to_owned()))
}
