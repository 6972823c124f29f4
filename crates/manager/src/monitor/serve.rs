//! The monitor's event loop: control clients, keeper reports, time limits.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use bathy_audit::What;
use bathy_client::command::{self, ExecOptions};
use bathy_client::connection::{Arrival, ConnectionError};
use bathy_client::wait::poll_until;
use bathy_protocol::{Cause, FromKeeper, Request, ToKeeper, Usage, Work, WorkEnd, unix_ns};
use bathy_runtime::folder::Folder;
use bathy_runtime::supervisor::Unrecorded;
use bathy_spec::CommandSpec;
use rustix::event::{PollFd, PollFlags};

use super::control::{FromMonitor, SOCKET, ToMonitor};
use super::network::answer_settled;
use super::pause::Pause;
use super::pending::{PendingClient, refuse, respond};
use super::{KEEPER_FAILED, Monitor, log, log_unrecorded, write_end};
use crate::store::Store;
use crate::store::life::Ending;

/// How long a guest may take to shut down after the grace period of its processes. It flushes its writes to a
/// disk that may be slow, on a host that may be busy.
pub const POWER_OFF: Duration = Duration::from_secs(30);
/// Appended to the end cause of a guest that took longer.
const OVERDUE: &str =
    "; it did not shut down in time and was killed: data that it had not written to its disk is lost";
/// The grace period when a time limit or the end of the main command stops the guest.
const LIMIT_GRACE_MS: u32 = 2000;
/// How long a client waits for the keeper's statistics.
const USAGE_TIMEOUT: Duration = Duration::from_secs(10);
/// The most clients that wait for the keeper's answer, and the most keeper warnings that are recorded.
pub(super) const MAX_WAITING: usize = 64;
const MAX_WARNINGS: u32 = 16;
/// The most ends of commands per second; a keeper that reports more is compromised.
const MAX_ENDS: u32 = 1000;
/// The stream of the main command on the owner's connection.
const MAIN: u32 = 1;

/// A client that waits for the keeper's statistics.
pub(super) struct UsageRequest {
    socket: OwnedFd,
    until: Instant,
}

/// The state of the event loop.
#[derive(Default)]
pub(super) struct Loop {
    pub pending: Vec<PendingClient>,
    /// Copies of the sockets of connected clients: they show when a client disconnects, whatever the keeper
    /// reports.
    pub clients: Vec<OwnedFd>,
    pub waiting: Vec<UsageRequest>,
    pub pause: Pause,
    /// Why the sandbox is being stopped, and when it is killed if it does not end.
    pub stopping: Option<(String, Instant)>,
    /// That deadline has passed and the sandbox was killed.
    overdue: bool,
    /// Since when no client is connected.
    pub idle_since: Option<Instant>,
    main_tag: u64,
    main_exit: Option<i32>,
    warnings: u32,
    /// The ends of commands in the current second, and when it began.
    ends: (u32, Option<Instant>),
    pub ended: Option<String>,
}

impl Monitor {
    /// Serves until the sandbox has ended, and records that.
    pub(super) fn serve(mut self) {
        let mut state = Loop { idle_since: Some(Instant::now()), ..Loop::default() };
        if let Err(error) = self.start_main(&mut state) {
            state.ended = Some(format!(
                "its main command could not be started: {}",
                bathy_protocol::chain(error.as_ref())
            ));
        }
        while state.ended.is_none() {
            self.turn(&mut state);
        }
        // All processes have exited before the end is reported. Some freezers hold back even killed
        // processes.
        self.supervisor.sandbox.kill();
        let _ = self.freezer.thaw();
        let Self { record, folder, mut store, supervisor, life, .. } = self;
        let mut journal = supervisor.end();
        let unrecorded = journal.finish();
        let _ = std::fs::remove_file(folder.path().join(SOCKET));
        let cause = match (state.ended, state.stopping) {
            (_, Some((asked, _))) => asked,
            (Some(ended), None) => ended,
            (None, None) => String::new(),
        };
        let cause = with_unrecorded(cause, &unrecorded);
        let started_ns = record.started_ns;
        let exit_code = state.main_exit;
        let ending = Ending { started_ns, at_ns: unix_ns(), cause: cause.clone(), exit_code };
        write_end(&mut store, &life, &record.id, &ending);
        journal.note(What::SandboxEnded { cause });
        if !record.spec.auto_remove {
            return log_unrecorded(&journal.finish());
        }
        // Our lock prevents others from removing it as well; what fails here is completed by a later command.
        journal.finish();
        match remove(&folder, &mut store, &record.id) {
            Ok(true) => journal.note(What::SandboxRemoved),
            // A command removed it and records that.
            Ok(false) => {}
            // The log that this is written to may have been removed as well.
            Err(error) => log(error),
        }
        log_unrecorded(&journal.finish());
    }

