//! Sandboxes that are kept: what every face of the product does with them.
//!
//! The store says what was last written down, the life lock says what is true now; [`Manager::find`] and
//! [`Manager::list`] bring the two together.

mod code;
mod copy;
mod files;
mod force;
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
use bathy_runtime::assets::AssetsError;
use bathy_runtime::disk::DiskError;
use bathy_runtime::engine::EngineError;
use bathy_runtime::folder::Folder;
use bathy_spec::SpecError;
use bathy_spec::name::NameError;
use bathy_spec::operator::{Operator, OperatorError};
use bathy_spec::paths::{Paths, PathsError};
use serde::Serialize;
use thiserror::Error;

use crate::monitor::KEEPER_FAILED;
use crate::monitor::control::{self, ControlError};
use crate::store::{self, Change, Record, State, Store, StoreError};

pub use code::BegunCell;
pub use copy::CopyOptions;
pub use lifecycle::{NewSandbox, collect_ended};
pub use network::ChangedPolicy;
pub use orphans::Adopted;
pub use repl::{NewRepl, Repl, ReplOutcome, ReplStatus};
pub use work::{Begun, ExecRequest};

/// The cause that is written down for a sandbox whose processes are gone without a word.
const KILLED: &str = "its processes were killed from outside";

/// Something could not be done with a sandbox.
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
    /// What it is made of.
    #[error(transparent)]
    Assets(#[from] AssetsError),
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error(transparent)]
    Door(#[from] ControlError),
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// What is to be copied in.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// Where it is to be copied to.
    #[error(transparent)]
    Unpack(#[from] UnpackError),
    #[error(transparent)]
    Transfer(#[from] TransferError),
    #[error(transparent)]
    Interpreter(Box<InterpreterError>),
    /// A file of the sandbox.
    #[error("Cannot use {0}{hint}", hint = full_disk(.1))]
    File(PathBuf, #[source] io::Error),
    /// It runs, and must not.
    #[error("The sandbox `{0}` is running. `bathy stop {0}` stops it, `bathy restart {0}` starts it anew")]
    Running(String),
    /// It runs, and must not be removed.
    #[error("The sandbox `{0}` is running. `bathy rm -f {0}` ends it and removes it")]
    NotRemoved(String),
    /// It does not run, and must.
    #[error("The sandbox `{name}` is {status}. Start it with `bathy start {name}`")]
    NotRunning {
        name: String,
        /// What it is instead.
        status: Status,
    },
    #[error("The sandbox `{0}` is paused. Let it go on with `bathy resume {0}`")]
    Paused(String),
    /// It would be gone before it could be started again.
    #[error("The sandbox `{0}` is removed when it ends, so it cannot be restarted. Make a new one")]
    GoneWhenEnded(String),
    /// The store does not know it, and its files are there.
    #[error(
        "The sandbox `{0}` is not in the store, but its disk is there. `bathy adopt {0}` takes it back, `bathy rm {0}` removes it"
    )]
    Orphaned(String),
    /// The store knows it, and its files are not there.
    #[error("The disk of the sandbox `{0}` is not there any more. `bathy rm {0}` removes what is left of it")]
    Lost(String),
    /// Somebody else is starting or removing it.
    #[error("The sandbox `{0}` is being changed by another command. Try again")]
    Busy(String),
    /// Its monitor did not get it to run.
    #[error("The sandbox `{name}` could not be started: {reason}")]
    NotStarted {
        name: String,
        /// Why. May hold the guest's text: escape before showing.
        reason: String,
    },
    /// Its policy is another one, and it does not keep to it yet.
    #[error(
        "The new policy of `{name}` is written down, but may not hold: the running sandbox did not confirm it. It holds as soon as the sandbox has another gateway, or is started again; `bathy restart {name}` makes sure"
    )]
    NotObeyed {
        name: String,
        source: ControlError,
    },
    /// It does not end when it is asked to.
    #[error("The sandbox `{0}` does not end. `bathy kill {0}` ends it by force")]
    DoesNotEnd(String),
    /// Its processes could not be killed, or not be told from others.
    #[error("The processes of the sandbox `{0}` could not be ended. `bathy inspect {0}` has their numbers")]
    NotKilled(String),
    /// The caller has had enough.
    #[error("Interrupted")]
    Interrupted,
}

/// What to do about a file that the disk has no room for.
fn full_disk(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            ", because the host's disk is full. Nothing was changed. Free some space, or remove a sandbox with `bathy rm`"
        }
        _ => "",
    }
}

/// What a sandbox is right now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It has never run.
    Created,
    Running,
    Paused,
    /// It ended as it should.
    Stopped,
    /// Its processes are gone, and nobody said why.
    Dead,
    /// Its disk is there, and the store does not know it.
    Orphaned,
    /// The store knows it, and its disk is not there.
    Lost,
    /// Its folder cannot be looked into.
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

/// A sandbox, and what it is.
#[derive(Clone, Debug, Serialize)]
pub struct Sandboxed {
    /// What is written down.
    #[serde(flatten)]
    pub record: Record,
    pub status: Status,
}

