//! The monitor: one process per running persistent sandbox. It starts the keeper, runs the main command,
//! passes clients to the keeper, enforces the time limits and records how the sandbox ends.
//!
//! It is the user's own process and trusted, but it does not trust what the keeper sends. When it exits, its
//! connection to the keeper closes and the sandbox ends.

pub mod control;
mod network;
mod pause;
mod pending;
mod serve;

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{fmt, process};

use bathy_audit::{Event, LogError, What};
use bathy_image::ImageConfig;
use bathy_jail::cgroup::CgroupError;
use bathy_protocol::unix_ns;
use bathy_runtime::assets::{Assets, AssetsError, Wanted};
use bathy_runtime::folder::Folder;
use bathy_runtime::freeze::Freezer;
use bathy_runtime::images::Pull;
use bathy_runtime::launch::{LaunchError, PersistentFiles, Resources, Sandbox};
use bathy_runtime::resource_group::ResourceGroup;
use bathy_runtime::supervisor::network::SandboxGateways;
use bathy_runtime::supervisor::{Journal, Observer, Subject, Supervisor, Unrecorded};
use bathy_spec::Chosen;
use bathy_spec::operator::{Operator, OperatorError};
use bathy_spec::paths::{Paths, PathsError};
use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::store::life::{Ending, Run, forget_ending, write_ending, write_running};
use crate::store::{Change, Record, State, Store, StoreError};
pub use serve::POWER_OFF;

/// The prefix of the end cause when the keeper exited by itself.
pub(crate) const KEEPER_FAILED: &str = "its keeper ";
/// The actor name in the audit log.
const PROGRAM: &str = "bathy monitor";
/// How long another process that checks the disk's lock may hold it.
const DISK_TIMEOUT: Duration = Duration::from_secs(2);
/// The space reserved for the monitor's own log, in bytes.
const LOG_SPACE: u64 = 4096;

