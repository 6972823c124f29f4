//! Persistent sandboxes as every front end uses them.
//!
//! The store can be stale; whether a sandbox is running is decided by its life lock. [`Manager::find`] and
//! [`Manager::list`] combine the two.

mod code;
mod copy;
mod files;
mod force;
mod images;
mod lifecycle;
mod network;
mod orphans;
mod repl;
mod warnings;
mod work;

use std::path::PathBuf;
use std::{fmt, fs, io};

use bathy_audit::{Actor, Event, Log, LogError, What};
use bathy_client::connection::ConnectionError;
use bathy_client::interpreter::InterpreterError;
use bathy_client::transfer::{PackError, TransferError, UnpackError};
use bathy_jail::cgroup::Cgroup;
use bathy_protocol::unix_ns;
use bathy_registry::ClientError;
use bathy_registry::credentials::CredentialsError;
use bathy_runtime::assets::AssetsError;
use bathy_runtime::disk::DiskError;
use bathy_runtime::engine::EngineError;
use bathy_runtime::folder::Folder;
use bathy_runtime::images::ImagesError;
use bathy_spec::SpecError;
use bathy_spec::name::NameError;
use bathy_spec::operator::{Operator, OperatorError};
use bathy_spec::paths::{Paths, PathsError};
use serde::Serialize;
use thiserror::Error;

use crate::monitor::KEEPER_FAILED;
use crate::monitor::control::{self, ControlError};
use crate::store::{self, Change, Record, State, Store, StoreError};

pub use copy::CopyOptions;
pub use images::{ImageError, InspectedImage, LayerDigests, ListedImage};
pub use lifecycle::{NewSandbox, collect_ended};
pub use network::ChangedPolicy;
pub use orphans::Adopted;
pub use repl::{NewRepl, Repl, ReplOutcome, ReplStatus};
pub use work::{ExecRequest, PreparedExec};

/// The recorded cause for a sandbox whose processes ended without a report.
const KILLED: &str = "its processes were killed from outside";

/// An operation on a sandbox failed.
#[derive(Debug, Error)]
pub enum ManagerError {
    #[error(transparent)]
    Paths(#[from] PathsError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Name(#[from] NameError),
    #[error(transparent)]
    Operator(#[from] OperatorError),
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("Cannot write the audit log, so nothing was done")]
    Audit(#[from] LogError),
    /// Kernel, image or programs are missing.
    #[error(transparent)]
    Assets(#[from] AssetsError),
    #[error(transparent)]
    Image(Box<ImageError>),
    #[error(transparent)]
    Images(Box<ImagesError>),
    /// The registry does not accept a login.
    #[error(transparent)]
    Login(Box<ClientError>),
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// A file to copy in cannot be read.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// A file cannot be written at its destination.
    #[error(transparent)]
    Unpack(#[from] UnpackError),
    #[error(transparent)]
    Transfer(#[from] TransferError),
    #[error(transparent)]
    Interpreter(Box<InterpreterError>),
    /// A file of the sandbox cannot be used.
    #[error("Cannot use {0}{hint}", hint = full_disk(.1))]
    File(PathBuf, #[source] io::Error),
    /// The sandbox must not be running.
    #[error("The sandbox `{0}` is running. `bathy stop {0}` stops it, `bathy restart {0}` restarts it")]
    Running(String),
    /// A running sandbox is not removed without force.
    #[error("The sandbox `{0}` is running. `bathy rm -f {0}` ends it and removes it")]
    NotRemoved(String),
    /// The sandbox must be running.
    #[error("The sandbox `{name}` is {status}. Start it with `bathy start {name}`")]
    NotRunning { name: String, status: Status },
    #[error("The sandbox `{0}` is paused. Resume it with `bathy resume {0}`")]
    Paused(String),
    /// The sandbox is removed when it ends, so it cannot be restarted.
    #[error("The sandbox `{0}` is removed when it ends, so it cannot be restarted. Make a new one")]
    AutoRemove(String),
    /// The store has no record, but the files exist.
    #[error(
        "The sandbox `{0}` is not in the store, but its disk is there. `bathy adopt {0}` restores it, `bathy rm {0}` removes it"
    )]
    Orphaned(String),
    /// The store has a record, but the files are missing.
    #[error("The disk of the sandbox `{0}` is missing. `bathy rm {0}` removes what is left of it")]
    Lost(String),
    /// Another command is starting or removing it.
    #[error("The sandbox `{0}` is being changed by another command. Try again")]
    Busy(String),
    /// The monitor did not bring the sandbox up.
    #[error("The sandbox `{name}` could not be started: {reason}")]
    NotStarted {
        name: String,
        /// May hold text from the guest: escape it before printing.
        reason: String,
    },
    /// The running sandbox did not confirm its new policy.
    #[error(
        "The new policy of `{name}` is saved, but may not be in effect: the running sandbox did not confirm it. It takes effect when the gateway or the sandbox restarts; `bathy restart {name}` makes sure"
    )]
    NotObeyed { name: String, source: ControlError },
    /// The sandbox did not shut down when asked.
    #[error("The sandbox `{0}` does not end. `bathy kill {0}` ends it by force")]
    DoesNotEnd(String),
    /// The sandbox's processes could not be killed or not be identified.
    #[error("The processes of the sandbox `{0}` could not be killed. `bathy inspect {0}` shows their pids")]
    NotKilled(String),
    /// The user interrupted the command.
    #[error("Interrupted")]
    Interrupted,
}

impl ManagerError {
    /// Whether no sandbox has the name or id, as opposed to an error while looking.
    pub fn is_unknown_name(&self) -> bool {
        matches!(self, Self::Store(StoreError::Name(NameError::Unknown { .. })))
    }
}

/// A hint for an error that was caused by a full disk.
fn full_disk(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            ", because the host's disk is full. Nothing was changed. Free some space, or remove a sandbox with `bathy rm`"
        }
        _ => "",
    }
}

