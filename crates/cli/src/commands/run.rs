//! `bathy run`: an ephemeral sandbox around one command.

use std::error::Error;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bathy_client::attach::{Attach, AttachRequest, Times};
use bathy_client::command;
use bathy_manager::ephemeral::{self, Ended, NewEphemeral};
use bathy_manager::{Manager, NewSandbox};
use bathy_runtime::assets::{Assets, Wanted};
use bathy_runtime::engine;
use bathy_runtime::images::Pull;
use bathy_spec::image::Image;
use bathy_spec::operator::Operator;
use bathy_spec::paths::Paths;
use bathy_spec::{Choice, CommandSpec, SandboxSpec, SpecError};
use serde_json::{Value, json};

use crate::args::spec::SpecArgs;
use crate::commands::create;
use crate::commands::exec::{self, Done};
use crate::ui::denials::Denials;
use crate::ui::exit_code::{self, TimeLimit};
use crate::ui::narrator::Narrator;
use crate::ui::progress::Progress;
use crate::ui::stdio::{CallerStdio, Wiring};
use crate::ui::{hints, output, time};

/// Arguments of `bathy run`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    spec: SpecArgs,
    /// Create a persistent sandbox, start it in the background, and print its id.
    #[arg(short, long, conflicts_with_all = ["timeout", "tty", "interactive", "kernel"])]
    detach: bool,
    /// With --detach: a name for the sandbox, besides its id.
    #[arg(long, requires = "detach")]
    name: Option<String>,
    /// Accepted for compatibility: standard input is always passed to the command.
    #[arg(short, long)]
    interactive: bool,
    /// Allocate a terminal for the command.
    #[arg(short, long, conflicts_with = "json")]
    tty: bool,
    /// End the command after this time, such as 30, 90s or 5m; the exit code is then 124.
    #[arg(long, value_name = "TIME", value_parser = time::parse_duration)]
    timeout: Option<Duration>,
    /// Print the result and the duration of every phase as JSON.
    #[arg(long)]
    json: bool,
    /// Use another guest kernel.
    #[arg(long, value_name = "FILE", hide = true)]
    kernel: Option<PathBuf>,
    /// The command and its arguments.
    #[arg(trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

#[cfg(test)]
impl Args {
    pub fn words(&self) -> impl Iterator<Item = &str> {
        self.command.iter().filter_map(|word| word.to_str())
    }
}

/// Runs the command and returns its exit code.
pub fn run(args: Args) -> Result<u8, Box<dyn Error>> {
    if args.detach {
        let mut manager = Manager::open("bathy run")?;
        let spec = args.spec.spec(&args.command)?;
        let new = NewSandbox { name: args.name, spec, pull: args.spec.pull(), with_image_command: true };
        let sandbox = create::create(&mut manager, new, true)?;
        return create::report(&sandbox, args.json);
    }
    let started = bathy_protocol::unix_ns();
    // The command of an ephemeral sandbox need not be UTF-8.
    let spec = args.spec.spec(&[])?;
    args.spec.warn_of_no_effect();
    let pull = args.spec.pull();
    let argv = if args.command.is_empty() {
        spec.command.iter().map(|word| word.clone().into_bytes()).collect()
    } else {
        args.command.into_iter().map(OsString::into_vec).collect::<Vec<_>>()
    };
    // What an image from a registry runs is known when it is here.
    let is_empty = argv.is_empty() && matches!(spec.root_image(), Ok(Image::Recipe(_)));
    if is_empty || argv.first().is_some_and(Vec::is_empty) {
        return Err(SpecError::EmptyCommand.into());
    }
    // The sandbox lives as long as its command, so the shorter time ends both.
    let timeout = args.timeout.map(TimeLimit::timeout);
    let life = spec.max_duration.map(|limit| TimeLimit { after: limit.into(), option: "--max-duration" });
    let limit = timeout.into_iter().chain(life).min_by_key(|limit| limit.after);
    let mut command = CommandSpec { argv, timeout: limit.map(|limit| limit.after), ..CommandSpec::default() };
    if args.tty {
        exec::pass_terminal_variables(&mut command);
    }
    let wiring = Wiring { stdin: true, terminal: args.tty, json: args.json, detachable: false };
    let paths = Paths::of_user()?;
    let operator = Operator::load()?;
    let engine = engine::choose(spec.engine, &operator, &paths)?;
    let spec = spec.checked_for(&engine)?;
    Ephemeral { spec, engine, paths, operator, command, wiring, limit, kernel: args.kernel, pull, started }
        .run()
}

/// An ephemeral sandbox for one command.
struct Ephemeral {
    spec: SandboxSpec,
    engine: Choice,
    paths: Paths,
    operator: Operator,
    command: CommandSpec,
    wiring: Wiring,
    limit: Option<TimeLimit>,
    kernel: Option<PathBuf>,
    pull: Pull,
    /// When the command line was read, in nanoseconds since 1970.
    started: u64,
}

