//! The `bathy` command. It is thin: it parses arguments into a [`bathy_spec::SandboxSpec`], and turns results into output
//! and exit codes.

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
    code, completion, copy, create, doctor, events, exec, image, jobs, lifecycle, list, login, logs, man,
    mcp, net, policy, repl, run, setup, stats, top,
};
use crate::ui::{exit_code, mistakes, output};

/// Exit code for failures of bathy itself, as opposed to those of the command in the sandbox.
const OUR_FAILURE: u8 = 125;

/// Runs untrusted code in sandboxes, each with its own Linux kernel.
#[derive(Parser)]
#[command(name = "bathy", version, propagate_version = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Run a command in an ephemeral sandbox, which is removed when the command ends.
    ///
    /// Input, output and the exit code are passed through. Other exit codes: 124 if the command exceeded its time limit,
    /// 125 if bathy itself failed, 126 if the command cannot be executed, 127 if it does not exist, 128+n if signal n ended it.
    /// With --detach the sandbox is persistent, as with `bathy create` and `bathy start`.
    Run(Box<run::Args>),
    /// Create a persistent sandbox, and print its id.
    Create(Box<create::Args>),
    /// Start sandboxes.
    Start(lifecycle::Names),
    /// Stop sandboxes: ask their processes to end, and kill those that do not. Their disks remain.
    Stop(lifecycle::StopArgs),
    /// Stop and start sandboxes.
    Restart(lifecycle::StopArgs),
    /// Remove sandboxes with their disks and logs.
    Rm(lifecycle::RemoveArgs),
    /// Take back orphaned sandboxes: their disks exist, but the store does not know them.
    ///
    /// A store that was damaged, lost, or replaced by an older one leaves such sandboxes; `bathy ls` shows them as orphaned.
    /// Their names and settings are read from the file beside the disk. Without that file they get default settings and no
    /// network.
    Adopt(lifecycle::Names),
    /// List sandboxes.
    Ls(list::Args),
    /// List running sandboxes.
    Ps(list::Args),
    /// Print all details of sandboxes as JSON.
    Inspect(list::InspectArgs),
    /// Wait for sandboxes to end, and print the exit codes of their main commands.
    Wait(lifecycle::WaitArgs),
    /// Pause sandboxes: they use no processor time until they are resumed.
    Pause(lifecycle::PauseArgs),
    /// Resume paused sandboxes.
    Resume(lifecycle::Names),
    /// Run a command in a running sandbox.
    ///
    /// Exit codes are those of `bathy run`.
    Exec(exec::Args),
    /// Run code and show its result: the value of its last expression, pictures, errors.
    ///
    /// Without --sandbox it runs in an ephemeral sandbox, which is removed afterwards. The exit code is 1 if the code raised an
    /// error, 124 if it exceeded its time limit, 127 if there is no interpreter, the code's own if it ended its interpreter,
    /// and otherwise as with `bathy run`.
    Code(Box<code::Args>),
    /// Open a Python REPL whose state persists: a new one, or an existing one by its name.
    ///
    /// A REPL exists until it is removed. While it is idle, it is paused and its memory is on disk; the next cell resumes it.
    Repl(Box<repl::Args>),
    /// Serve sandboxes to AI agents over the Model Context Protocol.
    ///
    /// Without --http it serves the one client that started it, over standard input and output, until that client exits.
    /// Sandboxes that agents create outlive the server, until their maximum duration or idle timeout, unless --rm is given.
    Mcp(Box<mcp::Args>),
    /// Open a login shell in a running sandbox.
    Shell(exec::ShellArgs),
    /// List a sandbox's main command and jobs.
    Jobs(jobs::Args),
    /// Attach to a sandbox's main command or a job. Ctrl-P Ctrl-Q detaches, and so does Ctrl-C without -t.
    Attach(jobs::AttachArgs),
    /// Print the output of a sandbox's main command and jobs, or its kernel's console.
    Logs(logs::Args),
    /// Kill a sandbox, or send a signal to its main command or to a job.
    Kill(jobs::KillArgs),
    /// Copy files and folders into or out of a running sandbox.
    Cp(copy::Args),
    /// Print the resource usage of sandboxes.
    Stats(stats::Args),
    /// Show the resource usage of sandboxes, live.
    Top(top::Args),
    /// Show or change what a sandbox may reach.
    Policy {
        #[command(subcommand)]
        verb: policy::Verb,
    },
    /// Inspect the network traffic of sandboxes.
    Net {
        #[command(subcommand)]
        verb: net::Verb,
    },
    /// Print the published ports of a sandbox.
    Port(policy::PortArgs),
    /// Print events: everything that crossed a sandbox's boundary, and who requested it.
    Events(events::Args),
    /// Verify the audit log.
    Audit {
        #[command(subcommand)]
        verb: events::AuditVerb,
    },
    /// Fetch an image from a registry.
    ///
    /// Every part is verified by its digest. `bathy run --image IMAGE` also fetches what is missing.
    Pull(image::PullArgs),
    /// List, inspect, name and remove images from registries.
    Image {
        #[command(subcommand)]
        verb: image::Verb,
    },
    /// Keep a login for a registry.
    Login(login::LoginArgs),
    /// Forget a login for a registry.
    Logout(login::LogoutArgs),
    /// Build what is missing of the guest kernel and the default image.
    Setup(setup::Args),
    /// Check whether this machine can run sandboxes, and suggest fixes.
    Doctor(doctor::Args),
    /// Print a completion script for a shell.
    ///
    /// In bash, zsh and fish it also completes the names of sandboxes: `source <(bathy completion bash)`, or
    /// `bathy completion fish | source`.
    Completion(completion::Args),
    /// Show a manual page, or write all of them to a folder.
    Man(man::Args),
    /// Print the version, as --version does.
    #[command(hide = true)]
    Version,
    /// Run the monitor of a persistent sandbox.
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
    /// Runs the verb and returns the exit code.
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
            Self::Pull(args) => image::pull(&args),
            Self::Image { verb } => image::run(&verb),
            Self::Login(args) => login::login(&args),
            Self::Logout(args) => login::logout(&args),
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
                // The process that started the monitor may have blocked signals.
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
            let error = mistakes::improve(error, &mut Cli::command(), &line);
            // A broken pipe or terminal does not change the exit code.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(OUR_FAILURE) } else { ExitCode::SUCCESS };
        }
    };
    match cli.verb.run() {
        Ok(code) => ExitCode::from(code),
        // As with any program whose output pipe was closed.
        Err(error) if is_broken_pipe(error.as_ref()) => ExitCode::from(exit_code::BROKEN_PIPE),
        Err(error) => {
            output::failure(error.as_ref());
            ExitCode::from(OUR_FAILURE)
        }
    }
}

/// Accepts `bathy --engine kvm run …` for `bathy run --engine kvm …`.
fn engine_after_verb(mut words: Vec<OsString>) -> Vec<OsString> {
    let flag = match words.get(1).and_then(|word| word.to_str()) {
        Some("--engine") => 2,
        Some(word) if word.starts_with("--engine=") => 1,
        _ => return words,
    };
    // The program, the option with its value, and the verb.
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
    fn the_version_is_a_verb_too() {
        assert!(matches!(Cli::try_parse_from(["bathy", "version"]).unwrap().verb, Verb::Version));
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
