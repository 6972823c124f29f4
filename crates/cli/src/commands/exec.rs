//! `bathy exec` and `bathy shell`: commands in a running sandbox.

use std::error::Error;
use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::time::Duration;

use bathy_client::attach::{Attach, AttachRequest, Finished, Outcome};
use bathy_client::command::ExecOptions;
use bathy_client::connection::Connection;
use bathy_manager::{ExecRequest, Manager, Sandboxed};
use bathy_protocol::Restriction;
use bathy_spec::{CommandSpec, Security, SpecError};
use serde_json::{Value, json};

use crate::args::choice::choice;
use crate::args::env::EnvArgs;
use crate::args::spec::{SECURITY, parse_security};
use crate::ui::exit_code::{self, TimeLimit};
use crate::ui::stdio::{CallerStdio, Wiring};
use crate::ui::{escape, hints, output, terminal, time};

/// Variables that describe the capabilities of the caller's terminal.
const TERMINAL_VARIABLES: [&str; 2] = ["TERM", "COLORTERM"];
/// Shells to try, in order.
const SHELLS: &str = "for shell in \"$SHELL\" /bin/bash /bin/sh; do [ -x \"$shell\" ] && exec \"$shell\" -l; done; echo 'there is no shell' >&2; exit 127";

/// Arguments of `bathy exec`.
#[derive(clap::Args)]
pub struct Args {
    /// Pass standard input to the command.
    #[arg(short, long)]
    interactive: bool,
    /// Allocate a terminal for the command.
    #[arg(short, long)]
    tty: bool,
    /// Run the command as a job, which outlives this program, and print the job's number.
    #[arg(short, long, conflicts_with_all = ["interactive", "timeout"])]
    detach: bool,
    #[command(flatten)]
    how: How,
    /// End the command after this time, such as 30, 90s or 5m; the exit code is then 124.
    #[arg(long, value_name = "TIME", value_parser = time::parse_duration)]
    timeout: Option<Duration>,
    /// Print the result, including the output, as JSON.
    #[arg(long, conflicts_with = "tty")]
    json: bool,
    /// The sandbox: its name, its id or a prefix of its id.
    name: String,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Arguments of `bathy shell`.
#[derive(clap::Args)]
pub struct ShellArgs {
    #[command(flatten)]
    how: How,
    /// The sandbox: its name, its id or a prefix of its id.
    name: String,
}

/// The environment, user and security level of a command.
#[derive(clap::Args)]
struct How {
    #[command(flatten)]
    env: EnvArgs,
    /// Working directory in the sandbox.
    #[arg(short, long, value_name = "PATH")]
    workdir: Option<OsString>,
    /// User in the sandbox: a name or number, optionally with :GROUP.
    #[arg(short, long)]
    user: Option<String>,
    /// The security level of the command: default, or restricted (not root, no new privileges, a read-only root).
    #[arg(long, value_name = "LEVEL", value_parser = choice(SECURITY, parse_security), hide_possible_values = true)]
    security: Option<Security>,
    /// Keep the root file system writable for a restricted command.
    #[arg(long)]
    writable_root: bool,
}

impl How {
    fn restriction(&self) -> Option<Restriction> {
        (self.security == Some(Security::Restricted))
            .then_some(Restriction { writable_root: self.writable_root })
    }

