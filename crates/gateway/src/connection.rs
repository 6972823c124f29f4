//! One TCP connection: the guest's side is a stack of its own, the other side is a socket of the host. Nothing but
//! bytes passes between them.

mod answering;
mod dialing;
mod host_socket;
mod open;
mod reading;
mod resolving;
mod state;
#[cfg(test)]
mod tests;
mod turn;

use std::mem;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use bathy_policy::Protocol;

use crate::counts::Meter;
use crate::frame::Segment;
use crate::host;
use crate::inspect::{AppProtocol, Inspector, ParsedTarget};
use crate::link::Link;
use crate::policy_check::Endpoint;
use crate::reply;
use crate::stack::{Clock, FourTuple, Stack};
use answering::Answering;
use dialing::Dialing;
use host_socket::HostSocket;
use open::Open;
use reading::Reading;
use resolving::Resolving;
use state::State;
use turn::Turn;

pub use turn::TurnOutcome;

/// How many bytes one connection moves, both ways together, before others have their turn.
const TURN: usize = 256 * 1024;

/// What stacks are made with during a turn.
#[derive(Clone, Copy)]
pub struct NewStacks {
    /// The clock of all stacks.
    pub clock: Clock,
    /// The size of each of a stack's buffers.
    pub buffer_size: usize,
}

#[derive(Debug)]
pub struct Connection {
    pub tuple: FourTuple,
    /// What is dialed, or the inbound peer, with what was known about it when the connection began.
    pub endpoint: Endpoint,
    /// Whether an inbound peer at a published port opened it.
    pub inbound: bool,
    /// What the client asked for last.
    pub target: Option<ParsedTarget>,
    /// The rule that allows it.
    pub rule: String,
    pub started: Instant,
    pub meter: Meter,
    /// Whether it was logged as established.
    pub is_logged: bool,
    state: State,
}

impl Connection {
    fn new(tuple: FourTuple, state: State, now: Instant) -> Self {
        Self {
            tuple,
            endpoint: Endpoint::unnamed(Protocol::Tcp, tuple.remote),
            inbound: false,
            target: None,
            rule: String::new(),
            started: now,
            meter: Meter::default(),
            is_logged: false,
            state,
        }
    }

    /// Dialed at once. The guest's SYN is answered when the server has answered.
    pub fn dialing(tuple: FourTuple, socket: OwnedFd, syn: Vec<u8>, now: Instant) -> Self {
        let inspector = Inspector::passive(tuple.remote.ip());
        Self::new(tuple, State::Dialing(Dialing::new(socket, inspector, syn, now)), now)
    }

    /// The client's first bytes are read before anything is dialed.
    pub fn reading(tuple: FourTuple, stack: Stack, now: Instant) -> Self {
        let inspector = Inspector::new(tuple.remote.ip());
        Self::new(tuple, State::Reading(Reading::new(stack, inspector, now)), now)
    }

    /// Denied: the gateway sends this answer and closes.
    pub fn answering(tuple: FourTuple, stack: Stack, answer: Vec<u8>, now: Instant) -> Self {
        Self::new(tuple, State::Answering(Answering::new(stack, answer, now)), now)
    }

    /// DNS over TCP, resolved by the gateway.
    pub fn resolving(tuple: FourTuple, stack: Stack, now: Instant) -> Self {
        Self::new(tuple, State::Resolving(Resolving::new(stack, now)), now)
    }

    /// Accepted from a peer at a published port.
    pub fn inbound(tuple: FourTuple, peer: SocketAddr, socket: OwnedFd, stack: Stack, now: Instant) -> Self {
        let open = Open::half_open(stack, HostSocket::new(socket), None, now);
        let endpoint = Endpoint::unnamed(Protocol::Tcp, peer);
        Self { inbound: true, endpoint, ..Self::new(tuple, State::Open(open), now) }
    }

    /// The same connection, to this endpoint and allowed by this rule.
    pub fn allowed(self, endpoint: Endpoint, rule: String) -> Self {
        Self { endpoint, rule, ..self }
    }

    /// Holds back what the client sends until the policy has decided about it, from its first byte on.
    pub fn inspect(&mut self) {
        let inspector = Box::new(Inspector::new(self.endpoint.remote.ip()));
        match &mut self.state {
            State::Dialing(state) => state.inspector = inspector,
            State::Reading(state) => state.inspector = inspector,
            State::DialingRead(state) => state.inspector = inspector,
            State::Open(state) => state.inspector = Some(inspector),
            State::Closed | State::Answering(_) | State::Resolving(_) => {}
        }
    }

