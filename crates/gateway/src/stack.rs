//! The guest's side of one TCP connection: a stack of its own. So the cost of a packet does not depend on the
//! number of connections, and none can disturb another.

#[cfg(test)]
pub(crate) mod guest;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bathy_protocol::network::{GUEST_V4, GUEST_V6, MTU};
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{Checksum, ChecksumCapabilities, Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::time::Instant as StackInstant;
use smoltcp::wire::{HardwareAddress, IpAddress, IpCidr, IpEndpoint, IpListenEndpoint, TcpPacket};

use crate::link::{EtherType, Link};

/// How long the guest may leave segments unacknowledged.
const GUEST_TIMEOUT: Duration = Duration::from_secs(120);
/// How often an idle guest is probed, so that a connection may be idle for any time.
const KEEP_ALIVE: Duration = Duration::from_secs(30);
const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;

/// Converts between the host's clock and that of all stacks.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: Instant,
}

impl Clock {
    pub fn new() -> Self {
        Self { start: Instant::now() }
    }

    fn stack(self, now: Instant) -> StackInstant {
        let micros = now.saturating_duration_since(self.start).as_micros();
        StackInstant::from_micros(i64::try_from(micros).unwrap_or(i64::MAX))
    }

    fn outside(self, time: StackInstant) -> Instant {
        self.start + Duration::from_micros(u64::try_from(time.total_micros()).unwrap_or(0))
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}

/// Drops segments that would overrun smoltcp's receive buffer. smoltcp (0.14) trusts its own bookkeeping of
/// windows, which a guest can confuse: the window of a SYN is never scaled, but is read as if it were, also when
/// the SYN is retransmitted. It would accept more than its buffer holds, and its assertion would end the process.
/// So no segment is passed on that ends behind the buffer.
#[derive(Debug, Default)]
struct WindowGuard {
    has_sent: bool,
    /// The acknowledgement number of the last segment sent, until the window is computed from it.
    acknowledged: Option<u32>,
    /// The first sequence number that does not fit into the buffer. It only ever grows.
    window_end: Option<u32>,
}

impl WindowGuard {
    /// Observes a segment of the gateway.
    fn sent(&mut self, ether_type: EtherType, packet: &[u8]) {
        let Some(segment) = segment(ether_type, packet) else { return };
        self.has_sent = true;
        // A reset acknowledges what the other segment carried, whether it was accepted or not.
        if segment.ack() && !segment.rst() {
            self.acknowledged = Some(number(segment.ack_number()));
        }
    }

    /// Moves the window's end, if a segment was sent since: `space` bytes from its acknowledgement.
    fn update_window(&mut self, space: usize) {
        if let Some(acknowledged) = self.acknowledged.take() {
            self.window_end = u32::try_from(space).ok().map(|space| acknowledged.wrapping_add(space));
        }
    }

    fn admits(&self, ether_type: EtherType, packet: &[u8]) -> bool {
        let Some(segment) = segment(ether_type, packet) else { return true };
        let Ok(length) = u32::try_from(segment.payload().len()) else { return false };
        let end = number(segment.seq_number()).wrapping_add(length);
        length == 0 || self.window_end.is_some_and(|window_end| window_end.wrapping_sub(end) <= u32::MAX / 2)
    }
}

fn segment(ether_type: EtherType, packet: &[u8]) -> Option<TcpPacket<&[u8]>> {
    let header = if ether_type == EtherType::V4 { IPV4_HEADER } else { IPV6_HEADER };
    packet.get(header..).and_then(|bytes| TcpPacket::new_checked(bytes).ok())
}

fn number(number: smoltcp::wire::TcpSeqNumber) -> u32 {
    number.0.cast_unsigned()
}

/// A device for smoltcp with one received packet at most.
struct Wire<'a> {
    packet: Option<&'a [u8]>,
    link: &'a mut Link,
    guard: &'a mut WindowGuard,
    ether_type: EtherType,
}

