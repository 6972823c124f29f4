//! TCP connections of the guest: admission, turns, end.

use std::net::IpAddr;

use bathy_policy::{Access, Protocol};
use bathy_protocol::network::{GATEWAY_V4, GATEWAY_V6, NEVER_BEGAN, NetEvent, Peer};

use crate::connection::{Connection, NewStacks, TurnOutcome};
use crate::flows::FlowSocket;
use crate::frame::Segment;
use crate::gateway::{Closed, Gateway, Token, connection_number, watch};
use crate::host;
use crate::inspect::{AppProtocol, ParsedTarget};
use crate::policy_check::{self, Endpoint};
use crate::reply;
use crate::resolver::{Lookup, QueryOrigin};
use crate::stack::{FourTuple, Stack};

pub const DNS_PORT: u16 = 53;
/// Where a denial is explained in an HTTP response.
const HTTP_PORT: u16 = 80;
/// The TLS alert `access_denied`, fatal.
const TLS_DENIED: [u8; 7] = [21, 3, 3, 0, 2, 2, 49];
/// How many requests or queries of one connection are handled before others have their turn.
const STEPS_AT_ONCE: usize = 64;
/// The buffer size of a connection that the gateway itself answers.
const LOCAL_BUFFER: usize = 4096;

pub fn is_gateway(address: IpAddr) -> bool {
    address == IpAddr::V4(GATEWAY_V4) || address == IpAddr::V6(GATEWAY_V6)
}

impl Gateway {
    pub(crate) fn on_segment(&mut self, segment: &Segment<'_>) {
        let tuple = FourTuple { guest_port: segment.guest_port, remote: segment.remote };
        if let Some(number) = self.table.find(tuple) {
            if let Some(connection) = self.table.get_mut(number) {
                connection.on_packet(segment.packet, self.now, &mut self.link);
            }
            self.table.queue(number);
        } else if segment.opens {
            // Dropped: the guest's kernel retransmits its SYN.
            if self.event_log.may_begin() {
                self.open(segment, tuple);
            }
        } else {
            reply::send_reset(&mut self.link, segment);
        }
    }

    /// Connections and flows, with those whose last bytes the peer has not acknowledged.
    fn open_count(&self) -> usize {
        self.table.count() + self.flows.count() + self.closing.count()
    }

    fn send_buffer(&self) -> Option<usize> {
        self.table.send_buffer(self.closing.count())
    }

    /// Whether the quota admits one more connection or flow from the guest.
    pub(crate) fn admits_outbound(&mut self) -> bool {
        if self.open_count() >= self.quota.connections {
            self.event_log.count_limit("connections at once");
            return false;
        }
        if !self.quota.outbound.take_one(self.now) {
            self.event_log.count_limit("new connections in a second");
            return false;
        }
        true
    }

    /// Whether the quota admits one more inbound peer. Inbound peers get at most half of all connections, so that
    /// they cannot starve the guest's own.
    pub(crate) fn admits_inbound(&mut self) -> bool {
        if !self.quota.inbound.take_one(self.now) {
            self.event_log.count_limit("new inbound connections in a second");
            return false;
        }
        let connections = self.table.all().filter(|(_, connection)| connection.inbound).count();
        let flows =
            self.flows.all().filter(|(_, flow)| matches!(flow.socket, FlowSocket::Inbound(..))).count();
        let most = self.quota.connections;
        if connections + flows >= most / 2 || self.open_count() >= most {
            self.event_log.count_limit("inbound connections at once");
            return false;
        }
        true
    }

