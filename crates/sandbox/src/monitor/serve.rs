//! The monitor's loop: clients at the door, the keeper's reports, time limits.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use bathy_audit::{Event, What};
use bathy_protocol::message::{decode, encode};
use bathy_protocol::{CONNECTION, Cause, Decoder, FromKeeper, Request, ToKeeper, Usage, Work, WorkEnd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg, sockopt::socket_peercred,
};

use super::door::{FromMonitor, LIMIT, SOCKET, ToMonitor};
use super::{Monitor, actor};
use crate::command::{self, ExecOptions};
use crate::connection::{Arrival, ConnectionError};
use crate::ending;
use crate::launch::unix_ns;
use crate::spec::CommandSpec;
use crate::store::{Change, State};

/// How many connections may be at the door at once, and how long each may take to say what it wants.
const AT_THE_DOOR: usize = 64;
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a guest may take to go down after its processes' grace.
const POWER_OFF: Duration = Duration::from_secs(5);
/// What a sandbox's processes have when a time limit or the end of the main command stops it.
const LIMIT_GRACE_MS: u32 = 2000;
/// How long somebody waits for the keeper's answer: a large guest's memory takes its time.
const USAGE_PATIENCE: Duration = Duration::from_secs(10);
const PARKING_PATIENCE: Duration = Duration::from_secs(120);
/// How long a keeper takes to be gone after its connection is.
const KEEPERS_END: Duration = Duration::from_millis(20);
/// How many may wait for the keeper's answer at once, and how many of its warnings are recorded.
const MOST_WAITING: usize = 64;
const MOST_WARNINGS: u32 = 16;
/// How many ends of commands are recorded in a second; a keeper that reports more makes them up.
const MOST_ENDS: u32 = 1000;
/// The stream of the main command on the owner's connection, and its number as a job.
const MAIN: u32 = 1;

/// A connection that has not said what it wants.
struct Visitor {
    socket: OwnedFd,
    decoder: Decoder,
    until: Instant,
}

/// Somebody who waits for the keeper's answer.
struct Waiting {
    socket: OwnedFd,
    what: Awaited,
    until: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Awaited {
    Usage,
    Pause,
    Resume,
}

/// What the loop knows besides the sandbox itself.
#[derive(Default)]
struct Loop {
    visitors: Vec<Visitor>,
    /// Copies of the sockets of connected clients: they tell when the client leaves, whatever the keeper says.
    clients: Vec<OwnedFd>,
    waiting: Vec<Waiting>,
    paused: bool,
    /// Why the sandbox is being stopped, and when it is ended if it does not.
    stopping: Option<(String, Instant)>,
    /// Since when nobody is connected.
    idle_since: Option<Instant>,
    main_tag: u64,
    main_exit: Option<i32>,
    warnings: u32,
    /// Ends of commands since when.
    ends: (u32, Option<Instant>),
    ended: Option<String>,
}

impl Monitor {
    /// Serves until the sandbox has ended, and writes that down.
    pub(super) fn serve(mut self) {
        let mut state = Loop { idle_since: Some(Instant::now()), ..Loop::default() };
        if let Err(error) = self.start_main(&mut state) {
            state.ended =
                Some(format!("its main command could not be started: {}", crate::chain(error.as_ref())));
        }
        while state.ended.is_none() {
            self.turn(&mut state);
        }
        let Self { record, folder, mut store, audit, sandbox, cgroup, freezer, .. } = self;
        // All its processes are gone before anything says so. Some freezers keep even the killed.
        sandbox.kill();
        let _ = freezer.thaw();
        drop(sandbox);
        if let Some(mut cgroup) = cgroup {
            let _ = cgroup.remove();
        }
        let _ = std::fs::remove_file(folder.path().join(SOCKET));
        let cause = match (state.ended, state.stopping) {
            (_, Some((asked, _))) => asked,
            (Some(ended), None) => ended,
            (None, None) => String::new(),
        };
        let change = Change::Ended { at_ns: unix_ns(), cause: cause.clone(), exit_code: state.main_exit };
        let written = store.end_all_jobs(&record.id, "the sandbox ended").and_then(|_| {
            store.transition(&record.id, &[State::Running, State::Paused], State::Stopped, &[change])
        });
        if let Err(error) = written {
            eprintln!("bathy monitor: {}", crate::chain(&error));
        }
        let ended =
            Event::now(actor(), What::SandboxEnded { cause }).in_sandbox(&record.id, record.name.clone());
        if let Err(error) = audit.append(&[ended]) {
            eprintln!("bathy monitor: {}", crate::chain(&error));
        }
    }

