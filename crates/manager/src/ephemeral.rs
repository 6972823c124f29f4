//! Ephemeral sandboxes: created for one command or one cell, recorded, and ended with it.

use std::io;

use bathy_audit::{LogError, What};
use bathy_client::attach::Outcome;
use bathy_client::command;
use bathy_client::connection::Connection;
use bathy_client::interpreter::{CellEnd, CellOutcome, InterpreterError, Interrupter};
use bathy_protocol::WorkEnd;
use bathy_runtime::assets::Assets;
use bathy_runtime::audit::{audit_log, sandbox_created};
use bathy_runtime::disk;
use bathy_runtime::ephemeral::Reservation;
use bathy_runtime::launch::{LaunchError, Resources, Sandbox};
use bathy_runtime::resource_group::ResourceGroup;
use bathy_runtime::supervisor::network::SandboxGateways;
use bathy_runtime::supervisor::{BackgroundSupervisor, Journal, Observer, Subject, Unrecorded};
use bathy_spec::operator::Operator;
use bathy_spec::paths::Paths;
use bathy_spec::{Chosen, SandboxSpec, name};
use thiserror::Error;

use crate::reserve::{ReserveError, reserve};

/// The most characters of a refusal that are recorded.
const MAX_REASON: usize = 500;

/// An ephemeral sandbox could not be started.
#[derive(Debug, Error)]
pub enum EphemeralError {
    /// The operator's limit on sandboxes is reached.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// The audit log cannot be written, so nothing was started.
    #[error(transparent)]
    Audit(#[from] LogError),
    /// The host provides no random numbers.
    #[error("Cannot make an id for the sandbox")]
    Id(#[from] io::Error),
    #[error(transparent)]
    Launch(LaunchError),
    /// The launch failed, and its end could not be recorded either.
    #[error("{}. {}", .0, .1)]
    LaunchUnrecorded(LaunchError, String),
}

/// The inputs of an ephemeral sandbox.
pub struct NewEphemeral<'a> {
    /// The command that creates the sandbox, as the audit log names it.
    pub program: &'static str,
    /// The specification, already validated.
    pub spec: &'a SandboxSpec,
    pub engine: Chosen,
    /// Kernel, initramfs, root image and programs.
    pub assets: &'a Assets,
    pub paths: &'a Paths,
    pub operator: &'a Operator,
}

/// A running ephemeral sandbox. Dropping it ends it without a record; see [`Self::end`].
#[derive(Debug)]
pub struct Ephemeral {
    sandbox: Sandbox,
    background: BackgroundSupervisor,
    id: String,
    tag: u64,
    /// Counts this sandbox towards the operator's limit until it is dropped.
    _reservation: Reservation,
}

impl Ephemeral {
    /// Records and starts an ephemeral sandbox, if the operator's limit allows one more. `work` makes the
    /// event of the work from its tag; `observer` sees every recorded event.
    ///
    /// # Errors
    /// The limit is reached, the start cannot be recorded, or the sandbox cannot be started.
    pub fn start(
        new: NewEphemeral<'_>,
        work: &dyn Fn(u64) -> What,
        observer: Box<dyn Observer>,
    ) -> Result<Self, EphemeralError> {
        let NewEphemeral { program, spec, engine, paths, operator, .. } = new;
        let reservation = reserve(paths, operator)?;
        let (id, tag) = (name::new_id()?, command::new_tag()?);
        let subject = Subject { program, id: id.clone(), name: None };
        let mut background =
            BackgroundSupervisor::new(Journal::new(audit_log(paths, operator)?, subject, observer));
        background.begin([sandbox_created(spec, engine, None), work(tag)])?;
        let started = launch(&id, new).and_then(|(sandbox, network)| {
            background.watch(network, sandbox.memory_watch()).map_err(LaunchError::Prepare)?;
            Ok(sandbox)
        });
        match started {
            Ok(sandbox) => Ok(Self { sandbox, background, id, tag, _reservation: reservation }),
            Err(error) => {
                let cause = format!("it could not be started: {}", bathy_protocol::chain(&error));
                let ended = Ended { exit: "not started".to_owned(), cause, timed_out: false };
                Err(match unrecorded(&id, background.finish(ended.events(tag))) {
                    None => EphemeralError::Launch(error),
                    Some(sentence) => EphemeralError::LaunchUnrecorded(error, sentence),
                })
            }
        }
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    /// The tag of the sandbox's work, as in the audit log.
    pub fn tag(&self) -> u64 {
        self.tag
    }

    /// The connection to the sandbox's keeper.
    pub fn connection(&mut self) -> &mut Connection {
        &mut self.sandbox.connection
    }

    /// When the keeper was started, in nanoseconds since 1970.
    pub fn spawned_unix_ns(&self) -> u64 {
        self.sandbox.spawned_unix_ns
    }

    /// A sentence about why the sandbox was ended or its keeper failed, once its connection is closed. None
    /// for any other end.
    pub fn failure(&self) -> Option<String> {
        if let Some(excess) = self.background.excess() {
            return Some(format!("The sandbox was ended: {excess}"));
        }
        Some(format!("The sandbox's keeper could not {}", self.sandbox.failure()?))
    }

    /// Why the sandbox ends if its work failed with `error`: because of its memory, because its keeper
    /// failed, or for that reason.
    pub fn cause_of(&self, error: &dyn std::error::Error) -> String {
        if let Some(excess) = self.background.excess() {
            return excess.to_owned();
        }
        match self.sandbox.exited_keepers_end() {
            Some(end) => format!("its keeper {end}"),
            None => bathy_protocol::chain(error),
        }
    }

    /// Ends the sandbox and records that. The sandbox has ended when this returns, even if the end cannot be
    /// recorded. In that case the returned sentence is for the user.
    #[must_use]
    pub fn end(self, ended: Ended) -> Option<String> {
        let Self { sandbox, background, id, tag, _reservation } = self;
        background.expect_end();
        drop(sandbox);
        unrecorded(&id, background.finish(ended.events(tag)))
    }
}

fn launch(id: &str, new: NewEphemeral<'_>) -> Result<(Sandbox, Option<SandboxGateways>), LaunchError> {
    let NewEphemeral { spec, engine, assets, paths, operator, .. } = new;
    let resources = Resources {
        engine,
        assets,
        paths,
        disk: disk::make(&paths.cache, &paths.state, spec.disk)?,
        persistent: None,
        group: ResourceGroup::ephemeral(id, spec, engine, &paths.state)?,
        ceilings: operator.network(),
        allow_command: format!("bathy run --net {} --allow", spec.network.preset),
    };
    Sandbox::start(spec, resources)
}

/// A sentence about events that are not in the audit log.
fn unrecorded(id: &str, unrecorded: Unrecorded) -> Option<String> {
    let Unrecorded { events, failure } = unrecorded;
    match events {
        0 => None,
        1 => Some(format!("1 event of the sandbox {id} is not in the audit log: {failure}")),
        _ => Some(format!("{events} events of the sandbox {id} are not in the audit log: {failure}")),
    }
}

/// How an ephemeral sandbox and its work ended, for the audit log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// How the work ended.
    pub exit: String,
    /// Why the sandbox ended.
    pub cause: String,
    /// Whether the work hit its time limit.
    pub timed_out: bool,
}

impl Ended {
    /// The outcome when only the sandbox's end is known, with its cause.
    pub fn without_result(cause: String) -> Self {
        Self { exit: "the sandbox ended".to_owned(), cause, timed_out: false }
    }

