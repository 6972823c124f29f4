//! Connections whose host socket is connecting.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::host_socket::HostSocket;
use super::open::Open;
use super::turn::{Turn, TurnOutcome};
use crate::inspect::Inspector;
use crate::stack::{FourTuple, Stack};

/// How long the server may take to answer. A guest's own kernel gives up after about as long.
pub(super) const DIAL_TIME: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct Dialing {
    pub(super) host: HostSocket,
    pub(super) inspector: Box<Inspector>,
    /// The guest's SYN, answered only when the server has answered.
    pub(super) syn: Vec<u8>,
    pub(super) deadline: Instant,
}

impl Dialing {
    pub(super) fn new(socket: OwnedFd, inspector: Inspector, syn: Vec<u8>, now: Instant) -> Self {
        Self { host: HostSocket::new(socket), inspector: Box::new(inspector), syn, deadline: now + DIAL_TIME }
    }

    /// The socket has connected: answers the guest's SYN. Without a stack the state is given back.
    pub(super) fn connected(self, tuple: FourTuple, turn: &mut Turn<'_>) -> Result<Open, Self> {
        let Some(mut stack) = Stack::listen(tuple, turn.buffer_size, turn.clock, turn.link) else {
            return Err(self);
        };
        stack.on_packet(&self.syn, turn.now, turn.link);
        Ok(Open::half_open(stack, self.host, Some(self.inspector), turn.now))
    }
}

/// The client's first bytes were read and allowed before anything was dialed.
#[derive(Debug)]
pub(super) struct DialingRead {
    pub(super) stack: Stack,
    pub(super) host: HostSocket,
    pub(super) inspector: Box<Inspector>,
    pub(super) deadline: Instant,
}

impl DialingRead {
    /// While the socket is connecting, the guest's stack still sends ACKs, and may be reset.
    pub(super) fn wait(&mut self, turn: &mut Turn<'_>) -> TurnOutcome {
        self.stack.transmit(turn.now, turn.link);
        if self.stack.is_reset() {
            return TurnOutcome::Ended("reset by the client".to_owned());
        }
        TurnOutcome::Idle
    }

    /// The socket has connected; the guest's side was established before.
    pub(super) fn connected(self) -> Open {
        let Self { stack, host, inspector, deadline: _ } = self;
        Open { stack, host, inspector: Some(inspector), handshake_deadline: None }
    }
}
