//! The keeper's one loop: devices, clients, console, the guest's end, deadlines.

#[cfg(test)]
mod tests;

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bathy_devices::{GuestRam, Outcome};
use bathy_logs::{Meta, Ring, STDERR, STDOUT};
use bathy_protocol::launch::Launch;
use bathy_protocol::{Cause, FromKeeper, StdChannel, Timeline, chain, unix_ns};
use rustix::event::Timespec;
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::io::Errno;

use crate::Persistent;
use crate::clients::{Clients, FIRST_CLIENT};
use crate::console_log::{ConsoleLog, Reading};
use crate::devices::{Devices, FIRST_TOKEN};
use crate::guest::Guest;
use crate::hub::{Hub, HubError, MAX_FRAMES, OWNER};
use crate::nic_link::{Moved, NicLink};
use crate::owner::OwnerInbox;
use crate::parking::Parking;
use crate::port::PortError;
use crate::timers::Timers;
use crate::watchdog::{Look, Watchdog};

const CONSOLE: u64 = 2;
pub(crate) const GUEST: u64 = 3;
const NIC_LINK: u64 = 4;

/// How long clients have to receive the last message.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
/// How much is taken from the agent, or read from a client, at once.
pub(crate) const CHUNK: usize = 64 * 1024;
/// How often that is done before others have their turn.
const ROUNDS: usize = 16;
/// How many turns a guest that has ended gets at most: more than all its streams may have sent.
const LAST_ROUNDS: usize = 4096;
/// How long to wait when the host has no memory for a frame.
const SHORT_PAUSE: Duration = Duration::from_millis(10);
/// How often the log's rate is measured.
const LOG_PERIOD: Duration = Duration::from_millis(100);

/// The time by which the loop decides; tests bring their own.
pub(crate) type Clock = Box<dyn Fn() -> Instant>;

/// What the loop waits on. Both are made before the keeper confines itself.
pub struct Epolls {
    /// While the guest runs.
    pub running: Rc<OwnedFd>,
    /// While the guest is parked: only the owner and the guest's end.
    pub parked: OwnedFd,
}

impl Epolls {
    pub fn new() -> io::Result<Self> {
        let epoll = || epoll::create(epoll::CreateFlags::CLOEXEC);
        Ok(Self { running: Rc::new(epoll()?), parked: epoll()? })
    }
}

/// What a loop is started with.
pub struct KeeperResources {
    pub epolls: Epolls,
    pub guest: Guest,
    pub devices: Devices,
    pub ram: Arc<GuestRam>,
    /// The end of the guest's console that is read.
    pub console: OwnedFd,
    pub owner: OwnedFd,
    /// The socket to the gateway, if the guest has a network device.
    pub link: Option<OwnedFd>,
    /// The lock on the sandbox's processor slot.
    pub slot: OwnedFd,
    pub persistent: Option<Persistent>,
}

/// Held and never used: while they are open, the sandbox's processor slot is taken and the sandbox counts as running.
struct Locks {
    _slot: OwnedFd,
    _life: Option<OwnedFd>,
}

/// Everything that the loop works on.
pub struct Keeper {
    epoll: Rc<OwnedFd>,
    pub(crate) guest: Guest,
    pub(crate) devices: Devices,
    nic_link: Option<NicLink>,
    pub(crate) hub: Hub,
    pub(crate) clients: Clients,
    pub(crate) inbox: OwnerInbox,
    pub(crate) parking: Parking,
    console: ConsoleLog,
    /// The log of the jobs' output.
    output: Option<Ring>,
    ready_timeout: Duration,
    pub(crate) watchdog: Watchdog,
    pub(crate) timers: Timers,
    pub(crate) clock: Clock,
    _locks: Locks,
}

/// Why the loop ends.
#[derive(Debug)]
pub(crate) enum End {
    /// The owner closed its connection: there is no recipient for a reason.
    OwnerClosed,
    /// The guest ended by itself.
    GuestExited,
    /// A reason that is sent to the clients.
    Because(Cause),
}

impl From<HubError> for End {
    fn from(error: HubError) -> Self {
        Self::Because(Cause::Violation(chain(&error)))
    }
}

