//! Connections of the guest: whether they may begin, their turns, their end.

use std::net::IpAddr;

use bathy_policy::{Protocol, Verdict};
use bathy_protocol::network::{GATEWAY_V4, GATEWAY_V6, NEVER_BEGAN, NetEvent, Peer};

use crate::connection::{Connection, Pumped};
use crate::flows::Way;
use crate::frame::Segment;
use crate::gateway::{Gateway, Token, connections_number, watch};
use crate::host;
use crate::inspect::{Found, Speech};
use crate::policy_check::{self, Endpoint};
use crate::reply;
use crate::resolver::{Asked, Asker};
use crate::stack::{Ends, Stack};

/// Where names are asked for.
pub const NAMES_PORT: u16 = 53;
/// Where a denial is explained in the client's own language.
const HTTP_PORT: u16 = 80;
/// The alert with which TLS says that access is denied.
const TLS_DENIED: [u8; 7] = [21, 3, 3, 0, 2, 2, 49];
/// How many requests or questions of one connection are judged before others have their turn.
const STEPS_AT_ONCE: usize = 64;
/// How much waits each way in a connection that ends here.
const LOCAL_ROOM: usize = 4096;

/// Whether it is the gateway itself.
pub fn is_gateway(address: IpAddr) -> bool {
    address == IpAddr::V4(GATEWAY_V4) || address == IpAddr::V6(GATEWAY_V6)
}

impl Gateway {
    pub(crate) fn on_segment(&mut self, segment: &Segment<'_>) {
        let ends = Ends { guest_port: segment.guest_port, remote: segment.remote };
        if let Some(number) = self.table.of(ends) {
            if let Some(connection) = self.table.get_mut(number) {
                connection.on_packet(segment.packet, self.now, &mut self.link);
            }
            self.table.queue(number);
        } else if segment.opens {
            // While nothing may begin, the guest's kernel asks again later.
            if self.event_log.may_begin() {
                self.open(segment, ends);
            }
        } else {
            reply::reset(&mut self.link, segment);
        }
    }

    /// How many connections and flows there are, with those that the other side has not let go of.
    fn open_count(&self) -> usize {
        self.table.count() + self.flows.count() + self.closing.count()
    }

    fn send_buffer(&self) -> Option<usize> {
        self.table.send_buffer(self.closing.count())
    }

    /// Whether one more connection or flow of the guest's may begin.
    pub(crate) fn has_allowance(&mut self) -> bool {
        if self.open_count() >= self.allowance.connections {
            self.event_log.limited("connections at once");
            return false;
        }
        if !self.allowance.new.take_one(self.now) {
            self.event_log.limited("new connections in a second");
            return false;
        }
        true
    }

    /// Whether one more caller may be let in. Callers have half of all connections at most: whoever they are, the guest's
    /// own go on.
    pub(crate) fn has_allowance_for_caller(&mut self) -> bool {
        if !self.allowance.callers.take_one(self.now) {
            self.event_log.limited("new callers in a second");
            return false;
        }
        let connections = self.table.all().filter(|(_, connection)| connection.inbound).count();
        let flows = self.flows.all().filter(|(_, flow)| matches!(flow.way, Way::Back(..))).count();
        let most = self.allowance.connections;
        if connections + flows >= most / 2 || self.open_count() >= most {
            self.event_log.limited("callers at once");
            return false;
        }
        true
    }

