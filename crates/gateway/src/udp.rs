//! UDP datagrams, ICMP echo requests and other protocols of the guest.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

use bathy_policy::{Access, Protocol};
use bathy_protocol::network::{NEVER_BEGAN, NetEvent, Peer, Transport};

use crate::flows::{DATAGRAMS_AT_ONCE, FlowSocket};
use crate::frame::Datagram;
use crate::gateway::{Closed, Gateway, Token, flow_number, watch};
use crate::host;
use crate::policy_check;
use crate::reply;
use crate::resolver::QueryOrigin;
use crate::stack::FourTuple;
use crate::tcp::{DNS_PORT, is_gateway};

impl Gateway {
    pub(crate) fn on_datagram(&mut self, datagram: &Datagram<'_>) {
        let tuple = FourTuple { guest_port: datagram.guest_port, remote: datagram.remote };
        if let Some(number) = self.flows.find(tuple) {
            if let Some(flow) = self.flows.get_mut(number) {
                flow.send(datagram.payload, &self.ports, self.now);
            }
            return;
        }
        if !self.event_log.may_begin() {
            return;
        }
        if is_gateway(tuple.remote.ip()) {
            if tuple.remote.port() == DNS_PORT {
                let origin = QueryOrigin::Datagram(tuple.guest_port, tuple.remote);
                let lookup = self.resolver.start(datagram.payload, origin, &self.policy_check, self.now);
                self.on_lookup(lookup);
            } else {
                reply::send_prohibited(&mut self.link, tuple.remote.ip(), datagram.packet);
            }
            return;
        }
        self.begin_flow(datagram, tuple);
    }

    fn begin_flow(&mut self, datagram: &Datagram<'_>, tuple: FourTuple) {
        if !self.admits_outbound() {
            return;
        }
        let endpoint = self.policy_check.endpoint(Protocol::Udp, tuple.remote, self.now);
        let decision = self.policy_check.connect(&endpoint);
        let rule = decision.by.to_string();
        // Payloads of datagrams are not inspected: where a name or a request would decide, the flow is denied.
        if !matches!(decision.access, Access::Allow | Access::AllowAndInspect) {
            reply::send_prohibited(&mut self.link, tuple.remote.ip(), datagram.packet);
            let fix = self.policy_check.fix(&endpoint, None);
            return self.event_log.log_denial(&policy_check::peer(&endpoint, None), &rule, fix.as_deref());
        }
        let peer = policy_check::peer(&endpoint, None);
        match host::udp_socket(tuple.remote) {
            Ok(socket) => {
                let number = self.flows.add(tuple, endpoint, FlowSocket::Outbound(socket), self.now);
                self.log_flow(number, peer, rule);
                self.watch_flow(number);
                if let Some(flow) = self.flows.get_mut(number) {
                    flow.send(datagram.payload, &self.ports, self.now);
                }
            }
            Err(error) => {
                let closed = Closed { number: NEVER_BEGAN, peer, bytes: (0, 0), started: self.now };
                self.log_close(closed, &format!("not sent: {error}"));
            }
        }
    }

    /// Logs that a flow was allowed.
    pub(crate) fn log_flow(&mut self, flow: u64, peer: Peer, rule: String) {
        let number = flow_number(flow);
        if let Some(flow) = self.flows.get_mut(flow) {
            self.counts.begin(number, &mut flow.meter);
        }
        self.event_log.log(NetEvent::Allowed { number, peer, rule });
    }

    fn watch_flow(&mut self, number: u64) {
        if let Some(FlowSocket::Outbound(socket)) = self.flows.get_mut(number).map(|flow| &flow.socket)
            && watch(&self.epoll, socket.as_fd(), Token::Flow(number)).is_err()
        {
            self.end_flow(number, "the host is short of memory or descriptors");
        }
    }

    /// Delivers datagrams from a flow's socket to the guest.
    pub(crate) fn on_flow(&mut self, number: u64) {
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut is_left = true;
        for _ in 0..DATAGRAMS_AT_ONCE {
            if !self.may_receive() {
                break;
            }
            let flow = self.flows.get_mut(number);
            let Some((count, tuple)) =
                flow.and_then(|flow| Some((flow.receive(&mut buffer, self.now)?, flow.tuple)))
            else {
                is_left = false;
                break;
            };
            self.deliver(tuple.remote, tuple.guest_port, buffer.get(..count).unwrap_or_default());
        }
        self.buffer = buffer;
        if is_left {
            self.flows_pending.insert(number);
        }
    }

    pub(crate) fn deliver(&mut self, from: SocketAddr, guest_port: u16, payload: &[u8]) {
        self.quota.down.0.take(u64::try_from(payload.len()).unwrap_or(0));
        self.quota.down.1.take(1);
        reply::send_datagram(&mut self.link, from, guest_port, payload);
    }

    pub(crate) fn end_flow(&mut self, number: u64, reason: &str) {
        if let Some(flow) = self.flows.remove(number) {
            let mut peer = policy_check::peer(&flow.endpoint, None);
            if let FlowSocket::Inbound(..) = flow.socket {
                peer = Peer { inbound: true, port: flow.tuple.guest_port, ..peer };
            }
            let (number, bytes) = (flow_number(number), flow.meter.bytes());
            self.log_close(Closed { number, peer, bytes, started: flow.started }, reason);
            self.counts.end(flow.meter);
        }
    }

    /// Echo requests are answered only for the gateway itself; none leaves the host.
    pub(crate) fn on_echo(&mut self, remote: IpAddr, packet: &[u8]) {
        if is_gateway(remote) {
            return reply::send_echo_reply(&mut self.link, remote, packet);
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
        reply::send_prohibited(&mut self.link, remote, packet);
        let peer = Peer { transport, inbound: false, address: remote, port: 0, name: None };
        self.event_log.log_denial(&peer, rule, None);
    }
}