impl Keeper {
    /// Registers everything that the loop waits for, besides the devices, which register themselves.
    pub fn new(resources: KeeperResources, launch: &Launch, timeline: Timeline) -> io::Result<Self> {
        let KeeperResources { epolls, guest, devices, ram, console, owner, link, slot, persistent } =
            resources;
        let Epolls { running: epoll, parked } = epolls;
        let (life, output, console_ring, parking_file) = match persistent {
            Some(Persistent { life, output, console, parking }) => {
                (Some(life), Some(output), Some(console), Some(parking))
            }
            None => (None, None, None, None),
        };
        let parking = Parking::new(ram, parking_file, parked);
        parking.watch(owner.as_fd(), FIRST_CLIENT)?;
        parking.watch(guest.ended(), GUEST)?;
        let ready_timeout = Duration::from_millis(launch.ready_timeout_ms);
        let keeper = Self {
            clients: Clients::new(Rc::clone(&epoll), owner)?,
            guest,
            devices,
            nic_link: link.map(NicLink::new),
            hub: Hub::new(timeline, launch.restricted),
            inbox: OwnerInbox::default(),
            parking,
            console: ConsoleLog::new(console, console_ring),
            output,
            ready_timeout,
            watchdog: Watchdog::default(),
            timers: Timers { ready: Instant::now().checked_add(ready_timeout), ..Timers::default() },
            clock: Box::new(Instant::now),
            _locks: Locks { _slot: slot, _life: life },
            epoll,
        };
        keeper.watch_console()?;
        let ended = EventData::new_u64(GUEST);
        epoll::add(&keeper.epoll, keeper.guest.ended(), ended, EventFlags::IN)?;
        if let Some(nic_link) = &keeper.nic_link {
            watch_nic_link(&keeper.epoll, nic_link)?;
        }
        Ok(keeper)
    }

    /// Serves until the sandbox ends, and reports the cause to all clients. The guest ends with the keeper, which is the
    /// first process of the pid namespace that the guest's is nested in, so the filter need not allow any signal for that.
    pub fn run(mut self) {
        if matches!(self.guest, Guest::Process(_)) {
            self.hub.send_to_owner(&FromKeeper::GuestStarted);
            // At once, while the guest boots. The loop notices an owner that has exited.
            let _ = self.clients.flush(OWNER, &mut self.hub);
        }
        let cause = match self.serve() {
            End::OwnerClosed => return,
            End::Because(cause) => cause,
            End::GuestExited => self.guest.cause(),
        };
        self.report_end(cause);
    }

    fn report_end(&mut self, cause: Cause) {
        // Nothing of the guest runs from here on, and everything that it sent has been handled.
        self.guest.pause();
        self.console.read_rest();
        self.guest.finish_console();
        self.console.read_rest();
        let mut console = self.console.tail();
        if let (Cause::GuestExited(_), Some(failure)) = (&cause, self.guest.failure()) {
            if !console.is_empty() {
                console.push('\n');
            }
            console.push_str(&failure);
        }
        self.hub.broadcast(&FromKeeper::Ended { cause, console });
        self.flush_before_exit();
    }

    fn flush_before_exit(&mut self) {
        let deadline = Instant::now() + FLUSH_TIMEOUT;
        loop {
            let ids: Vec<_> = self.hub.clients().collect();
            for id in ids {
                if self.clients.flush(id, &mut self.hub).is_err() {
                    self.hub.drop_client(id);
                    self.clients.remove(id);
                }
            }
            let unread = self.hub.clients().any(|id| !self.hub.for_client(id).is_empty());
            let now = Instant::now();
            if !unread || now >= deadline {
                return;
            }
            // Waiting on epoll and not by sleeping: the filter allows no sleep.
            let _ = self.clients.rearm(&self.hub);
            let _ = wait(&self.epoll, Some(Duration::from_millis(10)));
        }
    }

    fn serve(&mut self) -> End {
        loop {
            let left = self.timers.next().map(|at| at.saturating_duration_since((self.clock)()));
            let turn = wait(&self.epoll, left)
                .map_err(|error| failed("wait for events", &error))
                .and_then(|events| self.turn(events));
            if let Err(end) = turn {
                return end;
            }
        }
    }

