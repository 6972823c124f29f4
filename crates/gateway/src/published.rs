//! Published ports: whoever calls there reaches a port of the guest's, if the policy lets them.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use bathy_policy::{Protocol, Verdict};
use bathy_protocol::network::{GATEWAY_V4, Peer, Transport};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SocketFlags, acceptfrom_with, recvfrom};

use crate::connection::Connection;
use crate::flows::{TURN, Way};
use crate::gateway::Gateway;
use crate::host;
use crate::policy_check::Endpoint;
use crate::stack::{Ends, Stack};

/// The ports that callers have from the guest's point of view.
const FIRST_PORT: u16 = 32768;
const PORTS: u16 = 28232;
/// How long callers wait when the host has no room for one more.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(100);
/// How many callers are taken before others have their turn.
const CALLERS_AT_ONCE: usize = 64;

impl Gateway {
    pub(crate) fn on_port(&mut self, index: usize) {
        // What cannot be recorded is not decided, and what cannot be delivered is not taken.
        if !self.event_log.may_begin() || !self.may_receive() || self.now < self.ports_after {
            self.ports_left.insert(index);
            return;
        }
        let Some(bound) = self.bound.get(index).copied() else { return };
        if bound.udp {
            self.take_datagrams(index, bound.guest)
        } else {
            self.take_callers(index, bound.guest)
        }
    }

    fn take_callers(&mut self, index: usize, guest_port: u16) {
        for _ in 0..CALLERS_AT_ONCE {
            let Some(port) = self.ports.get(index) else { return };
            match acceptfrom_with(port, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok((socket, caller)) => {
                    if let Some(caller) = caller.and_then(|caller| SocketAddr::try_from(caller).ok()) {
                        self.take_caller(socket, unmapped(caller), guest_port);
                    }
                }
                Err(Errno::AGAIN) => return,
                // Nobody can be taken now, and no edge will tell when.
                Err(error) if host::is_shortage(error) => {
                    self.ports_after = self.now + SHORTAGE_PAUSE;
                    break;
                }
                // The caller is gone: the next one may do better.
                Err(_) => {}
            }
        }
        // There may be more, and no edge tells.
        self.ports_left.insert(index);
    }

    fn take_caller(&mut self, socket: OwnedFd, caller: SocketAddr, guest_port: u16) {
        let peer = Peer {
            transport: Transport::Tcp,
            inbound: true,
            address: caller.ip(),
            port: guest_port,
            name: None,
        };
        let decision = self.policy_check.accept(caller.ip(), Protocol::Tcp, guest_port);
        let rule = decision.by.to_string();
        if decision.verdict != Verdict::Allow {
            host::break_off(&socket);
            return self.event_log.denied(&peer, &rule, None);
        }
        let free = |gateway: &Self, ends| !gateway.table.has(ends);
        let ends = if self.has_allowance_for_caller() { self.free_ends(guest_port, free) } else { None };
        let besides = self.closing.count();
        let room = self.table.room(besides);
        let stack = ends.and_then(|ends| Stack::calling(ends, room, self.clock, &mut self.link));
        let (Some(ends), Some(stack)) = (ends, stack) else { return host::break_off(&socket) };
        if host::limit_buffer(&socket, self.table.send_buffer(besides)).is_err() {
            return host::break_off(&socket);
        }
        let mut connection = Connection::inbound(ends, caller, socket, stack, self.now);
        connection.rule = rule;
        let number = self.table.add(connection);
        self.watch_connection(number);
    }

    fn free_ends(&mut self, guest_port: u16, is_free: impl Fn(&Self, Ends) -> bool) -> Option<Ends> {
        for _ in 0..PORTS {
            self.next_port = (self.next_port + 1) % PORTS;
            let remote = SocketAddr::new(GATEWAY_V4.into(), FIRST_PORT + self.next_port);
            let ends = Ends { guest_port, remote };
            if is_free(self, ends) {
                return Some(ends);
            }
        }
        None
    }

    fn take_datagrams(&mut self, index: usize, guest_port: u16) {
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut left = true;
        for _ in 0..TURN {
            let Some(port) = self.ports.get(index) else { break };
            match recvfrom(port, &mut buffer, RecvFlags::DONTWAIT) {
                Ok((count, _, Some(caller))) => {
                    if let Ok(caller) = SocketAddr::try_from(caller) {
                        let payload = buffer.get(..count).unwrap_or_default();
                        self.take_datagram(index, caller, guest_port, payload);
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
            self.ports_left.insert(index);
        }
    }

    fn take_datagram(&mut self, index: usize, caller: SocketAddr, guest_port: u16, payload: &[u8]) {
        let number = self.flows.back_to(index, caller).or_else(|| self.begin_back(index, caller, guest_port));
        if let Some(flow) = number.and_then(|number| self.flows.get_mut(number)) {
            flow.received(payload.len(), self.now);
            let ends = flow.ends;
            self.deliver(ends.remote, ends.guest_port, payload);
        }
    }

    fn begin_back(&mut self, index: usize, caller: SocketAddr, guest_port: u16) -> Option<u64> {
        let address = unmapped(caller).ip();
        let peer = Peer { transport: Transport::Udp, inbound: true, address, port: guest_port, name: None };
        let decision = self.policy_check.accept(address, Protocol::Udp, guest_port);
        let rule = decision.by.to_string();
        if decision.verdict != Verdict::Allow {
            self.event_log.denied(&peer, &rule, None);
            return None;
        }
        if !self.has_allowance_for_caller() {
            return None;
        }
        let ends = self.free_ends(guest_port, |gateway, ends| gateway.flows.of(ends).is_none())?;
        let place = Endpoint::unnamed(Protocol::Udp, unmapped(caller));
        let number = self.flows.add(ends, place, Way::Back(index, caller), self.now);
        self.note_flow(number, peer, rule);
        Some(number)
    }
}

/// Sockets that serve both families tell of IPv4 in the clothes of IPv6.
fn unmapped(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(bathy_policy::canonical(address.ip()), address.port())
}