    fn command(self, argv: Vec<Vec<u8>>, timeout: Option<Duration>) -> Result<CommandSpec, String> {
        let (env, cwd) = (self.env.variables()?, self.workdir.map(OsString::into_vec));
        Ok(CommandSpec { argv, env, cwd, user: self.user, timeout })
    }
}

/// Runs the command and returns its exit code.
pub fn run(args: Args) -> Result<u8, Box<dyn Error>> {
    if args.command.first().is_none_or(|program| program.is_empty()) {
        return Err(SpecError::EmptyCommand.into());
    }
    let wiring = Wiring { stdin: args.interactive, terminal: args.tty, json: args.json, detachable: false };
    let options = options(wiring, args.how.restriction());
    let argv = args.command.into_iter().map(OsString::into_vec).collect();
    let mut command = args.how.command(argv, args.timeout)?;
    if args.tty {
        pass_terminal_variables(&mut command);
    }
    let mut manager = Manager::open("bathy exec")?;
    let sandbox = manager.find(&args.name)?;
    if args.detach {
        start_job(&mut manager, &sandbox, &command, options, args.json)
    } else {
        execute(&mut manager, &sandbox, &command, options, wiring)
    }
}

/// Runs a login shell, on the caller's terminal if there is one.
pub fn shell(args: ShellArgs) -> Result<u8, Box<dyn Error>> {
    let wiring = Wiring { stdin: true, terminal: io::stdin().is_terminal(), ..Wiring::default() };
    let options = options(wiring, args.how.restriction());
    let argv = ["/bin/sh", "-c", SHELLS].map(|word| word.as_bytes().to_vec()).to_vec();
    let mut command = args.how.command(argv, None)?;
    if wiring.terminal {
        pass_terminal_variables(&mut command);
    }
    let mut manager = Manager::open("bathy shell")?;
    let sandbox = manager.find(&args.name)?;
    execute(&mut manager, &sandbox, &command, options, wiring)
}

/// How the guest connects a command's standard streams.
pub fn options(wiring: Wiring, restricted: Option<Restriction>) -> ExecOptions {
    ExecOptions { stdin: wiring.stdin, terminal: wiring.terminal.then(terminal::size), restricted }
}

/// Passes the description of the caller's terminal to a command.
pub fn pass_terminal_variables(command: &mut CommandSpec) {
    for name in TERMINAL_VARIABLES {
        if let Some(value) = std::env::var_os(name) {
            command.env.entry(name.to_owned()).or_insert_with(|| value.into_vec());
        }
    }
}

fn connect(manager: &mut Manager, sandbox: &Sandboxed) -> Result<Connection, Box<dyn Error>> {
    manager.connect(sandbox).map_err(|error| hints::not_running(error, sandbox))
}

fn execute(
    manager: &mut Manager,
    sandbox: &Sandboxed,
    command: &CommandSpec,
    options: ExecOptions,
    wiring: Wiring,
) -> Result<u8, Box<dyn Error>> {
    let mut stdio = CallerStdio::new(wiring)?;
    let mut connection = connect(manager, sandbox)?;
    let begun = manager.begin_exec(sandbox, &ExecRequest { command, options, job: false })?;
    let what = AttachRequest::Start { exec: begun.exec, tag: begun.tag, job: None, leave: false };
    stdio.enter()?;
    let finished = Attach::start(&mut connection, what, command.timeout, stdio.stdio())?.run();
    let done = finished.map(Done::new);
    let stop = stdio.close();
    let done = done?;
    let (code, message) = exit_code::of(&done.outcome, command.timeout.map(TimeLimit::timeout), &stop)?;
    if wiring.json {
        output::json(&json!({
            "exit_code": code,
            "error": message,
            "stdout": done.stdout,
            "stderr": done.stderr,
            "warnings": done.warnings,
        }))?;
    } else {
        done.warn();
        if let Some(message) = message {
            output::note(message);
        }
        hints::of_exec(code, &command.argv, Path::new("."), sandbox.name()).iter().for_each(output::note);
    }
    Ok(code)
}

/// The result of a command, without the descriptors that it was connected to.
pub struct Done {
    pub outcome: Outcome,
    /// Warnings of the keeper.
    pub warnings: Vec<String>,
    /// Standard output, if it was collected.
    pub stdout: Value,
    /// Standard error, if it was collected.
    pub stderr: Value,
}

impl Done {
    pub fn new(finished: Finished<'_>) -> Self {
        Self {
            stdout: exit_code::collected(&finished.stdout),
            stderr: exit_code::collected(&finished.stderr),
            outcome: finished.outcome,
            warnings: finished.warnings,
        }
    }

    pub fn warn(&self) {
        for warning in &self.warnings {
            output::note(format_args!("warning: {}", escape::text(warning)));
        }
    }
}

/// Starts the command as a job and prints its number.
fn start_job(
    manager: &mut Manager,
    sandbox: &Sandboxed,
    command: &CommandSpec,
    options: ExecOptions,
    json: bool,
) -> Result<u8, Box<dyn Error>> {
    // A job's output goes to its log, including output from before the client detaches.
    let stdio = CallerStdio::new(Wiring { json: true, ..Wiring::default() })?;
    let mut connection = connect(manager, sandbox)?;
    let begun = manager.begin_exec(sandbox, &ExecRequest { command, options, job: true })?;
    let what = AttachRequest::Start { exec: begun.exec, tag: begun.tag, job: begun.job, leave: true };
    let finished = Attach::start(&mut connection, what, None, stdio.stdio())?.run();
    let done = finished.map(Done::new);
    let stop = stdio.close();
    let done = done?;
    done.warn();
    // A job that ended before the client detached has started, too.
    if matches!(done.outcome, Outcome::Detached | Outcome::Exited(_)) {
        if json {
            output::json(&json!({ "job": begun.job }))?;
        } else if let Some(number) = begun.job {
            output::line(number)?;
        }
        return Ok(0);
    }
    let (code, message) = exit_code::of(&done.outcome, None, &stop)?;
    if let Some(message) = message {
        output::note(message);
    }
    Ok(code)
}

#[cfg(test)]
impl Args {
    /// The parsed arguments: whether input is passed, the sandbox, the command.
    pub fn words(&self) -> (bool, &str, Vec<&str>) {
        (self.interactive, &self.name, self.command.iter().filter_map(|word| word.to_str()).collect())
    }
}