#[derive(Debug, Error)]
pub enum MonitorError {
    #[error(transparent)]
    Paths(#[from] PathsError),
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The sandbox has been removed.
    #[error("There is no sandbox {0} any more")]
    Removed(String),
    #[error(transparent)]
    Operator(#[from] OperatorError),
    #[error(transparent)]
    Assets(#[from] AssetsError),
    #[error("Cannot open the sandbox's file {0}")]
    File(PathBuf, #[source] io::Error),
    #[error("Cannot make the sandbox's logs")]
    Logs(#[from] bathy_logs::CreateError),
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    #[error(transparent)]
    Audit(#[from] LogError),
    /// The monitor process could not be set up.
    #[error("Cannot prepare the sandbox's monitor")]
    Prepare(#[source] io::Error),
}

/// What a monitor reports to the command that started it, as one line of JSON on its standard output.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum StartReport {
    Running,
    Failed(String),
}

/// Runs a monitor. Standard input is the sandbox's life lock; one `StartReport` goes to standard output.
///
/// # Errors
/// The sandbox could not be started. How it ends later is written to the store.
pub fn run(id: &str) -> Result<(), MonitorError> {
    // A new session: closing the terminal does not end the sandbox.
    let _ = rustix::process::setsid();
    let life = io::stdin().lock_fd().map_err(MonitorError::Prepare)?;
    reserve_log_space();
    match Monitor::start(id, life) {
        Ok(monitor) => {
            report(&StartReport::Running);
            monitor.serve();
            Ok(())
        }
        Err(error) => {
            report(&StartReport::Failed(bathy_protocol::chain(&error)));
            Err(error)
        }
    }
}

/// Sends the report and closes standard output, which the starting command waits for.
fn report(report: &StartReport) {
    if let Ok(line) = serde_json::to_string(report) {
        // The starting command may have exited; the sandbox runs all the same.
        let _ = writeln!(io::stdout(), "{line}");
    }
    if let Ok(null) = File::options().write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdout(null);
    }
}

trait LockFd {
    fn lock_fd(&self) -> io::Result<File>;
}

impl LockFd for io::Stdin {
    /// Duplicates standard input: the copy of the descriptor holds the same lock.
    fn lock_fd(&self) -> io::Result<File> {
        let copy: OwnedFd = rustix::io::fcntl_dupfd_cloexec(self, 3)?;
        Ok(File::from(copy))
    }
}

/// A running sandbox and its records.
struct Monitor {
    record: Record,
    folder: Folder,
    store: Store,
    supervisor: Supervisor<OwnedFd>,
    image_config: ImageConfig,
    freezer: Freezer,
    listener: std::os::unix::net::UnixListener,
    started: Instant,
    life: File,
}

impl Monitor {
    fn start(id: &str, life: File) -> Result<Self, MonitorError> {
        let paths = Paths::of_user()?;
        let mut store = Store::open(&paths.state)?;
        let policy = Operator::load()?;
        let audit = bathy_runtime::audit::audit_log(&paths, &policy)?;
        let folder = Folder::of(&paths, id);
        let listener = control::listen(folder.path()).map_err(MonitorError::Prepare)?;
        // Read after listening: a command that changes the record before now, and cannot reach us, has
        // already stored the change.
        let mut record = store.get(id)?.ok_or_else(|| MonitorError::Removed(id.to_owned()))?;
        // The operator's limits may be newer than the sandbox. They apply to this run; the record is not
        // changed.
        record.spec = policy.apply(record.spec)?.spec;
        let at_ns = unix_ns();
        let started = Change::Started { at_ns, monitor_pid: process::id() };
        // We hold the life lock, so any other state in the store is stale.
        let any = [State::Created, State::Stopped, State::Running, State::Paused];
        if !store.transition(id, &any, State::Running, &[started])? {
            return Err(MonitorError::Removed(id.to_owned()));
        }
        let subject = Subject { program: PROGRAM, id: id.to_owned(), name: record.name.clone() };
        let mut journal = Journal::new(audit, subject, Box::new(LogObserver));
        // Cleared only now: on a full disk the store may not have the last end yet.
        let forgotten = forget_ending(&life).map_err(MonitorError::Prepare);
        let launched = forgotten.and_then(|()| Self::launch(&record, &folder, &paths, &life, &policy));
        let launched = launched.and_then(|launched| {
            let changes = [
                Change::Keeper(launched.running.0.keeper_pid()),
                Change::Enforcement(launched.enforcement.clone()),
            ];
            store.transition(id, &[State::Running], State::Running, &changes)?;
            let engine = Some(launched.engine.as_str().to_owned());
            journal.begin([What::SandboxStarted { engine }])?;
            Ok((store.get(id)?, launched))
        });
        match launched {
            Ok((updated, launched)) => {
                let spec = record.spec.clone();
                let record = Record { spec, ..updated.unwrap_or(record) };
                let keeper_pid = launched.running.0.keeper_pid();
                let run = Run { started_ns: at_ns, monitor_pid: process::id(), keeper_pid };
                if let Err(error) = write_running(&life, run) {
                    log(error);
                }
                Ok(Self {
                    record,
                    folder,
                    store,
                    supervisor: Supervisor::new(launched.running, journal),
                    image_config: launched.image_config,
                    freezer: launched.freezer,
                    listener,
                    started: Instant::now(),
                    life,
                })
            }
            Err(error) => {
                let cause = format!("it could not be started: {}", bathy_protocol::chain(&error));
                // On a full disk some of this may fail. The first error is the one to report.
                let started_ns = Some(at_ns);
                let ending = Ending { started_ns, at_ns: unix_ns(), cause: cause.clone(), exit_code: None };
                write_end(&mut store, &life, id, &ending);
                journal.note(What::SandboxEnded { cause });
                log_unrecorded(&journal.finish());
                let _ = std::fs::remove_file(folder.path().join(control::SOCKET));
                Err(error)
            }
        }
    }

    fn launch(
        record: &Record,
        folder: &Folder,
        paths: &Paths,
        life: &File,
        policy: &Operator,
    ) -> Result<Launched, MonitorError> {
        let spec = &record.spec;
        // The starting command chose the engine; a record without one was written by an earlier version.
        let engine = record.engine.unwrap_or(Chosen::Uml);
        let open = |path: PathBuf| Folder::open(&path).map_err(|error| MonitorError::File(path, error));
        // The starting command has pulled and built what was missing.
        let wanted = Wanted { engine, spec, kernel: None, pull: Pull::Never };
        let assets = Assets::ensure(paths, &wanted, &mut |_| {})?;
        let log_capacity = spec.log_size.0 / 2;
        for ring in [folder.output_log(), folder.console_log()] {
            if !ring.exists() {
                bathy_logs::create(&ring, log_capacity)?;
            }
        }
        let files = PersistentFiles {
            life: life.try_clone().map_err(MonitorError::Prepare)?,
            output: open(folder.output_log())?,
            console: open(folder.console_log())?,
            parking: folder
                .open_parking(spec)
                .map_err(|error| MonitorError::File(folder.path().join("parking"), error))?,
            log_capacity,
        };
        let group = ResourceGroup::persistent(&record.id, spec, engine, folder.path())?;
        let resources = Resources {
            engine,
            assets: &assets,
            paths,
            disk: open_disk(folder)?,
            persistent: Some(files),
            group,
            ceilings: policy.network(),
            allow_command: format!("bathy policy allow {}", record.display_name()),
        };
        let (mut sandbox, network) = Sandbox::start(spec, resources)?;
        sandbox.wait_until_ready(Duration::from_millis(spec.ready_timeout_ms))?;
        let cgroup = sandbox.group().cgroup();
        let freezer = Freezer::new(cgroup, sandbox.keeper_pid(), engine, spec.mode());
        let enforcement = serde_json::json!({
            "cpu": sandbox.group().describe_cpu(),
            "cpu_weight": sandbox.group().describe_weight(),
            "memory": cgroup.enforced().memory,
            "processes": cgroup.enforced().processes,
            "freezer": freezer.describe(),
            "ports": network.as_ref().map(SandboxGateways::ports).unwrap_or_default(),
        });
        let running = (sandbox, network);
        Ok(Launched { engine, running, image_config: assets.image_config, freezer, enforcement })
    }
}

/// Opens the disk and locks it for as long as the monitor or the keeper has it open: even if the `life` file
/// is lost, two guests never write to one disk.
fn open_disk(folder: &Folder) -> Result<File, MonitorError> {
    let path = folder.disk();
    let deadline = Instant::now() + DISK_TIMEOUT;
    let open = || {
        let disk = Folder::open(&path)?;
        loop {
            match flock(&disk, FlockOperation::NonBlockingLockExclusive) {
                // Another process is checking the lock, which takes microseconds.
                Err(Errno::WOULDBLOCK) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(Errno::WOULDBLOCK) => {
                    return Err(io::Error::other("it is in use by a sandbox that runs"));
                }
                locked => return Ok(locked.map(|()| disk)?),
            }
        }
    };
    open().map_err(|error| MonitorError::File(path.clone(), error))
}

struct Launched {
    engine: Chosen,
    running: (Sandbox, Option<SandboxGateways>),
    image_config: ImageConfig,
    freezer: Freezer,
    enforcement: serde_json::Value,
}

/// Records how a sandbox ended: first in reserved space in the `life` file, then in the store.
fn write_end(store: &mut Store, life: &File, id: &str, ending: &Ending) {
    if let Err(error) = write_ending(life, ending) {
        log(format_args!("cannot record how the sandbox ended: {error}"));
    }
    let Ending { at_ns, cause, exit_code, .. } = ending.clone();
    let change = Change::Ended { at_ns, cause, exit_code };
    let written = store.with_reserve(|store| {
        store.end_all_jobs(id, "the sandbox ended")?;
        let from = [State::Running, State::Paused];
        store.transition(id, &from, State::Stopped, std::slice::from_ref(&change))
    });
    if let Err(error) = written {
        log(bathy_protocol::chain(&error));
    }
}

/// Reserves space for [`log`], which matters most on a full disk.
fn reserve_log_space() {
    // Best effort.
    let _ = fallocate(io::stderr(), FallocateFlags::KEEP_SIZE, 0, LOG_SPACE);
}

/// Writes to the sandbox's `monitor.log`. On a full disk this may fail, which must not end the monitor.
fn log(about: impl fmt::Display) {
    let _ = writeln!(io::stderr(), "bathy monitor: {about}");
}

/// Logs events that cannot be recorded.
struct LogObserver;

impl Observer for LogObserver {
    fn on_event(&mut self, _event: &Event) {}

    fn on_backlog(&mut self, failure: &str) {
        log(format_args!("{failure}; until there is, events wait and nothing new begins in the network"));
    }
}

/// Logs how many events were not recorded, if any.
fn log_unrecorded(unrecorded: &Unrecorded) {
    if unrecorded.events > 0 {
        let Unrecorded { events, failure } = unrecorded;
        log(format_args!("{events} events are not in the audit log: {failure}"));
    }
}
