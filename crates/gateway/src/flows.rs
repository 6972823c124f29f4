//! UDP flows: datagrams of one four-tuple, until it is idle.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send, sendto};

use crate::counts::Meter;
use crate::policy_check::Endpoint;
use crate::stack::FourTuple;

const IDLE_TIME: Duration = Duration::from_secs(60);
/// How often idle flows are looked for.
const SWEEP: Duration = Duration::from_secs(5);
pub const DATAGRAMS_AT_ONCE: usize = 64;

/// The socket that a flow uses on the host.
#[derive(Debug)]
pub enum FlowSocket {
    /// From the guest: a connected socket of its own.
    Outbound(OwnedFd),
    /// From an inbound peer at this address: the socket of the published port with this index.
    Inbound(usize, SocketAddr),
}

/// Datagrams between a port of the guest and one remote address.
#[derive(Debug)]
pub struct Flow {
    pub tuple: FourTuple,
    pub endpoint: Endpoint,
    pub socket: FlowSocket,
    pub started: Instant,
    pub meter: Meter,
    last: Instant,
}

#[derive(Debug)]
pub struct Flows {
    by_number: BTreeMap<u64, Flow>,
    by_tuple: HashMap<FourTuple, u64>,
    last: u64,
    swept: Instant,
}

impl Flows {
    pub fn new(now: Instant) -> Self {
        Self { by_number: BTreeMap::new(), by_tuple: HashMap::new(), last: 0, swept: now }
    }

    pub fn count(&self) -> usize {
        self.by_number.len()
    }

    pub fn all(&self) -> impl Iterator<Item = (u64, &Flow)> {
        self.by_number.iter().map(|(number, flow)| (*number, flow))
    }

    pub fn find(&self, tuple: FourTuple) -> Option<u64> {
        self.by_tuple.get(&tuple).copied()
    }

    /// The flow of an inbound peer at a published port.
    pub fn inbound_flow(&self, port: usize, remote: SocketAddr) -> Option<u64> {
        let is_it =
            |flow: &Flow| matches!(flow.socket, FlowSocket::Inbound(of, to) if of == port && to == remote);
        self.by_number.iter().find(|(_, flow)| is_it(flow)).map(|(number, _)| *number)
    }

    pub fn add(&mut self, tuple: FourTuple, endpoint: Endpoint, socket: FlowSocket, now: Instant) -> u64 {
        self.last += 1;
        let flow = Flow { tuple, endpoint, socket, started: now, meter: Meter::default(), last: now };
        self.by_tuple.insert(tuple, self.last);
        self.by_number.insert(self.last, flow);
        self.last
    }

    pub fn get_mut(&mut self, number: u64) -> Option<&mut Flow> {
        self.by_number.get_mut(&number)
    }

    pub fn remove(&mut self, number: u64) -> Option<Flow> {
        let flow = self.by_number.remove(&number)?;
        self.by_tuple.remove(&flow.tuple);
        Some(flow)
    }

    /// When to look for idle flows next.
    pub fn due(&self) -> Option<Instant> {
        (!self.by_number.is_empty()).then_some(self.swept + SWEEP)
    }

    pub fn idle(&mut self, now: Instant) -> Vec<u64> {
        if now < self.swept + SWEEP {
            return Vec::new();
        }
        self.swept = now;
        let is_idle = |flow: &Flow| now.saturating_duration_since(flow.last) >= IDLE_TIME;
        self.by_number.iter().filter(|(_, flow)| is_idle(flow)).map(|(number, _)| *number).collect()
    }
}

impl Flow {
    /// Sends a datagram of the guest. If the socket's buffer is full it is dropped, as UDP may.
    pub fn send(&mut self, payload: &[u8], ports: &[OwnedFd], now: Instant) {
        self.last = now;
        let sent = match &self.socket {
            FlowSocket::Outbound(socket) => send(socket, payload, SendFlags::NOSIGNAL),
            FlowSocket::Inbound(port, remote) => match ports.get(*port) {
                Some(socket) => sendto(socket, payload, SendFlags::NOSIGNAL, remote),
                None => return,
            },
        };
        // The error of an earlier datagram is reported by the next send, which sent nothing.
        if let (Err(Errno::CONNREFUSED), FlowSocket::Outbound(socket)) = (sent, &self.socket) {
            let _ = send(socket, payload, SendFlags::NOSIGNAL);
        }
        self.meter.add_sent(u64::try_from(payload.len()).unwrap_or(0));
    }

    /// Receives a datagram for the guest from the flow's own socket.
    pub fn receive(&mut self, buffer: &mut [u8], now: Instant) -> Option<usize> {
        let FlowSocket::Outbound(socket) = &self.socket else { return None };
        loop {
            match recv(socket, &mut *buffer, RecvFlags::empty()) {
                Ok((count, _)) => {
                    self.received(count, now);
                    return Some(count);
                }
                Err(Errno::INTR | Errno::CONNREFUSED) => {}
                Err(_) => return None,
            }
        }
    }

    /// Counts a datagram for the guest.
    pub fn received(&mut self, count: usize, now: Instant) {
        self.last = now;
        self.meter.add_received(u64::try_from(count).unwrap_or(0));
    }
}