struct In<'a>(&'a [u8]);
struct Out<'a>(&'a mut Link, &'a mut WindowGuard, EtherType);

impl RxToken for In<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, work: F) -> R {
        work(self.0)
    }
}

impl TxToken for Out<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, work: F) -> R {
        let Self(link, guard, ether_type) = self;
        let mut result = None;
        let mut work = Some(work);
        link.send(ether_type, length, |packet| {
            result = work.take().map(|work| work(packet));
            guard.sent(ether_type, packet);
        });
        match (result, work) {
            (Some(result), _) => result,
            // Longer than any frame, which the stack never sends: the packet is discarded.
            (None, Some(work)) => work(&mut vec![0; length]),
            (None, None) => unreachable!("the work was done, and it has a result"),
        }
    }
}

impl Device for Wire<'_> {
    type RxToken<'a>
        = In<'a>
    where
        Self: 'a;
    type TxToken<'a>
        = Out<'a>
    where
        Self: 'a;

    fn receive(&mut self, _: StackInstant) -> Option<(In<'_>, Out<'_>)> {
        let packet = self.packet.take()?;
        Some((In(packet), Out(self.link, self.guard, self.ether_type)))
    }

    fn transmit(&mut self, _: StackInstant) -> Option<Out<'_>> {
        self.link.has_space().then_some(Out(self.link, self.guard, self.ether_type))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = usize::from(MTU);
        // The guest's virtio NIC offloads checksums, and nothing in between could corrupt a packet. Ours are
        // computed, for guests that forward packets.
        let mut checksum = ChecksumCapabilities::default();
        checksum.ipv4 = Checksum::Tx;
        checksum.tcp = Checksum::Tx;
        capabilities.checksum = checksum;
        capabilities
    }
}

pub struct Stack {
    interface: Interface,
    sockets: SocketSet<'static>,
    socket: SocketHandle,
    guard: WindowGuard,
    ether_type: EtherType,
    clock: Clock,
}

impl std::fmt::Debug for Stack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stack").field("kind", &self.ether_type).finish_non_exhaustive()
    }
}

/// What identifies a connection: the guest's address is fixed, so three values are enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FourTuple {
    pub guest_port: u16,
    /// The remote address, as the guest sees it.
    pub remote: SocketAddr,
}

impl Stack {
    /// A stack that accepts the connection whose SYN is passed to it next. `buffer_size` is that of each direction.
    pub fn listen(tuple: FourTuple, buffer_size: usize, clock: Clock, link: &mut Link) -> Option<Self> {
        let mut stack = Self::new(tuple, buffer_size, clock, link)?;
        let endpoint = IpListenEndpoint::from((tuple.remote.ip(), tuple.remote.port()));
        stack.tcp().listen(endpoint).ok()?;
        Some(stack)
    }

    /// A stack that opens a connection to the guest.
    pub fn connect(tuple: FourTuple, buffer_size: usize, clock: Clock, link: &mut Link) -> Option<Self> {
        let mut stack = Self::new(tuple, buffer_size, clock, link)?;
        let guest =
            if tuple.remote.is_ipv4() { IpAddress::Ipv4(GUEST_V4) } else { IpAddress::Ipv6(GUEST_V6) };
        let guest = IpEndpoint::new(guest, tuple.guest_port);
        let own = IpListenEndpoint::from((tuple.remote.ip(), tuple.remote.port()));
        let Self { interface, sockets, socket, .. } = &mut stack;
        sockets.get_mut::<Socket<'_>>(*socket).connect(interface.context(), guest, own).ok()?;
        Some(stack)
    }

