//! The gateway's event loop: frames of the guest, sockets of the host, messages of the owner (the process that
//! started it), timers.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use bathy_policy::Policies;
use bathy_protocol::network::{
    BoundPort, FromGateway, GatewayLaunch, MAX_FRAME, MAX_MESSAGE, NEVER_BEGAN, NetEvent, Peer, ToGateway,
    decode,
};
use rustix::event::Timespec;
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use thiserror::Error;

use crate::closing::ClosingSockets;
use crate::connection::Connection;
use crate::counts::Counts;
use crate::event_log::EventLog;
use crate::flows::Flows;
use crate::frame::{self, GuestPacket};
use crate::limits::Quota;
use crate::link::{Link, Received};
use crate::policy_check::PolicyCheck;
use crate::resolver::Resolver;
use crate::stack::Clock;
use crate::table::Table;

/// How many frames of the guest are handled before sockets have their turn.
const FRAMES_AT_ONCE: usize = 128;
/// How many connections have their turn before the link is read again.
const TURNS_AT_ONCE: usize = 64;
const EVENTS_AT_ONCE: usize = 128;
/// How long to wait for the owner to receive the final events.
const FINAL_FLUSH_TIME: Duration = Duration::from_secs(1);

const CONTROL: u64 = 0;
const LINK: u64 = 1;
/// The upper bits of a token are its kind, the lower bits the number.
const KIND: u64 = 1 << 60;

/// What an epoll event belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    Control,
    Link,
    Port(u64),
    /// The host's socket of a connection.
    Connection(u64),
    Flow(u64),
    /// The socket of a DNS query to the host's resolver.
    Query(u64),
}

impl Token {
    fn number(self) -> u64 {
        match self {
            Self::Control => CONTROL,
            Self::Link => LINK,
            Self::Port(number) => KIND + number,
            Self::Connection(number) => 2 * KIND + number,
            Self::Flow(number) => 3 * KIND + number,
            Self::Query(number) => 4 * KIND + number,
        }
    }

    fn of(number: u64) -> Self {
        let rest = number % KIND;
        match number / KIND {
            0 if rest == CONTROL => Self::Control,
            0 => Self::Link,
            1 => Self::Port(rest),
            2 => Self::Connection(rest),
            3 => Self::Flow(rest),
            _ => Self::Query(rest),
        }
    }
}

#[derive(Debug, Error)]
pub enum GatewayError {
    #[error("The policies cannot be read: {0}")]
    Policies(serde_json::Error),
    #[error("The gateway cannot wait for events: {0}")]
    Events(io::Error),
}

#[derive(Debug)]
pub struct Gateway {
    pub(crate) epoll: OwnedFd,
    pub(crate) link: Link,
    pub(crate) event_log: EventLog,
    pub(crate) policy_check: PolicyCheck,
    pub(crate) resolver: Resolver,
    pub(crate) table: Table,
    pub(crate) flows: Flows,
    pub(crate) counts: Counts,
    pub(crate) closing: ClosingSockets,
    pub(crate) quota: Quota,
    pub(crate) ports: Vec<OwnedFd>,
    pub(crate) bound: Vec<BoundPort>,
    /// Published ports whose accept queue or receive buffer was not drained.
    pub(crate) ports_pending: BTreeSet<usize>,
    /// Back-off: no inbound peer is accepted before this, because the host was short of descriptors or memory.
    pub(crate) accept_after: Instant,
    /// Connections that were not established when the owner stopped recording events. They continue when it records
    /// again.
    pub(crate) deferred: BTreeSet<u64>,
    /// Flows with datagrams for the guest that were not delivered yet.
    pub(crate) flows_pending: BTreeSet<u64>,
    pub(crate) next_port: u16,
    pub(crate) clock: Clock,
    pub(crate) now: Instant,
    /// Test clock: how far `now` is ahead of the host's clock.
    ahead: Duration,
    pub(crate) buffer: Vec<u8>,
    link_readable: bool,
    frame: Vec<u8>,
}

/// The keeper or the owner has closed its end, so the gateway exits.
struct Shutdown;

