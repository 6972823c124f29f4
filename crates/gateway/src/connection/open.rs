//! Established connections, between whose sides bytes are copied.

use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::answering::Answering;
use super::host_socket::HostSocket;
use super::reading::inspect;
use super::turn::{Turn, TurnOutcome, ended};
use crate::host;
use crate::inspect::Inspector;
use crate::stack::Stack;

/// How long the guest may take to complete the handshake.
pub(super) const HALF_OPEN_TIME: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct Open {
    pub(super) stack: Stack,
    pub(super) host: HostSocket,
    /// An inbound connection has none: the guest's responses are not subject to the policy.
    pub(super) inspector: Option<Box<Inspector>>,
    /// The deadline of the guest's handshake; none once it is complete.
    pub(super) handshake_deadline: Option<Instant>,
}

impl Open {
    /// The host's side is established, the guest's handshake is in progress.
    pub(super) fn half_open(
        stack: Stack,
        host: HostSocket,
        inspector: Option<Box<Inspector>>,
        now: Instant,
    ) -> Self {
        Self { stack, host, inspector, handshake_deadline: Some(now + HALF_OPEN_TIME) }
    }

    /// `is_logged` is whether the connection was logged as established, `reset` is the reason if the guest resets it.
    pub(super) fn pump(&mut self, turn: &mut Turn<'_>, is_logged: bool, reset: &str) -> TurnOutcome {
        match self.pump_up(turn) {
            Ok(None) => {}
            Ok(Some(outcome)) => return outcome,
            Err(error) => return self.failed(error),
        }
        if let Err(error) = self.host.receive_into(&mut self.stack, self.inspector.as_deref_mut(), turn) {
            return self.failed(error);
        }
        self.propagate_fins();
        self.stack.transmit(turn.now, turn.link);
        if self.stack.is_established() {
            self.handshake_deadline = None;
            if !is_logged {
                return TurnOutcome::Opened;
            }
        }
        let has_more = self.can_inspect_on();
        ended(&mut self.stack, &mut self.host, reset).unwrap_or_else(|| turn.idle_or_more(has_more))
    }

    fn pump_up(&mut self, turn: &mut Turn<'_>) -> Result<Option<TurnOutcome>, Errno> {
        match &mut self.inspector {
            Some(inspector) if !inspector.is_done() => {
                if let Some(outcome) = inspect(inspector, &mut self.stack, turn.meter) {
                    return Ok(Some(outcome));
                }
                self.host.send_cleared(inspector)?;
            }
            _ => self.host.send_from(&mut self.stack, turn)?,
        }
        Ok(None)
    }

    /// Whether an inspector whose buffer was full has space again for bytes that the guest sent before: no event
    /// reports that.
    fn can_inspect_on(&mut self) -> bool {
        let Some(inspector) = &self.inspector else { return false };
        let has_space = inspector.is_done() || inspector.space() > 0;
        self.host.can_write() && self.stack.tcp().recv_queue() > 0 && has_space
    }

    /// A FIN from one side is forwarded to the other, behind all bytes that precede it.
    fn propagate_fins(&mut self) {
        if self.host.is_read_closed() && self.stack.is_established() {
            self.stack.tcp().close();
        }
        let has_unsent = self.inspector.as_ref().is_some_and(|inspector| !inspector.cleared().is_empty());
        if !self.host.is_write_closed() && !has_unsent && self.stack.guest_has_finished() {
            self.host.close_write();
        }
    }

    /// The client's next request is denied. What was allowed before is still sent, and the server's responses to it
    /// precede the gateway's answer.
    pub(super) fn denied(mut self, answer: Vec<u8>, now: Instant) -> Answering {
        let mut has_passed_requests = false;
        if let Some(inspector) = &mut self.inspector {
            has_passed_requests = inspector.has_passed_requests();
            if self.host.send_cleared(inspector).is_err() {
                self.abort();
            }
        }
        if has_passed_requests {
            self.host.close_write();
        }
        if answer.is_empty() {
            self.abort();
        }
        Answering::denied(self.stack, has_passed_requests.then_some(self.host), answer, now)
    }

    fn abort(&mut self) {
        self.stack.tcp().abort();
        self.host.abort();
    }

    fn failed(&mut self, error: Errno) -> TurnOutcome {
        self.abort();
        TurnOutcome::Ended(format!("connection failed: {}", host::describe(error)))
    }
}
