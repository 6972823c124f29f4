//! Records what the gateway of an ephemeral sandbox reports, beside everything else that the process does, and starts another
//! one when it is gone. The monitor does the same for a persistent one.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bathy_audit::{Event, Log, What};
use bathy_policy::Policies;
use bathy_protocol::network::FromGateway;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::gateway::{self, Gateway, GatewayError, LEAVE_TIME, Network, Received};
use crate::ledger::Ledger;
use crate::net_events::recorded;
use crate::restarts::Restarts;
use crate::spool::{Sink, Spool};
use crate::sys;

/// How many reports are recorded at once.
const AT_ONCE: usize = 256;
/// How long the end of the sandbox may go unnoticed while events wait to be recorded.
const LOOK: Duration = Duration::from_millis(100);

/// What is done besides recording.
pub struct Hooks {
    /// Makes the event of a report.
    pub event: Box<dyn FnMut(What) -> Event + Send>,
    /// Is told why events cannot be recorded, each time when that begins.
    pub waits: Box<dyn FnMut(&str) + Send>,
}

/// Records what a gateway reports.
#[derive(Debug)]
pub struct Recorder {
    end: Arc<End>,
    thread: JoinHandle<Unrecorded>,
}

/// How far the sandbox's end has come.
#[derive(Debug)]
struct End {
    /// The gateway's end is expected.
    is_expected: AtomicBool,
    /// The sandbox is gone, and its gateway is about to be.
    has_come: AtomicBool,
    /// Wakes the thread.
    wake: OwnedFd,
}

/// Events that could not be recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unrecorded {
    /// How many.
    pub events: u64,
    /// Why not.
    pub failure: String,
}

impl Recorder {
    /// Records until the sandbox is gone whose network this is.
    ///
    /// # Errors
    /// When the host has no room for a thread.
    pub fn start(network: Network, gateway: Gateway, log: Log, hooks: Hooks) -> io::Result<Self> {
        let end = Arc::new(End::new()?);
        let mut listener = Listener {
            end: Arc::clone(&end),
            gateways: Gateways { line: Some(Line::new(&gateway)?), network, gateway: Some(gateway) },
            restarts: Restarts::default(),
            held: false,
            events: Spool::new(log),
            hooks,
        };
        let work = move || listener.listen();
        let builder = thread::Builder::new().name("network".to_owned());
        Ok(Self { end, thread: sys::apart_from_signals(|| builder.spawn(work))? })
    }

    /// The gateway's end is expected from now on.
    pub fn expect_end(&self) {
        self.end.is_expected.store(true, Ordering::Relaxed);
    }

    /// Waits until all of it is recorded that can be. The sandbox is gone.
    pub fn finish(self) -> Unrecorded {
        self.expect_end();
        self.end.has_come.store(true, Ordering::Relaxed);
        // The counter is far from full.
        let _ = rustix::io::write(&self.end.wake, &1_u64.to_ne_bytes());
        // A panic would have ended the program.
        self.thread.join().unwrap_or_default()
    }
}

impl End {
    fn new() -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { is_expected: AtomicBool::new(false), has_come: AtomicBool::new(false), wake })
    }

    fn is_expected(&self) -> bool {
        self.is_expected.load(Ordering::Relaxed)
    }

    fn has_come(&self) -> bool {
        self.has_come.load(Ordering::Relaxed)
    }
}

/// A gateway's control socket, and what stands for its process.
#[derive(Debug)]
struct Line {
    control: OwnedFd,
    process: OwnedFd,
}

impl Line {
    fn new(gateway: &Gateway) -> io::Result<Self> {
        let (control, process) = gateway.listener()?;
        Ok(Self { control, process })
    }
}

/// Where gateways come from.
trait Supply {
    /// That of the present gateway, if there is one.
    fn line(&self) -> Option<&Line>;
    /// What is known from all of them.
    fn ledger(&mut self) -> &mut Ledger;
    /// What the sandbox may reach.
    fn policies(&self) -> Option<&Policies>;
    /// Ends the present one. What it had sent by then, and was not read.
    fn end(&mut self) -> Vec<FromGateway>;
    /// Starts another one.
    fn start(&mut self) -> Result<(), GatewayError>;
}

/// Gateways of a sandbox's network. The keeper is not asked: the next one goes on with the link of the last.
struct Gateways {
    line: Option<Line>,
    network: Network,
    gateway: Option<Gateway>,
}

impl Supply for Gateways {
    fn line(&self) -> Option<&Line> {
        self.line.as_ref()
    }

    fn ledger(&mut self) -> &mut Ledger {
        &mut self.network.ledger
    }

