//! `run_command`: one command, from a shell or as it is.

use std::cell::RefCell;
use std::fs::File;
use std::io::{Seek, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use bathy_client::attach::{Attach, AttachRequest, Filter, Outcome, Sink, Stdio};
use bathy_client::command::ExecOptions;
use bathy_manager::{ExecRequest, Sandboxed};
use bathy_protocol::Exit;
use bathy_spec::CommandSpec;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::arguments::{Cwd, Env, MAX_TIMEOUT, SandboxId};
use super::{RUNS, Spec};
use crate::answer::Answer;
use crate::call::Call;
use crate::error::ToolError;
use crate::outputs::ONE;
use crate::shown::{Shelf, object};

/// The most standard input, in characters.
const STDIN: u64 = 4 << 20;
/// The longest shell command, in characters: the kernel takes no longer argument.
const COMMAND: u64 = 128 * 1024 - 1;

pub fn run_command() -> Spec {
    Spec::new(
        "run_command",
        "Run a command",
        RUNS,
        "Runs a command in a sandbox and returns standard output, standard error and exit code; one other than 0 is no error \
         of the tool. Give `command`, a line of /bin/sh, or `argv`. Without sandbox_id a new sandbox is made, as by run_code. \
         The command may change anything in its sandbox and nothing outside, reaches the public internet at most, and has no \
         terminal. `cd` and variables do not last to the next call, files do. It is ended at its time limit, or when the call \
         is cancelled.",
        run,
    )
}

/// A command and what it runs with.
#[derive(Deserialize, JsonSchema)]
pub struct Command {
    /// A line of /bin/sh. Give this or argv
    #[schemars(length(min = 1, max = COMMAND))]
    command: Option<String>,
    /// A program and its arguments, without a shell
    #[schemars(length(min = 1))]
    argv: Option<Vec<String>>,
    cwd: Option<Cwd>,
    #[serde(default)]
    env: Env,
}

impl Command {
    /// The command as the manager takes it.
    pub fn spec(self, timeout: Option<Duration>) -> Result<CommandSpec, ToolError> {
        let argv = match (self.command, self.argv) {
            (Some(line), None) => vec!["/bin/sh".to_owned(), "-c".to_owned(), line],
            (None, Some(argv)) if argv.first().is_some_and(|program| !program.is_empty()) => argv,
            (None, Some(_)) => {
                return Err(ToolError::failed("The first word of `argv` is the program, and it is empty."));
            }
            (Some(_), Some(_)) => {
                return Err(ToolError::failed(
                    "Give `command` (a line of shell) or `argv` (a program and its arguments), not both.",
                ));
            }
            (None, None) => {
                return Err(ToolError::failed(
                    "There is nothing to run. Give `command`, a line of shell such as \"ls -l\", or `argv`, such as [\"ls\", \"-l\"].",
                ));
            }
        };
        if argv.iter().any(|word| word.contains('\0')) {
            return Err(ToolError::failed(
                "The command contains a NUL character, which no program can be given.",
            ));
        }
        for (name, value) in &self.env.0 {
            if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
                let name = crate::text::line(name, 80);
                return Err(ToolError::Failed(format!(
                    "{name:?} is not the name of an environment variable, or its value has a NUL character."
                )));
            }
        }
        Ok(CommandSpec {
            argv: argv.into_iter().map(String::into_bytes).collect(),
            env: self.env.0.into_iter().map(|(name, value)| (name, value.into_bytes())).collect(),
            cwd: self.cwd.map(|cwd| cwd.0.into_bytes()),
            user: None,
            timeout,
        })
    }
}

/// How long a command may run, in seconds.
fn command_timeout() -> u64 {
    120
}

#[derive(Deserialize, JsonSchema)]
struct Arguments {
    #[serde(flatten)]
    command: Command,
    sandbox_id: Option<SandboxId>,
    /// Time limit
    #[serde(default = "command_timeout")]
    #[schemars(range(min = 1, max = MAX_TIMEOUT))]
    timeout_seconds: u64,
    /// Standard input
    #[schemars(length(max = STDIN))]
    stdin: Option<String>,
}