/// The present status of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It was never started.
    Created,
    Running,
    Paused,
    /// It ran and ended normally.
    Stopped,
    /// Its processes ended without a report.
    Dead,
    /// Its disk exists, but the store has no record.
    Orphaned,
    /// The store has a record, but the disk is missing.
    Lost,
    /// Its folder cannot be read.
    Unusable,
}

impl fmt::Display for Status {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(match self {
            Self::Created => "created",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
            Self::Dead => "dead",
            Self::Orphaned => "orphaned",
            Self::Lost => "lost",
            Self::Unusable => "unusable",
        })
    }
}

/// A sandbox's record and its present status.
#[derive(Clone, Debug, Serialize)]
pub struct Sandboxed {
    #[serde(flatten)]
    pub record: Record,
    pub status: Status,
}

impl Sandboxed {
    /// The name to show to users.
    pub fn name(&self) -> &str {
        self.record.display_name()
    }

    /// Whether its processes are running.
    pub fn is_alive(&self) -> bool {
        matches!(self.status, Status::Running | Status::Paused)
    }
}

/// The operations on persistent sandboxes.
pub struct Manager {
    paths: Paths,
    store: Store,
    audit: Log,
    operator: Operator,
    /// The operator's configuration could not be read: descriptions beside disks are not adopted.
    is_without_operator: bool,
    /// The name of the command, for the audit log.
    program: String,
    warnings: warnings::Warnings,
}

impl Manager {
    /// Opens the user's store and audit log. `program` is the actor in the audit log.
    pub fn open(program: &str) -> Result<Self, ManagerError> {
        Self::open_with(program, Operator::load()?)
    }

    /// Like [`Self::open`], for listing and ending sandboxes only. It succeeds even if the operator's file is
    /// invalid; then nothing can be started, entered or widened.
    pub fn open_to_end(program: &str) -> Result<Self, ManagerError> {
        match Operator::load() {
            Ok(operator) => Self::open_with(program, operator),
            Err(error) => {
                let mut manager = Self::open_with(program, Operator::default())?;
                manager.is_without_operator = true;
                let why = bathy_protocol::chain(&error);
                manager.warnings.add(format!("{why}. Until it can, nothing is started or entered"));
                Ok(manager)
            }
        }
    }

