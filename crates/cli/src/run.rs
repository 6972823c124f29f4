//! `bathy run`: an ephemeral sandbox around one command.

use std::collections::BTreeMap;
use std::error::Error;
use std::ffi::OsString;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::time::Duration;

use bathy_image::Store;
use bathy_protocol::launch::UmlMode;
use bathy_protocol::{Cause, RefusalKind};
use bathy_sandbox::attach::{Finished, Sink, Stdio, Times};
use bathy_sandbox::spec::variable;
use bathy_sandbox::{
    Assets, Attach, CommandSpec, Engine, Outcome, Paths, Sandbox, SandboxSpec, Size, SpecError, engine,
    launch,
};
use serde_json::{Value, json};

use crate::progress::Progress;
use crate::{escape, output, sys};

const TIMED_OUT: u8 = 124;
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;
/// The exit code of a run whose output nobody reads any more.
pub const BROKEN_PIPE: u8 = 141;
/// How much of each output `--json` keeps.
const JSON_OUTPUT: usize = 16 * 1024 * 1024;

/// The longest time that can be asked for.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

/// Arguments of `bathy run`.
#[derive(clap::Args)]
pub struct Args {
    /// The root image.
    #[arg(long, default_value = "default")]
    image: String,
    /// The engine: auto, kvm or uml.
    #[arg(long, value_parser = parse_engine, default_value = "auto")]
    engine: Engine,
    /// Guest memory.
    #[arg(short, long, value_name = "SIZE", default_value = "512M")]
    memory: Size,
    /// Processors.
    #[arg(long, default_value_t = 1)]
    cpus: u32,
    /// Size of the writable disk.
    #[arg(long, value_name = "SIZE", default_value = "4G")]
    disk: Size,
    /// End the command after this many seconds; the exit code is then 124.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    timeout: Option<Duration>,
    /// Set an environment variable.
    #[arg(short, long, value_name = "NAME=VALUE", value_parser = variable)]
    env: Vec<(String, Vec<u8>)>,
    /// Working directory in the sandbox.
    #[arg(short, long, value_name = "PATH")]
    workdir: Option<OsString>,
    /// User in the sandbox: a name or number, with :group if wanted.
    #[arg(short, long)]
    user: Option<String>,
    /// How the uml engine contains guest processes: seccomp (fast) or ptrace (users inside the guest are kept apart).
    #[arg(long, value_parser = parse_mode, default_value = "seccomp")]
    uml_mode: UmlMode,
    /// Print the result, with the time of every phase, as JSON.
    #[arg(long)]
    json: bool,
    /// How long the guest may take to get ready, in seconds.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds, default_value = "30", hide = true)]
    ready_timeout: Duration,
    /// Use another guest kernel.
    #[arg(long, value_name = "FILE", hide = true)]
    kernel: Option<PathBuf>,
    /// The command and its arguments.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs the command and returns its exit code.
pub fn run(args: Args) -> Result<u8, Box<dyn Error>> {
    let started = launch::unix_ns();
    if args.command.first().is_none_or(|program| program.is_empty()) {
        return Err(SpecError::EmptyCommand.into());
    }
    let spec = SandboxSpec {
        image: args.image,
        engine: args.engine,
        memory: args.memory,
        cpus: args.cpus,
        disk: args.disk,
        uml_mode: args.uml_mode,
        ready_timeout_ms: u64::try_from(args.ready_timeout.as_millis())?,
        ..SandboxSpec::default()
    };
    let spec = spec.checked()?;
    let engine = engine::choose(spec.engine)?;
    let command = CommandSpec {
        argv: args.command.into_iter().map(OsString::into_vec).collect(),
        env: args.env.into_iter().collect::<BTreeMap<_, _>>(),
        cwd: args.workdir.map(OsString::into_vec),
        user: args.user,
        timeout: args.timeout,
    };

    let paths = Paths::of_user()?;
    let store = Store::new(paths.cache.clone());
    let mut progress = Progress::new();
    let assets =
        Assets::ensure(&store, &spec.image, args.kernel.as_deref(), &mut |step| progress.step(step))?;
    drop(progress);

    let stop = sys::stop_signals()?;
    let (stdin, stdout, stderr) = (std::io::stdin(), std::io::stdout(), std::io::stderr());
    let stdio = Stdio {
        stdin: Some(stdin.as_fd()),
        stdout: if args.json { Sink::memory(JSON_OUTPUT) } else { Sink::Descriptor(stdout.as_fd()) },
        stderr: if args.json { Sink::memory(JSON_OUTPUT) } else { Sink::Descriptor(stderr.as_fd()) },
        interrupt: Some(stop.as_fd()),
    };
    let mut sandbox = Sandbox::start(&spec, &assets, &paths)?;
    let spawned = sandbox.spawned_unix_ns;
    let finished = Attach::start(&mut sandbox.connection, &command, &assets.image_config, stdio)?.run();
    let last_words = if finished.is_err() { sandbox.failure() } else { None };
    // Whatever happened, the sandbox is gone before anything is said about it.
    drop(sandbox);
    let finished = match (finished, last_words) {
        (Err(_), Some(words)) => return Err(format!("The sandbox's keeper could not {words}").into()),
        (finished, _) => finished?,
    };

    let (code, message) = verdict(&finished.outcome, &command, &stop)?;
    if args.json {
        let phases = phases(started, spawned, &finished.times);
        output::line(report(code, message.as_deref(), &finished, engine, &phases))?;
    } else {
        for warning in &finished.warnings {
            output::note(format_args!("warning: {}", escape::text(warning)));
        }
        if let Some(message) = message {
            output::note(message);
        }
    }
    Ok(code)
}

/// The exit code, and what to say if it is not the command's own.
fn verdict(
    outcome: &Outcome,
    command: &CommandSpec,
    stop: &std::os::fd::OwnedFd,
) -> Result<(u8, Option<String>), Box<dyn Error>> {
    Ok(match outcome {
        Outcome::Exited(exit) => (exit.shell_code(), None),
        Outcome::Refused(refused) => {
            let code = match refused.kind {
                RefusalKind::NotFound => NOT_FOUND,
                RefusalKind::NotExecutable => NOT_EXECUTABLE,
                RefusalKind::BadRequest => crate::OUR_FAILURE,
            };
            (code, Some(escape::text(&refused.message)))
        }
        Outcome::TimedOut => {
            let seconds = command.timeout.unwrap_or_default().as_secs_f64();
            (TIMED_OUT, Some(format!("the command was ended after {seconds} s, its --timeout")))
        }
        Outcome::Interrupted => (128u8.saturating_add(sys::read_signal(stop)?), None),
        Outcome::BrokenPipe => (BROKEN_PIPE, None),
        Outcome::SandboxEnded { cause, console } => (crate::OUR_FAILURE, Some(obituary(cause, console))),
    })
}

fn obituary(cause: &Cause, console: &str) -> String {
    let what = match cause {
        Cause::Killed => "the sandbox was ended".to_owned(),
        Cause::GuestExited(status) => format!("the guest ended before its command did (status {status})"),
        Cause::NotReady(ms) => format!("the guest was not ready after {} s", *ms as f64 / 1000.0),
        Cause::Violation(what) => format!("the guest broke the rules and was ended: {}", escape::text(what)),
        Cause::Failed(what) => format!("the sandbox could not be kept: {}", escape::text(what)),
    };
    if console.is_empty() {
        format!("{what}. The guest kernel said nothing")
    } else {
        let lines: String = escape::text(console).lines().map(|line| format!("\n  | {line}")).collect();
        format!("{what}. The guest kernel's last lines:{lines}")
    }
}

/// Milliseconds of every phase, in order.
fn phases(started: u64, spawned: u64, times: &Times) -> Value {
    let timeline = &times.timeline;
    let end = launch::unix_ns();
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

fn report(
    code: u8,
    message: Option<&str>,
    finished: &Finished<'_>,
    engine: engine::Choice,
    phases: &Value,
) -> Value {
    let output = |sink: &Sink<'_>| match sink {
        Sink::Memory { kept, total, .. } => {
            json!({ "text": String::from_utf8_lossy(kept), "bytes": total, "truncated": *total > kept.len() as u64 })
        }
        Sink::Descriptor(_) => Value::Null,
    };
    json!({
        "exit_code": code,
        "error": message,
        "stdout": output(&finished.stdout),
        "stderr": output(&finished.stderr),
        "warnings": finished.warnings,
        "engine": engine.engine,
        "engine_reason": engine.reason,
        "kernel": finished.times.timeline.kernel,
        "phases_ms": phases,
    })
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is not a number of seconds"))?;
    Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|duration| !duration.is_zero() && *duration <= LONGEST)
        .ok_or_else(|| format!("{text:?} is not between zero and a year of seconds"))
}

fn parse_engine(text: &str) -> Result<Engine, String> {
    serde_json::from_value(Value::from(text)).map_err(|_| "the engines are auto, kvm and uml".to_owned())
}

fn parse_mode(text: &str) -> Result<UmlMode, String> {
    serde_json::from_value(Value::from(text)).map_err(|_| "the modes are seccomp and ptrace".to_owned())
}