    pub fn of_command(outcome: &Outcome) -> Self {
        let exit = match outcome {
            Outcome::Exited(exit) => command::exit_text(&WorkEnd::Exited(*exit)),
            Outcome::Refused(refused) => command::exit_text(&WorkEnd::Refused(refused.message.clone())),
            Outcome::TimedOut => "timeout".to_owned(),
            Outcome::Interrupted => "interrupted".to_owned(),
            Outcome::BrokenPipe => "its output was closed".to_owned(),
            _ => "the sandbox ended".to_owned(),
        };
        let cause = match outcome {
            Outcome::SandboxEnded { cause, .. } => cause.to_string(),
            _ => "its command was done".to_owned(),
        };
        Self { exit, cause, timed_out: matches!(outcome, Outcome::TimedOut) }
    }

    pub fn of_cell(outcome: &Result<CellOutcome, InterpreterError>) -> Self {
        let done = "its code was done".to_owned();
        let (exit, cause) = match outcome {
            Ok(outcome) => (cell_exit(outcome), done),
            Err(InterpreterError::Refused(why)) => {
                (format!("refused: {}", why.chars().take(MAX_REASON).collect::<String>()), done)
            }
            Err(InterpreterError::SandboxEnded { cause, .. }) => {
                ("the sandbox ended".to_owned(), cause.to_string())
            }
            Err(_) => {
                ("unknown".to_owned(), "its keeper exited, or its client closed the connection".to_owned())
            }
        };
        let timeout = Some(Interrupter::Timeout);
        let timed_out = outcome.as_ref().is_ok_and(|outcome| outcome.ended.interrupted == timeout);
        Self { exit, cause, timed_out }
    }

    fn events(self, tag: u64) -> Vec<What> {
        let Self { exit, cause, timed_out } = self;
        let limit = timed_out.then(|| What::limit_hit("duration", "the command was ended"));
        let work = What::ExecEnded { exec: command::tag_text(tag), job: None, exit };
        limit.into_iter().chain([work, What::SandboxEnded { cause }, What::SandboxRemoved]).collect()
    }
}

fn cell_exit(outcome: &CellOutcome) -> String {
    match (&outcome.ended.end, outcome.ended.interrupted) {
        (_, Some(Interrupter::Timeout)) => "timeout".to_owned(),
        (_, Some(Interrupter::Asked)) => "interrupted".to_owned(),
        (CellEnd::Exited(exit), None) => command::exit_text(&WorkEnd::Exited(*exit)),
        (CellEnd::Finished(_), None) => format!("code {}", u8::from(!outcome.ok)),
        (CellEnd::OutOfMemory, None) => "out of memory".to_owned(),
        _ => "its interpreter ended".to_owned(),
    }
}