    fn open_with(program: &str, operator: Operator) -> Result<Self, ManagerError> {
        let paths = Paths::of_user()?;
        let store = Store::open(&paths.state)?;
        let audit = bathy_runtime::audit::audit_log(&paths, &operator)?;
        let warnings = warnings::Warnings::default();
        let program = program.to_owned();
        Ok(Self { paths, store, audit, operator, is_without_operator: false, program, warnings })
    }

    /// With its own state folder and no operator.
    #[cfg(test)]
    fn in_home(home: &std::path::Path) -> Self {
        let paths = Paths { state: home.join("state"), cache: home.join("cache") };
        let operator = Operator::default();
        let store = Store::open(&paths.state).unwrap();
        let audit = bathy_runtime::audit::audit_log(&paths, &operator).unwrap();
        let warnings = warnings::Warnings::default();
        let program = "test".to_owned();
        Self { paths, store, audit, operator, is_without_operator: false, program, warnings }
    }

    /// Like [`Self::open`], on behalf of agents: the operator's limits for agents apply.
    pub fn open_for_agents(program: &str) -> Result<Self, ManagerError> {
        Ok(Self::open(program)?.for_agents())
    }

    /// Applies the operator's limits for agents.
    #[must_use]
    pub fn for_agents(mut self) -> Self {
        self.operator = self.operator.for_agents();
        self
    }

    pub fn operator(&self) -> &Operator {
        &self.operator
    }

    /// Finds a sandbox by its name, its id or the beginning of its id.
    ///
    /// # Errors
    /// There is none, or the store has no record; see [`Self::find_any`].
    pub fn find(&mut self, wanted: &str) -> Result<Sandboxed, ManagerError> {
        let record = match self.store.find(wanted) {
            Err(unknown @ StoreError::Name(NameError::Unknown { .. })) => {
                return Err(match self.find_orphan(wanted)? {
                    Some(orphan) => ManagerError::Orphaned(orphan.name().to_owned()),
                    None => unknown.into(),
                });
            }
            found => found?,
        };
        match self.settle(record)? {
            Some(sandbox) => self.as_described(sandbox),
            // It was removed when it ended: looking again returns that error.
            None => Err(match self.store.find(wanted) {
                Ok(record) => ManagerError::Busy(record.display_name().to_owned()),
                Err(error) => error.into(),
            }),
        }
    }

    /// All sandboxes that have a record, the oldest first.
    pub fn list(&mut self) -> Result<Vec<Sandboxed>, ManagerError> {
        self.sweep();
        let records = self.store.list()?;
        let listed = |record: Record| match self.settle(record.clone()) {
            // One unusable folder must not hide the others.
            Err(error @ ManagerError::File(..)) => {
                self.warnings.add(bathy_protocol::chain(&error));
                Some(Ok(Sandboxed { record, status: Status::Unusable }))
            }
            settled => settled.transpose(),
        };
        records.into_iter().filter_map(listed).collect()
    }

    /// The sandbox's present state.
    pub fn refresh(&mut self, sandbox: &Sandboxed) -> Result<Sandboxed, ManagerError> {
        self.find(&sandbox.record.id)
    }

    /// The folder of a sandbox's files.
    pub fn folder(&self, sandbox: &Sandboxed) -> Folder {
        Folder::of(&self.paths, &sandbox.record.id)
    }

    /// Records an event of a sandbox.
    pub fn note(&self, sandbox: &Record, what: What) -> Result<(), ManagerError> {
        let event = Event::now(Actor::this_process(self.program.clone()), what);
        Ok(self.audit.append(&[event.in_sandbox(&sandbox.id, sandbox.name.clone())])?)
    }

    /// The audit log's folder.
    pub fn audit_folder(&self) -> PathBuf {
        bathy_runtime::audit::audit_folder(&self.paths)
    }

