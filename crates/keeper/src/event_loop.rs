//! The keeper's one loop: devices, client, console, the guest's end, deadlines.

use std::error::Error;
use std::fmt::Write;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use bathy_devices::Outcome;
use bathy_jail::Spawned;
use bathy_protocol::{Cause, FromKeeper};
use bathy_uml::vhost::{SocketError, VhostError};
use rustix::event::Timespec;
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustix::process::{WaitId, WaitIdOptions, waitid};

use crate::console_log::{ConsoleLog, Reading};
use crate::devices::{Devices, FIRST_TOKEN};
use crate::hub::{Demand, Hub, HubError};
use crate::unix_ns;

const CLIENT: u64 = 1;
const CONSOLE: u64 = 2;
const GUEST: u64 = 3;

/// How long the last message may take to reach a client.
const FAREWELL: Duration = Duration::from_secs(1);
/// How much is taken from the agent, or read from a client, at once.
const CHUNK: usize = 64 * 1024;

/// Everything that the loop works on.
pub struct Keeper {
    pub epoll: Rc<OwnedFd>,
    pub devices: Devices,
    pub hub: Hub,
    pub client: OwnedFd,
    pub console: ConsoleLog,
    pub guest: Spawned,
    pub ready_timeout: Duration,
    /// What the client was warned of.
    pub warned: Vec<io::ErrorKind>,
    /// Held, never used: while it is open the sandbox's processor slot is taken.
    pub _slot: OwnedFd,
}

/// Why the loop ends.
enum End {
    /// Nobody is left to be told.
    ClientGone,
    /// The guest's process ended by itself.
    GuestGone,
    /// The client is told why.
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
}

impl Alarms {
    fn next(&self) -> Option<Instant> {
        [self.devices, self.console, self.ready].into_iter().flatten().min()
    }
}