impl Gateway {
    /// Serves over these sockets. `ports` are bound, in the order of the launch's.
    ///
    /// # Errors
    /// When the policies cannot be parsed or the host has no epoll instance to give.
    pub fn new(
        launch: GatewayLaunch,
        control: OwnedFd,
        link: OwnedFd,
        ports: Vec<OwnedFd>,
    ) -> Result<Self, GatewayError> {
        let policies = read_policies(&launch.policies)?;
        let events = |error: Errno| GatewayError::Events(error.into());
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(events)?;
        let now = Instant::now();
        let report = rustix::io::fcntl_dupfd_cloexec(&control, 0).map_err(events)?;
        let mut resolver = Resolver::new(launch.resolvers, launch.limits.queries).reporting_to(report);
        let mut quota = Quota::new(&launch.limits, now);
        if let Some(spent) = launch.spent {
            resolver = resolver.continuing(spent);
            quota.use_up();
        }
        let gateway = Self {
            epoll,
            link: Link::new(link),
            event_log: EventLog::new(control, now),
            policy_check: PolicyCheck::new(policies, launch.allow_command).with_host_networks(launch.own),
            resolver,
            table: Table::default(),
            flows: Flows::new(now),
            counts: Counts::default(),
            closing: ClosingSockets::default(),
            quota,
            ports,
            bound: launch.ports,
            ports_pending: BTreeSet::new(),
            accept_after: now,
            deferred: BTreeSet::new(),
            flows_pending: BTreeSet::new(),
            next_port: 0,
            clock: Clock::new(),
            now,
            ahead: Duration::ZERO,
            buffer: vec![0; 65536],
            link_readable: true,
            frame: vec![0; MAX_FRAME],
        };
        watch(&gateway.epoll, gateway.event_log.fd(), Token::Control).map_err(events)?;
        watch(&gateway.epoll, gateway.link.fd(), Token::Link).map_err(events)?;
        for (number, port) in (0..).zip(&gateway.ports) {
            watch(&gateway.epoll, port.as_fd(), Token::Port(number)).map_err(events)?;
        }
        Ok(gateway)
    }

    /// Keeps byte counts in memory that outlives this process.
    pub(crate) fn counting_in(mut self, counts: Counts) -> Self {
        self.counts = counts;
        self
    }

    /// Serves until the keeper or the owner closes its end.
    ///
    /// # Errors
    /// When epoll fails.
    pub fn run(mut self) -> Result<(), GatewayError> {
        self.event_log.send(&FromGateway::Ready);
        while self.step(true)? {}
        Ok(())
    }

