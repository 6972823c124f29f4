//! The `bathy` command: thin. It turns words into a [`bathy_spec::SandboxSpec`], and results into output and exit codes.

mod args;
mod commands;
mod jsonc;
mod location;
mod sys;
mod ui;

use std::error::Error;
use std::ffi::OsString;
use std::io;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use crate::commands::{
    code, completion, copy, create, doctor, events, exec, jobs, lifecycle, list, logs, man, mcp, net, policy,
    repl, run, setup, stats, top,
};
use crate::ui::{exit_code, mistakes, output};

/// Exit code for failures of ours, as opposed to those of the command in the sandbox.
const OUR_FAILURE: u8 = 125;

/// Runs code that nobody should trust, each in a sandbox with its own Linux kernel.
#[derive(Parser)]
#[command(name = "bathy", version, propagate_version = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Run a command in a new sandbox that is gone afterwards.
    ///
    /// Input, output and the exit code pass through. 125 is a failure of bathy itself, 126 a command that cannot be
    /// executed, 127 one that does not exist, 128+n one that was ended by signal n, 124 one that took too long.
    /// With --detach the sandbox is kept instead, as with `bathy create` and `bathy start`.
    Run(Box<run::Args>),
    /// Make a sandbox that is kept, and print its id.
    Create(Box<create::Args>),
    /// Start sandboxes.
    Start(lifecycle::Names),
    /// Stop sandboxes: their processes are asked to end, and ended if they do not. Their disks are kept.
    Stop(lifecycle::StopArgs),
    /// Stop and start sandboxes.
    Restart(lifecycle::StopArgs),
    /// Remove sandboxes with their disks and logs.
    Rm(lifecycle::RemoveArgs),
    /// Take back sandboxes whose disks are there and that the store does not know.
    ///
    /// That is so after the store was damaged, lost, or replaced by an older one; `bathy ls` shows such sandboxes as orphaned.
    /// What stands beside the disk tells their names and settings. Where nothing does, they get the usual settings and no
    /// network.
    Adopt(lifecycle::Names),
    /// List sandboxes.
    Ls(list::Args),
    /// List the sandboxes that run.
    Ps(list::Args),
    /// Print everything that is known about sandboxes, as JSON.
    Inspect(list::InspectArgs),
    /// Wait until sandboxes have ended, and print the exit codes of their main commands.
    Wait(lifecycle::WaitArgs),
    /// Freeze sandboxes: they use no processor until they are resumed.
    Pause(lifecycle::PauseArgs),
    /// Let paused sandboxes go on.
    Resume(lifecycle::Names),
    /// Run a command in a sandbox that runs.
    ///
    /// Exit codes are those of `bathy run`.
    Exec(exec::Args),
    /// Run code and show its result: the value of its last expression, pictures, errors.
    ///
    /// Without --sandbox it runs in a new sandbox that is gone afterwards. The exit code is 1 if the code raised an error,
    /// 124 if it took too long, its own if it ended its interpreter, 127 if there is no interpreter, and as with
    /// `bathy run` otherwise.
    Code(Box<code::Args>),
    /// Open a Python REPL that remembers: make one, or go on with one by its name.
    ///
    /// A REPL lives until it is removed. While nobody uses it, it is paused with its memory on disk; the next cell resumes
    /// it.
    Repl(Box<repl::Args>),
    /// Serve sandboxes to AI agents over the Model Context Protocol.
    ///
    /// Without --http it speaks with the one client that started it, over standard input and output, until that ends.
    /// Sandboxes that agents make outlive the server; their lifetime and idle time end and remove them, or --rm does.
    Mcp(Box<mcp::Args>),
    /// Open a login shell in a sandbox that runs.
    Shell(exec::ShellArgs),
    /// List a sandbox's main command and jobs.
    Jobs(jobs::Args),
    /// Connect to a sandbox's main command or job. Ctrl-P Ctrl-Q leaves it running, and so does Ctrl-C without -t.
    Attach(jobs::AttachArgs),
    /// Print what a sandbox's main command, jobs and kernel said.
    Logs(logs::Args),
    /// End a sandbox at once, or send a signal to its main command or a job.
    Kill(jobs::KillArgs),
    /// Copy files and folders into or out of a sandbox that runs.
    Cp(copy::Args),
    /// Print what sandboxes use.
    Stats(stats::Args),
    /// Show what sandboxes use, live.
    Top(top::Args),
    /// Show or change what a sandbox may reach.
    Policy {
        #[command(subcommand)]
        verb: policy::Verb,
    },
    /// Look at the network of sandboxes.
    Net {
        #[command(subcommand)]
        verb: net::Verb,
    },
    /// Print the published ports of a sandbox.
    Port(policy::PortArgs),
    /// Print what happened: every crossing of the boundary, and who asked for it.
    Events(events::Args),
    /// Check the record of events.
    Audit {
        #[command(subcommand)]
        verb: events::AuditVerb,
    },
    /// Build what is missing: the guest kernel of the engine in use, and the default image.
    Setup(setup::Args),
    /// Check what this machine offers, and tell how to mend what is missing.
    Doctor(doctor::Args),
    /// Print a completion script for a shell.
    ///
    /// In bash, zsh and fish it completes names of sandboxes as well: `source <(bathy completion bash)`, or
    /// `bathy completion fish | source`.
    Completion(completion::Args),
    /// Print or write manual pages.
    Man(man::Args),
    /// Print the version, as --version does.
    #[command(hide = true)]
    Version,
    /// Keep a sandbox: the parent of everything that runs for it.
    #[command(hide = true)]
    Monitor {
        /// The sandbox's id.
        id: String,
    },
    /// Print what completes a word of a command line, for the scripts of `bathy completion`.
    #[command(hide = true)]
    Complete(completion::CompleteArgs),
    /// Run the KVM probe guest in this process.
    #[command(hide = true, name = bathy_runtime::kvm_probe::VERB)]
    ProbeKvm,
}