    /// One turn of the loop: what has come due, the events, and what follows from them.
    fn turn(&mut self, events: Vec<(u64, EventFlags)>) -> Result<(), End> {
        let now = (self.clock)();
        let mut outcome = self.on_timers(now)?;
        for (token, flags) in events {
            outcome = outcome.merge(self.on_event(token, flags, now)?);
        }
        self.serve_backlogs()?;
        outcome = outcome.merge(self.exchange()?).merge(self.move_frames()?).merge(self.watch_guest()?);
        self.set_timers(outcome, now);
        self.check_ready(now)?;
        if let Some(kind) = self.devices.take_new_disk_error() {
            let text = format!("the host failed a request of the sandbox's disk: {kind}");
            self.hub.broadcast(&FromKeeper::Warning(text));
        }
        self.reject_slow_client()?;
        self.clients.rearm(&self.hub).map_err(|error| failed("watch a client", &error))
    }

    fn on_timers(&mut self, now: Instant) -> Result<Outcome, End> {
        let due = |timer: &mut Option<Instant>| timer.take_if(|at| *at <= now).is_some();
        let mut outcome = Outcome::default();
        if due(&mut self.timers.disk_limits) {
            self.devices.lift_disk_limits();
            self.timers.devices = Some(now);
        }
        if due(&mut self.timers.devices) {
            outcome = self.settle(Devices::service)?;
        }
        if due(&mut self.timers.console) {
            self.watch_console().map_err(|error| failed("watch the console", &error))?;
        }
        if due(&mut self.timers.log) {
            self.hub.refill_log_budget();
        }
        Ok(outcome)
    }

    fn on_event(&mut self, token: u64, flags: EventFlags, now: Instant) -> Result<Outcome, End> {
        match token {
            CONSOLE => self.read_console(now)?,
            NIC_LINK => {
                if let Some(nic_link) = &mut self.nic_link {
                    nic_link.wake();
                }
            }
            GUEST => return Err(self.guest_exited()),
            token if token >= FIRST_CLIENT => {
                let hung_up = flags.intersects(EventFlags::HUP | EventFlags::ERR);
                self.on_client_event(token - FIRST_CLIENT, hung_up)?;
            }
            token if token >= FIRST_TOKEN => return self.settle(|devices| devices.on_event(token)),
            _ => {}
        }
        Ok(Outcome::default())
    }

    fn read_console(&mut self, now: Instant) -> Result<(), End> {
        match self.console.read() {
            Reading::Empty => return Ok(()),
            Reading::Pause(pause) => self.timers.console = Some(now + pause),
            Reading::Ended => {}
        }
        // Not watched at all: epoll reports a hang-up whatever it is asked for.
        epoll::delete(&self.epoll, self.console.fd()).map_err(|error| failed("leave the console", &error))
    }

    fn set_timers(&mut self, outcome: Outcome, now: Instant) {
        if outcome.more || self.has_backlogs() {
            self.timers.devices = Some(now);
        } else if let Some(pause) = outcome.retry_after {
            self.timers.serve_devices_at(now + pause);
        }
        if self.hub.owes_grants() && self.timers.log.is_none() {
            self.timers.log = Some(now + LOG_PERIOD);
        }
    }

    fn check_ready(&mut self, now: Instant) -> Result<(), End> {
        if self.hub.is_ready() {
            self.timers.ready = None;
        } else if self.timers.ready.is_some_and(|at| at <= now) {
            let waited = u64::try_from(self.ready_timeout.as_millis()).unwrap_or(u64::MAX);
            return Err(End::Because(Cause::NotReady(waited)));
        }
        Ok(())
    }

    /// Pings a guest that is silent for long, and ends one that does not answer.
    fn watch_guest(&mut self) -> Result<Outcome, End> {
        // The clock is read again: the guest may have been parked for long during this turn.
        let now = (self.clock)();
        match self.watchdog.look(self.hub.due(), now).map_err(End::Because)? {
            Look::Never => self.timers.watchdog = None,
            Look::At(again) => self.timers.watchdog = Some(again),
            Look::Ping(again) => {
                self.timers.watchdog = Some(again);
                self.hub.ping();
                return self.exchange();
            }
        }
        Ok(Outcome::default())
    }

