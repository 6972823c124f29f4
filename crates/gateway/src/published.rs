//! Published ports: inbound peers that the policy allows are connected to a port of the guest.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use bathy_policy::{Access, Protocol};
use bathy_protocol::network::{GATEWAY_V4, Peer, Transport};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SocketFlags, acceptfrom_with, recvfrom};

use crate::connection::Connection;
use crate::flows::{DATAGRAMS_AT_ONCE, FlowSocket};
use crate::gateway::Gateway;
use crate::host;
use crate::policy_check::Endpoint;
use crate::stack::{FourTuple, Stack};

/// The source ports that inbound peers have in the guest.
const FIRST_PORT: u16 = 32768;
const PORTS: u16 = 28232;
/// How long to wait before accepting again when the host is short of descriptors or memory.
const SHORTAGE_BACKOFF: Duration = Duration::from_millis(100);
/// How many inbound peers are accepted before others have their turn.
const ACCEPTS_AT_ONCE: usize = 64;

impl Gateway {
    pub(crate) fn on_port(&mut self, index: usize) {
        // Fails closed: without space in the event log or the link, the accept queue is left alone.
        if !self.event_log.may_begin() || !self.may_receive() || self.now < self.accept_after {
            self.ports_pending.insert(index);
            return;
        }
        let Some(bound) = self.bound.get(index).copied() else { return };
        if bound.udp {
            self.receive_datagrams(index, bound.guest)
        } else {
            self.accept_peers(index, bound.guest)
        }
    }

    fn accept_peers(&mut self, index: usize, guest_port: u16) {
        for _ in 0..ACCEPTS_AT_ONCE {
            let Some(port) = self.ports.get(index) else { return };
            match acceptfrom_with(port, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok((socket, remote)) => {
                    if let Some(remote) = remote.and_then(|remote| SocketAddr::try_from(remote).ok()) {
                        self.accept_peer(socket, unmapped(remote), guest_port);
                    }
                }
                Err(Errno::AGAIN) => return,
                // Nothing can be accepted now, and epoll reports no edge when that changes.
                Err(error) if host::is_shortage(error) => {
                    self.accept_after = self.now + SHORTAGE_BACKOFF;
                    break;
                }
                // That peer has closed already; the next one may be accepted.
                Err(_) => {}
            }
        }
        // The accept queue may not be empty, and epoll reports no further edge.
        self.ports_pending.insert(index);
    }

    fn accept_peer(&mut self, socket: OwnedFd, remote: SocketAddr, guest_port: u16) {
        let peer = Peer {
            transport: Transport::Tcp,
            inbound: true,
            address: remote.ip(),
            port: guest_port,
            name: None,
        };
        let decision = self.policy_check.accept(remote.ip(), Protocol::Tcp, guest_port);
        let rule = decision.by.to_string();
        if decision.access != Access::Allow {
            host::reset_on_close(&socket);
            return self.event_log.log_denial(&peer, &rule, None);
        }
        let free = |gateway: &Self, tuple| !gateway.table.contains(tuple);
        let tuple = if self.admits_inbound() { self.free_tuple(guest_port, free) } else { None };
        let others = self.closing.count();
        let buffer_size = self.table.buffer_size(others);
        let stack = tuple.and_then(|tuple| Stack::connect(tuple, buffer_size, self.clock, &mut self.link));
        let (Some(tuple), Some(stack)) = (tuple, stack) else { return host::reset_on_close(&socket) };
        if host::limit_buffer(&socket, self.table.send_buffer(others)).is_err() {
            return host::reset_on_close(&socket);
        }
        let mut connection = Connection::inbound(tuple, remote, socket, stack, self.now);
        connection.rule = rule;
        let number = self.table.add(connection);
        self.watch_connection(number);
    }

    fn free_tuple(
        &mut self,
        guest_port: u16,
        is_free: impl Fn(&Self, FourTuple) -> bool,
    ) -> Option<FourTuple> {
        for _ in 0..PORTS {
            self.next_port = (self.next_port + 1) % PORTS;
            let remote = SocketAddr::new(GATEWAY_V4.into(), FIRST_PORT + self.next_port);
            let tuple = FourTuple { guest_port, remote };
            if is_free(self, tuple) {
                return Some(tuple);
            }
        }
        None
    }

    fn receive_datagrams(&mut self, index: usize, guest_port: u16) {
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut left = true;
        for _ in 0..DATAGRAMS_AT_ONCE {
            let Some(port) = self.ports.get(index) else { break };
            match recvfrom(port, &mut buffer, RecvFlags::DONTWAIT) {
                Ok((count, _, Some(remote))) => {
                    if let Ok(remote) = SocketAddr::try_from(remote) {
                        let payload = buffer.get(..count).unwrap_or_default();
                        self.receive_datagram(index, remote, guest_port, payload);
                    }
                }
                Err(Errno::AGAIN) => {
                    left = false;
                    break;
                }
                _ => {}
            }
        }
        self.buffer = buffer;
        if left {
            self.ports_pending.insert(index);
        }
    }

    fn receive_datagram(&mut self, index: usize, remote: SocketAddr, guest_port: u16, payload: &[u8]) {
        let number = self
            .flows
            .inbound_flow(index, remote)
            .or_else(|| self.begin_inbound_flow(index, remote, guest_port));
        if let Some(flow) = number.and_then(|number| self.flows.get_mut(number)) {
            flow.received(payload.len(), self.now);
            let tuple = flow.tuple;
            self.deliver(tuple.remote, tuple.guest_port, payload);
        }
    }

    fn begin_inbound_flow(&mut self, index: usize, remote: SocketAddr, guest_port: u16) -> Option<u64> {
        let address = unmapped(remote).ip();
        let peer = Peer { transport: Transport::Udp, inbound: true, address, port: guest_port, name: None };
        let decision = self.policy_check.accept(address, Protocol::Udp, guest_port);
        let rule = decision.by.to_string();
        if decision.access != Access::Allow {
            self.event_log.log_denial(&peer, &rule, None);
            return None;
        }
        if !self.admits_inbound() {
            return None;
        }
        let tuple = self.free_tuple(guest_port, |gateway, tuple| gateway.flows.find(tuple).is_none())?;
        let endpoint = Endpoint::unnamed(Protocol::Udp, unmapped(remote));
        let number = self.flows.add(tuple, endpoint, FlowSocket::Inbound(index, remote), self.now);
        self.log_flow(number, peer, rule);
        Some(number)
    }
}

/// Dual-stack sockets report IPv4 peers as IPv4-mapped addresses.
fn unmapped(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(bathy_policy::canonical(address.ip()), address.port())
}