    fn open(&mut self, segment: &Segment<'_>, tuple: FourTuple) {
        if !self.admits_outbound() {
            return reply::send_reset(&mut self.link, segment);
        }
        if is_gateway(tuple.remote.ip()) {
            return self.open_to_gateway(segment, tuple);
        }
        let endpoint = self.policy_check.endpoint(Protocol::Tcp, tuple.remote, self.now);
        let decision = self.policy_check.connect(&endpoint);
        let rule = decision.by.to_string();
        match decision.access {
            Access::Deny => {
                self.log_denial(&endpoint, None, &rule);
                if tuple.remote.port() != HTTP_PORT {
                    return reply::send_reset(&mut self.link, segment);
                }
                let answer = self.policy_check.denial_response(&endpoint, None, &rule, false);
                if let Some(stack) = self.stack_for(segment, tuple, LOCAL_BUFFER) {
                    self.table.add(Connection::answering(tuple, stack, answer, self.now));
                }
            }
            Access::InspectFirst => {
                let buffer_size = self.table.buffer_size(self.closing.count());
                if let Some(stack) = self.stack_for(segment, tuple, buffer_size) {
                    let connection = Connection::reading(tuple, stack, self.now);
                    self.table.add(connection.allowed(endpoint, rule));
                }
            }
            Access::Allow | Access::AllowAndInspect => match host::dial(tuple.remote, self.send_buffer()) {
                Ok(socket) => {
                    let connection = Connection::dialing(tuple, socket, segment.without_payload(), self.now);
                    let mut connection = connection.allowed(endpoint, rule);
                    if decision.access == Access::AllowAndInspect {
                        connection.inspect();
                    }
                    let number = self.table.add(connection);
                    self.watch_connection(number);
                }
                Err(error) => {
                    reply::send_reset(&mut self.link, segment);
                    let reason = format!("not connected: {error}");
                    let peer = policy_check::peer(&endpoint, None);
                    let closed = Closed { number: NEVER_BEGAN, peer, bytes: (0, 0), started: self.now };
                    self.log_close(closed, &reason);
                }
            },
        }
    }

    fn open_to_gateway(&mut self, segment: &Segment<'_>, tuple: FourTuple) {
        if tuple.remote.port() != DNS_PORT {
            return reply::send_reset(&mut self.link, segment);
        }
        if let Some(stack) = self.stack_for(segment, tuple, LOCAL_BUFFER) {
            self.table.add(Connection::resolving(tuple, stack, self.now));
        }
    }

    fn stack_for(&mut self, segment: &Segment<'_>, tuple: FourTuple, buffer_size: usize) -> Option<Stack> {
        let Some(mut stack) = Stack::listen(tuple, buffer_size, self.clock, &mut self.link) else {
            reply::send_reset(&mut self.link, segment);
            return None;
        };
        stack.on_packet(&segment.without_payload(), self.now, &mut self.link);
        Some(stack)
    }

    pub(crate) fn watch_connection(&mut self, number: u64) {
        let socket = self.table.get_mut(number).and_then(|connection| connection.socket());
        if socket.is_some_and(|socket| watch(&self.epoll, socket, Token::Connection(number)).is_err()) {
            self.end(number, "the host is short of memory or descriptors");
        }
    }

    fn log_denial(&mut self, endpoint: &Endpoint, name: Option<&bathy_policy::HostName>, rule: &str) {
        let fix = self.policy_check.fix(endpoint, name);
        self.event_log.log_denial(&policy_check::peer(endpoint, name), rule, fix.as_deref());
    }

    pub(crate) fn turn(&mut self, number: u64) {
        for _ in 0..STEPS_AT_ONCE {
            let buffer_size = self.table.buffer_size(self.closing.count());
            let new_stacks = NewStacks { clock: self.clock, buffer_size };
            let Some(connection) = self.table.get_mut(number) else { return };
            let mut down = self.quota.down.0.left();
            let (before, sent) = (down, self.link.sent.0);
            let outcome = connection.pump(self.now, new_stacks, &mut self.link, &mut down);
            self.quota.down.0.take(before - down);
            self.quota.down.1.take(self.link.sent.0 - sent);
            match outcome {
                TurnOutcome::Idle => return self.table.set_timer(number, self.now),
                TurnOutcome::More => break,
                TurnOutcome::Opened => self.log_open(number),
                TurnOutcome::Decide(target) => self.decide_target(number, target),
                TurnOutcome::Unreadable(why) => self.deny(number, None, &why),
                TurnOutcome::Query(bytes) => {
                    let lookup = self.resolver.start(
                        &bytes,
                        QueryOrigin::Connection(number),
                        &self.policy_check,
                        self.now,
                    );
                    self.on_lookup(lookup);
                }
                TurnOutcome::Ended(reason) => return self.end(number, &reason),
            }
        }
        self.table.queue(number);
        self.table.set_timer(number, self.now);
    }

    pub(crate) fn log_open(&mut self, number: u64) {
        let Some(connection) = self.table.get_mut(number) else { return };
        connection.is_logged = true;
        let (number, peer, rule) = (connection_number(number), peer_of(connection), connection.rule.clone());
        self.counts.begin(number, &mut connection.meter);
        self.event_log.log(NetEvent::Allowed { number, peer, rule });
    }

