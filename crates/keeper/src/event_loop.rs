//! The keeper's one loop: devices, client, console, the guest's end, deadlines.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bathy_devices::{GuestRam, Outcome};
use bathy_logs::{Meta, Ring, STDERR, STDOUT};
use bathy_protocol::{Cause, FromKeeper, StdChannel, chain, unix_ns};
use rustix::event::Timespec;
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::console_log::{ConsoleLog, Reading};
use crate::devices::{Devices, FIRST_TOKEN};
use crate::guest::Guest;
use crate::hub::{ClientId, Demand, Hub, HubError, MAX_FRAMES, OWNER};
use crate::nic_link::{Moved, NicLink};
use crate::port::PortError;
use crate::watchdog::{Look, Watchdog};

const CONSOLE: u64 = 2;
pub(crate) const GUEST: u64 = 3;
const NIC_LINK: u64 = 4;
/// Clients have tokens from here on, above those of the devices.
const FIRST_CLIENT: u64 = 1 << 32;

/// How long the last message may take to reach a client.
const FAREWELL: Duration = Duration::from_secs(1);
/// How much is taken from the agent, or read from a client, at once.
pub(crate) const CHUNK: usize = 64 * 1024;
/// How often that is done before others have their turn.
const ROUNDS: usize = 16;
/// How many turns a guest that has ended gets at most: more than all its streams may have sent.
const LAST_ROUNDS: usize = 4096;
/// How long a host without memory for a frame is left alone.
const SHORT_PAUSE: Duration = Duration::from_millis(10);
/// How often the log's rate is measured.
const LOG_PERIOD: Duration = Duration::from_millis(100);

/// Everything that the loop works on.
pub struct Keeper {
    pub epoll: Rc<OwnedFd>,
    pub devices: Devices,
    /// The network card's way to the gateway, while there is one.
    pub nic_link: Option<NicLink>,
    pub hub: Hub,
    /// The clients' sockets; the owner's is always among them.
    pub clients: BTreeMap<ClientId, OwnedFd>,
    /// Sockets that came with a message of the owner's that is not read yet.
    pub new_clients: VecDeque<OwnedFd>,
    /// What the owner asked for and did not get yet.
    pub demands: VecDeque<Demand>,
    pub last_client: ClientId,
    pub console: ConsoleLog,
    /// Where the output of jobs goes.
    pub output: Option<Ring>,
    pub ram: Arc<GuestRam>,
    /// Where the guest's memory goes while it is paused.
    pub parking: Option<File>,
    /// What is waited for meanwhile: the owner, and the guest's end.
    pub asleep: OwnedFd,
    pub guest: Guest,
    pub ready_timeout: Duration,
    pub watchdog: Watchdog,
    /// When the disks' limits end: a guest that shuts down has a deadline by which its disk has to be written, and its
    /// processes are gone by then.
    pub limits_end: Option<Instant>,
    /// What the clients were warned of.
    pub warned: Vec<io::ErrorKind>,
    /// Held, never used: while they are open the sandbox's processor slot is taken, and the sandbox counts as running.
    pub _locks: (OwnedFd, Option<OwnedFd>),
}

/// Why the loop ends.
pub(crate) enum End {
    /// Nobody is left to be told.
    OwnerGone,
    /// The guest's process ended by itself.
    GuestGone,
    /// The clients are told why.
    Because(Cause),
}

impl From<HubError> for End {
    fn from(error: HubError) -> Self {
        Self::Because(Cause::Violation(chain(&error)))
    }
}

/// When the loop has to wake up by itself.
#[derive(Default)]
struct Alarms {
    devices: Option<Instant>,
    console: Option<Instant>,
    ready: Option<Instant>,
    log: Option<Instant>,
    watchdog: Option<Instant>,
    limits: Option<Instant>,
}

impl Alarms {
    fn next(&self) -> Option<Instant> {
        let all = [self.devices, self.console, self.ready, self.log, self.watchdog, self.limits];
        all.into_iter().flatten().min()
    }
}