    fn open(&mut self, segment: &Segment<'_>, ends: Ends) {
        if !self.has_allowance() {
            return reply::reset(&mut self.link, segment);
        }
        if is_gateway(ends.remote.ip()) {
            return self.open_to_gateway(segment, ends);
        }
        let place = self.policy_check.place(Protocol::Tcp, ends.remote, self.now);
        let decision = self.policy_check.connect(&place);
        let rule = decision.by.to_string();
        match decision.verdict {
            Verdict::Deny => {
                self.note_denial(&place, None, &rule);
                if ends.remote.port() != HTTP_PORT {
                    return reply::reset(&mut self.link, segment);
                }
                let answer = self.policy_check.explain(&place, None, &rule, false);
                if let Some(stack) = self.stack_for(segment, ends, LOCAL_ROOM) {
                    self.table.add(Connection::answering(ends, stack, answer, self.now));
                }
            }
            Verdict::IfRead => {
                let room = self.table.room(self.closing.count());
                if let Some(stack) = self.stack_for(segment, ends, room) {
                    let connection = Connection::reading(ends, stack, self.now);
                    self.table.add(connection.allowed(place, rule));
                }
            }
            Verdict::Allow | Verdict::UnlessRead => match host::dial(ends.remote, self.send_buffer()) {
                Ok(socket) => {
                    let connection = Connection::dialing(ends, socket, segment.without_payload(), self.now);
                    let mut connection = connection.allowed(place, rule);
                    if decision.verdict == Verdict::UnlessRead {
                        connection.inspect();
                    }
                    let number = self.table.add(connection);
                    self.watch_connection(number);
                }
                Err(error) => {
                    reply::reset(&mut self.link, segment);
                    let reason = format!("not connected: {error}");
                    self.note_end(NEVER_BEGAN, policy_check::peer(&place, None), (0, 0), self.now, &reason);
                }
            },
        }
    }

    fn open_to_gateway(&mut self, segment: &Segment<'_>, ends: Ends) {
        if ends.remote.port() != NAMES_PORT {
            return reply::reset(&mut self.link, segment);
        }
        if let Some(stack) = self.stack_for(segment, ends, LOCAL_ROOM) {
            self.table.add(Connection::resolving(ends, stack, self.now));
        }
    }

    fn stack_for(&mut self, segment: &Segment<'_>, ends: Ends, room: usize) -> Option<Stack> {
        let Some(mut stack) = Stack::answering(ends, room, self.clock, &mut self.link) else {
            reply::reset(&mut self.link, segment);
            return None;
        };
        stack.on_packet(&segment.without_payload(), self.now, &mut self.link);
        Some(stack)
    }

    pub(crate) fn watch_connection(&mut self, number: u64) {
        let socket = self.table.get_mut(number).and_then(|connection| connection.socket());
        if socket.is_some_and(|socket| watch(&self.epoll, socket, Token::Connection(number)).is_err()) {
            self.end(number, "the host has no room for it");
        }
    }

    fn note_denial(&mut self, place: &Endpoint, name: Option<&bathy_policy::HostName>, rule: &str) {
        let cure = self.policy_check.cure(place, name);
        self.event_log.denied(&policy_check::peer(place, name), rule, cure.as_deref());
    }

    /// Gives a connection its turn.
    pub(crate) fn turn(&mut self, number: u64) {
        for _ in 0..STEPS_AT_ONCE {
            let room = self.table.room(self.closing.count());
            let Some(connection) = self.table.get_mut(number) else { return };
            let mut down = self.allowance.down.0.left();
            let (before, sent) = (down, self.link.sent.0);
            let pumped = connection.pump(self.now, self.clock, room, &mut self.link, &mut down);
            self.allowance.down.0.take(before - down);
            self.allowance.down.1.take(self.link.sent.0 - sent);
            match pumped {
                Pumped::Idle => return self.table.set_timer(number, self.now),
                Pumped::More => break,
                Pumped::Opened => self.note_beginning(number),
                Pumped::Decide(found) => self.judge_found(number, found),
                Pumped::Unreadable(why) => self.deny(number, None, &why),
                Pumped::Question(bytes) => {
                    let asked =
                        self.resolver.ask(&bytes, Asker::Connection(number), &self.policy_check, self.now);
                    self.on_asked(asked);
                }
                Pumped::Ended(reason) => return self.end(number, &reason),
            }
        }
        self.table.queue(number);
        self.table.set_timer(number, self.now);
    }