    pub(super) fn note(&mut self, what: What) {
        self.supervisor.journal.note(what);
    }

    /// Starts the main command, if there is one, as job 0.
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
        self.supervisor.sandbox.connection.queue(MAIN, &start)?;
        self.supervisor.sandbox.connection.queue(MAIN, &Request::Detach)?;
        self.supervisor.sandbox.connection.send()?;
        Ok(())
    }

    fn turn(&mut self, state: &mut Loop) {
        let now = Instant::now();
        self.keep_time(state, now);
        if state.ended.is_some() {
            return;
        }
        let mut fds = vec![
            PollFd::from_borrowed_fd(self.supervisor.sandbox.connection.fd(), self.connection_events(state)),
            PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN),
        ];
        let wanted = state.pending.iter().map(|client| (client.socket.as_fd(), PollFlags::IN));
        let leaving = state.clients.iter().map(|client| (client.as_fd(), PollFlags::RDHUP));
        fds.extend(wanted.chain(leaving).map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)));
        if let Some(gateway) = self.supervisor.gateway_fd() {
            fds.push(PollFd::from_borrowed_fd(gateway, PollFlags::IN));
        }
        if let Err(error) = poll_until(&mut fds, self.next_alarm(state)) {
            state.ended = Some(format!("its monitor cannot poll: {error}"));
            return;
        }
        let fired: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
        drop(fds);
        let mut fired = fired.into_iter().map(|flags| flags - PollFlags::OUT).map(|flags| !flags.is_empty());
        let (keeper, arrived) = (fired.next() == Some(true), fired.next() == Some(true));
        // What was polled is paired with its flag before anything is added: serving a pending client may add it to the clients.
        let pending = std::mem::take(&mut state.pending);
        let pending: Vec<_> =
            pending.into_iter().map(|client| (client, fired.next() == Some(true))).collect();
        let clients = std::mem::take(&mut state.clients);
        let had_clients = !clients.is_empty();
        let stay: Vec<_> = clients.into_iter().filter(|_| fired.next() != Some(true)).collect();
        let gateway = fired.next() == Some(true);
        state.clients.extend(stay);
        for (client, spoke) in pending {
            self.serve_pending(client, spoke, state);
        }
        if !state.clients.is_empty() {
            state.idle_since = None;
        } else if had_clients || state.idle_since.is_none() {
            state.idle_since = Some(Instant::now());
        }
        if arrived {
            self.accept_clients(state);
        }
        if keeper {
            self.on_keeper_messages(state);
        }
        if gateway {
            answer_settled(self.supervisor.on_gateway_messages());
        }
        if let Err(error) = self.supervisor.sandbox.connection.send() {
            state.ended = Some(bathy_protocol::chain(&error));
        }
    }

    /// The poll events of the keeper's connection. Reports are not read while the event queue is full
    /// (backpressure), unless the sandbox is being stopped. A hang-up is noticed in any case.
    fn connection_events(&self, state: &Loop) -> PollFlags {
        let takes = self.supervisor.journal.has_capacity() || state.stopping.is_some();
        let reports = if takes { PollFlags::IN } else { PollFlags::empty() };
        if self.supervisor.sandbox.connection.unsent() > 0 { reports | PollFlags::OUT } else { reports }
    }

    fn next_alarm(&self, state: &Loop) -> Option<Instant> {
        let pending = state.pending.iter().map(|client| client.until);
        let pending = pending.chain(state.waiting.iter().map(|waiting| waiting.until)).min();
        let stopping = state.stopping.as_ref().filter(|_| !state.overdue).map(|(_, until)| *until);
        let limits = if state.stopping.is_some() { [None, None] } else { self.limits(state) };
        // While nothing of the guest runs, nothing is watched.
        let memory = self.supervisor.memory_due().filter(|_| !state.pause.frozen());
        let others = [pending, stopping, self.pause_due(state), self.supervisor.due(), memory];
        limits.into_iter().chain(others).flatten().min()
    }

    /// The deadlines of the sandbox's maximum duration and idle timeout.
    fn limits(&self, state: &Loop) -> [Option<Instant>; 2] {
        let spec = &self.record.spec;
        let whole = spec.max_duration.and_then(|limit| self.started.checked_add(limit.into()));
        let idle = spec.idle_timeout.and_then(|limit| state.idle_since?.checked_add(limit.into()));
        [whole, idle]
    }

    fn keep_time(&mut self, state: &mut Loop, now: Instant) {
        state.pending.retain(|client| client.until > now);
        state.waiting.retain(|waiting| waiting.until > now);
        answer_settled(self.supervisor.keep_time(now));
        if !state.pause.frozen()
            && let Some(cause) = self.supervisor.check_memory(now)
        {
            state.ended = Some(cause);
            return;
        }
        if let Some((why, until)) = &mut state.stopping {
            if *until <= now && !state.overdue {
                state.overdue = true;
                why.push_str(OVERDUE);
                self.supervisor.sandbox.kill();
            }
            return;
        }
        let names = ["max-duration", "idle-timeout"];
        let passed = self.limits(state).into_iter().zip(names).find(|(at, _)| at.is_some_and(|at| at <= now));
        if let Some((_, limit)) = passed {
            let detail = format!("the sandbox is stopped by its --{limit}");
            self.note(What::limit_hit(limit, detail.clone()));
            self.stop(state, detail, LIMIT_GRACE_MS);
        } else if self.pause_due(state).is_some_and(|at| at <= now) {
            self.pause_idle(state);
        }
    }

    /// Asks the guest to shut down. A guest that was paused on request cannot, so it is killed.
    fn stop(&mut self, state: &mut Loop, why: String, grace_ms: u32) {
        if self.stop_when_awake(state, &why, grace_ms) {
            return;
        }
        let asked = self.supervisor.sandbox.connection.queue_to_keeper(&ToKeeper::PowerOff { grace_ms });
        let until = Instant::now() + Duration::from_millis(grace_ms.into()) + POWER_OFF;
        if state.pause.frozen() || asked.is_err() {
            self.supervisor.sandbox.kill();
        }
        state.stopping.get_or_insert((why, until));
    }

    pub(super) fn answer(&mut self, socket: OwnedFd, request: &ToMonitor, state: &mut Loop) {
        let stopping = state.stopping.is_some();
        match request {
            ToMonitor::Connect if stopping => refuse(&socket, "the sandbox is being stopped"),
            ToMonitor::Connect => self.admit_client(socket, state),
            ToMonitor::Stop { grace_ms } => {
                self.stop(state, "it was stopped".to_owned(), *grace_ms);
                respond(&socket, &FromMonitor::Done);
            }
            ToMonitor::Kill => {
                let killed = || ("it was killed".to_owned(), Instant::now() + POWER_OFF);
                state.stopping.get_or_insert_with(killed);
                self.supervisor.sandbox.kill();
                respond(&socket, &FromMonitor::Done);
            }
            ToMonitor::Pause { release_memory } => self.pause_by_hand(socket, *release_memory, state),
            ToMonitor::Resume => self.resume(socket, state),
            ToMonitor::Usage => self.ask_usage(socket, state),
            ToMonitor::Policy => self.change_policy(socket),
        }
    }

    fn ask_usage(&mut self, socket: OwnedFd, state: &mut Loop) {
        if state.waiting.len() >= MAX_WAITING {
            return refuse(&socket, "the sandbox's keeper does not answer");
        }
        state.waiting.push(UsageRequest { socket, until: Instant::now() + USAGE_TIMEOUT });
        // A keeper that is moving memory is asked afterwards.
        if !state.pause.moving() {
            // Encoding does not fail; if it did, the client would time out.
            let _ = self.supervisor.sandbox.connection.queue_to_keeper(&ToKeeper::Usage);
        }
    }

    fn on_keeper_messages(&mut self, state: &mut Loop) {
        let arrivals = match self.supervisor.sandbox.connection.receive() {
            Ok(arrivals) => arrivals,
            Err(ConnectionError::KeeperExited) => {
                let ended = || format!("{KEEPER_FAILED}{}", self.supervisor.sandbox.keepers_end());
                state.ended.get_or_insert_with(ended);
                return;
            }
            Err(error) => {
                state.ended = Some(bathy_protocol::chain(&error));
                return;
            }
        };
        for arrival in arrivals {
            match arrival {
                Arrival::Keeper(FromKeeper::Ended { cause, console }) => {
                    let mut text = cause.to_string();
                    let expected = matches!(cause, Cause::GuestExited(0) | Cause::Killed);
                    if !expected && let Some(last) = console.lines().next_back() {
                        text = format!("{text}; the guest kernel's last line: {last}");
                    }
                    state.ended.get_or_insert(text);
                }
                Arrival::Keeper(FromKeeper::WorkEnded { tag, job, end }) => {
                    self.work_ended(tag, job, &end, state);
                }
                Arrival::Keeper(FromKeeper::Usage(usage)) => self.send_usage(usage, state),
                Arrival::Keeper(FromKeeper::Parked { .. }) => self.moved(None, state),
                Arrival::Keeper(FromKeeper::NotParked(reason)) => self.moved(Some(&reason), state),
                Arrival::Keeper(FromKeeper::Warning(detail)) => {
                    state.warnings += 1;
                    if state.warnings <= MAX_WARNINGS {
                        let detail: String = detail.chars().take(500).collect();
                        self.note(What::limit_hit("host disk", detail));
                    }
                }
                Arrival::Keeper(FromKeeper::Ready(_) | FromKeeper::GuestStarted)
                | Arrival::Answer(..)
                | Arrival::Output(..) => {}
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
        if *count > MAX_ENDS {
            state.ended = Some("its keeper reported impossibly many ends of commands".to_owned());
            return;
        }
        let exit = command::exit_text(end);
        self.note(What::ExecEnded { exec: command::tag_text(tag), job, exit: exit.clone() });
        if let Some(job) = job
            && let Err(error) = self.store.end_job(&self.record.id, job, &exit)
        {
            log(bathy_protocol::chain(&error));
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

    fn send_usage(&mut self, usage: Usage, state: &mut Loop) {
        for waiting in state.waiting.drain(..) {
            respond(&waiting.socket, &FromMonitor::Usage(usage));
        }
    }
}

/// Removes a sandbox that has ended. The record goes before the lock file: until then no command treats the
/// folder as abandoned. False if the record had been removed already.
fn remove(folder: &Folder, store: &mut Store, id: &str) -> Result<bool, String> {
    let rest = folder.begin_removal().map_err(|error| error.to_string())?;
    let deleted = store.delete_removed(id, &rest).map_err(|error| bathy_protocol::chain(&error))?;
    rest.remove().map_err(|error| error.to_string())?;
    Ok(deleted)
}

/// Appends how many events are missing from the audit log.
fn with_unrecorded(cause: String, unrecorded: &Unrecorded) -> String {
    match unrecorded {
        Unrecorded { events: 0, .. } => cause,
        Unrecorded { events, failure } => {
            format!("{cause}; {events} of its events are not in the audit log: {failure}")
        }
    }
}