fn run(call: &Call, given: Arguments) -> Result<Answer, ToolError> {
    let timeout = Duration::from_secs(given.timeout_seconds);
    let command = given.command.spec(Some(timeout))?;
    let (sandbox, is_new, mut notes) = call.sandbox_or_new(given.sandbox_id.as_deref())?;
    call.progress.step("running");
    let done = execute(call, &sandbox, &command, given.stdin.as_deref());
    if is_new && (done.is_err() || call.cancel.is_cancelled()) {
        call.discard(&sandbox);
    }
    let done = done?;
    if is_new {
        let id = &sandbox.record.id;
        notes.push(format!("A new sandbox was made. Pass sandbox_id {id:?} to later calls to go on in it."));
    }
    answer(call, &sandbox, done, timeout, notes)
}

/// A command that has ended.
struct Done {
    outcome: Outcome,
    stdout: Kept,
    stderr: Kept,
    took: Duration,
}

/// The beginning of an output.
#[derive(Default)]
struct Kept {
    bytes: Vec<u8>,
    total: u64,
}

/// Keeps the beginning of an output in memory, and reports it as progress.
fn keep<'a>(call: &'a Call, kept: &'a RefCell<Kept>) -> Filter<'a> {
    Box::new(move |bytes| {
        call.progress.output(bytes);
        let mut kept = kept.borrow_mut();
        let room = ONE.saturating_sub(kept.bytes.len()).min(bytes.len());
        kept.bytes.extend_from_slice(bytes.get(..room).unwrap_or_default());
        kept.total += u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        // The sink itself writes nothing.
        Vec::new()
    })
}

fn execute(
    call: &Call,
    sandbox: &Sandboxed,
    command: &CommandSpec,
    stdin: Option<&str>,
) -> Result<Done, ToolError> {
    let failed = |error: std::io::Error| ToolError::Failed(format!("Cannot prepare the command: {error}"));
    let input = stdin.map(input).transpose().map_err(failed)?;
    let nowhere = File::options().write(true).open("/dev/null").map_err(failed)?;
    let (mut connection, begun) = call.manager(|manager| {
        let connection = manager.connect(sandbox)?;
        let options = ExecOptions { stdin: input.is_some(), ..ExecOptions::default() };
        let begun = manager.begin_exec(sandbox, &ExecRequest { command, options, job: false })?;
        Ok((connection, begun))
    })?;
    let (stdout, stderr) = (RefCell::default(), RefCell::default());
    let stdio = Stdio {
        stdin: input.as_ref().map(AsFd::as_fd),
        stdout: Sink::Filtered(nowhere.as_fd(), keep(call, &stdout)),
        stderr: Sink::Filtered(nowhere.as_fd(), keep(call, &stderr)),
        interrupt: Some(call.cancel.fd()),
        terminal: None,
        detach_keys: false,
    };
    let what = AttachRequest::Start { exec: begun.exec, tag: begun.tag, job: None, leave: false };
    let began = Instant::now();
    let finished = Attach::start(&mut connection, what, command.timeout, stdio).and_then(Attach::run);
    let outcome = finished.map_err(|error| ToolError::Failed(bathy_protocol::chain(&error)))?.outcome;
    let took = began.elapsed();
    Ok(Done { outcome, stdout: stdout.into_inner(), stderr: stderr.into_inner(), took })
}

