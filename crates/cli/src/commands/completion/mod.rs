//! `bathy completion`: scripts that ask `bathy complete` what fits, because only the store knows the sandboxes' names.

mod candidates;

use std::error::Error;
use std::io::{self, Write};

use bathy_image::Recipe;
use bathy_manager::Manager;
use clap::Command;
use clap_complete::Shell;

use crate::ui::{escape, output};
use candidates::{Known, candidates};

/// Instructs a script to complete files.
const FILES: &str = ":files";

/// Arguments of `bathy completion`.
#[derive(clap::Args)]
pub struct Args {
    /// The shell to complete for.
    shell: Shell,
}

/// Arguments of `bathy complete`.
#[derive(clap::Args)]
pub struct CompleteArgs {
    /// The index of the word to complete.
    index: usize,
    /// All words of the line, from the program's name on.
    #[arg(last = true)]
    words: Vec<String>,
}

pub fn script(args: &Args, command: &Command) -> Result<u8, Box<dyn Error>> {
    let script = match args.shell {
        Shell::Bash => include_str!("bash.sh").to_owned(),
        Shell::Zsh => include_str!("zsh.sh").to_owned(),
        Shell::Fish => include_str!("fish.fish").to_owned(),
        other => generated(other, command),
    };
    io::stdout().write_all(script.as_bytes())?;
    Ok(0)
}

/// Prints the completions of a word: in each line a value, a tab and its description.
pub fn complete(args: CompleteArgs, mut command: Command) -> Result<u8, Box<dyn Error>> {
    command.build();
    for candidate in candidates(&command, &args.words, args.index, &names) {
        match candidate.value.as_str() {
            FILES => output::line(FILES)?,
            value => {
                let (value, about) = (escape::word(value), escape::word(&candidate.about));
                output::line(format_args!("{value}\t{about}"))?;
            }
        }
    }
    Ok(0)
}

/// The names that the store or this program knows. Completion has no place for errors: what cannot be read has no names.
fn names(known: Known) -> Vec<String> {
    let manager = || Manager::open_to_end("bathy complete").ok();
    match known {
        Known::Sandboxes => manager()
            .and_then(|mut manager| manager.list().ok())
            .into_iter()
            .flatten()
            .map(|sandbox| sandbox.name().to_owned())
            .collect(),
        Known::Orphans => manager()
            .and_then(|manager| manager.orphans().ok())
            .into_iter()
            .flatten()
            .map(|sandbox| sandbox.name().to_owned())
            .collect(),
        Known::Repls => manager()
            .and_then(|mut manager| manager.list_repls().ok())
            .into_iter()
            .flatten()
            .map(|repl| repl.name)
            .collect(),
        Known::Images => {
            let pulled = manager().map(|mut manager| manager.image_names()).unwrap_or_default();
            Recipe::images().map(str::to_owned).chain(pulled).collect()
        }
    }
}

/// A script that completes verbs and options, and no names.
fn generated(shell: Shell, command: &Command) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command.clone(), "bathy", &mut script);
    without_hidden(&String::from_utf8_lossy(&script), command)
}

/// A generated script without the lines that offer hidden verbs and options, which the generator does not leave out.
fn without_hidden(script: &str, command: &Command) -> String {
    let hidden = hidden(command);
    let offers = |line: &str, word: &String| {
        let line = line.trim_start();
        line.starts_with(&format!("cand {word} "))
            || line.starts_with(&format!("[CompletionResult]::new('{word}',"))
    };
    script.split_inclusive('\n').filter(|line| !hidden.iter().any(|word| offers(line, word))).collect()
}

/// The hidden verbs and options of a command and of its verbs.
fn hidden(command: &Command) -> Vec<String> {
    let options = command.get_arguments().filter(|arg| arg.is_hide_set()).filter_map(|arg| arg.get_long());
    let verbs = command.get_subcommands().filter(|verb| verb.is_hide_set()).map(Command::get_name);
    let own = options.map(|long| format!("--{long}")).chain(verbs.map(str::to_owned));
    own.chain(command.get_subcommands().flat_map(hidden)).collect()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::Cli;

    #[test]
    fn scripts_offer_no_hidden_verbs_and_options() {
        for shell in [Shell::Elvish, Shell::PowerShell] {
            let script = generated(shell, &Cli::command());
            for shown in ["--memory", "--net", "'bathy;policy;set'"] {
                assert!(script.contains(shown), "{shell}: {shown}");
            }
            for hidden in ["--kernel", "--ready-timeout", "cand monitor", "('monitor'", "('complete'"] {
                assert!(!script.contains(hidden), "{shell}: {hidden}");
            }
        }
    }
}
