//! Sandboxes around one command or one piece of code: made for it, recorded, and ended with it.

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
use bathy_runtime::supervisor::{Background, Journal, Observer, Subject, Unrecorded};
use bathy_spec::operator::Operator;
use bathy_spec::paths::Paths;
use bathy_spec::{Chosen, SandboxSpec, name};
use thiserror::Error;

use crate::reserve::{ReserveError, reserve};

/// How much of a refusal is recorded.
const MOST_REASON: usize = 500;

/// An ephemeral sandbox could not be made.
#[derive(Debug, Error)]
pub enum EphemeralError {
    /// There may be no more sandboxes.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// The audit log: what cannot be recorded is not done.
    #[error(transparent)]
    Audit(#[from] LogError),
    /// The host gives no random numbers.
    #[error("Cannot make an id for the sandbox")]
    Id(#[from] io::Error),
    #[error(transparent)]
    Launch(LaunchError),
    /// Its end is not recorded, either.
    #[error("{}. {}", .0, .1)]
    LaunchUnrecorded(LaunchError, String),
}

/// What an ephemeral sandbox is made of.
pub struct NewEphemeral<'a> {
    /// The command that makes it, as the audit log has it.
    pub program: &'static str,
    /// Its description, which has been checked.
    pub spec: &'a SandboxSpec,
    pub engine: Chosen,
    /// What every sandbox is made of.
    pub assets: &'a Assets,
    pub paths: &'a Paths,
    /// What the operator allows.
    pub operator: &'a Operator,
}

/// A running ephemeral sandbox. Dropping it ends it, without a record of that; see [`Self::end`].
#[derive(Debug)]
pub struct Ephemeral {
    sandbox: Sandbox,
    background: Background,
    id: String,
    tag: u64,
    /// It counts among the operator's sandboxes for as long as this.
    _reservation: Reservation,
}

impl Ephemeral {
    /// Records that a sandbox is made for one piece of work, if the operator allows one more, and starts it. `work` is what
    /// is recorded of the work, whose number it is given; `observer` sees everything that is recorded.
    ///
    /// # Errors
    /// When there may be no more sandboxes, when it cannot be recorded, or cannot be started.
    pub fn start(
        new: NewEphemeral<'_>,
        work: &dyn Fn(u64) -> What,
        observer: Box<dyn Observer>,
    ) -> Result<Self, EphemeralError> {
        let NewEphemeral { program, spec, engine, paths, operator, .. } = new;
        let reservation = reserve(paths, operator)?;
        let (id, tag) = (name::new_id()?, command::new_tag()?);
        let subject = Subject { program, id: id.clone(), name: None };
        let mut background = Background::new(Journal::new(audit_log(paths, operator)?, subject, observer));
        background.begin([sandbox_created(spec, engine, None), work(tag)])?;
        let started = launch(&id, new).and_then(|(sandbox, network)| {
            background.watch(network).map_err(LaunchError::Prepare)?;
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

    /// The number of its work.
    pub fn tag(&self) -> u64 {
        self.tag
    }

    /// How to speak to it.
    pub fn connection(&mut self) -> &mut Connection {
        &mut self.sandbox.connection
    }

    /// When its keeper was started: wall clock, nanoseconds since 1970.
    pub fn spawned_unix_ns(&self) -> u64 {
        self.sandbox.spawned_unix_ns
    }

    /// Why its keeper did not run, if it did not. For a keeper whose connection is closed.
    pub fn failure(&self) -> Option<String> {
        self.sandbox.failure()
    }

    /// Ends it, and records that. The sandbox has ended when this returns, whether or not that can be recorded: what is not
    /// is a sentence for the caller.
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
        cure: format!("bathy run --net {} --allow", spec.network.preset),
    };
    Sandbox::start(spec, resources)
}

/// What is not in the audit log, for the caller.
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
    /// How the work did.
    pub exit: String,
    /// Why the sandbox did.
    pub cause: String,
    /// Whether the work's time was up.
    pub timed_out: bool,
}

impl Ended {
    /// What is not known.
    pub fn unknown() -> Self {
        let cause = "its keeper was gone".to_owned();
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
                (format!("refused: {}", why.chars().take(MOST_REASON).collect::<String>()), done)
            }
            Err(InterpreterError::SandboxEnded { cause, .. }) => {
                ("the sandbox ended".to_owned(), cause.to_string())
            }
            Err(_) => ("unknown".to_owned(), "its keeper was gone, or its client".to_owned()),
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