    fn policies(&self) -> Option<&Policies> {
        Some(&self.network.policies)
    }

    fn end(&mut self) -> Vec<FromGateway> {
        self.line = None;
        self.gateway.take().map(Gateway::end_now).unwrap_or_default()
    }

    fn start(&mut self) -> Result<(), GatewayError> {
        let gateway = self.network.start()?;
        self.line = Some(Line::new(&gateway).map_err(GatewayError::Prepare)?);
        self.gateway = Some(gateway);
        Ok(())
    }
}

struct Listener<S, G> {
    end: Arc<End>,
    gateways: G,
    restarts: Restarts,
    /// Whether the gateway was told to begin nothing new.
    held: bool,
    events: Spool<S>,
    hooks: Hooks,
}

impl<S: Sink, G: Supply> Listener<S, G> {
    fn listen(&mut self) -> Unrecorded {
        // How long the gateway of a sandbox that is gone may take to send what is left.
        let mut until = None;
        loop {
            // While events wait, only a sandbox that ends is heard: what it says then is the last.
            if self.events.is_empty() || self.end.is_expected() {
                self.read();
            }
            self.events.retry(Instant::now());
            self.tell_hold();
            if self.end.has_come() {
                let until = *until.get_or_insert_with(|| Instant::now() + LEAVE_TIME);
                if self.gateways.line().is_none() || Instant::now() >= until {
                    return self.finish();
                }
            } else {
                self.restart(Instant::now());
            }
            self.wait(until);
        }
    }

    fn finish(&mut self) -> Unrecorded {
        let left = self.gateways.end();
        self.record(left, None);
        let events = self.events.finish();
        Unrecorded { events, failure: self.events.failure().to_owned() }
    }

    /// Takes what the gateway has reported.
    fn read(&mut self) {
        let (mut messages, mut gone) = (Vec::new(), None);
        // Whatever it sends, the rest of the loop has its turn.
        for _ in 0..AT_ONCE {
            let Some(line) = self.gateways.line().filter(|_| gone.is_none()) else { break };
            match gateway::receive(&line.control) {
                Received::Message(FromGateway::Failed(reason)) => {
                    gone = Some(reason.chars().take(500).collect())
                }
                // The sandbox is at its end, which is not the gateway's doing.
                Received::Message(FromGateway::Unplugged) => {
                    self.end.is_expected.store(true, Ordering::Relaxed)
                }
                Received::Message(message) => messages.push(message),
                Received::Closed if self.end.is_expected() => gone = Some(String::new()),
                Received::Closed => gone = Some(gateway::end_of(&line.process)),
                Received::Nothing => break,
            }
        }
        if gone.is_some() {
            messages.extend(self.gateways.end());
        }
        self.record(messages, gone);
    }

    /// Records what a gateway sent, and that it is gone if it is, for this reason.
    fn record(&mut self, messages: Vec<FromGateway>, gone: Option<String>) {
        let (mut events, now) = (Vec::new(), Instant::now());
        for message in messages {
            self.gateways.ledger().on_message(&message, now);
            if let FromGateway::Event(event) = message {
                events.push(recorded(event, self.gateways.policies()));
            }
        }
        if self.gateways.line().is_none() {
            events.extend(self.gateways.ledger().close(now));
        }
        if let Some(reason) = gone {
            self.held = false;
            if !self.end.is_expected() {
                events.push(What::GatewayLost { reason, restarted: false });
                self.restarts.lost(now);
            }
        }
        self.spool(events);
    }

    fn spool(&mut self, events: Vec<What>) {
        let was_empty = self.events.is_empty();
        self.events.record(events.into_iter().map(&mut self.hooks.event), Instant::now());
        if was_empty && !self.events.is_empty() {
            (self.hooks.waits)(self.events.failure());
        }
    }

    /// Starts another gateway when it is time. While events wait to be recorded none is started, since it would begin something
    /// new before it could be told not to.
    fn restart(&mut self, now: Instant) {
        if self.end.is_expected() || !self.events.is_empty() || !self.restarts.take_due(now) {
            return;
        }
        let lost = match self.gateways.start() {
            Ok(()) => What::GatewayLost { reason: "it is back".to_owned(), restarted: true },
            Err(error) => {
                self.restarts.lost(Instant::now());
                let reason = format!("it could not be started again: {}", bathy_protocol::chain(&error));
                What::GatewayLost { reason, restarted: false }
            }
        };
        self.spool(vec![lost]);
    }

    /// Tells the gateway whether something new may begin, whenever that changes.
    fn tell_hold(&mut self) {
        let hold = !self.events.is_empty();
        let Some(line) = self.gateways.line() else { return };
        // One that does not take it has stopped, or is about to be noticed as gone; it is tried again.
        if hold != self.held && gateway::hold(&line.control, hold).is_ok() {
            self.held = hold;
        }
    }