    pub(crate) fn note_beginning(&mut self, number: u64) {
        let Some(connection) = self.table.get_mut(number) else { return };
        connection.is_logged = true;
        let (number, peer, rule) = (connections_number(number), peer_of(connection), connection.rule.clone());
        self.counts.begin(number, &mut connection.moved);
        self.event_log.event(NetEvent::Allowed { number, peer, rule });
    }

    fn judge_found(&mut self, number: u64, found: Found) {
        let Some(connection) = self.table.get_mut(number) else { return };
        if connection.is_undecided() {
            // It is dialled now, and the host's addresses may have changed since it began.
            connection.endpoint.is_host = self.policy_check.is_host(connection.endpoint.remote.ip());
        }
        let decision = self.policy_check.decide(&connection.endpoint, &found);
        if decision.verdict != Verdict::Allow {
            return self.deny(number, Some(found), &decision.by.to_string());
        }
        connection.rule = decision.by.to_string();
        if !connection.accept(found) {
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

    fn deny(&mut self, number: u64, found: Option<Found>, rule: &str) {
        let Some(connection) = self.table.get_mut(number) else { return };
        let place = connection.endpoint.clone();
        let name = found.as_ref().and_then(Found::name);
        let without_body = matches!(&found, Some(Found::Http { method, .. }) if method == "HEAD");
        let answer = match (connection.speech(), &found) {
            (_, Some(Found::Other)) | (Speech::Other, _) => Vec::new(),
            (Speech::Tls, _) => TLS_DENIED.to_vec(),
            (Speech::Http, _) => self.policy_check.explain(&place, name, rule, without_body),
        };
        connection.deny(answer, self.now);
        self.note_denial(&place, name, rule);
    }

    /// Ends a connection, and writes it down if it had begun, or if it was to begin and did not.
    pub(crate) fn end(&mut self, number: u64, reason: &str) {
        let Some(mut connection) = self.table.remove(number) else { return };
        connection.send_final(self.now, &mut self.link);
        self.resolver.forget(number);
        let number = connections_number(number);
        if connection.was_only_dialed() {
            // Somebody outside has heard of it, although it never stood.
            let (peer, rule) = (peer_of(&connection), connection.rule.clone());
            self.counts.begin(number, &mut connection.moved);
            self.event_log.event(NetEvent::Allowed { number, peer, rule });
        }
        if connection.is_logged || !connection.is_local() {
            let moved = connection.moved.bytes();
            self.note_end(number, peer_of(&connection), moved, connection.started, reason);
        }
        self.counts.end(std::mem::take(&mut connection.moved));
        if let Some(socket) = connection.into_closing() {
            self.closing.add(socket, self.now);
        }
    }

    pub(crate) fn on_asked(&mut self, asked: Asked) {
        match asked {
            Asked::Waits(number) => {
                // One that cannot be watched is asked again when its time is over.
                if let Some(socket) = self.resolver.socket(number) {
                    let _ = watch(&self.epoll, socket, Token::Question(number));
                }
            }
            Asked::Now(answer) => {
                if let Some(event) = answer.event {
                    self.event_log.asked(event);
                }
                let Some(message) = answer.message else { return };
                match answer.asker {
                    Asker::Datagram(guest_port, own) => {
                        reply::datagram(&mut self.link, own, guest_port, &message);
                    }
                    Asker::Connection(number) => {
                        if let Some(connection) = self.table.get_mut(number) {
                            connection.on_dns_response(&message, self.now);
                            self.table.queue(number);
                        }
                    }
                }
            }
        }
    }

    pub(crate) fn on_question(&mut self, number: u64) {
        if let Some(asked) = self.resolver.go_on(number, &mut self.policy_check, self.now) {
            self.on_asked(asked);
        }
    }
}

/// As it is written down.
pub fn peer_of(connection: &Connection) -> Peer {
    let name = connection.found.as_ref().and_then(Found::name);
    let peer = policy_check::peer(&connection.endpoint, name);
    if connection.inbound { Peer { inbound: true, port: connection.ends.guest_port, ..peer } } else { peer }
}
