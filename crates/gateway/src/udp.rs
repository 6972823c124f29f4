//! Datagrams and echoes of the guest.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

use bathy_policy::{Protocol, Verdict};
use bathy_protocol::network::{NEVER_BEGAN, NetEvent, Peer, Transport};

use crate::flows::{TURN, Way};
use crate::frame::Datagram;
use crate::gateway::{Gateway, Token, flows_number, watch};
use crate::host;
use crate::policy_check;
use crate::reply;
use crate::resolver::Asker;
use crate::stack::Ends;
use crate::tcp::{NAMES_PORT, is_gateway};

impl Gateway {
    pub(crate) fn on_datagram(&mut self, datagram: &Datagram<'_>) {
        let ends = Ends { guest_port: datagram.guest_port, remote: datagram.remote };
        if let Some(number) = self.flows.of(ends) {
            if let Some(flow) = self.flows.get_mut(number) {
                flow.send(datagram.payload, &self.ports, self.now);
            }
            return;
        }
        if !self.event_log.may_begin() {
            return;
        }
        if is_gateway(ends.remote.ip()) {
            if ends.remote.port() == NAMES_PORT {
                let asker = Asker::Datagram(ends.guest_port, ends.remote);
                let asked = self.resolver.ask(datagram.payload, asker, &self.policy_check, self.now);
                self.on_asked(asked);
            } else {
                reply::prohibit(&mut self.link, ends.remote.ip(), datagram.packet);
            }
            return;
        }
        self.begin_flow(datagram, ends);
    }

    fn begin_flow(&mut self, datagram: &Datagram<'_>, ends: Ends) {
        if !self.has_allowance() {
            return;
        }
        let place = self.policy_check.place(Protocol::Udp, ends.remote, self.now);
        let decision = self.policy_check.connect(&place);
        let rule = decision.by.to_string();
        // What is in a datagram is not read: one whose name or content would decide is denied.
        if !matches!(decision.verdict, Verdict::Allow | Verdict::UnlessRead) {
            reply::prohibit(&mut self.link, ends.remote.ip(), datagram.packet);
            let cure = self.policy_check.cure(&place, None);
            return self.event_log.denied(&policy_check::peer(&place, None), &rule, cure.as_deref());
        }
        let peer = policy_check::peer(&place, None);
        match host::datagrams(ends.remote) {
            Ok(socket) => {
                let number = self.flows.add(ends, place, Way::Out(socket), self.now);
                self.note_flow(number, peer, rule);
                self.watch_flow(number);
                if let Some(flow) = self.flows.get_mut(number) {
                    flow.send(datagram.payload, &self.ports, self.now);
                }
            }
            Err(error) => {
                self.note_end(NEVER_BEGAN, peer, (0, 0), self.now, &format!("not sent: {error}"));
            }
        }
    }

    /// Writes down that a flow begins.
    pub(crate) fn note_flow(&mut self, flow: u64, peer: Peer, rule: String) {
        let number = flows_number(flow);
        if let Some(flow) = self.flows.get_mut(flow) {
            self.counts.begin(number, &mut flow.moved);
        }
        self.event_log.event(NetEvent::Allowed { number, peer, rule });
    }

    fn watch_flow(&mut self, number: u64) {
        if let Some(Way::Out(socket)) = self.flows.get_mut(number).map(|flow| &flow.way)
            && watch(&self.epoll, socket.as_fd(), Token::Flow(number)).is_err()
        {
            self.end_flow(number, "the host has no room for it");
        }
    }

    /// Datagrams for the guest.
    pub(crate) fn on_flow(&mut self, number: u64) {
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut is_left = true;
        for _ in 0..TURN {
            if !self.may_receive() {
                break;
            }
            let flow = self.flows.get_mut(number);
            let Some((count, ends)) =
                flow.and_then(|flow| Some((flow.receive(&mut buffer, self.now)?, flow.ends)))
            else {
                is_left = false;
                break;
            };
            self.deliver(ends.remote, ends.guest_port, buffer.get(..count).unwrap_or_default());
        }
        self.buffer = buffer;
        if is_left {
            self.flows_left.insert(number);
        }
    }

    /// Hands a datagram to the guest.
    pub(crate) fn deliver(&mut self, from: SocketAddr, guest_port: u16, payload: &[u8]) {
        self.allowance.down.0.take(u64::try_from(payload.len()).unwrap_or(0));
        self.allowance.down.1.take(1);
        reply::datagram(&mut self.link, from, guest_port, payload);
    }

    pub(crate) fn end_flow(&mut self, number: u64, reason: &str) {
        if let Some(flow) = self.flows.remove(number) {
            let mut peer = policy_check::peer(&flow.place, None);
            if let Way::Back(..) = flow.way {
                peer = Peer { inbound: true, port: flow.ends.guest_port, ..peer };
            }
            self.note_end(flows_number(number), peer, flow.moved.bytes(), flow.started, reason);
            self.counts.end(flow.moved);
        }
    }

    /// The gateway answers for itself, and nothing goes out.
    pub(crate) fn on_echo(&mut self, remote: IpAddr, packet: &[u8]) {
        if is_gateway(remote) {
            return reply::echo(&mut self.link, remote, packet);
        }
        self.refuse(Transport::Icmp, remote, packet, "echo requests do not leave a sandbox");
    }

    pub(crate) fn on_other(&mut self, remote: IpAddr, protocol: u8, packet: &[u8]) {
        self.refuse(Transport::Other(protocol), remote, packet, "only TCP and UDP leave a sandbox");
    }

    fn refuse(&mut self, transport: Transport, remote: IpAddr, packet: &[u8], rule: &str) {
        if !self.event_log.may_begin() {
            return;
        }
        reply::prohibit(&mut self.link, remote, packet);
        let peer = Peer { transport, inbound: false, address: remote, port: 0, name: None };
        self.event_log.denied(&peer, rule, None);
    }
}
