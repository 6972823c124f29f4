//! The audit record of an ephemeral sandbox: what a monitor records of a persistent one.

use std::error::Error;

use bathy_audit::{Actor, Event, Log, What};
use bathy_client::attach::Outcome;
use bathy_client::command;
use bathy_manager::reserve;
use bathy_protocol::WorkEnd;
use bathy_runtime::audit::audit_log;
use bathy_runtime::ephemeral::Reservation;
use bathy_runtime::launch::{Ephemeral, Sandbox};
use bathy_runtime::recorder::{Hooks, Recorder};
use bathy_spec::operator::Operator;
use bathy_spec::paths::Paths;
use bathy_spec::{Chosen, SandboxSpec, name};

use crate::ui::denials::Denials;
use crate::ui::{escape, output};

/// A sandbox in the record.
pub struct Record {
    log: Log,
    program: &'static str,
    id: String,
    tag: u64,
    denials: Denials,
    /// It counts among the operator's sandboxes for as long as this.
    _reservation: Reservation,
}

/// Who makes the sandbox, and what for.
pub struct Purpose<'a> {
    /// The name of the command.
    pub program: &'static str,
    /// What is to be recorded of the work; it is given the work's number.
    pub work: &'a dyn Fn(u64) -> What,
}

impl Record {
    /// Writes down that a sandbox is made for one piece of work, if the operator allows one more. What cannot be recorded
    /// is not done.
    pub fn begin(
        paths: &Paths,
        spec: &SandboxSpec,
        engine: Chosen,
        purpose: &Purpose<'_>,
    ) -> Result<Self, Box<dyn Error>> {
        let operator = Operator::load()?;
        let reservation = reserve(paths, &operator)?;
        let log = audit_log(paths, &operator)?;
        let record = Self {
            log,
            program: purpose.program,
            id: name::new_id()?,
            tag: command::new_tag()?,
            denials: Denials::default(),
            _reservation: reservation,
        };
        let created = What::SandboxCreated {
            image: spec.image.clone(),
            engine: engine.as_str().to_owned(),
            memory: spec.memory.0,
            disk: spec.disk.0,
            security: spec.security.as_str().to_owned(),
            processes: Some(spec.processes.into()),
            cpu: spec.cpu_quota.map(|quota| quota.to_string()),
            max_duration_ms: spec.max_duration.map(|limit| limit.as_millis()),
            idle_timeout_ms: None,
        };
        record.log.append(&record.events([created, (purpose.work)(record.tag)]))?;
        Ok(record)
    }

    /// Records how it ended. `outcome` is nothing if that is not known. The sandbox has ended whether or not that can be
    /// recorded: what is not recorded, and why, is a sentence for the caller.
    #[must_use]
    pub fn end(&self, outcome: Option<&Outcome>) -> Option<String> {
        let exit = match outcome {
            Some(Outcome::Exited(exit)) => command::exit_text(&WorkEnd::Exited(*exit)),
            Some(Outcome::Refused(refused)) => command::exit_text(&WorkEnd::Refused(refused.message.clone())),
            Some(Outcome::TimedOut) => "timeout".to_owned(),
            Some(Outcome::Interrupted) => "interrupted".to_owned(),
            Some(Outcome::BrokenPipe) => "its output was closed".to_owned(),
            _ => "the sandbox ended".to_owned(),
        };
        let cause = match outcome {
            Some(Outcome::SandboxEnded { cause, .. }) => cause.to_string(),
            Some(_) => "its command was done".to_owned(),
            None => "its keeper was gone".to_owned(),
        };
        self.end_as(exit, cause, matches!(outcome, Some(Outcome::TimedOut)))
    }

    /// As [`Self::end`]: how the work ended and why the sandbox did, as texts, and whether its time was up.
    #[must_use]
    pub fn end_as(&self, exit: String, cause: String, timed_out: bool) -> Option<String> {
        let mut events = Vec::new();
        if timed_out {
            events.push(What::limit_hit("duration", "the command was ended"));
        }
        events.push(What::ExecEnded { exec: command::tag_text(self.tag), job: None, exit });
        events.push(What::SandboxEnded { cause });
        events.push(What::SandboxRemoved);
        let error = self.log.append_last(&self.events(events)).err()?;
        Some(format!(
            "the end of the sandbox {} is not in the audit log: {}",
            self.id,
            bathy_protocol::chain(&error)
        ))
    }

    /// Starts the sandbox, and the record of its network.
    pub fn start(&self, sandbox: Ephemeral<'_>) -> Result<(Sandbox, Option<Recorder>), Box<dyn Error>> {
        let mut sandbox = sandbox.start()?;
        let network = self.network(&mut sandbox)?;
        Ok((sandbox, network))
    }

    /// Records what the sandbox's gateways report, until the sandbox is gone.
    fn network(&self, sandbox: &mut Sandbox) -> Result<Option<Recorder>, Box<dyn Error>> {
        let Some((network, gateway)) = sandbox.take_network() else { return Ok(None) };
        let (log, id) = (audit_log(&Paths::of_user()?, &Operator::load()?)?, self.id.clone());
        let (actor, denials) = (Actor::this_process(self.program), self.denials.clone());
        let event = move |what| {
            match &what {
                What::GatewayLost { restarted: true, .. } => {
                    output::note("the sandbox has a network again");
                }
                What::GatewayLost { reason, .. } => output::note(format_args!(
                    "the sandbox has lost its network: its gateway is gone: {}",
                    escape::text(reason)
                )),
                _ => {}
            }
            let event = Event::now(actor.clone(), what).in_sandbox(id.clone(), None);
            denials.record(&event);
            event
        };
        let waits = |failure: &str| {
            output::note(format_args!(
                "{failure}; until there is, nothing new begins in the sandbox's network"
            ));
        };
        let hooks = Hooks { event: Box::new(event), waits: Box::new(waits) };
        Ok(Some(Recorder::start(network, gateway, log, hooks)?))
    }

    /// What the sandbox was kept from, line by line.
    pub fn denials(&self) -> Vec<String> {
        self.denials.lines(&self.id)
    }

    /// The sandbox's id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The work's number.
    pub fn tag(&self) -> u64 {
        self.tag
    }

    fn events(&self, events: impl IntoIterator<Item = What>) -> Vec<Event> {
        let actor = Actor::this_process(self.program);
        let event = |what| Event::now(actor.clone(), what).in_sandbox(self.id.clone(), None);
        events.into_iter().map(event).collect()
    }
}

/// CallerStdio a sandbox, and waits until all that its gateway reported is recorded. What is not, as a sentence for the caller.
#[must_use]
pub fn end(sandbox: Sandbox, network: Option<Recorder>) -> Option<String> {
    if let Some(network) = &network {
        network.expect_end();
    }
    drop(sandbox);
    let unrecorded = network?.finish();
    let count = unrecorded.events;
    (count > 0).then(|| {
        let failure = unrecorded.failure;
        format!("{count} events of the sandbox's network are not in the audit log: {failure}")
    })
}