    /// Waits for the gateway, for the time to try something again, or for the sandbox's end.
    fn wait(&self, until: Option<Instant>) {
        let is_recorded = self.events.is_empty();
        let restart = self.restarts.due().filter(|_| is_recorded && !self.end.is_expected());
        let due = [self.events.due(), restart, until].into_iter().flatten().min();
        let timeout = due.map(|due| {
            let left = due.saturating_duration_since(Instant::now());
            let left = if is_recorded { left } else { left.min(LOOK) };
            Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(left.subsec_nanos()),
            }
        });
        let mut fds = Vec::with_capacity(2);
        // It has been written once, and is never read.
        if !self.end.has_come() {
            fds.push(PollFd::new(&self.end.wake, PollFlags::IN));
        }
        let reads = is_recorded || self.end.is_expected();
        if let Some(line) = self.gateways.line().filter(|_| reads) {
            fds.push(PollFd::new(&line.control, PollFlags::IN));
        }
        // Interrupted or not: it is looked at again.
        let _ = poll(&mut fds, timeout.as_ref());
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Mutex;

    use bathy_audit::{Actor, LogError};
    use bathy_protocol::network::{
        NetEvent, NetworkLimits, Peer, Spent, ToGateway, Transport, decode, encode,
    };
    use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

    use super::*;

    /// A log that is full or not.
    #[derive(Clone, Default)]
    struct Disk(Arc<Mutex<(bool, Vec<u64>)>>, Arc<Mutex<Vec<What>>>);

    impl Disk {
        fn set_full(&self, is_full: bool) {
            self.0.lock().unwrap().0 = is_full;
        }

        fn recorded(&self) -> Vec<u64> {
            self.0.lock().unwrap().1.clone()
        }
    }

    impl Sink for Disk {
        fn append(&self, events: &[Event]) -> Result<(), LogError> {
            let (is_full, recorded) = &mut *self.0.lock().unwrap();
            if *is_full {
                return Err(LogError::Full(PathBuf::new()));
            }
            self.1.lock().unwrap().extend(events.iter().map(|event| event.what.clone()));
            recorded.extend(events.iter().map(|event| match event.what {
                What::NetDropped { count, .. } => count,
                _ => u64::MAX,
            }));
            Ok(())
        }

        fn append_last(&self, events: &[Event]) -> Result<(), LogError> {
            self.append(events)
        }
    }

    /// What each gateway but the first was started with.
    type Started = Arc<Mutex<Vec<Option<Spent>>>>;

    /// Sockets that stand for gateways, one after the other.
    struct Sockets {
        line: Option<Line>,
        ledger: Ledger,
        next: Vec<OwnedFd>,
        started: Started,
    }

    impl Supply for Sockets {
        fn line(&self) -> Option<&Line> {
            self.line.as_ref()
        }

        fn ledger(&mut self) -> &mut Ledger {
            &mut self.ledger
        }

        fn policies(&self) -> Option<&Policies> {
            None
        }

        fn end(&mut self) -> Vec<FromGateway> {
            let Some(line) = self.line.take() else { return Vec::new() };
            let next = || match gateway::receive(&line.control) {
                Received::Message(message) => Some(message),
                _ => None,
            };
            std::iter::from_fn(next).collect()
        }

        fn start(&mut self) -> Result<(), GatewayError> {
            let control = self.next.pop().ok_or(GatewayError::Silent)?;
            self.started.lock().unwrap().push(self.ledger.carried_over(Instant::now()));
            self.line = Some(Line { process: control.try_clone().unwrap(), control });
            Ok(())
        }
    }

