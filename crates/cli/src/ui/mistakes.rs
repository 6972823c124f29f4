//! Mistakes on the command line, told so that the next try works.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, Error};

/// Verbs whose command stands behind `--`.
const WITH_COMMANDS: [&str; 2] = ["run", "create"];

/// The same error, told better if we can.
pub fn mend(error: Error, command: &mut Command, line: &[String]) -> Error {
    match error.kind() {
        ErrorKind::InvalidSubcommand => without_hidden(error, command),
        ErrorKind::UnknownArgument if line.iter().skip(1).take(2).eq(["policy", "set"]) => {
            as_rules(error, command)
        }
        ErrorKind::UnknownArgument => with_dashes(error, command, line),
        _ => error,
    }
}

/// Nobody is meant to use hidden verbs, so they are not proposed.
fn without_hidden(mut error: Error, command: &mut Command) -> Error {
    let Some(ContextValue::Strings(proposed)) = error.get(ContextKind::SuggestedSubcommand) else {
        return error;
    };
    let hidden = |name: &String| command.find_subcommand(name).is_some_and(Command::is_hide_set);
    let proposed: Vec<String> = proposed.iter().filter(|name| !hidden(name)).cloned().collect();
    if proposed.is_empty() {
        let wrong = text(&error, ContextKind::InvalidSubcommand);
        return command.error(ErrorKind::InvalidSubcommand, format!("unrecognized subcommand '{wrong}'"));
    }
    error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(proposed));
    error
}

/// A word where only options can stand is the beginning of a command without its `--`.
fn with_dashes(error: Error, command: &mut Command, line: &[String]) -> Error {
    let word = text(&error, ContextKind::InvalidArg);
    let verb = line.get(1).map(String::as_str).unwrap_or_default();
    let Some(at) = line.iter().skip(2).position(|given| *given == word) else { return error };
    if word.starts_with('-') || !WITH_COMMANDS.contains(&verb) {
        return error;
    }
    let (before, after) = line.split_at(at + 2);
    let words: Vec<&str> = before
        .iter()
        .skip(1)
        .map(String::as_str)
        .chain(["--"])
        .chain(after.iter().map(String::as_str))
        .collect();
    let message = format!("a command stands behind `--`. Did you mean this?\n\n  bathy {}", words.join(" "));
    let command =
        command.find_subcommand_mut(verb).map_or_else(|| Command::new("bathy"), |verb| verb.clone());
    command.bin_name(format!("bathy {verb}")).error(ErrorKind::UnknownArgument, message)
}

/// What is an option of `run` and `create` is a word of a rule where there is nothing but rules.
fn as_rules(error: Error, command: &mut Command) -> Error {
    let option = text(&error, ContextKind::InvalidArg);
    let Some(action @ ("allow" | "deny")) = option.strip_prefix("--") else { return error };
    let message = format!(
        "a rule is one word here, without dashes:\n\n  bathy policy set NAME PRESET '{action} api.example:443'"
    );
    command.error(ErrorKind::UnknownArgument, message)
}

fn text(error: &Error, kind: ContextKind) -> String {
    match error.get(kind) {
        Some(ContextValue::String(text)) => text.clone(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::Cli;

    fn told(line: &str) -> String {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let error = Cli::command().try_get_matches_from(&words).unwrap_err();
        mend(error, &mut Cli::command(), &words).to_string()
    }

    #[test]
    fn a_command_without_its_dashes_is_noticed() {
        assert!(told("bathy run ls").contains("bathy run -- ls\n"), "{}", told("bathy run ls"));
        assert!(told("bathy run -m 1G ls x").contains("bathy run -m 1G -- ls x\n"));
        assert!(told("bathy create --name a sleep").contains("bathy create --name a -- sleep\n"));
        assert!(!told("bathy run --nonsense").contains("Did you mean"));
    }

    #[test]
    fn rules_of_a_policy_are_no_options() {
        for action in ["allow", "deny"] {
            let told = told(&format!("bathy policy set web public --{action} a.example"));
            assert!(told.contains(&format!("'{action} api.example:443'")), "{told}");
        }
        assert!(!told("bathy policy set web public --nonsense").contains("api.example"));
    }

    #[test]
    fn hidden_verbs_are_not_proposed() {
        assert!(!told("bathy init").contains("monitor"), "{}", told("bathy init"));
        assert!(!told("bathy monito").contains("monitor"));
        assert!(told("bathy strat").contains("start"));
    }
}
