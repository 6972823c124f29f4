//! `run_command`: one command, from a shell or as it is.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Seek, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use bathy_client::attach::{Attach, AttachRequest, Filter, Outcome, Sink, Stdio};
use bathy_client::command::ExecOptions;
use bathy_manager::{ExecRequest, Sandboxed};
use bathy_protocol::Exit;
use bathy_spec::CommandSpec;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{RUNS, Spec, env, sandbox_id, timeout};
use crate::answer::{Answer, arguments};
use crate::call::Call;
use crate::error::ToolError;
use crate::outputs::ONE;
use crate::schema::Field;
use crate::shown::{Shelf, object};

/// How long a command runs if the caller does not say, in seconds.
const TIMEOUT: u64 = 120;
/// The most standard input, in characters.
const STDIN: u64 = 4 << 20;
/// The longest shell command, in characters: the kernel takes no longer argument.
const COMMAND: u64 = 128 * 1024 - 1;

/// The tool.
pub fn run_command() -> Spec {
    Spec {
        name: "run_command",
        title: "Run a command",
        description: "Runs a command in a sandbox and returns its standard output, standard error and exit code. Give `command` \
            for a line of /bin/sh, or `argv` for a program and its arguments without a shell. Without sandbox_id a \
            new sandbox is made and its sandbox_id returned; it lives one hour by default and is removed after 15 \
            minutes without use. The command may change anything in its sandbox and nothing outside. It reaches the \
            public internet only, unless the operator or sandbox_create allow less, and has no terminal. Each command is a \
            process of its own: `cd` and variables do not last, files do. At its time limit, or when the call is cancelled, it is ended. An exit code other than 0 is no error \
            of the tool. Long output is cut in the middle and linked as a resource.",
        hints: RUNS,
        takes: || {
            let mut fields = command_fields();
            fields.push(sandbox_id());
            fields.push(timeout(TIMEOUT, "the command"));
            fields.push(Field::text("stdin", "What the command reads from standard input").at_most(STDIN));
            fields
        },
        returns: || {
            vec![
                Field::text("sandbox_id", "The sandbox: pass it to later calls").required(),
                Field::integer(
                    "exit_code",
                    "Its exit code; 128 and the signal's number if a signal ended it",
                ),
                Field::boolean("timed_out", "Whether it was ended at its time limit").required(),
                Field::text("stdout", "Standard output; of long output the beginning and the end").required(),
                Field::text("stderr", "Standard error, in the same way").required(),
                Field::integer("stdout_bytes", "How long standard output was in all").required().at_least(0),
                Field::integer("stderr_bytes", "How long standard error was in all").required().at_least(0),
                Field::text(
                    "stdout_resource",
                    "Where the whole standard output can be read, if it is not all here",
                ),
                Field::text(
                    "stderr_resource",
                    "Where the whole standard error can be read, if it is not all here",
                ),
                Field::texts("notes", "What else there is to know").required(),
                Field::integer("duration_ms", "How long it took").required().at_least(0),
            ]
        },
        run,
    }
}

/// The arguments that say what is run, and how.
pub fn command_fields() -> Vec<Field> {
    vec![
        Field::text("command", "A line of /bin/sh. Give this or argv").not_empty().at_most(COMMAND),
        Field::texts("argv", "A program and its arguments, without a shell. Give this or command")
            .not_empty(),
        Field::text("cwd", "Working directory in the sandbox").not_empty().at_most(4095),
        env(),
    ]
}

/// What is run, and how.
#[derive(Deserialize)]
pub struct Command {
    command: Option<String>,
    argv: Option<Vec<String>>,
    cwd: Option<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
}

impl Command {
    /// The host's description of it.
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
        for (name, value) in &self.env {
            if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
                let name = crate::text::line(name, 80);
                return Err(ToolError::Failed(format!(
                    "{name:?} is not the name of an environment variable, or its value has a NUL character."
                )));
            }
        }
        Ok(CommandSpec {
            argv: argv.into_iter().map(String::into_bytes).collect(),
            env: self.env.into_iter().map(|(name, value)| (name, value.into_bytes())).collect(),
            cwd: self.cwd.map(String::into_bytes),
            user: None,
            timeout,
        })
    }
}

#[derive(Deserialize)]
struct Arguments {
    #[serde(flatten)]
    command: Command,
    sandbox_id: Option<String>,
    timeout_seconds: Option<u64>,
    stdin: Option<String>,
}

fn run(call: &Call, given: Value) -> Result<Answer, ToolError> {
    let given: Arguments = arguments(given)?;
    let timeout = Duration::from_secs(given.timeout_seconds.unwrap_or(TIMEOUT));
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

/// A command that is over.
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

/// Takes an output into memory, and tells progress about it.
fn keep<'a>(call: &'a Call, kept: &'a RefCell<Kept>) -> Filter<'a> {
    Box::new(move |bytes| {
        call.progress.output(bytes);
        let mut kept = kept.borrow_mut();
        let room = ONE.saturating_sub(kept.bytes.len()).min(bytes.len());
        kept.bytes.extend_from_slice(bytes.get(..room).unwrap_or_default());
        kept.total += u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        // Nothing is left to be written anywhere.
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

fn answer(
    call: &Call,
    sandbox: &Sandboxed,
    done: Done,
    timeout: Duration,
    mut notes: Vec<String>,
) -> Result<Answer, ToolError> {
    let (mut exit_code, mut is_error, mut timed_out) = (None, false, false);
    match &done.outcome {
        Outcome::Exited(exit) => {
            exit_code = Some(exit.shell_code());
            if let Exit::Signal(signal) = exit {
                notes.push(format!("The command was ended by signal {signal}."));
            }
        }
        Outcome::TimedOut => {
            (timed_out, is_error) = (true, true);
            notes.push(format!(
                "The command reached its time limit of {} s and was ended.",
                timeout.as_secs()
            ));
        }
        Outcome::Interrupted => return Err(ToolError::Cancelled),
        Outcome::Refused(refused) => {
            return Err(ToolError::Failed(format!("The command was not started: {}", refused.message)));
        }
        Outcome::SandboxEnded { cause, .. } => {
            call.state.host.pool.hang_up(sandbox);
            return Err(ToolError::Failed(format!(
                "The sandbox ended while the command ran: {}. Make a new one with sandbox_create.",
                cause
            )));
        }
        Outcome::NoAnswer | Outcome::BrokenPipe | Outcome::Detached | Outcome::TakenOver => {
            return Err(ToolError::failed(
                "The sandbox does not answer. Delete it with sandbox_delete and make another.",
            ));
        }
    }
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
    Ok(Answer { structured: Value::Object(structured), text, links, is_error, ..Answer::default() })
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
