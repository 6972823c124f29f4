//! DNS over TCP: connections to the gateway's own resolver.

use std::time::{Duration, Instant};

use super::answering::send_from;
use super::turn::{Turn, TurnOutcome, ended_locally};
use crate::dns;
use crate::queries::Queries;
use crate::stack::Stack;

/// How long the client may be idle between queries.
pub(super) const QUERY_IDLE_TIME: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct Resolving {
    pub(super) stack: Stack,
    queries: Queries,
    /// Responses that the client has not read.
    unread: Vec<u8>,
    pub(super) deadline: Instant,
}

impl Resolving {
    pub(super) fn new(stack: Stack, now: Instant) -> Self {
        Self { stack, queries: Queries::new(), unread: Vec::new(), deadline: now + QUERY_IDLE_TIME }
    }

    pub(super) fn pump(&mut self, turn: &mut Turn<'_>) -> TurnOutcome {
        if let Some(outcome) = self.queries.take(&mut self.stack, self.unread.len()) {
            return outcome;
        }
        send_from(&mut self.unread, &mut self.stack);
        if self.stack.guest_has_finished() && self.queries.is_idle() && self.unread.is_empty() {
            self.stack.tcp().close();
        }
        self.stack.transmit(turn.now, turn.link);
        ended_locally(&mut self.stack).unwrap_or_else(|| turn.idle_or_more(false))
    }

    pub(super) fn on_response(&mut self, message: &[u8], now: Instant) {
        self.queries.answered();
        self.unread.extend(dns::frame(message).unwrap_or_default());
        self.deadline = now + QUERY_IDLE_TIME;
    }
}