    fn note(&self, what: What) {
        let event = Event::now(actor(), what).in_sandbox(&self.record.id, self.record.name.clone());
        if let Err(error) = self.audit.append(&[event]) {
            eprintln!("bathy monitor: {}", crate::chain(&error));
        }
    }

    /// Runs the main command, if there is one, as job 0.
    fn start_main(&mut self, state: &mut Loop) -> Result<(), Box<dyn std::error::Error>> {
        let spec = &self.record.spec;
        if spec.command.is_empty() {
            return Ok(());
        }
        let command = CommandSpec {
            argv: spec.command.iter().map(|word| word.clone().into_bytes()).collect(),
            ..CommandSpec::default()
        };
        let exec = command::request(&command, spec, &self.image_config, ExecOptions::default());
        state.main_tag = command::new_tag()?;
        self.store.main_job(
            &self.record.id,
            &command.argv,
            Some(&exec.user),
            &command::tag_text(state.main_tag),
        )?;
        self.note(command::exec_started(&exec, state.main_tag, Some(0)));
        let start = Request::Start { work: Work::Exec(exec), tag: state.main_tag, job: Some(0) };
        self.sandbox.connection.tell(MAIN, &start)?;
        self.sandbox.connection.tell(MAIN, &Request::Detach)?;
        self.sandbox.connection.send()?;
        Ok(())
    }