/// Standard input from memory.
fn input(text: &str) -> std::io::Result<File> {
    let memory = rustix::fs::memfd_create("stdin", rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut file = File::from(memory);
    file.write_all(text.as_bytes())?;
    file.rewind()?;
    Ok(file)
}

/// The exit code of a command, if it ended by itself within its time limit.
fn exit_code(
    call: &Call,
    sandbox: &Sandboxed,
    outcome: &Outcome,
    timeout: Duration,
    notes: &mut Vec<String>,
) -> Result<Option<u8>, ToolError> {
    match outcome {
        Outcome::Exited(exit) => {
            if let Exit::Signal(signal) = exit {
                notes.push(format!("The command was ended by signal {signal}."));
            }
            Ok(Some(exit.shell_code()))
        }
        Outcome::TimedOut => {
            let seconds = timeout.as_secs();
            notes.push(format!("The command reached its time limit of {seconds} s and was ended."));
            Ok(None)
        }
        Outcome::Interrupted => Err(ToolError::Cancelled),
        Outcome::Refused(refused) => {
            Err(ToolError::Failed(format!("The command was not started: {}", refused.message)))
        }
        Outcome::SandboxEnded { cause, .. } => {
            call.state.host.pool.hang_up(sandbox);
            Err(ToolError::Failed(format!(
                "The sandbox ended while the command ran: {cause}. Make a new one with sandbox_create."
            )))
        }
        Outcome::NoAnswer | Outcome::BrokenPipe | Outcome::Detached | Outcome::TakenOver => Err(
            ToolError::failed("The sandbox does not answer. Delete it with sandbox_delete and make another."),
        ),
    }
}

fn answer(
    call: &Call,
    sandbox: &Sandboxed,
    done: Done,
    timeout: Duration,
    mut notes: Vec<String>,
) -> Result<Answer, ToolError> {
    let exit_code = exit_code(call, sandbox, &done.outcome, timeout, &mut notes)?;
    let timed_out = exit_code.is_none();
    let mut shelf = Shelf::new(call, "run_command");
    let lossy = |kept: &Kept| String::from_utf8_lossy(&kept.bytes).into_owned();
    let (stdout, stdout_link) = shelf.put("stdout", &lossy(&done.stdout), done.stdout.total)?;
    let (stderr, stderr_link) = shelf.put("stderr", &lossy(&done.stderr), done.stderr.total)?;
    let mut text = String::new();
    for (title, body) in [("stdout", &stdout), ("stderr", &stderr)] {
        if !body.is_empty() {
            text.push_str(&format!("{title}:\n{}\n", body.trim_end_matches('\n')));
        }
    }
    for note in &notes {
        text.push_str(&format!("note: {note}\n"));
    }
    if let Some(code) = exit_code {
        text.push_str(&format!("exit code: {code}\n"));
    }
    text.push_str(&format!("sandbox_id: {}", sandbox.record.id));
    let mut structured = object(json!({
        "sandbox_id": sandbox.record.id,
        "timed_out": timed_out,
        "stdout": stdout,
        "stderr": stderr,
        "stdout_bytes": done.stdout.total,
        "stderr_bytes": done.stderr.total,
        "notes": notes,
        "duration_ms": u64::try_from(done.took.as_millis()).unwrap_or(u64::MAX),
    }));
    structured.extend(exit_code.map(|code| ("exit_code".to_owned(), code.into())));
    for (key, link) in [("stdout_resource", &stdout_link), ("stderr_resource", &stderr_link)] {
        structured.extend(link.as_ref().map(|link| (key.to_owned(), link.uri.clone().into())));
    }
    let links = [stdout_link, stderr_link].into_iter().flatten().collect();
    Ok(Answer {
        structured: Value::Object(structured),
        text,
        links,
        is_error: timed_out,
        ..Answer::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(given: Value) -> Result<Vec<Vec<u8>>, String> {
        let command: Command = serde_json::from_value(given).unwrap();
        command.spec(None).map(|spec| spec.argv).map_err(|error| error.message())
    }

    #[test]
    fn a_command_is_a_line_of_shell_or_words() {
        assert_eq!(spec(json!({"command": "ls | wc"})).unwrap(), [&b"/bin/sh"[..], b"-c", b"ls | wc"]);
        assert_eq!(spec(json!({"argv": ["ls", "-l"]})).unwrap(), [b"ls", b"-l"]);
        assert!(spec(json!({"argv": ["ls"], "command": "ls"})).unwrap_err().contains("not both"));
        assert!(spec(json!({})).unwrap_err().contains("nothing to run"));
        assert!(spec(json!({"argv": [""]})).unwrap_err().contains("empty"));
        assert!(spec(json!({"command": "a\u{0}b"})).unwrap_err().contains("NUL"));
        assert!(spec(json!({"command": "a", "env": {"A=B": ""}})).unwrap_err().contains("\"A=B\""));
    }
}