    /// Compares a record with the life lock and records what the monitor could not, such as that it was
    /// killed. Returns none for a sandbox that is removed when it ends.
    fn settle(&mut self, record: Record) -> Result<Option<Sandboxed>, ManagerError> {
        let folder = Folder::of(&self.paths, &record.id);
        let failed = |error| ManagerError::File(folder.path().to_owned(), error);
        let claims_life = matches!(record.state, State::Running | State::Paused);
        let alive = claims_life && store::alive(folder.path()).map_err(failed)?;
        let is_there = |folder: &Folder| folder.disk().try_exists().map_err(failed);
        if !alive && !is_there(&folder)? && !self.finish_making(&folder)? && !is_there(&folder)? {
            return Ok(Some(Sandboxed { record, status: Status::Lost }));
        }
        if claims_life && !alive {
            return self.record_end(record, &folder);
        }
        if !claims_life && let Some(run) = store::life::running(folder.path()).map_err(failed)? {
            // The store was restored from an older backup.
            return self.record_run(record, run);
        }
        let status = match record.state {
            State::Created => Status::Created,
            State::Running => Status::Running,
            State::Paused => Status::Paused,
            State::Stopped => status_of_ended(&record),
        };
        Ok(Some(Sandboxed { record, status }))
    }

    /// Corrects the record of a running sandbox that the store has as ended.
    fn record_run(
        &mut self,
        record: Record,
        run: store::life::Run,
    ) -> Result<Option<Sandboxed>, ManagerError> {
        let started = Change::Started { at_ns: run.started_ns, monitor_pid: run.monitor_pid };
        let changes = [started, Change::Keeper(run.keeper_pid)];
        let from = [State::Created, State::Stopped];
        match self.store.transition(&record.id, &from, State::Running, &changes) {
            Ok(_) | Err(StoreError::Full(_)) => {}
            Err(error) => return Err(error.into()),
        }
        let record = self.store.get(&record.id)?.unwrap_or(record);
        Ok(Some(Sandboxed { record, status: Status::Running }))
    }

    /// Records the end of a sandbox whose monitor could not: as the monitor wrote it to the `life` file, or
    /// that its processes were killed. On a full disk this fails silently and the next command tries again.
    fn record_end(&mut self, record: Record, folder: &Folder) -> Result<Option<Sandboxed>, ManagerError> {
        let life = match store::take_life(folder.path()) {
            Ok(Some(life)) => life,
            // Another process holds the lock: it is starting the sandbox or recording its end.
            Ok(None) => return Ok(Some(Sandboxed { record, status: Status::Dead })),
            Err(error) => return Err(ManagerError::File(folder.path().to_owned(), error)),
        };
        let known = store::life::read_ending(folder.path());
        let known =
            known.filter(|known| record.started_ns.is_none() || known.started_ns == record.started_ns);
        let is_recorded = known.is_some();
        let ending = known.unwrap_or_else(|| store::life::Ending {
            started_ns: record.started_ns,
            at_ns: unix_ns(),
            cause: KILLED.to_owned(),
            exit_code: None,
        });
        let ended =
            Change::Ended { at_ns: ending.at_ns, cause: ending.cause.clone(), exit_code: ending.exit_code };
        let from = [State::Running, State::Paused];
        let written =
            self.store.transition(&record.id, &from, State::Stopped, &[ended]).and_then(|written| {
                let how = if is_recorded { "the sandbox ended" } else { "the sandbox was killed" };
                self.store.end_all_jobs(&record.id, how)?;
                Ok(written)
            });
        let written = match written {
            Err(StoreError::Full(_)) => {
                let record = Record { end_cause: Some(ending.cause), exit_code: ending.exit_code, ..record };
                return Ok(Some(Sandboxed { status: status_of_ended(&record), record }));
            }
            written => written?,
        };
        if written {
            let _ = Cgroup::remove_stale(&record.id);
            let _ = fs::remove_file(folder.path().join(control::SOCKET));
            if !is_recorded {
                self.note_last(&record, What::SandboxEnded { cause: ending.cause });
            }
            if record.spec.auto_remove {
                self.remove_files_and_record(&record, folder)?;
                drop(life);
                return Ok(None);
            }
        }
        let record = self.store.get(&record.id)?.unwrap_or(record);
        Ok(Some(Sandboxed { status: status_of_ended(&record), record }))
    }
}

/// The status of a sandbox that has ended: dead if its processes were killed from outside or failed.
fn status_of_ended(record: &Record) -> Status {
    let is_dead = |cause: &str| cause == KILLED || cause.starts_with(KEEPER_FAILED);
    if record.end_cause.as_deref().is_some_and(is_dead) { Status::Dead } else { Status::Stopped }
}