    fn new(tuple: FourTuple, buffer_size: usize, clock: Clock, link: &mut Link) -> Option<Self> {
        let ether_type = EtherType::of(tuple.remote.ip());
        let mut config = Config::new(HardwareAddress::Ip);
        let mut seed = [0; 8];
        rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty()).ok()?;
        config.random_seed = u64::from_ne_bytes(seed);
        let now = clock.stack(Instant::now());
        let mut guard = WindowGuard::default();
        let mut interface =
            Interface::new(config, &mut Wire { packet: None, link, guard: &mut guard, ether_type }, now);
        let own = IpAddress::from(tuple.remote.ip());
        let bits = if tuple.remote.is_ipv4() { 32 } else { 128 };
        interface.update_ip_addrs(|addresses| {
            // A fresh interface has space for its one address.
            let _ = addresses.push(IpCidr::new(own, bits));
        });
        let mut socket =
            Socket::new(SocketBuffer::new(vec![0; buffer_size]), SocketBuffer::new(vec![0; buffer_size]));
        socket.set_nagle_enabled(false);
        socket.set_timeout(Some(GUEST_TIMEOUT.into()));
        socket.set_keep_alive(Some(KEEP_ALIVE.into()));
        let mut sockets = SocketSet::new(Vec::with_capacity(1));
        let socket = sockets.add(socket);
        Some(Self { interface, sockets, socket, guard, ether_type, clock })
    }

    pub fn tcp(&mut self) -> &mut Socket<'static> {
        self.sockets.get_mut(self.socket)
    }

    pub fn on_packet(&mut self, packet: &[u8], now: Instant, link: &mut Link) {
        // With simultaneous open, before its own SYN is sent, smoltcp would compute a negative window.
        let has_begun = self.guard.has_sent || self.tcp().state() != State::SynSent;
        if !has_begun || !self.guard.admits(self.ether_type, packet) {
            return;
        }
        let mut wire =
            Wire { packet: Some(packet), link, guard: &mut self.guard, ether_type: self.ether_type };
        self.interface.poll_ingress_single(self.clock.stack(now), &mut wire, &mut self.sockets);
        self.update_window();
        // smoltcp listens again after a reset, with the windows of the last connection. A stack is for one
        // connection.
        if self.tcp().state() == State::Listen {
            self.tcp().abort();
        }
    }

    /// Sends as many segments as the link has space for.
    pub fn transmit(&mut self, now: Instant, link: &mut Link) {
        let now = self.clock.stack(now);
        // Each iteration sends one packet; the link's space and the guest's window bound them.
        while link.has_space() {
            let mut wire = Wire { packet: None, link, guard: &mut self.guard, ether_type: self.ether_type };
            let result = self.interface.poll_egress(now, &mut wire, &mut self.sockets);
            if result == smoltcp::iface::PollResult::None {
                break;
            }
        }
        self.update_window();
    }

    /// Sending does not change the receive buffer: its space is what it was at the last segment.
    fn update_window(&mut self) {
        let socket = self.tcp();
        let space = socket.recv_capacity().saturating_sub(socket.recv_queue());
        self.guard.update_window(space);
    }

    /// When the stack has a segment to send without an event.
    pub fn due(&mut self, now: Instant) -> Option<Instant> {
        let at = self.interface.poll_at(self.clock.stack(now), &self.sockets)?;
        Some(self.clock.outside(at))
    }

    /// Whether both directions are closed.
    pub fn is_over(&mut self) -> bool {
        self.is_reset() || self.tcp().state() == State::TimeWait
    }

    /// Whether the connection was reset. One that the guest resets during the handshake returns to listening.
    pub fn is_reset(&mut self) -> bool {
        matches!(self.tcp().state(), State::Closed | State::Listen)
    }

    /// Whether the handshake is complete.
    pub fn is_established(&mut self) -> bool {
        !matches!(self.tcp().state(), State::Closed | State::Listen | State::SynSent | State::SynReceived)
    }

    /// Whether the guest has sent its FIN, and everything before it was read.
    pub fn guest_has_finished(&mut self) -> bool {
        let established = self.is_established();
        let socket = self.tcp();
        established && !socket.may_recv() && socket.recv_queue() == 0
    }
}