    /// A recorder with as many gateways, their ends of the sockets in order, and what each but the first was started with.
    fn scene_with(disk: &Disk, count: usize) -> (Recorder, Vec<OwnedFd>, Started) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let pair = || socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let (mut next, mut gateways): (Vec<_>, Vec<_>) = std::iter::repeat_with(pair).take(count).unzip();
        next.reverse();
        let end = Arc::new(End::new().unwrap());
        let event = |what| Event::now(Actor::this_process("test"), what);
        let hooks = Hooks { event: Box::new(event), waits: Box::new(|_| {}) };
        let started = Arc::new(Mutex::new(Vec::new()));
        let control = next.pop().unwrap();
        let sockets = Sockets {
            line: Some(Line { process: control.try_clone().unwrap(), control }),
            ledger: Ledger::new(&NetworkLimits::default()),
            next,
            started: Arc::clone(&started),
        };
        let mut listener = Listener {
            end: Arc::clone(&end),
            gateways: sockets,
            restarts: Restarts::default(),
            held: false,
            events: Spool::new(disk.clone()),
            hooks,
        };
        let thread = thread::spawn(move || listener.listen());
        gateways.reverse();
        (Recorder { end, thread }, gateways, started)
    }

    /// A recorder with one gateway, and its end of the socket.
    fn scene(disk: &Disk) -> (Recorder, OwnedFd) {
        let (recorder, mut gateways, _) = scene_with(disk, 1);
        (recorder, gateways.remove(0))
    }

    fn tell(gateway: &OwnedFd, message: &FromGateway) {
        send(gateway, &encode(message).unwrap(), SendFlags::NOSIGNAL).unwrap();
    }

    fn event(count: u64) -> FromGateway {
        FromGateway::Event(NetEvent::Dropped { reason: String::new(), count })
    }

    /// What the gateway is told next.
    fn told(gateway: &OwnedFd) -> ToGateway {
        let wait = Timespec { tv_sec: 10, tv_nsec: 0 };
        poll(&mut [PollFd::new(gateway, PollFlags::IN)], Some(&wait)).unwrap();
        let mut message = [0; 64];
        let (count, _) = recv(gateway, &mut message, RecvFlags::empty()).unwrap();
        decode(&message[..count]).unwrap()
    }

    #[test]
    fn f1_the_gateway_of_an_ephemeral_sandbox_waits_until_its_events_are_recorded() {
        let disk = Disk::default();
        disk.set_full(true);
        let (recorder, gateway) = scene(&disk);
        tell(&gateway, &event(0));
        assert_eq!(told(&gateway), ToGateway::Hold(true));
        (1..40).for_each(|count| tell(&gateway, &event(count)));
        disk.set_full(false);
        assert_eq!(told(&gateway), ToGateway::Hold(false));
        tell(&gateway, &FromGateway::Unplugged);
        drop(gateway);
        assert_eq!(recorder.finish().events, 0);
        assert_eq!(disk.recorded(), (0..40).collect::<Vec<_>>());
    }

    #[test]
    fn f1_what_cannot_be_recorded_of_a_sandbox_that_ends_is_counted() {
        let disk = Disk::default();
        disk.set_full(true);
        let (recorder, gateway) = scene(&disk);
        tell(&gateway, &event(0));
        assert_eq!(told(&gateway), ToGateway::Hold(true));
        recorder.expect_end();
        (1..40).for_each(|count| tell(&gateway, &event(count)));
        tell(&gateway, &FromGateway::Unplugged);
        drop(gateway);
        let unrecorded = recorder.finish();
        assert_eq!(unrecorded.events, 40);
        assert!(unrecorded.failure.contains("full"), "{unrecorded:?}");
    }

    #[test]
    fn n9_an_ephemeral_sandbox_gets_another_gateway_and_no_new_budgets() {
        let disk = Disk::default();
        let (recorder, mut gateways, started) = scene_with(&disk, 2);
        let second = gateways.remove(0);
        let first = gateways.remove(0);
        let address = std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
        let peer = Peer { transport: Transport::Tcp, inbound: false, address, port: 80, name: None };
        tell(&first, &FromGateway::Event(NetEvent::Allowed { number: 2, peer, rule: String::new() }));
        tell(&first, &FromGateway::Spent(Spent { age_ms: 10, total: 500, most: 400 }));
        drop(first);
        tell(&second, &event(7));
        let until = Instant::now() + Duration::from_secs(60);
        while !disk.recorded().contains(&7) && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        recorder.expect_end();
        drop(second);
        assert_eq!(recorder.finish().events, 0);
        let spent = started.lock().unwrap().clone();
        assert!(matches!(spent[..], [Some(Spent { total: 500, most: 400, .. })]), "{spent:?}");
        let events = disk.1.lock().unwrap().clone();
        let [opened, closed, lost, back, What::NetDropped { count: 7, .. }] = &events[..] else {
            panic!("{events:?}")
        };
        assert!(matches!(opened, What::NetAllowed { .. }), "{opened:?}");
        assert!(matches!(closed, What::NetClosed { sent: None, received: None, .. }), "{closed:?}");
        assert!(matches!(lost, What::GatewayLost { restarted: false, .. }), "{lost:?}");
        assert!(matches!(back, What::GatewayLost { restarted: true, .. }), "{back:?}");
    }

    #[test]
    fn a_gateway_that_does_not_leave_is_not_waited_for() {
        let (recorder, _gateway) = scene(&Disk::default());
        assert_eq!(recorder.finish().events, 0);
    }
}