    /// Moves frames between the network device and the gateway. Without a gateway, the device's link is down.
    fn move_frames(&mut self) -> Result<Outcome, End> {
        let Some(nic_link) = &mut self.nic_link else { return Ok(Outcome::default()) };
        let moved = self.devices.with_network(|nic| nic_link.work(nic)).unwrap_or(Moved::Done);
        if moved == Moved::Closed {
            self.nic_link = None;
            self.devices.with_network(|nic| nic.set_link(false));
        }
        let mut outcome = self.settle(Devices::service_network)?;
        if moved == Moved::NoMemory {
            return Ok(outcome.merge(Outcome { retry_after: Some(SHORT_PAUSE), ..Outcome::default() }));
        }
        if let Some(nic_link) = &mut self.nic_link {
            // Each side may have freed buffer space for the other.
            let more = self.devices.with_network(|nic| nic_link.has_work(nic));
            outcome.more |= more.unwrap_or(false);
        }
        Ok(outcome)
    }

    /// Connects the network device to another gateway.
    pub(crate) fn connect_link(&mut self, socket: OwnedFd) -> Result<(), End> {
        let nic_link = NicLink::new(socket);
        watch_nic_link(&self.epoll, &nic_link).map_err(|error| failed("watch the network link", &error))?;
        // The old one leaves the epoll set when its last copy is closed.
        self.nic_link = Some(nic_link);
        self.devices.with_network(|nic| nic.set_link(true));
        Ok(())
    }

    /// Lets the devices work. A closed device connection is no error: the guest's process has ended, and its exit status
    /// says more.
    fn settle(
        &mut self,
        work: impl FnOnce(&mut Devices) -> Result<Outcome, PortError>,
    ) -> Result<Outcome, End> {
        match work(&mut self.devices) {
            Ok(outcome) => Ok(outcome),
            Err(error) if error.is_closed() => Ok(Outcome::default()),
            Err(error) => Err(End::Because(Cause::Violation(chain(&error)))),
        }
    }

    /// The guest has ended. What it sent before still counts, such as a command's last output and exit code.
    pub(crate) fn guest_exited(&mut self) -> End {
        for _ in 0..LAST_ROUNDS {
            let served =
                self.exchange().and_then(|first| Ok(first.merge(self.settle(Devices::service_control)?)));
            match served.and_then(|first| Ok(first.merge(self.exchange()?))) {
                Ok(outcome) if outcome.more => {}
                Ok(_) => break,
                Err(end) => return end,
            }
        }
        End::GuestExited
    }

    /// Moves bytes between the agent and the hub until neither side has any for the other, or others should have their turn.
    fn exchange(&mut self) -> Result<Outcome, End> {
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
                self.watchdog.on_activity();
            }
            let handled = self.hub.on_guest_bytes(&bytes, unix_ns())?;
            (moved, frames) = (moved + handled, frames + handled);
            self.log();
            let count = self.devices.send_to_agent(self.hub.for_guest());
            self.hub.guest_took(count);
            moved += count;
            if moved == 0 {
                self.flush_clients()?;
                return Ok(outcome);
            }
            outcome = outcome.merge(self.settle(Devices::service_control)?);
            self.flush_clients()?;
            if frames >= MAX_FRAMES {
                break;
            }
        }
        outcome.more = true;
        Ok(outcome)
    }

    /// Writes the output of jobs to their log.
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

    fn watch_console(&self) -> Result<(), Errno> {
        epoll::add(&self.epoll, self.console.fd(), EventData::new_u64(CONSOLE), EventFlags::IN)
    }
}

/// Edge-triggered: the link remembers what its socket is ready for.
fn watch_nic_link(epoll: &OwnedFd, nic_link: &NicLink) -> Result<(), Errno> {
    let flags = EventFlags::IN | EventFlags::OUT | EventFlags::ET;
    epoll::add(epoll, nic_link.fd(), EventData::new_u64(NIC_LINK), flags)
}

/// Waits for events, at most for `timeout`.
pub(crate) fn wait(epoll: &OwnedFd, timeout: Option<Duration>) -> Result<Vec<(u64, EventFlags)>, Errno> {
    // A time that does not fit is none.
    let timeout = timeout.and_then(|left| Timespec::try_from(left).ok());
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