impl Sandboxed {
    /// What people call it.
    pub fn name(&self) -> &str {
        self.record.display_name()
    }

    /// Whether its processes are there.
    pub fn is_alive(&self) -> bool {
        matches!(self.status, Status::Running | Status::Paused)
    }
}

/// Everything that is needed to work with kept sandboxes.
pub struct Manager {
    paths: Paths,
    store: Store,
    audit: Log,
    operator: Operator,
    /// The operator's settings are not known: settings that stand beside a disk are not taken over.
    is_without_operator: bool,
    /// Who asks: the name of the command.
    program: String,
    warnings: warnings::Warnings,
}

impl Manager {
    /// Opens the user's store and audit log. `program` is who asks, for the audit log.
    pub fn open(program: &str) -> Result<Self, ManagerError> {
        Self::open_with(program, Operator::load()?)
    }

    /// As [`Self::open`], to look at sandboxes and to end them, which an operator's file with a mistake in it must not prevent.
    /// Nothing may be started, entered or widened.
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

    /// With a state folder of its own, and no operator.
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

    /// As [`Self::open`], on behalf of agents: what they ask is held to the operator's limits for them.
    pub fn open_for_agents(program: &str) -> Result<Self, ManagerError> {
        Ok(Self::open(program)?.for_agents())
    }

    /// The same, on behalf of agents.
    #[must_use]
    pub fn for_agents(mut self) -> Self {
        self.operator = self.operator.for_agents();
        self
    }

    pub fn operator(&self) -> &Operator {
        &self.operator
    }

    /// The sandbox that somebody means by a name, an id, or the beginning of an id.
    ///
    /// # Errors
    /// When there is none, or the store does not know it: see [`Self::find_any`].
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
            // It has gone the way it was meant to: looking again says so.
            None => Err(match self.store.find(wanted) {
                Ok(record) => ManagerError::Busy(record.display_name().to_owned()),
                Err(error) => error.into(),
            }),
        }
    }

    /// All sandboxes that the store knows, the oldest first.
    pub fn list(&mut self) -> Result<Vec<Sandboxed>, ManagerError> {
        self.sweep();
        let records = self.store.list()?;
        let listed = |record: Record| match self.settle(record.clone()) {
            // One folder that cannot be used is no reason not to list the others.
            Err(error @ ManagerError::File(..)) => {
                self.warnings.add(bathy_protocol::chain(&error));
                Some(Ok(Sandboxed { record, status: Status::Unusable }))
            }
            settled => settled.transpose(),
        };
        records.into_iter().filter_map(listed).collect()
    }

    /// The same sandbox, as it is now.
    pub fn refresh(&mut self, sandbox: &Sandboxed) -> Result<Sandboxed, ManagerError> {
        self.find(&sandbox.record.id)
    }

    /// Where a sandbox's files are.
    pub fn folder(&self, sandbox: &Sandboxed) -> Folder {
        Folder::of(&self.paths, &sandbox.record.id)
    }

    /// Writes to the audit log on behalf of the caller.
    pub fn note(&self, sandbox: &Record, what: What) -> Result<(), ManagerError> {
        let event = Event::now(Actor::this_process(self.program.clone()), what);
        Ok(self.audit.append(&[event.in_sandbox(&sandbox.id, sandbox.name.clone())])?)
    }

    /// The audit log's folder.
    pub fn audit_folder(&self) -> PathBuf {
        bathy_runtime::audit::audit_folder(&self.paths)
    }

    /// Compares what is written with what is true, and writes down what nobody else could: that its monitor was killed.
    /// None is left of one that is to be removed when it ends.
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
            // The store is an older one that was brought back under it.
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

    /// Writes down that a sandbox runs which the store takes for one that does not.
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

    /// Writes down the end of a sandbox whose monitor could not: as the monitor left it beside the disk, or that its processes
    /// were killed. On a full disk sandboxes can be looked at all the same: the next command writes it down.
    fn record_end(&mut self, record: Record, folder: &Folder) -> Result<Option<Sandboxed>, ManagerError> {
        let life = match store::take_life(folder.path()) {
            Ok(Some(life)) => life,
            // The one who holds the lock is starting it, or writes down its end as well.
            Ok(None) => return Ok(Some(Sandboxed { record, status: Status::Dead })),
            Err(error) => return Err(ManagerError::File(folder.path().to_owned(), error)),
        };
        let known = store::life::read_ending(folder.path());
        let known =
            known.filter(|known| record.started_ns.is_none() || known.started_ns == record.started_ns);
        let told = known.is_some();
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
                let how = if told { "the sandbox ended" } else { "the sandbox was killed" };
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
            if !told {
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

/// What a sandbox is that has ended: dead, if its processes were killed from outside or failed.
fn status_of_ended(record: &Record) -> Status {
    let is_dead = |cause: &str| cause == KILLED || cause.starts_with(KEEPER_FAILED);
    if record.end_cause.as_deref().is_some_and(is_dead) { Status::Dead } else { Status::Stopped }
}