    fn decide_target(&mut self, number: u64, target: ParsedTarget) {
        let Some(connection) = self.table.get_mut(number) else { return };
        if connection.is_undecided() {
            // It is dialed only now, and the host's addresses may have changed since the SYN (TOCTOU).
            connection.endpoint.is_host = self.policy_check.is_host(connection.endpoint.remote.ip());
        }
        let decision = self.policy_check.decide(&connection.endpoint, &target);
        if decision.access != Access::Allow {
            return self.deny(number, Some(target), &decision.by.to_string());
        }
        connection.rule = decision.by.to_string();
        if !connection.accept(target) {
            return;
        }
        let buffer = self.send_buffer();
        let Some(connection) = self.table.get_mut(number) else { return };
        match host::dial(connection.endpoint.remote, buffer) {
            Ok(socket) => {
                connection.dialed(socket, self.now);
                self.watch_connection(number);
            }
            Err(error) => {
                connection.abort();
                self.end(number, &format!("not connected: {error}"));
            }
        }
    }

    fn deny(&mut self, number: u64, target: Option<ParsedTarget>, rule: &str) {
        let Some(connection) = self.table.get_mut(number) else { return };
        let endpoint = connection.endpoint.clone();
        let name = target.as_ref().and_then(ParsedTarget::name);
        let without_body = matches!(&target, Some(ParsedTarget::Http { method, .. }) if method == "HEAD");
        let answer = match (connection.app_protocol(), &target) {
            (_, Some(ParsedTarget::Other)) | (AppProtocol::Other, _) => Vec::new(),
            (AppProtocol::Tls, _) => TLS_DENIED.to_vec(),
            (AppProtocol::Http, _) => self.policy_check.denial_response(&endpoint, name, rule, without_body),
        };
        connection.deny(answer, self.now);
        self.log_denial(&endpoint, name, rule);
    }

    /// Removes a connection, and logs its end unless it only talked to the gateway.
    pub(crate) fn end(&mut self, number: u64, reason: &str) {
        let Some(mut connection) = self.table.remove(number) else { return };
        connection.send_final(self.now, &mut self.link);
        self.resolver.cancel(number);
        let number = connection_number(number);
        if connection.was_only_dialed() {
            // A SYN left the host, so the connection is logged although it was never established.
            let (peer, rule) = (peer_of(&connection), connection.rule.clone());
            self.counts.begin(number, &mut connection.meter);
            self.event_log.log(NetEvent::Allowed { number, peer, rule });
        }
        if connection.is_logged || !connection.is_local() {
            let (peer, bytes) = (peer_of(&connection), connection.meter.bytes());
            self.log_close(Closed { number, peer, bytes, started: connection.started }, reason);
        }
        self.counts.end(std::mem::take(&mut connection.meter));
        if let Some(socket) = connection.into_closing() {
            self.closing.add(socket, self.now);
        }
    }

    pub(crate) fn on_lookup(&mut self, lookup: Lookup) {
        match lookup {
            Lookup::Pending(number) => {
                // If epoll cannot watch it, the query times out and is retried.
                if let Some(socket) = self.resolver.socket(number) {
                    let _ = watch(&self.epoll, socket, Token::Query(number));
                }
            }
            Lookup::Done(answer) => {
                if let Some(event) = answer.event {
                    self.event_log.log_query(event);
                }
                let Some(message) = answer.message else { return };
                match answer.origin {
                    QueryOrigin::Datagram(guest_port, own) => {
                        reply::send_datagram(&mut self.link, own, guest_port, &message);
                    }
                    QueryOrigin::Connection(number) => {
                        if let Some(connection) = self.table.get_mut(number) {
                            connection.on_dns_response(&message, self.now);
                            self.table.queue(number);
                        }
                    }
                }
            }
        }
    }

    pub(crate) fn on_query_ready(&mut self, number: u64) {
        if let Some(lookup) = self.resolver.resume(number, &mut self.policy_check, self.now) {
            self.on_lookup(lookup);
        }
    }
}

/// The peer as events name it.
pub fn peer_of(connection: &Connection) -> Peer {
    let name = connection.target.as_ref().and_then(ParsedTarget::name);
    let peer = policy_check::peer(&connection.endpoint, name);
    if connection.inbound { Peer { inbound: true, port: connection.tuple.guest_port, ..peer } } else { peer }
}
