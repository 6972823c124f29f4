//! Commands that outlive the call that starts them.

use bathy_client::attach::{Attach, AttachRequest, Outcome, Sink, Stdio};
use bathy_client::command::ExecOptions;
use bathy_logs::{CONSOLE, Reader};
use bathy_manager::ExecRequest;
use serde::Deserialize;
use serde_json::{Value, json};

use super::command::{Command, command_fields};
use super::{READS, RUNS, SETTLES, Spec, sandbox_id};
use crate::answer::{Answer, arguments};
use crate::call::Call;
use crate::error::ToolError;
use crate::outputs::ONE;
use crate::schema::Field;
use crate::shown::{Shelf, object};
use crate::text;

/// The tools of the set `jobs`.
pub fn tools() -> Vec<Spec> {
    vec![job_start(), job_list(), job_logs(), job_kill()]
}

fn job() -> Field {
    Field::integer("job", "The job's number, from job_start or job_list")
        .required()
        .between(0, u64::from(u32::MAX))
}

#[derive(Deserialize)]
struct Which {
    sandbox_id: String,
    #[serde(default)]
    job: u32,
}

fn job_start() -> Spec {
    Spec {
        name: "job_start",
        title: "Start a job",
        description: "Starts a command in a sandbox that goes on after the call, such as a server, and returns its job number. Its \
            output is kept (the newest 16 MiB of a sandbox) and read with job_logs; job_kill ends it. It ends with its \
            sandbox, and does not by itself keep an idle sandbox from being removed.",
        hints: RUNS,
        takes: || {
            let mut fields = vec![sandbox_id().required()];
            fields.extend(command_fields());
            fields
        },
        returns: || {
            vec![
                Field::text("sandbox_id", "The sandbox").required(),
                Field::integer("job", "The job's number").required().at_least(0),
            ]
        },
        run: start,
    }
}

#[derive(Deserialize)]
struct Start {
    sandbox_id: String,
    #[serde(flatten)]
    command: Command,
}

fn start(call: &Call, given: Value) -> Result<Answer, ToolError> {
    let given: Start = arguments(given)?;
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
        // A job that is over at once has started, too.
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
    Spec {
        name: "job_list",
        title: "List jobs",
        description: "Lists the jobs of a sandbox: their numbers, command lines and whether and how each has ended. Changes \
            nothing. Job 0 is the sandbox's main command, if it has one.",
        hints: READS,
        takes: || vec![sandbox_id().required()],
        returns: || {
            vec![
                Field::objects(
                    "jobs",
                    "The jobs, in the order of their numbers",
                    vec![
                        Field::integer("job", "Its number").required().at_least(0),
                        Field::text("command", "Its command line, perhaps cut").required(),
                        Field::boolean("running", "Whether it runs").required(),
                        Field::text("exit", "How it ended, such as \"code 0\" or \"signal 9\""),
                    ],
                )
                .required(),
            ]
        },
        run: |call, given| {
            let given: Which = arguments(given)?;
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
                    value.extend(
                        job.exit.as_ref().map(|exit| ("exit".to_owned(), text::line(exit, 200).into())),
                    );
                    value
                })
                .collect();
            Ok(Answer::json(json!({ "jobs": list })))
        },
    }
}

fn job_logs() -> Spec {
    Spec {
        name: "job_logs",
        title: "Read a job's output",
        description: "Reads what a job has written to standard output and standard error so far, the newest 4 MiB at most. Changes \
            nothing and does not wait. Long output is cut in the middle and linked as a resource.",
        hints: READS,
        takes: || vec![sandbox_id().required(), job()],
        returns: || {
            vec![
                Field::integer("job", "The job's number").required().at_least(0),
                Field::boolean("running", "Whether it runs").required(),
                Field::text("exit", "How it ended"),
                Field::text("output", "Its output; of long output the beginning and the end").required(),
                Field::integer("output_bytes", "How long the output is, as far as it is kept")
                    .required()
                    .at_least(0),
                Field::text("output_resource", "Where the whole output can be read, if it is not all here"),
            ]
        },
        run: logs,
    }
}

fn logs(call: &Call, given: Value) -> Result<Answer, ToolError> {
    let given: Which = arguments(given)?;
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
    Spec {
        name: "job_kill",
        title: "End a job",
        description: "Sends a signal to a job of a sandbox: TERM asks it to end, INT interrupts it, KILL ends it at once. The \
            answer does not wait for its end; job_list shows it. Its output stays readable.",
        hints: SETTLES,
        takes: || {
            vec![
                sandbox_id().required(),
                job(),
                Field::choice("signal", "The signal", &["TERM", "INT", "KILL"]).default("TERM"),
            ]
        },
        returns: || {
            vec![
                Field::integer("job", "The job's number").required().at_least(0),
                Field::text("signal", "The signal that was sent").required(),
            ]
        },
        run: |call, given| {
            #[derive(Deserialize)]
            struct Kill {
                sandbox_id: String,
                job: u32,
                signal: Option<String>,
            }
            let given: Kill = arguments(given)?;
            let name = given.signal.as_deref().unwrap_or("TERM");
            let signal = match name {
                "KILL" => libc::SIGKILL,
                "INT" => libc::SIGINT,
                _ => libc::SIGTERM,
            };
            let sandbox = call.running_sandbox(&given.sandbox_id)?;
            call.manager(|manager| Ok(manager.signal_job(&sandbox, given.job, signal)?))?
                .map_err(ToolError::Failed)?;
            let text = format!("{name} was sent to job {}.", given.job);
            Ok(Answer::new(json!({ "job": given.job, "signal": name }), text))
        },
    }
}