    /// The host's socket, for epoll.
    pub fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.state.host().map(|host| host.socket.as_fd())
    }

    /// Epoll reported the host's socket.
    pub fn wake(&mut self) {
        if let Some(host) = self.state.host_mut() {
            host.wake();
        }
    }

    pub fn on_packet(&mut self, packet: &[u8], now: Instant, link: &mut Link) {
        if let Some(stack) = self.state.stack() {
            stack.on_packet(packet, now, link);
        }
    }

    /// When it needs a turn even without an event.
    pub fn due(&mut self, now: Instant) -> Option<Instant> {
        let stack = self.state.stack().and_then(|stack| stack.due(now));
        [stack, self.state.deadline()].into_iter().flatten().min()
    }

    /// Whether the policy has not decided yet: nothing was dialed, and nothing has left the sandbox.
    pub fn is_undecided(&self) -> bool {
        matches!(self.state, State::Reading(_))
    }

    /// Whether the client could not send anything yet.
    pub fn is_dialing(&self) -> bool {
        matches!(self.state, State::Dialing(_))
    }

    /// Whether what the client sends next is held back for a decision.
    pub fn is_inspected(&self) -> bool {
        self.state.inspector().is_some_and(Inspector::is_enforcing)
    }

    /// What the client asked for, if the gateway has parsed it.
    pub fn parsed_target(&self) -> Option<&ParsedTarget> {
        self.target.as_ref().or_else(|| self.state.inspector()?.observed())
    }

    /// Whether the gateway itself is the client's peer.
    pub fn is_local(&self) -> bool {
        matches!(self.state, State::Resolving(_) | State::Answering(_))
    }

    /// Whether its next turn could establish it or resolve a name, which would have to be logged.
    pub fn has_not_begun(&self) -> bool {
        !self.is_logged && !matches!(self.state, State::Answering(_))
    }

    /// True if a SYN may have left the host but the connection was never logged as established.
    pub fn was_only_dialed(&self) -> bool {
        self.state.host().is_some() && !self.inbound && !self.is_logged
    }

    /// Clears what [`TurnOutcome::Decide`] asked about. Returns whether it is to be dialed now.
    pub fn accept(&mut self, target: ParsedTarget) -> bool {
        if let Some(inspector) = self.state.inspector_mut() {
            inspector.accept(&target);
        }
        self.target = Some(target);
        self.is_undecided()
    }

    /// The socket for what was accepted is connecting.
    pub fn dialed(&mut self, socket: OwnedFd, now: Instant) {
        self.transition(|state| match state {
            State::Reading(reading) => State::DialingRead(reading.dialed(socket, now)),
            other => other,
        });
    }

    /// Rejects what [`TurnOutcome::Decide`] asked about, with an answer or, if that is empty, with a reset.
    pub fn deny(&mut self, answer: Vec<u8>, now: Instant) {
        self.transition(|state| match state {
            State::Reading(reading) => State::Answering(reading.denied(answer, now)),
            State::Open(open) => State::Answering(open.denied(answer, now)),
            other => other,
        });
    }

    fn transition(&mut self, next: impl FnOnce(State) -> State) {
        self.state = next(mem::take(&mut self.state));
    }

    /// The client's protocol, as far as it was parsed.
    pub fn app_protocol(&self) -> AppProtocol {
        self.state.inspector().map_or(AppProtocol::Other, Inspector::app_protocol)
    }

    pub fn abort(&mut self) {
        self.state.abort();
    }

    /// The socket, if both sides have closed and the peer has not acknowledged everything yet.
    pub fn into_closing(self) -> Option<OwnedFd> {
        self.state.into_closing()
    }

    /// Sends the guest the last segments, before the connection is removed.
    pub fn send_final(&mut self, now: Instant, link: &mut Link) {
        if let State::Dialing(dialing) = &self.state {
            let (guest_port, remote) = (self.tuple.guest_port, self.tuple.remote);
            let packet = &dialing.syn;
            reply::send_reset(link, &Segment { guest_port, remote, opens: true, resets: false, packet });
        }
        if let Some(stack) = self.state.stack() {
            stack.transmit(now, link);
        }
    }

    /// A response to one of its DNS queries.
    pub fn on_dns_response(&mut self, message: &[u8], now: Instant) {
        if let State::Resolving(resolving) = &mut self.state {
            resolving.on_response(message, now);
        }
    }

    /// Gives it a turn. `down` is how many bytes may go to the guest now, and is lowered by those that did.
    pub fn pump(
        &mut self,
        now: Instant,
        new_stacks: NewStacks,
        link: &mut Link,
        down: &mut u64,
    ) -> TurnOutcome {
        let NewStacks { clock, buffer_size } = new_stacks;
        let mut turn = Turn { now, clock, buffer_size, link, down, left: TURN, meter: &mut self.meter };
        if let Some(outcome) = finish_dial(&mut self.state, self.tuple, &mut turn) {
            return outcome;
        }
        if self.state.deadline().is_some_and(|deadline| deadline <= now) {
            return self.expire();
        }
        let reset = match (self.inbound, self.is_logged) {
            (false, _) => "reset by the client",
            (true, true) => "reset by the sandbox",
            (true, false) => "the sandbox does not listen on this port",
        };
        match &mut self.state {
            State::Closed | State::Dialing(_) => TurnOutcome::Idle,
            State::DialingRead(state) => state.wait(&mut turn),
            State::Reading(state) => state.pump(&mut turn),
            State::Open(state) => state.pump(&mut turn, self.is_logged, reset),
            State::Answering(state) => state.pump(&mut turn, reset),
            State::Resolving(state) => state.pump(&mut turn),
        }
    }

    fn expire(&mut self) -> TurnOutcome {
        self.abort();
        TurnOutcome::Ended(self.state.timeout_reason().to_owned())
    }
}

/// Moves on to [`State::Open`] if the host's socket has connected, and ends the connection if that failed.
fn finish_dial(state: &mut State, tuple: FourTuple, turn: &mut Turn<'_>) -> Option<TurnOutcome> {
    let connected = match state {
        State::Dialing(dialing) => dialing.host.connected()?,
        State::DialingRead(dialing) => dialing.host.connected()?,
        _ => return None,
    };
    if let Err(error) = connected {
        state.abort();
        return Some(TurnOutcome::Ended(format!("not connected: {}", host::describe(error))));
    }
    *state = match mem::take(state) {
        State::Dialing(dialing) => match dialing.connected(tuple, turn) {
            Ok(open) => State::Open(open),
            Err(dialing) => {
                *state = State::Dialing(dialing);
                return Some(TurnOutcome::Ended("the gateway could not create a TCP stack".to_owned()));
            }
        },
        State::DialingRead(dialing) => State::Open(dialing.connected()),
        other => other,
    };
    None
}