impl Verb {
    /// Does it; returns the exit code.
    fn run(self) -> Result<u8, Box<dyn Error>> {
        match self {
            Self::Run(args) => run::run(*args),
            Self::Create(args) => create::run(*args),
            Self::Start(names) => lifecycle::start(&names),
            Self::Stop(args) => lifecycle::stop(&args),
            Self::Restart(args) => lifecycle::restart(&args),
            Self::Rm(args) => lifecycle::remove(&args),
            Self::Adopt(names) => lifecycle::adopt(&names),
            Self::Ls(args) => list::list(&args, false),
            Self::Ps(args) => list::list(&args, true),
            Self::Inspect(args) => list::inspect(&args),
            Self::Wait(args) => lifecycle::wait(&args),
            Self::Pause(args) => lifecycle::pause(&args),
            Self::Resume(names) => lifecycle::resume(&names),
            Self::Exec(args) => exec::run(args),
            Self::Code(args) => code::run(*args),
            Self::Repl(args) => repl::run(*args),
            Self::Mcp(args) => mcp::run(*args),
            Self::Shell(args) => exec::shell(args),
            Self::Jobs(args) => jobs::list(&args),
            Self::Attach(args) => jobs::attach(&args),
            Self::Logs(args) => logs::run(&args),
            Self::Kill(args) => jobs::kill(&args),
            Self::Policy { verb } => policy::run(verb),
            Self::Net { verb } => net::run(&verb),
            Self::Port(args) => policy::ports(&args),
            Self::Cp(args) => copy::run(&args),
            Self::Stats(args) => stats::run(&args),
            Self::Top(args) => top::run(&args),
            Self::Events(args) => events::run(&args),
            Self::Audit { verb } => events::audit(&verb),
            Self::Setup(args) => setup::run(&args),
            Self::Doctor(args) => doctor::run(&args),
            Self::Completion(args) => completion::script(&args, &Cli::command()),
            Self::Complete(args) => completion::complete(args, Cli::command()),
            Self::Man(args) => man::run(&args, Cli::command()),
            Self::Version => {
                output::line(format_args!("bathy {}", env!("CARGO_PKG_VERSION")))?;
                Ok(0)
            }
            Self::Monitor { id } => {
                // Whoever started us may have had its own plans with signals.
                sys::unblock_signals()?;
                bathy_manager::monitor::run(&id)?;
                Ok(0)
            }
            Self::ProbeKvm => doctor::probe_kvm(),
        }
    }
}

fn main() -> ExitCode {
    let words = engine_after_verb(std::env::args_os().collect());
    let cli = match Cli::try_parse_from(&words) {
        Ok(cli) => cli,
        Err(error) => {
            let line: Vec<String> = words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
            let error = mistakes::mend(error, &mut Cli::command(), &line);
            // A broken pipe or terminal is no reason to fail differently.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(OUR_FAILURE) } else { ExitCode::SUCCESS };
        }
    };
    match cli.verb.run() {
        Ok(code) => ExitCode::from(code),
        // Like any program whose reader has gone away.
        Err(error) if is_broken_pipe(error.as_ref()) => ExitCode::from(exit_code::BROKEN_PIPE),
        Err(error) => {
            output::failure(error.as_ref());
            ExitCode::from(OUR_FAILURE)
        }
    }
}

/// `bathy --engine kvm run …` is `bathy run --engine kvm …`: people write what concerns the whole machine first.
fn engine_after_verb(mut words: Vec<OsString>) -> Vec<OsString> {
    let flag = match words.get(1).and_then(|word| word.to_str()) {
        Some("--engine") => 2,
        Some(word) if word.starts_with("--engine=") => 1,
        _ => return words,
    };
    // The program, the flag with its value, and the verb.
    if words.len() > flag + 1 {
        words.get_mut(1..=flag + 1).unwrap_or_default().rotate_right(1);
    }
    words
}

fn is_broken_pipe(error: &(dyn Error + 'static)) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engine_may_come_before_the_verb() {
        let moved = |line: &str| {
            let words = engine_after_verb(line.split(' ').map(OsString::from).collect());
            words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(moved("bathy --engine kvm run -- true"), "bathy run --engine kvm -- true");
        assert_eq!(moved("bathy --engine=uml create --name x"), "bathy create --engine=uml --name x");
        for line in
            ["bathy", "bathy --engine", "bathy --engine kvm", "bathy run --engine kvm -- --engine uml"]
        {
            assert_eq!(moved(line), line);
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_command_keeps_its_own_options() {
        for line in [
            "bathy exec -i web ls -l --json",
            "bathy exec -i web -- ls -l --json",
            "bathy exec web -i -- ls -l --json",
            "bathy exec web -i ls -l --json",
        ] {
            let cli = Cli::try_parse_from(line.split(' ')).unwrap();
            let Verb::Exec(args) = cli.verb else { panic!("{line} is not read as exec") };
            assert_eq!(args.words(), (true, "web", vec!["ls", "-l", "--json"]), "{line}");
        }
        for line in
            ["bathy run -i ls -l --json", "bathy run -i -- ls -l --json", "bathy run -i ls -- -l --json"]
        {
            let cli = Cli::try_parse_from(line.split(' ')).unwrap();
            let Verb::Run(args) = cli.verb else { panic!("{line} is not read as run") };
            let words: Vec<_> = args.words().filter(|word| *word != "--").collect();
            assert_eq!(words, ["ls", "-l", "--json"], "{line}");
        }
    }
}
