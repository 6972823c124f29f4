//! Connections whose first bytes decide whether they are allowed. Nothing is dialed yet.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::answering::Answering;
use super::dialing::{DIAL_TIME, DialingRead};
use super::host_socket::HostSocket;
use super::turn::{Turn, TurnOutcome, ended_locally};
use crate::counts::Meter;
use crate::inspect::{Inspection, Inspector};
use crate::stack::Stack;

/// How long the client may take to send its ClientHello or its request.
pub(super) const READING_TIME: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct Reading {
    pub(super) stack: Stack,
    pub(super) inspector: Box<Inspector>,
    pub(super) deadline: Instant,
}

impl Reading {
    pub(super) fn new(stack: Stack, inspector: Inspector, now: Instant) -> Self {
        Self { stack, inspector: Box::new(inspector), deadline: now + READING_TIME }
    }

    pub(super) fn pump(&mut self, turn: &mut Turn<'_>) -> TurnOutcome {
        if let Some(outcome) = inspect(&mut self.inspector, &mut self.stack, turn.meter) {
            return outcome;
        }
        self.stack.transmit(turn.now, turn.link);
        if self.stack.guest_has_finished() {
            self.stack.tcp().abort();
            return TurnOutcome::Ended("the client closed without a ClientHello or request".to_owned());
        }
        ended_locally(&mut self.stack).unwrap_or_else(|| turn.idle_or_more(false))
    }

    /// What the client asks for was allowed.
    pub(super) fn dialed(self, socket: OwnedFd, now: Instant) -> DialingRead {
        let Self { stack, inspector, deadline: _ } = self;
        DialingRead { stack, host: HostSocket::new(socket), inspector, deadline: now + DIAL_TIME }
    }

    pub(super) fn denied(mut self, answer: Vec<u8>, now: Instant) -> Answering {
        if answer.is_empty() {
            self.stack.tcp().abort();
        }
        Answering::denied(self.stack, None, answer, now)
    }
}

/// Parses as much of the client's stream as the inspector has buffer space for.
pub(super) fn inspect(
    inspector: &mut Inspector,
    stack: &mut Stack,
    meter: &mut Meter,
) -> Option<TurnOutcome> {
    meter.add_sent(read_into(inspector, stack));
    match inspector.parse() {
        Inspection::Decide(target) => Some(TurnOutcome::Decide(target)),
        Inspection::Refused(why) => Some(TurnOutcome::Unreadable(why)),
        Inspection::More => None,
    }
}

fn read_into(inspector: &mut Inspector, stack: &mut Stack) -> u64 {
    let mut taken = 0;
    // At most two rounds: what is queued may wrap around the end of the stack's ring buffer.
    while inspector.space() > 0 && stack.tcp().recv_queue() > 0 {
        let buffer_size = inspector.space();
        let count = stack.tcp().recv(|bytes| {
            let part = bytes.get(..bytes.len().min(buffer_size)).unwrap_or(bytes);
            inspector.push(part);
            (part.len(), part.len())
        });
        match count {
            Ok(count) if count > 0 => taken += u64::try_from(count).unwrap_or(0),
            _ => break,
        }
    }
    taken
}
