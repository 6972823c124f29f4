//! One process per running sandbox that is kept: it starts the keeper, runs the main command, hands clients over, keeps
//! the time limits, and writes down how things end.
//!
//! It is the user's own process and trusted; what it hears from the keeper it takes with care. When it dies the
//! keeper's connection to it closes, and the sandbox ends.

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
use bathy_image::{ImageConfig, Store as Cache};
use bathy_jail::cgroup::CgroupError;
use bathy_protocol::unix_ns;
use bathy_runtime::assets::{Assets, AssetsError};
use bathy_runtime::folder::Folder;
use bathy_runtime::freeze::Freezer;
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

/// How the cause begins of a sandbox whose keeper ended by itself.
pub const KEEPER_FAILED: &str = "its keeper ";
/// The name of this program in the audit log.
const PROGRAM: &str = "bathy monitor";
/// How long those who only look at a disk's lock may have it.
const DISK_PATIENCE: Duration = Duration::from_secs(2);
/// How much space is held for the monitor's own log.
const COMPLAINTS: u64 = 4096;

/// A sandbox could not be started.
#[derive(Debug, Error)]
pub enum MonitorError {
    #[error(transparent)]
    Paths(#[from] PathsError),
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There is no such sandbox.
    #[error("There is no sandbox {0} any more")]
    Gone(String),
    #[error(transparent)]
    Operator(#[from] OperatorError),
    /// What it is made of.
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
    /// Something about this process.
    #[error("Cannot prepare the sandbox's monitor")]
    Prepare(#[source] io::Error),
}

/// What a monitor tells the command that started it, as one line of JSON on its standard output.
#[derive(Debug, Serialize, Deserialize)]
pub enum Report {
    Running,
    Failed(String),
}

/// A monitor's whole life. Standard input is the sandbox's life lock, standard output wants a [`Report`].
///
/// # Errors
/// When the sandbox could not be started; how it ended later is written to the store.
pub fn run(id: &str) -> Result<(), MonitorError> {
    // A session of its own: whatever ends the terminal that started us does not end the sandbox.
    let _ = rustix::process::setsid();
    let life = io::stdin().lock_fd().map_err(MonitorError::Prepare)?;
    reserve_complaints();
    match Monitor::start(id, life) {
        Ok(monitor) => {
            report(&Report::Running);
            monitor.serve();
            Ok(())
        }
        Err(error) => {
            report(&Report::Failed(bathy_protocol::chain(&error)));
            Err(error)
        }
    }
}

/// Says how it went and closes standard output, which the command that started us waits for.
fn report(report: &Report) {
    if let Ok(line) = serde_json::to_string(report) {
        // The one who asked may be gone; the sandbox runs all the same.
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
    /// The lock that standard input is: a copy of the descriptor holds the same lock.
    fn lock_fd(&self) -> io::Result<File> {
        let copy: OwnedFd = rustix::io::fcntl_dupfd_cloexec(self, 3)?;
        Ok(File::from(copy))
    }
}

/// A running sandbox and everything that is written down about it.
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
        // Not before: whoever changes it now, and finds nobody to tell, has written it down for us.
        let mut record = store.get(id)?.ok_or_else(|| MonitorError::Gone(id.to_owned()))?;
        // The sandbox may be older than what the operator says. Only this run is bound by it: what is written stays.
        record.spec = policy.apply(record.spec)?.spec;
        let at_ns = unix_ns();
        let started = Change::Started { at_ns, monitor_pid: process::id() };
        // We hold the life lock, so whatever else is written there is out of date.
        let any = [State::Created, State::Stopped, State::Running, State::Paused];
        if !store.transition(id, &any, State::Running, &[started])? {
            return Err(MonitorError::Gone(id.to_owned()));
        }
        let subject = Subject { program: PROGRAM, id: id.to_owned(), name: record.name.clone() };
        let mut journal = Journal::new(audit, subject, Box::new(Complaints));
        // Not before: on a full disk the store may not have known of the last end.
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
                    complain(error);
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
                // On a full disk some of this may fail. The first failure is the one to tell.
                let started_ns = Some(at_ns);
                let ending = Ending { started_ns, at_ns: unix_ns(), cause: cause.clone(), exit_code: None };
                write_end(&mut store, &life, id, &ending);
                journal.note(What::SandboxEnded { cause });
                complain_about(&journal.finish());
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
        // Whoever starts a sandbox has decided; a record without a decision is one of an earlier version.
        let engine = record.engine.unwrap_or(Chosen::Uml);
        let open = |path: PathBuf| Folder::open(&path).map_err(|error| MonitorError::File(path, error));
        let cache = Cache::new(paths.cache.clone());
        let assets = Assets::ensure(&cache, engine, &spec.image, None, &mut |_| {})?;
        let log_capacity = spec.log_size.0 / 2;
        for ring in [folder.output_log(), folder.console_log()] {
            if !ring.exists() {
                bathy_logs::create(&ring, log_capacity)?;
            }
        }
        let kept = PersistentFiles {
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
            persistent: Some(kept),
            group,
            ceilings: policy.network(),
            cure: format!("bathy policy allow {}", record.display_name()),
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

/// Opens the disk, and locks it for as long as the monitor or the keeper has it open: whatever became of the `life` file, two guests
/// never write to one disk.
fn open_disk(folder: &Folder) -> Result<File, MonitorError> {
    let path = folder.disk();
    let deadline = Instant::now() + DISK_PATIENCE;
    let open = || {
        let disk = Folder::open(&path)?;
        loop {
            match flock(&disk, FlockOperation::NonBlockingLockExclusive) {
                // Those who only look have it for microseconds.
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

/// Writes down how a sandbox ended: beside its disk, in space that is held for that, and then in the store.
fn write_end(store: &mut Store, life: &File, id: &str, ending: &Ending) {
    if let Err(error) = write_ending(life, ending) {
        complain(format_args!("cannot write down how the sandbox ended: {error}"));
    }
    let Ending { at_ns, cause, exit_code, .. } = ending.clone();
    let change = Change::Ended { at_ns, cause, exit_code };
    let written = store.at_any_price(|store| {
        store.end_all_jobs(id, "the sandbox ended")?;
        let from = [State::Running, State::Paused];
        store.transition(id, &from, State::Stopped, std::slice::from_ref(&change))
    });
    if let Err(error) = written {
        complain(bathy_protocol::chain(&error));
    }
}

/// Holds some space for [`complain`], which is needed most when there is no other.
fn reserve_complaints() {
    // Where that is not possible there is only less to read.
    let _ = fallocate(io::stderr(), FallocateFlags::KEEP_SIZE, 0, COMPLAINTS);
}

/// Says something in the sandbox's `monitor.log`. On a full disk that may fail, which must not end the monitor.
fn complain(about: impl fmt::Display) {
    let _ = writeln!(io::stderr(), "bathy monitor: {about}");
}

/// Complains about events that cannot be recorded.
struct Complaints;

impl Observer for Complaints {
    fn on_event(&mut self, _event: &Event) {}

    fn on_backlog(&mut self, failure: &str) {
        complain(format_args!(
            "{failure}; until there is, events wait and nothing new begins in the network"
        ));
    }
}

/// Complains if there are events that are not recorded.
fn complain_about(unrecorded: &Unrecorded) {
    if unrecorded.events > 0 {
        let Unrecorded { events, failure } = unrecorded;
        complain(format_args!("{events} events are not in the audit log: {failure}"));
    }
}