impl Keeper {
    /// Registers what the loop waits for, besides the devices, which register themselves.
    pub fn watch(&self) -> io::Result<()> {
        let add = |fd: BorrowedFd<'_>, token| {
            epoll::add(&self.epoll, fd, EventData::new_u64(token), EventFlags::IN)
        };
        add(self.client.as_fd(), CLIENT)?;
        add(self.console.fd(), CONSOLE)?;
        add(self.guest.pidfd.as_fd(), GUEST)?;
        Ok(())
    }

    /// Serves until the sandbox ends, and tells the client why. The guest ends with the keeper, which is the first
    /// process of the pid namespace that the guest's is nested in: no signal has to be allowed for that.
    pub fn run(mut self) {
        let cause = match self.serve() {
            End::ClientGone => return,
            End::Because(cause) => cause,
            End::GuestGone => {
                let status =
                    waitid(WaitId::PidFd(self.guest.pidfd.as_fd()), WaitIdOptions::EXITED).ok().flatten();
                let code = status.as_ref().and_then(|status| status.exit_status());
                let signal = status.as_ref().and_then(|status| status.terminating_signal());
                Cause::GuestExited(code.or_else(|| signal.map(|signal| 128 + signal)).unwrap_or(-1))
            }
        };
        self.console.read();
        let mut console = self.console.tail();
        if let (Cause::GuestExited(_), Some(words)) = (&cause, self.guest.failure()) {
            if !console.is_empty() {
                console.push('\n');
            }
            console.push_str(&words);
        }
        self.hub.tell_end(cause, console);
        let deadline = Instant::now() + FAREWELL;
        while !self.hub.for_client().is_empty() && Instant::now() < deadline {
            match rustix::net::send(
                &self.client,
                self.hub.for_client(),
                SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
            ) {
                Ok(count) => self.hub.client_took(count),
                Err(Errno::AGAIN) => {
                    // Waiting on epoll and not by sleeping: the filter knows no sleep.
                    let _ = self.rearm_client();
                    let _ = self.wait(Some(Instant::now() + Duration::from_millis(10)));
                }
                Err(Errno::INTR) => {}
                Err(_) => return,
            }
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
            let events = self.wait(alarms.next()).map_err(|error| failed("wait for events", &error))?;
            let now = Instant::now();
            let mut outcome = Outcome::default();
            if alarms.devices.take_if(|at| *at <= now).is_some() {
                outcome = outcome.merge(self.settle(Devices::service)?);
            }
            if alarms.console.take_if(|at| *at <= now).is_some() {
                self.watch_console()?;
            }
            for (token, flags) in events {
                match token {
                    CLIENT => self.serve_client(flags.intersects(EventFlags::HUP | EventFlags::ERR))?,
                    CONSOLE => match self.console.read() {
                        Reading::Empty => {}
                        // Not watched at all meanwhile: a hang-up is reported whatever one asks for.
                        Reading::Pause(pause) => {
                            self.unwatch_console()?;
                            alarms.console = Some(now + pause);
                        }
                        Reading::Ended => self.unwatch_console()?,
                    },
                    GUEST => {
                        // What it sent before it ended still counts: a command's last output and status.
                        self.exchange()?;
                        return Err(End::GuestGone);
                    }
                    token if token >= FIRST_TOKEN => {
                        outcome = outcome.merge(self.settle(|devices| devices.on_event(token))?);
                    }
                    _ => {}
                }
            }
            outcome = outcome.merge(self.exchange()?);
            if outcome.more {
                alarms.devices = Some(now);
            } else if let Some(pause) = outcome.retry_after {
                alarms.devices = Some(alarms.devices.map_or(now + pause, |at| at.min(now + pause)));
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
                self.hub.tell_client(&FromKeeper::Warning(text));
            }
            self.rearm_client()?;
        }
    }

    fn wait(&self, until: Option<Instant>) -> Result<Vec<(u64, EventFlags)>, Errno> {
        let timeout = until.map(|until| {
            let left = until.saturating_duration_since(Instant::now());
            Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(left.subsec_nanos()),
            }
        });
        let mut events = [MaybeUninit::<Event>::uninit(); 32];
        match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
            Ok((events, _)) => Ok(events.iter().map(|event| (event.data.u64(), event.flags)).collect()),
            Err(Errno::INTR) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Lets the devices work. A closed connection is how the guest's end looks from here; its process tells more.
    fn settle(
        &mut self,
        work: impl FnOnce(&mut Devices) -> Result<Outcome, VhostError>,
    ) -> Result<Outcome, End> {
        match work(&mut self.devices) {
            Ok(outcome) => Ok(outcome),
            Err(VhostError::Socket(SocketError::Closed)) => Ok(Outcome::default()),
            Err(error) => Err(End::Because(Cause::Violation(chain(&error)))),
        }
    }

    /// Moves bytes between the agent and the hub until neither side has any for the other.
    fn exchange(&mut self) -> Result<Outcome, End> {
        match (self.devices.agent_sessions(), self.hub.is_greeted()) {
            (0, _) | (1, true) => {}
            (_, false) => self.hub.greet(unix_ns())?,
            (_, true) => return Err(HubError::HungUp.into()),
        }
        let mut outcome = Outcome::default();
        loop {
            let mut moved = 0;
            if self.hub.takes_output() {
                let bytes = self.devices.take_from_agent(CHUNK);
                moved += bytes.len();
                self.hub.hear_guest(&bytes, unix_ns())?;
            }
            let count = self.devices.send_to_agent(self.hub.for_guest());
            self.hub.guest_took(count);
            moved += count;
            if moved == 0 {
                return Ok(outcome);
            }
            outcome = outcome.merge(self.settle(Devices::service_control)?);
            self.write_client()?;
        }
    }

    fn serve_client(&mut self, hung_up: bool) -> Result<(), End> {
        self.write_client()?;
        let mut buffer = [0u8; CHUNK];
        if !self.hub.takes_requests() {
            // A guest that takes nothing must not keep a sandbox whose client is gone.
            return if hung_up { Err(End::ClientGone) } else { Ok(()) };
        }
        match rustix::net::recv(&self.client, &mut buffer, RecvFlags::DONTWAIT) {
            Ok((0, _)) => Err(End::ClientGone),
            Ok((count, _)) => match self.hub.hear_client(buffer.get(..count).unwrap_or_default())? {
                Demand::Kill => Err(End::Because(Cause::Killed)),
                Demand::None => Ok(()),
            },
            Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(_) => Err(End::ClientGone),
        }
    }

    fn write_client(&mut self) -> Result<(), End> {
        while !self.hub.for_client().is_empty() {
            match rustix::net::send(
                &self.client,
                self.hub.for_client(),
                SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
            ) {
                Ok(count) => self.hub.client_took(count),
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(_) => return Err(End::ClientGone),
            }
        }
        Ok(())
    }

    /// Waits for the client to read only while something waits for it, and to write only while there is room.
    fn rearm_client(&self) -> Result<(), End> {
        let mut flags = EventFlags::empty();
        flags.set(EventFlags::IN, self.hub.takes_requests());
        flags.set(EventFlags::OUT, !self.hub.for_client().is_empty());
        epoll::modify(&self.epoll, &self.client, EventData::new_u64(CLIENT), flags)
            .map_err(|error| failed("watch the client", &error))
    }

    fn watch_console(&self) -> Result<(), End> {
        epoll::add(&self.epoll, self.console.fd(), EventData::new_u64(CONSOLE), EventFlags::IN)
            .map_err(|error| failed("watch the console", &error))
    }

    fn unwatch_console(&self) -> Result<(), End> {
        epoll::delete(&self.epoll, self.console.fd()).map_err(|error| failed("leave the console", &error))
    }
}

fn failed(what: &str, error: &Errno) -> End {
    End::Because(Cause::Failed(format!("Cannot {what}: {error}")))
}

/// An error with its sources, in one line.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let _ = write!(text, ": {cause}");
        source = cause.source();
    }
    text
}
