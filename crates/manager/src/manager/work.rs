//! Commands, jobs and resource usage of a running sandbox.

use std::fs;
use std::time::{Duration, Instant};

use bathy_audit::What;
use bathy_client::command::{self, ExecOptions};
use bathy_client::connection::{Connection, ConnectionError};
use bathy_client::stream::{Stream, StreamEvent};
use bathy_image::ImageConfig;
use bathy_protocol::{Exec, Request, Restriction};
use bathy_spec::{CommandSpec, Security};

use super::{Manager, ManagerError, Sandboxed, Status};
use crate::monitor::control::{self, ControlError, FromMonitor, ToMonitor};
use crate::stats::Stats;
use crate::store::Job;

/// How long a monitor may take to answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The same, if it first has to bring the guest's memory back from disk.
const WAKING_TIMEOUT: Duration = Duration::from_secs(120);
/// The stream of a request that is not a command.
const STREAM: u32 = 1;

/// A command to run in a sandbox.
#[derive(Clone, Debug)]
pub struct ExecRequest<'a> {
    pub command: &'a CommandSpec,
    /// The restriction is what was asked for; the operator's floor and the sandbox's own restriction apply as
    /// well.
    pub options: ExecOptions,
    /// Whether it becomes a job, which outlives its client.
    pub job: bool,
}

/// A recorded command that is ready to be sent.
#[derive(Clone, Debug)]
pub struct PreparedExec {
    /// The request for the agent.
    pub exec: Exec,
    /// The command's tag in the audit log.
    pub tag: u64,
    pub job: Option<u32>,
}

impl Manager {
    /// Connects to a running sandbox. One that is paused because it was idle is resumed.
    pub fn connect(&mut self, sandbox: &Sandboxed) -> Result<Connection, ManagerError> {
        match sandbox.status {
            Status::Running => {}
            Status::Paused if sandbox.record.idle_paused => {}
            Status::Paused => return Err(ManagerError::Paused(sandbox.name().to_owned())),
            Status::Lost => return Err(ManagerError::Lost(sandbox.name().to_owned())),
            Status::Created | Status::Stopped | Status::Dead | Status::Orphaned | Status::Unusable => {
                let (name, status) = (sandbox.name().to_owned(), sandbox.status);
                return Err(ManagerError::NotRunning { name, status });
            }
        }
        let folder = self.folder(sandbox);
        // It may have been paused since its status was read.
        let timeout = if sandbox.record.spec.pause_idle.is_some() { WAKING_TIMEOUT } else { TIMEOUT };
        match control::ask(folder.path(), &ToMonitor::Connect, timeout) {
            Ok((FromMonitor::Connected, socket)) => Connection::new(socket)
                .map_err(|error| ManagerError::Connection(ConnectionError::Socket(error))),
            Ok(_) => Err(ControlError::Unexpected.into()),
            Err(error) => Err(self.not_answered(sandbox, error)),
        }
    }

    /// The image's defaults for commands.
    pub fn image_config(&self, sandbox: &Sandboxed) -> Result<ImageConfig, ManagerError> {
        let path = self.folder(sandbox).image_config();
        let read = || Ok(serde_json::from_slice(&fs::read(&path)?)?);
        read().map_err(|error| ManagerError::File(path.clone(), error))
    }

    /// Records a command and builds its request. Its end is recorded by the sandbox's monitor.
    pub fn begin_exec(
        &mut self,
        sandbox: &Sandboxed,
        request: &ExecRequest<'_>,
    ) -> Result<PreparedExec, ManagerError> {
        let mut options = request.options;
        options.restricted = Restriction::stricter(options.restricted, self.floor(sandbox));
        let image = self.image_config(sandbox)?;
        let exec = command::request(request.command, &sandbox.record.spec, &image, options);
        let tag = command::new_tag().map_err(|error| ManagerError::File("/dev/urandom".into(), error))?;
        let (id, text) = (&sandbox.record.id, command::tag_text(tag));
        let job = if request.job {
            Some(self.store.next_job(id, &exec.argv, Some(&exec.user), &text)?)
        } else {
            None
        };
        if let Err(error) = self.note(&sandbox.record, command::exec_started(&exec, tag, job)) {
            if let Some(job) = job {
                // The first error is the one to report.
                let _ = self.store.end_job(id, job, "it was not started");
            }
            return Err(error);
        }
        Ok(PreparedExec { exec, tag, job })
    }

    /// The operator's minimum restriction for every command.
    pub(super) fn floor(&self, sandbox: &Sandboxed) -> Option<Restriction> {
        let writable_root = sandbox.record.spec.writable_root;
        (self.operator.security() == Security::Restricted).then_some(Restriction { writable_root })
    }

    /// A sandbox's jobs; the main command is job 0.
    pub fn jobs(&mut self, sandbox: &Sandboxed) -> Result<Vec<Job>, ManagerError> {
        Ok(self.store.jobs(&sandbox.record.id)?)
    }

    /// Sends a signal to a job. Returns a refusal if there is no such job.
    pub fn signal_job(
        &mut self,
        sandbox: &Sandboxed,
        job: u32,
        signal: i32,
    ) -> Result<Result<(), String>, ManagerError> {
        let mut connection = self.connect(sandbox)?;
        let request = Request::SignalJob { job, signal };
        match answer(Stream::open(&mut connection, STREAM, &request)?)? {
            StreamEvent::Refused(refused) => Ok(Err(refused.message)),
            _ => {
                self.note_last(&sandbox.record, What::Killed { target: format!("job {job}"), signal });
                Ok(Ok(()))
            }
        }
    }

    /// The resource usage of a running sandbox.
    pub fn usage(&mut self, sandbox: &Sandboxed) -> Result<Stats, ManagerError> {
        let folder = self.folder(sandbox);
        match control::ask(folder.path(), &ToMonitor::Usage, TIMEOUT) {
            Ok((FromMonitor::Usage(usage), _)) => Ok(Stats::gather(&sandbox.record, &usage)),
            Ok(_) => Err(ControlError::Unexpected.into()),
            Err(error) => Err(self.not_answered(sandbox, error)),
        }
    }
}

/// The keeper's answer to a single request.
fn answer(mut stream: Stream<'_>) -> Result<StreamEvent, ConnectionError> {
    let deadline = Instant::now() + TIMEOUT;
    while Instant::now() < deadline {
        if !stream.wait(true, [], Some(deadline))?.arrived {
            continue;
        }
        for event in stream.receive()? {
            match event {
                StreamEvent::SandboxEnded { .. } => return Err(ConnectionError::KeeperExited),
                StreamEvent::Ready(_) | StreamEvent::Warning(_) => {}
                answer => return Ok(answer),
            }
        }
    }
    Err(ConnectionError::NoAnswer(TIMEOUT.as_secs()))
}