    /// One iteration of the loop, blocking if `waits`. Returns false when the gateway is to exit.
    ///
    /// # Errors
    /// When epoll fails.
    pub fn step(&mut self, waits: bool) -> Result<bool, GatewayError> {
        let mut events = [const { MaybeUninit::uninit() }; EVENTS_AT_ONCE];
        let timeout = if waits { self.timeout() } else { Some(Timespec { tv_sec: 0, tv_nsec: 0 }) };
        let ready = match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
            Ok((ready, _)) => &*ready,
            Err(Errno::INTR) => &[],
            Err(error) => return Err(GatewayError::Events(error.into())),
        };
        self.now = Instant::now() + self.ahead;
        let served = ready.iter().try_for_each(|event| self.on_event(event)).and_then(|()| self.work());
        Ok(served.is_ok())
    }

    /// Advances the clock, so that tests need not wait for timers.
    #[doc(hidden)]
    pub fn pass(&mut self, time: Duration) {
        self.ahead += time;
    }

    fn on_event(&mut self, event: &Event) -> Result<(), Shutdown> {
        match Token::of(event.data.u64()) {
            Token::Control => {
                self.event_log.flush();
                self.on_control()
            }
            Token::Link => {
                self.link_readable = true;
                self.link.flush();
                Ok(())
            }
            Token::Port(number) => {
                if let Ok(port) = usize::try_from(number) {
                    self.on_port(port);
                }
                Ok(())
            }
            Token::Connection(number) => {
                if let Some(connection) = self.table.get_mut(number) {
                    connection.wake();
                    self.table.queue(number);
                }
                Ok(())
            }
            Token::Flow(number) => {
                self.on_flow(number);
                Ok(())
            }
            Token::Query(number) => {
                self.on_query_ready(number);
                Ok(())
            }
        }
    }

    fn on_control(&mut self) -> Result<(), Shutdown> {
        loop {
            let mut message = vec![0; MAX_MESSAGE];
            match recv(self.event_log.fd(), &mut message, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(Shutdown),
                Ok((length, _)) => match decode(message.get(..length).unwrap_or_default()) {
                    Ok(ToGateway::Policies(text)) => self.change_policies(&text),
                    Ok(ToGateway::Hold(is_held)) => self.hold(is_held),
                    Ok(ToGateway::Own(own)) => self.policy_check.set_host_networks(own),
                    Err(error) => self.event_log.reply(&FromGateway::Failed(error.to_string())),
                },
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(_) => return Err(Shutdown),
            }
        }
    }

    fn change_policies(&mut self, text: &str) {
        match read_policies(text) {
            Ok(policies) => {
                self.policy_check.set_policies(policies);
                let closed = self.recheck_all();
                self.event_log.reply(&FromGateway::Changed { closed });
            }
            Err(error) => self.event_log.reply(&FromGateway::Failed(error.to_string())),
        }
    }

    /// While held, no new connection begins; after it, the deferred ones are queued.
    fn hold(&mut self, is_held: bool) {
        self.event_log.hold(is_held);
        if !is_held {
            for number in std::mem::take(&mut self.deferred) {
                self.table.queue(number);
            }
        }
    }

    /// Defers a connection that is not established while the owner cannot record events. Returns whether it did.
    fn defers(&mut self, number: u64) -> bool {
        let has_not_begun = |connection: &mut Connection| connection.has_not_begun();
        let holds = self.event_log.is_held() && self.table.get_mut(number).is_some_and(has_not_begun);
        if holds {
            self.deferred.insert(number);
        }
        holds
    }

    /// Whether the link has space and the rate limit allows anything to be sent to the guest.
    pub(crate) fn may_receive(&mut self) -> bool {
        self.link.has_space() && self.quota.may_receive(self.now).is_ok()
    }

    /// When epoll has to return without an event.
    fn timeout(&mut self) -> Option<Timespec> {
        let mut wake: Vec<Option<Instant>> =
            vec![self.event_log.due(), self.resolver.due(), self.flows.due(), self.closing.due()];
        if self.link_readable && self.event_log.has_space() {
            wake.push(Some(self.quota.may_send(self.now).err().unwrap_or(self.now)));
        }
        if self.link.has_space() {
            let is_waiting = self.table.queued() > 0 || !self.flows_pending.is_empty();
            let turn = if is_waiting { Some(self.now) } else { self.table.due() };
            let inbound = !self.ports_pending.is_empty() && self.event_log.may_begin();
            let turn = turn.into_iter().chain(inbound.then_some(self.accept_after)).min();
            let allowed = self.quota.may_receive(self.now).err();
            wake.push(turn.map(|turn| allowed.map_or(turn, |allowed| turn.max(allowed))));
        }
        let wake = wake.into_iter().flatten().min()?;
        // A time that does not fit is none.
        Timespec::try_from(wake.saturating_duration_since(self.now)).ok()
    }

    fn work(&mut self) -> Result<(), Shutdown> {
        self.on_guest_frames()?;
        for port in std::mem::take(&mut self.ports_pending) {
            self.on_port(port);
        }
        for flow in std::mem::take(&mut self.flows_pending) {
            self.on_flow(flow);
        }
        self.table.fire_timers(self.now);
        for _ in 0..TURNS_AT_ONCE {
            if !self.may_receive() {
                break;
            }
            let Some(number) = self.table.next_queued() else { break };
            if !self.defers(number) {
                self.turn(number);
            }
        }
        for number in self.resolver.expired(self.now) {
            self.on_query_ready(number);
        }
        for number in self.flows.idle(self.now) {
            self.end_flow(number, "idle");
        }
        self.closing.poll(self.now);
        self.event_log.flush_counts_if_due(self.now);
        Ok(())
    }

    fn on_guest_frames(&mut self) -> Result<(), Shutdown> {
        let mut frame = std::mem::take(&mut self.frame);
        let result = self.read_frames(&mut frame);
        self.frame = frame;
        result
    }

    fn read_frames(&mut self, buffer: &mut [u8]) -> Result<(), Shutdown> {
        for _ in 0..FRAMES_AT_ONCE {
            // Backpressure: while the event queue is full, no frame is read.
            if !self.link_readable || !self.event_log.has_space() || self.quota.may_send(self.now).is_err() {
                break;
            }
            match self.link.receive(buffer) {
                Received::Closed => {
                    self.end_all();
                    return Err(Shutdown);
                }
                Received::WouldBlock => self.link_readable = false,
                Received::Frame(frame) => {
                    self.quota.up.0.take(u64::try_from(frame.len()).unwrap_or(0));
                    self.quota.up.1.take(1);
                    self.on_frame(frame);
                }
            }
        }
        Ok(())
    }

    /// The sandbox has ended: logs the end of everything that is open, and flushes all events to the owner.
    fn end_all(&mut self) {
        let connections: Vec<_> = self.table.all().map(|(number, _)| number).collect();
        for number in connections {
            if let Some(connection) = self.table.get_mut(number) {
                connection.abort();
            }
            self.end(number, "the sandbox ended");
        }
        let flows: Vec<_> = self.flows.all().map(|(number, _)| number).collect();
        for number in flows {
            self.end_flow(number, "the sandbox ended");
        }
        self.closing.release();
        self.event_log.flush_counts();
        self.event_log.send(&FromGateway::Unplugged);
        let until = Instant::now() + FINAL_FLUSH_TIME;
        while !self.event_log.is_sent() && Instant::now() < until {
            let mut events = [const { MaybeUninit::uninit() }; EVENTS_AT_ONCE];
            let pause = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
            // A socket that stays full generates no event; the deadline ends the loop.
            let _ = epoll::wait(&self.epoll, &mut events, Some(&pause));
            self.event_log.flush();
        }
    }

    fn on_frame(&mut self, frame: &[u8]) {
        match frame::parse(frame) {
            Err(reason) => self.event_log.count_drop(reason),
            Ok(GuestPacket::ArpRequest) => crate::reply::send_arp_reply(&mut self.link),
            Ok(GuestPacket::NeighborSolicit(from)) => {
                crate::reply::send_neighbor_advert(&mut self.link, from)
            }
            Ok(GuestPacket::Echo { remote, packet }) => self.on_echo(remote, packet),
            Ok(GuestPacket::Tcp(segment)) => self.on_segment(&segment),
            Ok(GuestPacket::Udp(datagram)) => self.on_datagram(&datagram),
            Ok(GuestPacket::Other { remote, protocol, packet }) => self.on_other(remote, protocol, packet),
        }
    }

    /// Logs the end of a connection or flow, or one that could not begin.
    pub(crate) fn log_close(&mut self, closed: Closed, reason: &str) {
        let Closed { number, peer, bytes: (sent, received), started } = closed;
        let milliseconds = self.now.saturating_duration_since(started).as_millis();
        self.event_log.log(NetEvent::Closed {
            number,
            peer,
            sent,
            received,
            milliseconds: u64::try_from(milliseconds).unwrap_or(u64::MAX),
            reason: reason.to_owned(),
        });
    }
}

/// A connection or flow that has ended.
pub(crate) struct Closed {
    pub(crate) number: u64,
    pub(crate) peer: Peer,
    /// From the guest and to it.
    pub(crate) bytes: (u64, u64),
    pub(crate) started: Instant,
}

/// The number of a connection in events. Flows have the odd numbers between.
pub(crate) fn connection_number(number: u64) -> u64 {
    NEVER_BEGAN + number * 2
}

pub(crate) fn flow_number(number: u64) -> u64 {
    connection_number(number) + 1
}

/// Registers a socket, edge-triggered.
pub(crate) fn watch(epoll: &OwnedFd, socket: BorrowedFd<'_>, token: Token) -> Result<(), Errno> {
    let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
    epoll::add(epoll, socket, EventData::new_u64(token.number()), flags)
}

fn read_policies(text: &str) -> Result<Policies, GatewayError> {
    serde_json::from_str(text).map_err(GatewayError::Policies)
}
