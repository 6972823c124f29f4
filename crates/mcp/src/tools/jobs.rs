//! Commands that outlive the call that starts them.

use bathy_client::attach::{Attach, AttachRequest, Outcome, Sink, Stdio};
use bathy_client::command::ExecOptions;
use bathy_logs::{CONSOLE, Reader};
use bathy_manager::ExecRequest;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::arguments::SandboxId;
use super::command::Command;
use super::{READS, RUNS, SETTLES, Spec};
use crate::answer::Answer;
use crate::call::Call;
use crate::error::ToolError;
use crate::outputs::ONE;
use crate::shown::{Shelf, object};
use crate::text;

/// The tools of the set `jobs`.
pub fn tools() -> Vec<Spec> {
    vec![job_start(), job_list(), job_logs(), job_kill()]
}

#[derive(Deserialize, JsonSchema)]
struct Which {
    sandbox_id: SandboxId,
    /// Its number, from job_start or job_list
    #[schemars(range(max = u32::MAX))]
    job: u32,
}

fn job_start() -> Spec {
    Spec::new(
        "job_start",
        "Start a job",
        RUNS,
        "Starts a command in a sandbox that goes on after the call, such as a server, and returns its job number. Its output is \
         kept (the newest 16 MiB of a sandbox) and read with job_logs; job_kill ends it. It ends with its sandbox, and does \
         not by itself keep an idle sandbox from being removed.",
        start,
    )
}

#[derive(Deserialize, JsonSchema)]
struct Start {
    sandbox_id: SandboxId,
    #[serde(flatten)]
    command: Command,
}

fn start(call: &Call, given: Start) -> Result<Answer, ToolError> {
    let command = given.command.spec(None)?;
    let sandbox = call.running_sandbox(&given.sandbox_id)?;
    let (mut connection, begun) = call.manager(|manager| {
        let connection = manager.connect(&sandbox)?;
        let request = ExecRequest { command: &command, options: ExecOptions::default(), job: true };
        Ok((connection, manager.begin_exec(&sandbox, &request)?))
    })?;
    let stdio = Stdio {
        stdin: None,
        stdout: Sink::memory(0),
        stderr: Sink::memory(0),
        interrupt: Some(call.cancel.fd()),
        terminal: None,
        detach_keys: false,
    };
    let what = AttachRequest::Start { exec: begun.exec, tag: begun.tag, job: begun.job, leave: true };
    let finished = Attach::start(&mut connection, what, None, stdio).and_then(Attach::run);
    let finished = finished.map_err(|error| ToolError::Failed(bathy_protocol::chain(&error)))?;
    match finished.outcome {
        // A job that has ended already had started.
        Outcome::Detached | Outcome::Exited(_) => {}
        Outcome::Interrupted => return Err(ToolError::Cancelled),
        Outcome::Refused(refused) => {
            return Err(ToolError::Failed(format!("The job was not started: {}", refused.message)));
        }
        _ => return Err(ToolError::failed("The sandbox did not start the job.")),
    }
    let number = begun.job.unwrap_or(0);
    let text = format!("Job {number} has started. Read its output with job_logs.");
    Ok(Answer::new(json!({ "sandbox_id": sandbox.record.id, "job": number }), text))
}

fn job_list() -> Spec {
    Spec::new(
        "job_list",
        "List jobs",
        READS,
        "Lists the jobs of a sandbox: their numbers, command lines and whether and how each has ended. Changes nothing. Job 0 is \
         the sandbox's main command, if it has one.",
        list,
    )
}

#[derive(Deserialize, JsonSchema)]
struct All {
    sandbox_id: SandboxId,
}

fn list(call: &Call, given: All) -> Result<Answer, ToolError> {
    let sandbox = call.sandbox(&given.sandbox_id)?;
    call.remember(&sandbox);
    let jobs = call.manager(|manager| Ok(manager.jobs(&sandbox)?))?;
    let list: Vec<_> = jobs
        .iter()
        .map(|job| {
            let mut value = object(json!({
                "job": job.number,
                "command": text::line(&job.argv.join(" "), 400),
                "running": job.exit.is_none(),
            }));
            value.extend(job.exit.as_ref().map(|exit| ("exit".to_owned(), text::line(exit, 200).into())));
            value
        })
        .collect();
    Ok(Answer::json(json!({ "jobs": list })))
}

