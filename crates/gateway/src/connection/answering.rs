//! Connections that the gateway itself answers: a denial is explained in the client's own protocol.

use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::host_socket::HostSocket;
use super::reading::READING_TIME;
use super::turn::{Turn, TurnOutcome, ended, ended_locally};
use crate::host;
use crate::stack::Stack;

/// How long the client may take to read the answer.
pub(super) const ANSWER_TIME: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Answering {
    pub(super) stack: Stack,
    /// The server, while it may still respond to requests that were allowed before the denied one.
    pub(super) host: Option<HostSocket>,
    /// What is left of the answer.
    answer: Vec<u8>,
    pub(super) deadline: Instant,
}

impl Answering {
    /// Denied by its address. The client may not have completed the handshake.
    pub(super) fn new(stack: Stack, answer: Vec<u8>, now: Instant) -> Self {
        Self { stack, host: None, answer, deadline: now + READING_TIME }
    }

    /// Denied by what the client asked for.
    pub(super) fn denied(stack: Stack, host: Option<HostSocket>, answer: Vec<u8>, now: Instant) -> Self {
        Self { stack, host, answer, deadline: now + ANSWER_TIME }
    }

    /// `reset` is the reason if the guest resets the connection while the server still responds.
    pub(super) fn pump(&mut self, turn: &mut Turn<'_>, reset: &str) -> TurnOutcome {
        discard_received(&mut self.stack);
        if let Some(host) = &mut self.host
            && let Err(error) = host.receive_into(&mut self.stack, None, turn)
        {
            return self.failed(error);
        }
        if self.is_servers_turn_over() {
            send_from(&mut self.answer, &mut self.stack);
        }
        self.propagate_fins();
        self.stack.transmit(turn.now, turn.link);
        let end = match &mut self.host {
            Some(host) => ended(&mut self.stack, host, reset),
            None => ended_locally(&mut self.stack),
        };
        end.unwrap_or_else(|| turn.idle_or_more(false))
    }

    fn is_servers_turn_over(&self) -> bool {
        self.host.as_ref().is_none_or(HostSocket::is_read_closed)
    }

    fn propagate_fins(&mut self) {
        if self.is_servers_turn_over() && self.answer.is_empty() && self.stack.is_established() {
            self.stack.tcp().close();
        }
    }

    fn failed(&mut self, error: Errno) -> TurnOutcome {
        self.stack.tcp().abort();
        if let Some(host) = &mut self.host {
            host.abort();
        }
        TurnOutcome::Ended(format!("connection failed: {}", host::describe(error)))
    }
}

/// What the client still sends is discarded, so that it cannot fill the receive buffer.
fn discard_received(stack: &mut Stack) {
    while stack.tcp().recv(|bytes| (bytes.len(), bytes.len())).is_ok_and(|count| count > 0) {}
}

/// Moves as much of an answer as fits into the stack's send buffer.
pub(super) fn send_from(answer: &mut Vec<u8>, stack: &mut Stack) {
    if !answer.is_empty() && stack.tcp().can_send() {
        let count = stack.tcp().send_slice(answer).unwrap_or(0);
        answer.drain(..count);
    }
}
