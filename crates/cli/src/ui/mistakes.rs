//! Errors for mistakes on the command line, worded so that the next try works.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, Error};

/// Verbs of other tools, and what to do instead.
const FOREIGN: [(&[&str], &str); 15] = [
    (
        &["build", "push", "load", "save", "import"],
        "images are pulled from registries in this version, by `bathy pull`, and neither built nor pushed. What one lacks can be installed in a sandbox",
    ),
    (&["images", "rmi", "tag"], "`bathy image ls`, `bathy image rm` and `bathy image tag`"),
    (&["search"], "registries are not searched. `bathy pull debian:12` fetches an image by its name"),
    (
        &["commit", "export", "diff"],
        "a sandbox's disk cannot become an image in this version. `bathy cp` copies files out of it",
    ),
    (
        &["snapshot", "checkpoint", "restore", "fork", "clone"],
        "sandboxes cannot be copied in this version. `bathy stop` keeps a sandbox's disk, `bathy pause` its memory, too",
    ),
    (
        &["rename"],
        "a sandbox keeps its name; labels (`bathy create --label`) can be chosen freely, but only when it is made",
    ),
    (&["update", "set"], "limits cannot be changed after `bathy create`; the network can, by `bathy policy`"),
    (
        &["compose", "swarm", "service", "stack"],
        "a sandbox is described on its own, in options or in `bathysphere.toml`, and reaches no other one except through published ports",
    ),
    (
        &["volume"],
        "no directory or volume is mounted in this version. `bathy cp` copies files, and a persistent sandbox keeps its disk",
    ),
    (
        &["network"],
        "every sandbox has a network of its own: `--net`, `--allow` and `--deny` of `bathy run` and `create`, later `bathy policy`",
    ),
    (&["container", "sandbox"], "verbs stand alone, as in `bathy ls` and `bathy rm`"),
    (
        &["info", "system", "status"],
        "`bathy doctor` reports what this machine offers, `bathy ls` the sandboxes",
    ),
    (
        &["ssh", "sh", "bash", "enter"],
        "`bathy shell NAME` opens a shell in a sandbox, `bathy run -it bash` in a new one",
    ),
    (&["delete", "destroy", "remove"], "`bathy rm` removes sandboxes"),
    (
        &["prune"],
        "`bathy rm --all` removes all sandboxes that are not running, `bathy rm --filter label=batch` some of them, and `bathy image prune` images that no sandbox needs",
    ),
];
/// Options that mount directories in other tools.
const MOUNTS: [&str; 3] = ["-v", "--volume", "--mount"];
/// Verbs that make sandboxes, into which other tools could mount directories.
const MAKERS: [&str; 4] = ["run", "create", "code", "repl"];

/// Replaces an error by a more helpful one where there is one.
pub fn improve(error: Error, command: &mut Command, line: &[String]) -> Error {
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            foreign(&error, command).unwrap_or_else(|| without_hidden(error, command))
        }
        ErrorKind::UnknownArgument if line.iter().skip(1).take(2).eq(["policy", "set"]) => {
            as_rules(error, command)
        }
        ErrorKind::UnknownArgument if is_mount(&text(&error, ContextKind::InvalidArg), line) => {
            let message = "no directory of this machine can be mounted in this version. Copy files with `bathy cp`, or pass one on standard input";
            command.error(ErrorKind::UnknownArgument, message)
        }
        ErrorKind::UnknownArgument if text(&error, ContextKind::InvalidArg) == "-v" => {
            let message = "there is no option `-v`: `bathy --version` prints the version, and nothing makes bathy more verbose";
            command.error(ErrorKind::UnknownArgument, message)
        }
        _ => error,
    }
}

/// Whether an unknown option would mount a directory: `-v` does so only with a path, for a verb that makes a sandbox.
fn is_mount(option: &str, line: &[String]) -> bool {
    if option != "-v" {
        return MOUNTS.contains(&option);
    }
    let makes_sandbox = line.get(1).is_some_and(|verb| MAKERS.contains(&verb.as_str()));
    let is_path = |text: &str| text.contains(['/', ':', '.']);
    let with_path = |(index, word): (usize, &String)| match word.strip_prefix("-v") {
        Some("") => line.get(index + 1).is_some_and(|next| is_path(next)),
        Some(attached) => is_path(attached),
        None => false,
    };
    makes_sandbox && line.iter().enumerate().any(with_path)
}

/// Removes hidden verbs from the suggestions.
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

/// The answer to a verb of another tool.
fn foreign(error: &Error, command: &mut Command) -> Option<Error> {
    let verb = text(error, ContextKind::InvalidSubcommand);
    let (_, instead) = FOREIGN.iter().find(|(names, _)| names.contains(&verb.as_str()))?;
    Some(command.error(ErrorKind::InvalidSubcommand, format!("bathy has no verb `{verb}`: {instead}")))
}

/// `--allow` and `--deny` are options of `run` and `create`, but words of a rule in `bathy policy set`.
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
        improve(error, &mut Cli::command(), &words).to_string()
    }

    #[test]
    fn verbs_and_options_of_others_are_answered() {
        for verb in FOREIGN.iter().flat_map(|(names, _)| *names) {
            assert!(Cli::command().find_subcommand(verb).is_none(), "{verb} is ours");
            assert!(told(&format!("bathy {verb} x")).contains(&format!("has no verb `{verb}`: ")), "{verb}");
        }
        assert!(told("bathy build .").contains("bathy pull"));
        assert!(told("bathy images").contains("bathy image ls"));
        assert!(told("bathy prune").contains("rm --all"));
        for option in MOUNTS {
            let told = told(&format!("bathy run {option} /tmp:/work ls"));
            assert!(told.contains("bathy cp") && !told.contains("as a value"), "{told}");
        }
        assert!(told("bathy run -v.:/work ls").contains("bathy cp"));
        for line in ["bathy run --nonsense", "bathy -v", "bathy run -v ls", "bathy ls -v"] {
            assert!(!told(line).contains("bathy cp"), "{line}: {}", told(line));
        }
        assert!(told("bathy -v").contains("bathy --version"), "{}", told("bathy -v"));
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
