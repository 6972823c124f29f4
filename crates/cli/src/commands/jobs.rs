//! `bathy jobs`, `bathy attach` and `bathy kill`: commands that outlive their clients.

use std::error::Error;
use std::io::{self, IsTerminal};

use bathy_client::attach::{Attach, AttachRequest, Outcome};
use bathy_manager::store::Job;
use bathy_manager::{Manager, Sandboxed};
use bathy_protocol::unix_ns;

use crate::args::choice::choice;
use crate::commands::exec::Done;
use crate::commands::lifecycle::Results;
use crate::commands::open_to_look;
use crate::ui::stdio::{CallerStdio, Wiring};
use crate::ui::table::{Side, Table, cut, output_width};
use crate::ui::{exit_code, output, signals, time};

/// How many characters of a command are shown.
const COMMAND_WIDTH: usize = 60;

/// Arguments of `bathy jobs`.
#[derive(clap::Args)]
pub struct Args {
    /// Print the jobs as JSON.
    #[arg(long)]
    json: bool,
    /// The sandbox: its name, its id or a prefix of its id.
    name: String,
}

/// Arguments of `bathy attach`.
#[derive(clap::Args)]
pub struct AttachArgs {
    /// The job has a terminal, because it was started with -t.
    #[arg(short, long)]
    tty: bool,
    /// Do not forward standard input.
    #[arg(long)]
    no_stdin: bool,
    /// The sandbox: its name, its id or a prefix of its id.
    name: String,
    /// The job's number; 0 is the main command.
    #[arg(default_value_t = 0)]
    job: u32,
}

/// Arguments of `bathy kill`.
#[derive(clap::Args)]
pub struct KillArgs {
    /// The signal: a name such as TERM, or a number.
    #[arg(short, long, value_parser = choice(signals::SHOWN, signals::parse), hide_possible_values = true, default_value = "KILL")]
    signal: i32,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
    /// The sandbox: its name, its id or a prefix of its id.
    name: String,
    /// The job's number. Without it KILL kills the whole sandbox, and any other signal goes to the main command.
    job: Option<u32>,
}

/// Lists a sandbox's jobs.
pub fn list(args: &Args) -> Result<u8, Box<dyn Error>> {
    let mut manager = open_to_look("bathy jobs")?;
    let sandbox = manager.find(&args.name)?;
    let jobs = manager.jobs(&sandbox)?;
    if args.json {
        output::json(&jobs)?;
    } else {
        for line in table(&jobs, unix_ns()).fit(output_width(), &["USER", "STARTED"]).lines() {
            output::line(line)?;
        }
        if jobs.is_empty() {
            output::nothing(format_args!("no jobs yet; `bathy exec -d {} COMMAND` starts one", args.name));
        }
    }
    Ok(0)
}

fn table(jobs: &[Job], now: u64) -> Table {
    let mut table = Table::new(&[
        ("JOB", Side::Right),
        ("STATUS", Side::Left),
        ("STARTED", Side::Left),
        ("USER", Side::Left),
        ("COMMAND", Side::Left),
    ]);
    for job in jobs {
        table.row([
            job.number.to_string(),
            job.exit.clone().unwrap_or_else(|| "running".to_owned()),
            time::ago(job.started_ns, now),
            job.user.clone().unwrap_or_else(|| "-".to_owned()),
            cut(&job.argv.join(" "), COMMAND_WIDTH),
        ]);
    }
    table
}

/// Attaches the caller to a job.
pub fn attach(args: &AttachArgs) -> Result<u8, Box<dyn Error>> {
    let mut manager = Manager::open("bathy attach")?;
    let sandbox = manager.find(&args.name)?;
    let jobs = manager.jobs(&sandbox)?;
    let job = jobs.iter().find(|job| job.number == args.job).ok_or_else(|| no_job(&args.name, args.job))?;
    if let Some(exit) = &job.exit {
        return Err(format!(
            "Job {0} has ended ({exit}). `bathy logs {1} --job {0}` shows its output",
            args.job, args.name
        )
        .into());
    }
    let stdin = !args.no_stdin;
    let wiring = Wiring { stdin, terminal: args.tty, json: false, detachable: true };
    let mut stdio = CallerStdio::new(wiring)?;
    let mut connection = manager.connect(&sandbox)?;
    if io::stdin().is_terminal() {
        let keys = if args.tty { "Ctrl-P Ctrl-Q" } else { "Ctrl-C" };
        output::note(format_args!("attached to job {}; {keys} detaches, and the job continues", args.job));
    }
    stdio.enter()?;
    let finished =
        Attach::start(&mut connection, AttachRequest::Join { job: args.job }, None, stdio.stdio())?.run();
    let done = finished.map(Done::new);
    let stop = stdio.close();
    let done = done?;
    done.warn();
    if matches!(done.outcome, Outcome::Detached | Outcome::Interrupted) {
        let own_line = if args.tty { "\n" } else { "" };
        output::note_after(own_line, format_args!("job {} continues", args.job));
    }
    let (code, message) = exit_code::of(&done.outcome, None, &stop)?;
    if let Some(message) = message {
        output::note(message);
    }
    Ok(code)
}

/// The error for a job that does not exist.
pub fn no_job(sandbox: &str, job: u32) -> String {
    format!("{sandbox} has no job {job}. `bathy jobs {sandbox}` lists them")
}

/// Sends a signal to a job, or kills a sandbox.
pub fn kill(args: &KillArgs) -> Result<u8, Box<dyn Error>> {
    let mut manager = Manager::open_to_end("bathy kill")?;
    let mut results = Results::new(args.json);
    let killed = kill_one(&mut manager, args);
    output::warnings(&mut manager);
    results.add(&args.name, killed.map(|sandbox| (args.name.clone(), sandbox)))?;
    results.finish()
}

fn kill_one(manager: &mut Manager, args: &KillArgs) -> Result<Sandboxed, Box<dyn Error>> {
    let sandbox = manager.find(&args.name)?;
    match (args.job, args.signal) {
        (None, libc::SIGKILL) => manager.kill(&sandbox)?,
        (job, signal) => manager.signal_job(&sandbox, job.unwrap_or(0), signal)??,
    }
    Ok(sandbox)
}
