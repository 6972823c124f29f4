//! Datagrams, which have no beginning and no end: whoever exchanges some is kept apart for a while.

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

/// How long a flow is remembered after its last datagram.
const IDLE_TIME: Duration = Duration::from_secs(60);
/// How often flows are looked through for idle ones.
const SWEEP: Duration = Duration::from_secs(5);
/// How many datagrams one flow gets before others have their turn.
pub const TURN: usize = 64;

/// Where the datagrams of a flow go.
#[derive(Debug)]
pub enum FlowSocket {
    /// Out, over a socket of its own.
    Outbound(OwnedFd),
    /// Back to somebody who called at this published port.
    Inbound(usize, SocketAddr),
}

/// Datagrams between a port of the guest's and one other side.
#[derive(Debug)]
pub struct Flow {
    /// The guest's end.
    pub tuple: FourTuple,
    /// The other side.
    pub endpoint: Endpoint,
    /// How.
    pub socket: FlowSocket,
    /// When it began.
    pub started: Instant,
    /// Bytes from the guest and to it.
    pub meter: Meter,
    last: Instant,
}

/// All flows.
#[derive(Debug)]
pub struct Flows {
    by_number: BTreeMap<u64, Flow>,
    by_tuple: HashMap<FourTuple, u64>,
    last: u64,
    swept: Instant,
}

impl Flows {
    /// None yet.
    pub fn new(now: Instant) -> Self {
        Self { by_number: BTreeMap::new(), by_tuple: HashMap::new(), last: 0, swept: now }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.by_number.len()
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = (u64, &Flow)> {
        self.by_number.iter().map(|(number, flow)| (*number, flow))
    }

    /// The flow of these ends.
    pub fn find(&self, tuple: FourTuple) -> Option<u64> {
        self.by_tuple.get(&tuple).copied()
    }

    /// The flow of somebody who called at a published port.
    pub fn inbound_flow(&self, port: usize, remote: SocketAddr) -> Option<u64> {
        let is_it =
            |flow: &Flow| matches!(flow.socket, FlowSocket::Inbound(of, to) if of == port && to == remote);
        self.by_number.iter().find(|(_, flow)| is_it(flow)).map(|(number, _)| *number)
    }

    /// A new one.
    pub fn add(&mut self, tuple: FourTuple, endpoint: Endpoint, socket: FlowSocket, now: Instant) -> u64 {
        self.last += 1;
        let flow = Flow { tuple, endpoint, socket, started: now, meter: Meter::default(), last: now };
        self.by_tuple.insert(tuple, self.last);
        self.by_number.insert(self.last, flow);
        self.last
    }

    /// One of them.
    pub fn get_mut(&mut self, number: u64) -> Option<&mut Flow> {
        self.by_number.get_mut(&number)
    }

    /// Ends one.
    pub fn remove(&mut self, number: u64) -> Option<Flow> {
        let flow = self.by_number.remove(&number)?;
        self.by_tuple.remove(&flow.tuple);
        Some(flow)
    }

    /// When idle ones are to be looked for.
    pub fn due(&self) -> Option<Instant> {
        (!self.by_number.is_empty()).then_some(self.swept + SWEEP)
    }

    /// The flows that have been idle for too long.
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
    /// Sends a datagram of the guest's. One that finds no room is lost, as datagrams may be.
    pub fn send(&mut self, payload: &[u8], ports: &[OwnedFd], now: Instant) {
        self.last = now;
        let sent = match &self.socket {
            FlowSocket::Outbound(socket) => send(socket, payload, SendFlags::NOSIGNAL),
            FlowSocket::Inbound(port, remote) => match ports.get(*port) {
                Some(socket) => sendto(socket, payload, SendFlags::NOSIGNAL, remote),
                None => return,
            },
        };
        // An error that an earlier datagram met is told with the next one, which was not sent.
        if let (Err(Errno::CONNREFUSED), FlowSocket::Outbound(socket)) = (sent, &self.socket) {
            let _ = send(socket, payload, SendFlags::NOSIGNAL);
        }
        self.meter.add_sent(u64::try_from(payload.len()).unwrap_or(0));
    }

    /// Takes a datagram for the guest from a flow's own socket.
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

    /// A datagram for the guest came.
    pub fn received(&mut self, count: usize, now: Instant) {
        self.last = now;
        self.meter.add_received(u64::try_from(count).unwrap_or(0));
    }
}