impl Keeper {
    /// Registers what the loop waits for, besides the devices, which register themselves.
    pub fn watch(&self) -> io::Result<()> {
        let add = |fd: BorrowedFd<'_>, token| {
            epoll::add(&self.epoll, fd, EventData::new_u64(token), EventFlags::IN)
        };
        for (id, client) in &self.clients {
            add(client.as_fd(), FIRST_CLIENT + id)?;
        }
        add(self.console.fd(), CONSOLE)?;
        add(self.guest.ended(), GUEST)?;
        if let Some(nic_link) = &self.nic_link {
            watch_nic_link(&self.epoll, nic_link)?;
        }
        let asleep = |fd: BorrowedFd<'_>, token| {
            epoll::add(&self.asleep, fd, EventData::new_u64(token), EventFlags::IN)
        };
        if let Some(owner) = self.clients.get(&OWNER) {
            asleep(owner.as_fd(), FIRST_CLIENT)?;
        }
        asleep(self.guest.ended(), GUEST)?;
        Ok(())
    }

    /// Serves until the sandbox ends, and tells everybody why. The guest ends with the keeper, which is the first
    /// process of the pid namespace that the guest's is nested in: no signal has to be allowed for that.
    pub fn run(mut self) {
        if matches!(self.guest, Guest::Process(_)) {
            self.hub.tell_owner(&FromKeeper::GuestStarted);
            // At once, while the guest boots. An owner that is gone is noticed by the loop.
            let _ = self.write_client(OWNER);
        }
        let cause = match self.serve() {
            End::OwnerGone => return,
            End::Because(cause) => cause,
            End::GuestGone => self.guest.cause(),
        };
        // Nothing of the guest runs from here on, and all that it said is heard.
        self.guest.pause();
        self.console.read_rest();
        self.guest.finish_console();
        self.console.read_rest();
        let mut console = self.console.tail();
        if let (Cause::GuestExited(_), Some(words)) = (&cause, self.guest.failure()) {
            if !console.is_empty() {
                console.push('\n');
            }
            console.push_str(&words);
        }
        self.hub.tell_end(cause, console);
        self.say_farewell();
    }

    fn say_farewell(&mut self) {
        let deadline = Instant::now() + FAREWELL;
        loop {
            let ids: Vec<_> = self.clients.keys().copied().collect();
            for id in ids {
                if self.write_client(id).is_err() {
                    self.hub.drop_client(id);
                    self.clients.remove(&id);
                }
            }
            let unread = self.hub.clients().any(|id| !self.hub.for_client(id).is_empty());
            if !unread || Instant::now() >= deadline {
                return;
            }
            // Waiting on epoll and not by sleeping: the filter knows no sleep.
            let _ = self.rearm_clients();
            let _ = wait(&self.epoll, Some(Instant::now() + Duration::from_millis(10)));
        }
    }

    fn serve(&mut self) -> End {
        match self.serve_until_end() {
            Ok(never) => match never {},
            Err(end) => end,
        }
    }

    fn serve_until_end(&mut self) -> Result<std::convert::Infallible, End> {
        let mut alarms = Alarms { ready: Some(Instant::now() + self.ready_timeout), ..Alarms::default() };
        loop {
            let events =
                wait(&self.epoll, alarms.next()).map_err(|error| failed("wait for events", &error))?;
            let now = Instant::now();
            let mut outcome = Outcome::default();
            if alarms.limits.take_if(|at| *at <= now).is_some() {
                self.devices.lift_disk_limits();
                alarms.devices = Some(now);
            }
            if alarms.devices.take_if(|at| *at <= now).is_some() {
                outcome = outcome.merge(self.settle(Devices::service)?);
            }
            if alarms.console.take_if(|at| *at <= now).is_some() {
                self.watch_console()?;
            }
            if alarms.log.take_if(|at| *at <= now).is_some() {
                self.hub.refill_log_budget();
            }
            for (token, flags) in events {
                match token {
                    CONSOLE => match self.console.read() {
                        Reading::Empty => {}
                        // Not watched at all meanwhile: a hang-up is reported whatever one asks for.
                        Reading::Pause(pause) => {
                            self.unwatch_console()?;
                            alarms.console = Some(now + pause);
                        }
                        Reading::Ended => self.unwatch_console()?,
                    },
                    NIC_LINK => {
                        if let Some(nic_link) = &mut self.nic_link {
                            nic_link.wake();
                        }
                    }
                    GUEST => return Err(self.guest_gone()),
                    token if token >= FIRST_CLIENT => {
                        let hung_up = flags.intersects(EventFlags::HUP | EventFlags::ERR);
                        self.serve_client(token - FIRST_CLIENT, hung_up)?;
                    }
                    token if token >= FIRST_TOKEN => {
                        outcome = outcome.merge(self.settle(|devices| devices.on_event(token))?);
                    }
                    _ => {}
                }
            }
            self.serve_backlogs()?;
            outcome = outcome.merge(self.exchange()?).merge(self.move_frames()?);
            // By a clock that is read now: the owner may have had the guest stand still for long.
            match self.watchdog.look(self.hub.due(), Instant::now()).map_err(End::Because)? {
                Look::Never => alarms.watchdog = None,
                Look::At(again) => alarms.watchdog = Some(again),
                Look::Ping(again) => {
                    alarms.watchdog = Some(again);
                    self.hub.ping();
                    outcome = outcome.merge(self.exchange()?);
                }
            }
            if outcome.more || self.has_backlogs() {
                alarms.devices = Some(now);
            } else if let Some(pause) = outcome.retry_after {
                alarms.devices = Some(alarms.devices.map_or(now + pause, |at| at.min(now + pause)));
            }
            if let Some(end) = self.limits_end.take() {
                alarms.limits = Some(end);
            }
            if self.hub.owes_grants() && alarms.log.is_none() {
                alarms.log = Some(now + LOG_PERIOD);
            }
            if self.hub.is_ready() {
                alarms.ready = None;
            } else if alarms.ready.is_some_and(|at| at <= now) {
                let waited = u64::try_from(self.ready_timeout.as_millis()).unwrap_or(u64::MAX);
                return Err(End::Because(Cause::NotReady(waited)));
            }
            if let Some(kind) = self.devices.take_disk_error().filter(|kind| !self.warned.contains(kind)) {
                // Once each: a guest can provoke them as often as it likes.
                self.warned.push(kind);
                let text = format!("the host failed a request of the sandbox's disk: {kind}");
                self.hub.tell_all(&FromKeeper::Warning(text));
            }
            if let Some((id, error)) = self.hub.slow_client() {
                self.lose_client(id, error)?;
            }
            self.rearm_clients()?;
        }
    }

    /// Moves frames between the network card and the gateway. Without a gateway, the card's link is down.
    fn move_frames(&mut self) -> Result<Outcome, End> {
        let Some(nic_link) = &mut self.nic_link else { return Ok(Outcome::default()) };
        let moved = self.devices.with_network(|card| nic_link.work(card)).unwrap_or(Moved::Done);
        if moved == Moved::Gone {
            self.nic_link = None;
            self.devices.with_network(|card| card.set_link(false));
        }
        let mut outcome = self.settle(Devices::service_network)?;
        if moved == Moved::Short {
            return Ok(outcome.merge(Outcome { retry_after: Some(SHORT_PAUSE), ..Outcome::default() }));
        }
        if let Some(nic_link) = &mut self.nic_link {
            // What was taken made room in the guest's queue, and what the guest took made room here.
            let more = self.devices.with_network(|card| nic_link.has_work(card));
            outcome.more |= more.unwrap_or(false);
        }
        Ok(outcome)
    }

    /// Connects the card to another gateway.
    pub(crate) fn connect_cable(&mut self, socket: OwnedFd) -> Result<(), End> {
        let nic_link = NicLink::new(socket);
        watch_nic_link(&self.epoll, &nic_link).map_err(|error| failed("watch the network link", &error))?;
        // The old one goes out of the event queue with its last copy.
        self.nic_link = Some(nic_link);
        self.devices.with_network(|card| card.set_link(true));
        Ok(())
    }

    /// Lets the devices work. A closed connection is how the guest's end looks from here; its process tells more.
    fn settle(
        &mut self,
        work: impl FnOnce(&mut Devices) -> Result<Outcome, PortError>,
    ) -> Result<Outcome, End> {
        match work(&mut self.devices) {
            Ok(outcome) => Ok(outcome),
            Err(error) if error.is_gone() => Ok(Outcome::default()),
            Err(error) => Err(End::Because(Cause::Violation(chain(&error)))),
        }
    }

    /// The guest has ended. What it sent before still counts, a command's last output and status, also if nobody has looked at
    /// it yet.
    pub(crate) fn guest_gone(&mut self) -> End {
        for _ in 0..LAST_ROUNDS {
            let heard =
                self.exchange().and_then(|first| Ok(first.merge(self.settle(Devices::service_control)?)));
            match heard.and_then(|first| Ok(first.merge(self.exchange()?))) {
                Ok(outcome) if outcome.more => {}
                Ok(_) => break,
                Err(end) => return end,
            }
        }
        End::GuestGone
    }

    /// Moves bytes between the agent and the hub until neither side has any for the other, or others should have their turn.
    pub(crate) fn exchange(&mut self) -> Result<Outcome, End> {
        match (self.devices.agent_sessions(), self.hub.is_greeted()) {
            (0, _) | (1, true) => {}
            (_, false) => self.hub.greet(unix_ns())?,
            (_, true) => return Err(HubError::HungUp.into()),
        }
        let (mut outcome, mut frames) = (Outcome::default(), 0);
        for _ in 0..ROUNDS {
            let backlog = self.hub.has_guest_backlog();
            let bytes = if backlog { Vec::new() } else { self.devices.take_from_agent(CHUNK) };
            let mut moved = bytes.len();
            if !bytes.is_empty() {
                self.watchdog.heard();
            }
            let handled = self.hub.on_guest_bytes(&bytes, unix_ns())?;
            (moved, frames) = (moved + handled, frames + handled);
            self.log();
            let count = self.devices.send_to_agent(self.hub.for_guest());
            self.hub.guest_took(count);
            moved += count;
            if moved == 0 {
                self.write_clients()?;
                return Ok(outcome);
            }
            outcome = outcome.merge(self.settle(Devices::service_control)?);
            self.write_clients()?;
            if frames >= MAX_FRAMES {
                break;
            }
        }
        outcome.more = true;
        Ok(outcome)
    }

    /// Handles frames that clients sent earlier, some of each.
    fn serve_backlogs(&mut self) -> Result<(), End> {
        let waiting: Vec<_> = self.hub.clients().filter(|id| self.hub.has_backlog(*id)).collect();
        for id in waiting {
            if !self.hub.takes_requests() {
                break;
            }
            if let Err(error) = self.hub.on_client_bytes(id, &[]) {
                self.lose_client(id, error)?;
            }
        }
        Ok(())
    }

    /// Whether frames of clients wait that can be handled.
    fn has_backlogs(&self) -> bool {
        self.hub.takes_requests() && self.hub.clients().any(|id| self.hub.has_backlog(id))
    }

    fn serve_client(&mut self, id: ClientId, hung_up: bool) -> Result<(), End> {
        if self.write_client(id).is_err() {
            return self.client_gone(id);
        }
        if id == OWNER {
            // A guest that takes nothing must not keep its owner from being heard.
            return self.serve_owner();
        }
        if !self.hub.takes_requests() {
            return if hung_up { self.client_gone(id) } else { Ok(()) };
        }
        if self.hub.has_backlog(id) {
            return Ok(());
        }
        let Some(client) = self.clients.get(&id) else { return Ok(()) };
        let mut buffer = [0u8; CHUNK];
        match rustix::net::recv(client, &mut buffer, RecvFlags::DONTWAIT) {
            Ok((0, _)) => self.client_gone(id),
            Ok((count, _)) => match self.hub.on_client_bytes(id, buffer.get(..count).unwrap_or_default()) {
                Ok(_) => Ok(()),
                Err(error) => self.lose_client(id, error),
            },
            Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(_) => self.client_gone(id),
        }
    }

    /// A client broke the rules: it is told, if it listens, and let go. The owner's rules are the sandbox's.
    fn lose_client(&mut self, id: ClientId, error: HubError) -> Result<(), End> {
        if id == OWNER {
            return Err(error.into());
        }
        self.client_gone(id)
    }

    fn client_gone(&mut self, id: ClientId) -> Result<(), End> {
        if id == OWNER {
            return Err(End::OwnerGone);
        }
        self.hub.drop_client(id);
        if let Some(socket) = self.clients.remove(&id) {
            // The monitor holds a copy, to know when the client leaves: closing ours would tell nobody.
            let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
            // A copy keeps the socket in the epoll set until it is taken out.
            let _ = epoll::delete(&self.epoll, &socket);
        }
        Ok(())
    }

    /// Takes over the socket of a new client.
    pub(crate) fn take_client(&mut self, socket: OwnedFd) -> Result<(), End> {
        self.last_client += 1;
        let id = self.last_client;
        if !self.hub.add_client(id) {
            let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
            return Ok(());
        }
        epoll::add(&self.epoll, &socket, EventData::new_u64(FIRST_CLIENT + id), EventFlags::IN)
            .map_err(|error| failed("watch a client", &error))?;
        self.clients.insert(id, socket);
        Ok(())
    }

    fn write_clients(&mut self) -> Result<(), End> {
        let waiting: Vec<_> = self.hub.clients().filter(|id| !self.hub.for_client(*id).is_empty()).collect();
        for id in waiting {
            if self.write_client(id).is_err() {
                self.client_gone(id)?;
            }
        }
        Ok(())
    }

    /// Sends what a client takes now.
    pub(crate) fn write_client(&mut self, id: ClientId) -> Result<(), Errno> {
        let Some(client) = self.clients.get(&id) else { return Ok(()) };
        while !self.hub.for_client(id).is_empty() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(client, self.hub.for_client(id), flags) {
                Ok(count) => self.hub.client_took(id, count),
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Waits for clients to read only while something waits for them, and to write only while there is room.
    fn rearm_clients(&self) -> Result<(), End> {
        for (id, client) in &self.clients {
            let mut flags = EventFlags::empty();
            let reads = self.hub.takes_requests() && !self.hub.has_backlog(*id);
            flags.set(EventFlags::IN, *id == OWNER || reads);
            flags.set(EventFlags::OUT, !self.hub.for_client(*id).is_empty());
            epoll::modify(&self.epoll, client, EventData::new_u64(FIRST_CLIENT + id), flags)
                .map_err(|error| failed("watch a client", &error))?;
        }
        Ok(())
    }

    /// Writes what jobs said to their log.
    fn log(&mut self) {
        for logged in self.hub.take_logged() {
            let Some(ring) = &mut self.output else { continue };
            let channel = match logged.channel {
                StdChannel::Stdout => STDOUT,
                StdChannel::Stderr => STDERR,
            };
            // A log that cannot be written is no reason to end a sandbox; the ring counts what it dropped.
            let _ = ring.write(&Meta { unix_ns: unix_ns(), source: logged.job, channel }, &logged.bytes);
        }
    }

    fn watch_console(&self) -> Result<(), End> {
        epoll::add(&self.epoll, self.console.fd(), EventData::new_u64(CONSOLE), EventFlags::IN)
            .map_err(|error| failed("watch the console", &error))
    }

    fn unwatch_console(&self) -> Result<(), End> {
        epoll::delete(&self.epoll, self.console.fd()).map_err(|error| failed("leave the console", &error))
    }
}

/// By edges: what it is ready for is remembered.
fn watch_nic_link(epoll: &OwnedFd, nic_link: &NicLink) -> Result<(), Errno> {
    let flags = EventFlags::IN | EventFlags::OUT | EventFlags::ET;
    epoll::add(epoll, nic_link.fd(), EventData::new_u64(NIC_LINK), flags)
}

/// Waits for something to happen.
pub(crate) fn wait(epoll: &OwnedFd, until: Option<Instant>) -> Result<Vec<(u64, EventFlags)>, Errno> {
    let timeout = until.map(|until| {
        let left = until.saturating_duration_since(Instant::now());
        Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        }
    });
    let mut events = [MaybeUninit::<Event>::uninit(); 32];
    match epoll::wait(epoll, &mut events, timeout.as_ref()) {
        Ok((events, _)) => Ok(events.iter().map(|event| (event.data.u64(), event.flags)).collect()),
        Err(Errno::INTR) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

pub(crate) fn failed(what: &str, error: &Errno) -> End {
    End::Because(Cause::Failed(format!("Cannot {what}: {error}")))
}
