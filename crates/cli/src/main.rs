//! The `bathy` command: thin. It turns words into a [`bathy_sandbox::SandboxSpec`], and results into output and exit codes.

mod doctor;
mod escape;
mod output;
mod progress;
mod run;
mod setup;
mod sys;

use std::error::Error;
use std::io;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

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
    Run(run::Args),
    /// Build what is missing: the guest kernel and the default image.
    Setup(setup::Args),
    /// Check what this machine offers, and tell how to mend what is missing.
    Doctor(doctor::Args),
    /// Print a completion script for a shell.
    Completion {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Run the KVM probe guest in this process.
    #[command(hide = true)]
    ProbeKvm,
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // A broken pipe or terminal is no reason to fail differently.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(OUR_FAILURE) } else { ExitCode::SUCCESS };
        }
    };
    let outcome = match cli.verb {
        Verb::Run(args) => run::run(args),
        Verb::Setup(args) => setup::run(&args),
        Verb::Doctor(args) => doctor::run(&args),
        Verb::Completion { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "bathy", &mut io::stdout());
            Ok(0)
        }
        Verb::ProbeKvm => doctor::probe_kvm(),
    };
    match outcome {
        Ok(code) => ExitCode::from(code),
        // Like any program whose reader has gone away.
        Err(error) if is_broken_pipe(error.as_ref()) => ExitCode::from(run::BROKEN_PIPE),
        Err(error) => {
            output::note(chain(error.as_ref()));
            ExitCode::from(OUR_FAILURE)
        }
    }
}

fn is_broken_pipe(error: &(dyn Error + 'static)) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// An error with its sources: printed once, here.
fn chain(error: &dyn Error) -> String {
    let mut text = escape::text(&error.to_string());
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&escape::text(&cause.to_string()));
        source = cause.source();
    }
    text
}