    fn turn(&mut self, state: &mut Loop) {
        let now = Instant::now();
        self.keep_time(state, now);
        let mut fds = vec![
            PollFd::from_borrowed_fd(self.sandbox.connection.fd(), self.connection_events()),
            PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN),
        ];
        let wanted = state.visitors.iter().map(|visitor| (visitor.socket.as_fd(), PollFlags::IN));
        let leaving = state.clients.iter().map(|client| (client.as_fd(), PollFlags::RDHUP));
        fds.extend(wanted.chain(leaving).map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)));
        let timeout = self.next_alarm(state).map(|at| timespec(at.saturating_duration_since(now)));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => {
                state.ended = Some(format!("its monitor cannot wait: {error}"));
                return;
            }
        }
        let fired: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        let mut fired = fired.into_iter();
        let (keeper, door) = (fired.next() == Some(true), fired.next() == Some(true));
        let visitors = std::mem::take(&mut state.visitors);
        for visitor in visitors {
            let spoke = fired.next() == Some(true);
            self.serve_visitor(visitor, spoke, state);
        }
        let clients = std::mem::take(&mut state.clients);
        let had_clients = !clients.is_empty();
        let stay: Vec<_> = clients.into_iter().filter(|_| fired.next() != Some(true)).collect();
        state.clients.extend(stay);
        if !state.clients.is_empty() {
            state.idle_since = None;
        } else if had_clients || state.idle_since.is_none() {
            state.idle_since = Some(Instant::now());
        }
        if door {
            self.open_door(state);
        }
        if keeper {
            self.hear_keeper(state);
        }
        if let Err(error) = self.sandbox.connection.send() {
            state.ended = Some(crate::chain(&error));
        }
    }

    fn connection_events(&self) -> PollFlags {
        if self.sandbox.connection.unsent() > 0 { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
    }

    fn next_alarm(&self, state: &Loop) -> Option<Instant> {
        let waiting = state.waiting.iter().filter(|waiting| waiting.what == Awaited::Usage);
        let visitors = state.visitors.iter().map(|visitor| visitor.until);
        let visitors = visitors.chain(waiting.map(|waiting| waiting.until)).min();
        let stopping = state.stopping.as_ref().map(|(_, until)| *until);
        let limits = if stopping.is_some() { [None, None] } else { self.limits(state) };
        limits.into_iter().chain([visitors, stopping]).flatten().min()
    }

    /// When the sandbox's time is up: in all, and without anybody.
    fn limits(&self, state: &Loop) -> [Option<Instant>; 2] {
        let spec = &self.record.spec;
        let whole = spec.max_duration.and_then(|limit| self.started.checked_add(limit.into()));
        let idle = spec.idle_timeout.and_then(|limit| state.idle_since?.checked_add(limit.into()));
        [whole, idle]
    }

    fn keep_time(&mut self, state: &mut Loop, now: Instant) {
        state.visitors.retain(|visitor| visitor.until > now);
        state.waiting.retain(|waiting| waiting.until > now || waiting.what != Awaited::Usage);
        if let Some((_, until)) = &state.stopping {
            if *until <= now {
                self.sandbox.kill();
            }
            return;
        }
        let names = ["max-duration", "idle-timeout"];
        let passed = self.limits(state).into_iter().zip(names).find(|(at, _)| at.is_some_and(|at| at <= now));
        if let Some((_, limit)) = passed {
            let detail = format!("the sandbox is stopped by its --{limit}");
            self.note(What::LimitHit { limit: limit.to_owned(), detail: detail.clone() });
            self.stop(state, detail, LIMIT_GRACE_MS);
        }
    }

    /// Asks the guest to go down. A frozen guest cannot: it is ended.
    fn stop(&mut self, state: &mut Loop, why: String, grace_ms: u32) {
        let asked = self.sandbox.connection.tell_keeper(&ToKeeper::PowerOff { grace_ms });
        let until = Instant::now() + Duration::from_millis(grace_ms.into()) + POWER_OFF;
        if state.paused || asked.is_err() {
            self.sandbox.kill();
        }
        state.stopping.get_or_insert((why, until));
    }

    fn open_door(&mut self, state: &mut Loop) {
        while let Ok((socket, _)) = self.listener.accept() {
            let ours = rustix::process::geteuid();
            let known = socket_peercred(&socket).is_ok_and(|peer| peer.uid == ours || peer.uid.is_root());
            if !known || state.visitors.len() >= AT_THE_DOOR || socket.set_nonblocking(true).is_err() {
                continue;
            }
            let visitor = Visitor {
                socket: socket.into(),
                decoder: Decoder::new(LIMIT),
                until: Instant::now() + PATIENCE,
            };
            // Most have spoken already.
            self.serve_visitor(visitor, true, state);
        }
    }

    fn serve_visitor(&mut self, mut visitor: Visitor, spoke: bool, state: &mut Loop) {
        if !spoke {
            state.visitors.push(visitor);
            return;
        }
        let mut buffer = [0u8; 512];
        match recv(&visitor.socket, &mut buffer, RecvFlags::DONTWAIT) {
            Ok((count @ 1.., _)) => visitor.decoder.push(buffer.get(..count).unwrap_or_default()),
            Err(Errno::AGAIN | Errno::INTR) => {}
            _ => return,
        }
        match visitor.decoder.next_frame() {
            Ok(Some(frame)) => {
                if let Ok(question) = decode(frame.payload) {
                    self.answer(visitor.socket, &question, state);
                }
            }
            Ok(None) => state.visitors.push(visitor),
            Err(_) => {}
        }
    }

    fn answer(&mut self, socket: OwnedFd, question: &ToMonitor, state: &mut Loop) {
        let stopping = state.stopping.is_some();
        match question {
            ToMonitor::Connect if stopping => refuse(&socket, "the sandbox is being stopped"),
            ToMonitor::Connect if state.paused => {
                refuse(&socket, "the sandbox is paused; `bathy resume` lets it go on");
            }
            ToMonitor::Connect => self.connect(socket, state),
            ToMonitor::Stop { grace_ms } => {
                self.stop(state, "it was stopped".to_owned(), *grace_ms);
                say(&socket, &FromMonitor::Done);
            }
            ToMonitor::Kill => {
                let killed = || ("it was killed".to_owned(), Instant::now() + POWER_OFF);
                state.stopping.get_or_insert_with(killed);
                self.sandbox.kill();
                say(&socket, &FromMonitor::Done);
            }
            ToMonitor::Pause { .. } if state.paused => say(&socket, &FromMonitor::Done),
            ToMonitor::Pause { release_memory } => self.pause(socket, *release_memory, state),
            ToMonitor::Resume if !state.paused => say(&socket, &FromMonitor::Done),
            ToMonitor::Resume => self.wait_for_keeper(socket, Awaited::Resume, &ToKeeper::Unpark, state),
            ToMonitor::Usage => self.wait_for_keeper(socket, Awaited::Usage, &ToKeeper::Usage, state),
        }
    }

    fn wait_for_keeper(&mut self, socket: OwnedFd, what: Awaited, question: &ToKeeper, state: &mut Loop) {
        if state.waiting.len() >= MOST_WAITING {
            return refuse(&socket, "the sandbox's keeper does not answer");
        }
        let patience = if what == Awaited::Usage { USAGE_PATIENCE } else { PARKING_PATIENCE };
        // It does not fail to encode; the visitor would run out of patience.
        if self.sandbox.connection.tell_keeper(question).is_ok() {
            state.waiting.push(Waiting { socket, what, until: Instant::now() + patience });
        }
    }

    /// Hands a connection over to the keeper and keeps a copy, to notice when the client leaves.
    fn connect(&mut self, socket: OwnedFd, state: &mut Loop) {
        let Ok(copy) = socket.try_clone() else { return refuse(&socket, "too many clients") };
        // The answer comes before anything that the keeper says.
        if self.sandbox.connection.unsent() > 0 {
            return refuse(
                &socket,
                "the sandbox's keeper is busy and takes no clients; `bathy kill` ends it",
            );
        }
        say(&socket, &FromMonitor::Connected);
        match self.hand_over(&socket) {
            Ok(true) => state.clients.push(copy),
            Ok(false) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => state.ended = Some(format!("its keeper does not take clients: {error}")),
        }
    }

    fn hand_over(&mut self, socket: &OwnedFd) -> io::Result<bool> {
        // What was queued before goes first; a keeper that does not read at all is not waited for.
        self.sandbox.connection.send().map_err(io::Error::other)?;
        if self.sandbox.connection.unsent() > 0 {
            return Ok(false);
        }
        let mut message = Vec::new();
        encode(CONNECTION, &ToKeeper::Client, &mut message).map_err(io::Error::other)?;
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let sockets = [socket.as_fd()];
        ancillary.push(SendAncillaryMessage::ScmRights(&sockets));
        let sent = sendmsg(
            self.sandbox.connection.fd(),
            &[io::IoSlice::new(&message)],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        )?;
        if sent == message.len() {
            Ok(true)
        } else {
            Err(io::Error::other("the keeper takes half a message"))
        }
    }

    fn pause(&mut self, socket: OwnedFd, release_memory: bool, state: &mut Loop) {
        if let Err(error) = self.freezer.freeze() {
            return refuse(&socket, &crate::chain(&error));
        }
        state.paused = true;
        if release_memory {
            self.wait_for_keeper(socket, Awaited::Pause, &ToKeeper::Park, state);
        } else {
            self.paused(&socket);
        }
    }

    fn paused(&mut self, socket: &OwnedFd) {
        let written = self.store.transition(&self.record.id, &[State::Running], State::Paused, &[]);
        self.note(What::SandboxPaused);
        match written {
            Ok(_) => say(socket, &FromMonitor::Done),
            Err(error) => refuse(socket, &crate::chain(&error)),
        }
    }

    fn resumed(&mut self, socket: &OwnedFd, state: &mut Loop) {
        if let Err(error) = self.freezer.thaw() {
            return refuse(socket, &crate::chain(&error));
        }
        state.paused = false;
        // Its idle time begins anew.
        state.idle_since = state.clients.is_empty().then(Instant::now);
        let written = self.store.transition(&self.record.id, &[State::Paused], State::Running, &[]);
        self.note(What::SandboxResumed);
        match written {
            Ok(_) => say(socket, &FromMonitor::Done),
            Err(error) => refuse(socket, &crate::chain(&error)),
        }
    }

    fn hear_keeper(&mut self, state: &mut Loop) {
        let arrivals = match self.sandbox.connection.receive() {
            Ok(arrivals) => arrivals,
            Err(ConnectionError::Gone) => {
                // Its connection closes a moment before its end can be asked for.
                std::thread::sleep(KEEPERS_END);
                let ended = || format!("its keeper {}", self.sandbox.keepers_end());
                state.ended.get_or_insert_with(ended);
                return;
            }
            Err(error) => {
                state.ended = Some(crate::chain(&error));
                return;
            }
        };
        for arrival in arrivals {
            match arrival {
                Arrival::Keeper(FromKeeper::Ended { cause, console }) => {
                    let mut text = ending::describe(&cause);
                    let expected = matches!(cause, Cause::GuestExited(0) | Cause::Killed);
                    if !expected && let Some(last) = console.lines().next_back() {
                        text = format!("{text}; the guest kernel's last line: {last}");
                    }
                    state.ended.get_or_insert(text);
                }
                Arrival::Keeper(FromKeeper::WorkEnded { tag, job, end }) => {
                    self.work_ended(tag, job, &end, state);
                }
                Arrival::Keeper(FromKeeper::Usage(usage)) => self.tell_usage(usage, state),
                Arrival::Keeper(FromKeeper::Parked { .. }) => self.parked(None, state),
                Arrival::Keeper(FromKeeper::NotParked(reason)) => self.parked(Some(&reason), state),
                Arrival::Keeper(FromKeeper::Warning(detail)) => {
                    state.warnings += 1;
                    if state.warnings <= MOST_WARNINGS {
                        let detail = detail.chars().take(500).collect();
                        self.note(What::LimitHit { limit: "host disk".to_owned(), detail });
                    }
                }
                Arrival::Keeper(FromKeeper::Ready(_)) | Arrival::Answer(..) | Arrival::Output(..) => {}
            }
        }
    }

    fn work_ended(&mut self, tag: u64, job: Option<u32>, end: &WorkEnd, state: &mut Loop) {
        let now = Instant::now();
        let (count, since) = &mut state.ends;
        if since.is_none_or(|since| now.duration_since(since) > Duration::from_secs(1)) {
            (*count, *since) = (0, Some(now));
        }
        *count += 1;
        if *count > MOST_ENDS {
            state.ended = Some("its keeper reported more ends of commands than there can be".to_owned());
            return;
        }
        let exit = command::exit_text(end);
        self.note(What::ExecEnded { exec: command::tag_text(tag), job, exit: exit.clone() });
        if let Some(job) = job
            && let Err(error) = self.store.end_job(&self.record.id, job, &exit)
        {
            eprintln!("bathy monitor: {}", crate::chain(&error));
        }
        if job == Some(0) && tag == state.main_tag {
            state.main_exit = Some(match end {
                WorkEnd::Exited(exit) => exit.shell_code().into(),
                WorkEnd::Refused(_) => 127,
            });
            if state.stopping.is_none() {
                self.stop(state, format!("its main command ended: {exit}"), LIMIT_GRACE_MS);
            }
        }
    }

    fn tell_usage(&mut self, usage: Usage, state: &mut Loop) {
        let asked = |waiting: &mut Waiting| waiting.what == Awaited::Usage;
        for waiting in state.waiting.extract_if(.., asked) {
            say(&waiting.socket, &FromMonitor::Usage(usage));
        }
    }

    /// The keeper has moved the memory, one way or the other, or could not: the answer to the first who asked, for it
    /// answers in order.
    fn parked(&mut self, failure: Option<&str>, state: &mut Loop) {
        let first = state.waiting.iter().position(|waiting| waiting.what != Awaited::Usage);
        let Some(waiting) = first.map(|index| state.waiting.remove(index)) else { return };
        match (waiting.what, failure) {
            (Awaited::Resume, None) => self.resumed(&waiting.socket, state),
            (_, None) => self.paused(&waiting.socket),
            (_, Some(reason)) => {
                // Not half paused: it goes on.
                if self.freezer.thaw().is_ok() {
                    state.paused = false;
                }
                let reason = format!("its memory cannot be moved to the host's disk: {reason}");
                refuse(&waiting.socket, &reason);
            }
        }
    }
}

fn say(socket: &OwnedFd, answer: &FromMonitor) {
    let mut message = Vec::new();
    if encode(CONNECTION, answer, &mut message).is_ok() {
        // Fits into a fresh socket's buffer; whoever asked may be gone.
        let _ = rustix::net::send(socket, &message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }
}

fn refuse(socket: &OwnedFd, reason: &str) {
    // An answer has a limit; a reason that is longer says enough at its beginning.
    let reason: String = reason.chars().take(800).collect();
    say(socket, &FromMonitor::Refused(reason));
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

/// Waits until there is something to read; `false` when it is too late.
pub(super) fn readable(fd: BorrowedFd<'_>, deadline: Instant) -> bool {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        match poll(&mut fds, Some(&timespec(left))) {
            Ok(0) => return false,
            Err(Errno::INTR) => {}
            Ok(_) | Err(_) => return true,
        }
    }
}