fn job_logs() -> Spec {
    Spec::new(
        "job_logs",
        "Read a job's output",
        READS,
        "Reads what a job has written to standard output and standard error so far, the newest 4 MiB at most. Changes nothing \
         and does not wait. read_output reads the rest of what is too long.",
        logs,
    )
}

fn logs(call: &Call, given: Which) -> Result<Answer, ToolError> {
    let sandbox = call.sandbox(&given.sandbox_id)?;
    call.remember(&sandbox);
    let (job, path) = call.manager(|manager| {
        let jobs = manager.jobs(&sandbox)?;
        let job = jobs.into_iter().find(|job| job.number == given.job);
        Ok((job, manager.folder(&sandbox).output_log()))
    })?;
    let job =
        job.ok_or_else(|| ToolError::Failed(format!("There is no job {}. job_list lists them.", given.job)))?;
    let failed = |error: bathy_logs::ReaderError| ToolError::Failed(bathy_protocol::chain(&error));
    let (mut output, mut total) = (Vec::new(), 0);
    if path.exists() {
        let mut reader = Reader::open(&path).and_then(Reader::until_now).map_err(failed)?;
        while let Some(record) = reader.next().map_err(failed)? {
            if record.meta.source == given.job && record.meta.channel != CONSOLE {
                total += u64::try_from(record.bytes.len()).unwrap_or(u64::MAX);
                output.extend_from_slice(&record.bytes);
                // The newest is what is wanted.
                if output.len() > 2 * ONE {
                    output.drain(..output.len() - ONE);
                }
            }
        }
    }
    output.drain(..output.len().saturating_sub(ONE));
    let mut shelf = Shelf::new(call, "job_logs");
    let (shown, link) = shelf.put("output", &String::from_utf8_lossy(&output), total)?;
    let mut structured = object(json!({
        "job": given.job,
        "running": job.exit.is_none(),
        "output": shown,
        "output_bytes": total,
    }));
    structured.extend(job.exit.as_ref().map(|exit| ("exit".to_owned(), text::line(exit, 200).into())));
    structured.extend(link.as_ref().map(|link| ("output_resource".to_owned(), link.uri.clone().into())));
    let state = job
        .exit
        .as_ref()
        .map_or_else(|| "running".to_owned(), |exit| format!("ended: {}", text::line(exit, 200)));
    let text = format!("{}\n[job {}: {state}]", shown.trim_end_matches('\n'), given.job);
    let links = link.into_iter().collect();
    Ok(Answer { structured: Value::Object(structured), text, links, ..Answer::default() })
}

fn job_kill() -> Spec {
    Spec::new(
        "job_kill",
        "End a job",
        SETTLES,
        "Sends a signal to a job of a sandbox: TERM asks it to end, INT interrupts it, KILL ends it at once. The answer does not \
         wait for its end; job_list shows it. Its output stays readable.",
        kill,
    )
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
enum Signal {
    #[default]
    Term,
    Int,
    Kill,
}

#[derive(Deserialize, JsonSchema)]
struct Kill {
    sandbox_id: SandboxId,
    /// Its number, from job_start or job_list
    #[schemars(range(max = u32::MAX))]
    job: u32,
    /// The signal
    #[serde(default)]
    signal: Signal,
}

fn kill(call: &Call, given: Kill) -> Result<Answer, ToolError> {
    let (name, signal) = match given.signal {
        Signal::Term => ("TERM", libc::SIGTERM),
        Signal::Int => ("INT", libc::SIGINT),
        Signal::Kill => ("KILL", libc::SIGKILL),
    };
    let sandbox = call.running_sandbox(&given.sandbox_id)?;
    call.manager(|manager| Ok(manager.signal_job(&sandbox, given.job, signal)?))?
        .map_err(ToolError::Failed)?;
    let text = format!("{name} was sent to job {}.", given.job);
    Ok(Answer::new(json!({ "job": given.job, "signal": name }), text))
}