impl Ephemeral {
    fn run(mut self) -> Result<u8, Box<dyn Error>> {
        let mut progress = Progress::new();
        let wanted = Wanted {
            engine: self.engine.engine,
            spec: &self.spec,
            kernel: self.kernel.as_deref(),
            pull: self.pull,
        };
        let assets = Assets::ensure(&self.paths, &wanted, &mut |step| progress.step(step))?;
        drop(progress);
        self.spec.image_digest.clone_from(&assets.image_digest);
        self.command.argv = assets.image_config.command(std::mem::take(&mut self.command.argv));
        if self.command.argv.first().is_none_or(Vec::is_empty) {
            return Err(SpecError::EmptyCommand.into());
        }
        self.run_with(&assets)
    }

    fn run_with(&self, assets: &Assets) -> Result<u8, Box<dyn Error>> {
        let (spec, command, wiring) = (&self.spec, &self.command, self.wiring);
        let (engine, paths) = (&self.engine, &self.paths);
        let operator = &self.operator;
        let mut stdio = CallerStdio::new(wiring)?;
        let exec = command::request(command, spec, &assets.image_config, exec::options(wiring, None));
        let work = |tag| command::exec_started(&exec, tag, None);
        let new = NewEphemeral { program: "bathy run", spec, engine: engine.engine, assets, paths, operator };
        let denials = Denials::default();
        let mut sandbox = ephemeral::Ephemeral::start(new, &work, Box::new(Narrator::new(denials.clone())))?;
        let (id, spawned) = (sandbox.id().to_owned(), sandbox.spawned_unix_ns());
        if let Err(error) = stdio.enter() {
            sandbox
                .end(Ended::without_result(format!("the caller's terminal cannot be used: {error}")))
                .into_iter()
                .for_each(output::note);
            return Err(error.into());
        }
        let what = AttachRequest::Start { exec, tag: sandbox.tag(), job: None, leave: false };
        let finished =
            Attach::start(sandbox.connection(), what, command.timeout, stdio.stdio()).and_then(Attach::run);
        let keeper_failure = if finished.is_err() { sandbox.failure() } else { None };
        let finished =
            finished.map(|mut finished| (std::mem::take(&mut finished.times), Done::new(finished)));
        let ended = match &finished {
            Ok((_, done)) => Ended::of_command(&done.outcome),
            Err(error) => Ended::without_result(sandbox.cause_of(error)),
        };
        // The sandbox has ended before anything is reported about it.
        let unrecorded = sandbox.end(ended);
        let stop = stdio.close();
        if finished.is_err() {
            unrecorded.iter().for_each(output::note);
        }
        let (times, mut done) = match (finished, keeper_failure) {
            (Err(_), Some(failure)) => return Err(failure.into()),
            (finished, _) => finished?,
        };
        // The command's own exit code does not change.
        done.warnings.extend(unrecorded);

        let (code, message) = exit_code::of(&done.outcome, self.limit, &stop)?;
        let denied = denials.lines(&id);
        self.report(&Report { id, code, message, done, denied, times, spawned })?;
        Ok(code)
    }

    /// Prints the result as JSON, or what the command's own output does not show.
    fn report(&self, report: &Report) -> Result<(), Box<dyn Error>> {
        let Report { id, code, message, done, denied, times, spawned } = report;
        if self.wiring.json {
            return output::json(&json!({
                "exit_code": code,
                "error": message,
                "stdout": done.stdout,
                "stderr": done.stderr,
                "warnings": done.warnings,
                "denied": denied,
                "engine": self.engine.engine,
                "engine_reason": self.engine.reason,
                "sandbox": id,
                "image": self.spec.image_text(),
                "kernel": times.timeline.kernel,
                "phases_ms": phases(self.started, *spawned, times),
            }));
        }
        done.warn();
        message.iter().for_each(output::note);
        // A command that succeeded did not need what it was denied.
        denied.iter().filter(|_| *code != 0).for_each(output::note);
        hints::of_run(*code, &self.command.argv, Path::new(".")).iter().for_each(output::note);
        Ok(())
    }
}

/// The result of a command and of its sandbox.
struct Report {
    /// The sandbox's id.
    id: String,
    code: u8,
    /// Why the exit code is not the command's own.
    message: Option<String>,
    done: Done,
    /// The first denials of the network policy.
    denied: Vec<String>,
    times: Times,
    /// When the sandbox's processes were started, in nanoseconds since 1970.
    spawned: u64,
}

/// Milliseconds of every phase, in order.
fn phases(started: u64, spawned: u64, times: &Times) -> Value {
    let timeline = &times.timeline;
    let end = bathy_protocol::unix_ns();
    let ms = |from: u64, to: u64| {
        (from != 0 && to >= from).then(|| ((to - from) as f64 / 1000.0).round() / 1000.0)
    };
    json!({
        "prepare": ms(started, spawned),
        "spawn": ms(spawned, timeline.keeper),
        "jail": ms(timeline.keeper, timeline.jailed),
        "kernel": ms(timeline.jailed, timeline.pid1),
        "mounts": ms(timeline.pid1, timeline.mounted),
        "ready": ms(timeline.mounted, timeline.ready),
        "first_byte": ms(timeline.ready, times.first_byte),
        "exit": ms(timeline.ready, times.exited),
        "cleanup": ms(times.exited, end),
        "total": ms(started, end),
    })
}
