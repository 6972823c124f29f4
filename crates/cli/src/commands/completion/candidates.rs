//! What completes a word of a command line: verbs, options, values and names.

use clap::{Arg, ArgAction, Command, ValueHint};

use super::FILES;

/// Names that are not part of the command line's definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// Sandboxes of the store.
    Sandboxes,
    /// Sandboxes that the store does not know.
    Orphans,
    Repls,
    Images,
}

/// A completion of a word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub value: String,
    /// Its description in one line.
    pub about: String,
}

impl Candidate {
    fn new(value: impl Into<String>) -> Self {
        Self { value: value.into(), about: String::new() }
    }
}

/// The completions of the word at `index`. `names` looks up what only the store knows.
pub fn candidates(
    command: &Command,
    words: &[String],
    index: usize,
    names: &dyn Fn(Known) -> Vec<String>,
) -> Vec<Candidate> {
    let mut line = Line::new(command);
    for word in words.iter().take(index).skip(1) {
        line.read(word);
    }
    let current = words.get(index).map_or("", String::as_str);
    let (before, begun) = line.split(current);
    if let Some(option) = before.strip_prefix("--") {
        line.pending = line.long(option);
    }
    let fitting = line.at(begun, names).into_iter().filter(|candidate| {
        candidate.value == FILES || candidate.value.starts_with(begun) && candidate.value != begun
    });
    fitting
        .map(|candidate| match candidate.value.as_str() {
            FILES => candidate,
            value => Candidate { value: format!("{before}{value}"), ..candidate },
        })
        .collect()
}

/// The parsed words of a line.
struct Line<'a> {
    command: &'a Command,
    /// The verbs so far.
    verbs: Vec<&'a str>,
    /// How many positional arguments the verb has had.
    positionals: usize,
    /// The option whose value comes next.
    pending: Option<&'a Arg>,
    /// After `--` there are no options.
    is_escaped: bool,
    /// Words of the command that runs in a sandbox are not completed.
    is_foreign: bool,
    /// Some shells split `NAME:PATH` at the colon.
    is_path: bool,
}

impl<'a> Line<'a> {
    fn new(command: &'a Command) -> Self {
        Self {
            command,
            verbs: Vec::new(),
            positionals: 0,
            pending: None,
            is_escaped: false,
            is_foreign: false,
            is_path: false,
        }
    }

    fn read(&mut self, word: &str) {
        self.is_path = word == ":";
        if self.is_foreign || self.is_path {
            return;
        }
        // Some shells split `--option=value` into three words.
        if self.pending.is_some() && word == "=" {
            return;
        }
        if self.pending.take().is_some() {
            return;
        }
        if !self.is_escaped && word == "--" {
            self.is_escaped = true;
        } else if let Some(option) = word.strip_prefix("--").filter(|_| !self.is_escaped) {
            self.pending = self.long(option).filter(|_| !option.contains('='));
        } else if let Some(cluster) =
            word.strip_prefix('-').filter(|rest| !self.is_escaped && !rest.is_empty())
        {
            self.pending = self.short(cluster);
        } else {
            self.word(word);
        }
    }

    fn word(&mut self, word: &str) {
        let verb = self.command.get_subcommands().find(|verb| verb.get_name() == word);
        if let Some(verb) = verb.filter(|_| self.positionals == 0) {
            self.command = verb;
            self.verbs.push(verb.get_name());
            return;
        }
        self.is_foreign = self.positional().is_some_and(Arg::is_trailing_var_arg_set);
        self.positionals += 1;
    }

    /// The option of this name, if it takes a value.
    fn long(&self, option: &str) -> Option<&'a Arg> {
        let name = option.split_once('=').map_or(option, |(name, _)| name);
        self.options().find(|arg| arg.get_long() == Some(name)).filter(|arg| takes_value(arg))
    }

    /// The last option of several letters, if its value is the next word.
    fn short(&self, cluster: &str) -> Option<&'a Arg> {
        let mut letters = cluster.chars();
        while let Some(letter) = letters.next() {
            let arg = self.options().find(|arg| arg.get_short() == Some(letter));
            if let Some(arg) = arg.filter(|arg| takes_value(arg)) {
                return Some(arg).filter(|_| letters.as_str().is_empty());
            }
        }
        None
    }

    fn options(&self) -> impl Iterator<Item = &'a Arg> {
        self.command.get_arguments().filter(|arg| !arg.is_positional())
    }

    /// The positional argument that comes next: the last one may come again.
    fn positional(&self) -> Option<&'a Arg> {
        let mut all: Vec<_> = self.command.get_positionals().collect();
        all.sort_by_key(|arg| arg.get_index());
        let several = |arg: &&&Arg| matches!(arg.get_action(), ArgAction::Append);
        all.get(self.positionals).or_else(|| all.iter().find(several)).copied()
    }

    /// Splits the word to complete into its fixed beginning and the part to complete.
    fn split<'w>(&self, word: &'w str) -> (&'w str, &'w str) {
        match word.split_once('=') {
            Some((option, value)) if option.starts_with("--") && !self.is_escaped => {
                (word.get(..=option.len()).unwrap_or_default(), value)
            }
            // The word is the sign alone where a shell split it off.
            Some(("", "")) if self.pending.is_some() => ("", ""),
            _ => ("", word),
        }
    }

    fn at(&self, begun: &str, names: &dyn Fn(Known) -> Vec<String>) -> Vec<Candidate> {
        if self.is_foreign || self.is_path {
            return Vec::new();
        }
        if let Some(option) = self.pending {
            return self.values(option, names);
        }
        if begun.starts_with('-') && !self.is_escaped {
            return self.options().filter(|arg| !arg.is_hide_set()).filter_map(option).collect();
        }
        let verbs =
            self.command.get_subcommands().filter(|verb| !verb.is_hide_set() && self.positionals == 0);
        let verbs = verbs.map(|verb| Candidate {
            value: verb.get_name().to_owned(),
            about: verb.get_about().map(ToString::to_string).unwrap_or_default(),
        });
        verbs.chain(self.positional().into_iter().flat_map(|arg| self.values(arg, names))).collect()
    }

    fn values(&self, arg: &Arg, names: &dyn Fn(Known) -> Vec<String>) -> Vec<Candidate> {
        let known = |known| names(known).into_iter().map(Candidate::new).collect();
        let files = || vec![Candidate::new(FILES)];
        match (self.verbs.as_slice(), arg.get_id().as_str()) {
            // A name that is yet to be given.
            (["create" | "run"] | ["repl", "new"] | ["mcp", ..] | ["image", ..], "name") => Vec::new(),
            (["repl", ..], "name" | "names") => known(Known::Repls),
            (["adopt"], "names") => known(Known::Orphans),
            (["cp"], "from" | "to") => {
                let sandboxes =
                    names(Known::Sandboxes).into_iter().map(|name| Candidate::new(format!("{name}:")));
                sandboxes.chain(files()).collect()
            }
            (_, "name" | "names" | "sandbox") => known(Known::Sandboxes),
            (_, "image" | "images") => known(Known::Images),
            _ => {
                let values = arg.get_possible_values().into_iter().filter(|value| !value.is_hide_set());
                let mut values: Vec<_> = values.map(|value| Candidate::new(value.get_name())).collect();
                if matches!(arg.get_value_hint(), ValueHint::AnyPath) {
                    values.extend(files());
                }
                values
            }
        }
    }
}

/// Whether the option takes a value on the command line, which flags do not.
fn takes_value(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Set | ArgAction::Append)
}

fn option(arg: &Arg) -> Option<Candidate> {
    let value = format!("--{}", arg.get_long()?);
    let about = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let about =
        about.split_inclusive(". ").next().unwrap_or_default().trim_end().trim_end_matches('.').to_owned();
    Some(Candidate { value, about })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::Cli;

    fn names(known: Known) -> Vec<String> {
        let names: &[&str] = match known {
            Known::Sandboxes => &["web", "worker"],
            Known::Orphans => &["lost"],
            Known::Repls => &["notes"],
            Known::Images => &["default"],
        };
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    /// What is offered for the last word of a line.
    fn offered(line: &str) -> Vec<String> {
        let mut command = Cli::command();
        command.build();
        let words: Vec<_> = line.split(' ').map(str::to_owned).collect();
        let found = candidates(&command, &words, words.len() - 1, &names);
        found.into_iter().map(|candidate| candidate.value).collect()
    }

    #[test]
    fn names_are_offered_where_a_sandbox_is_named() {
        for line in [
            "bathy exec ",
            "bathy exec -i -e A=1 --workdir /tmp ",
            "bathy policy deny ",
            "bathy net log ",
            "bathy events --sandbox ",
            "bathy code --sandbox ",
            "bathy stop -t 5 ",
            "bathy logs --tail 3 ",
        ] {
            assert_eq!(offered(line), ["web", "worker"], "{line}");
        }
        assert_eq!(offered("bathy stop web wo"), ["worker"]);
        assert_eq!(offered("bathy adopt "), ["lost"]);
        assert_eq!(offered("bathy repl rm "), ["notes"]);
        assert_eq!(offered("bathy cp w"), ["web:", "worker:", FILES]);
        assert_eq!(offered("bathy cp file wo"), ["worker:", FILES]);
    }

    #[test]
    fn nothing_is_offered_where_a_name_is_new_or_a_command_begins() {
        for line in [
            "bathy create --name ",
            "bathy run -d --name ",
            "bathy repl new ",
            "bathy run ",
            "bathy run ls -",
            "bathy exec web ls ",
            "bathy run --memory ",
            "bathy nonsense ",
        ] {
            assert_eq!(offered(line), Vec::<String>::new(), "{line}");
        }
    }

    #[test]
    fn values_are_offered_however_a_shell_splits_the_line() {
        assert_eq!(offered("bathy run --net "), ["none", "public", "allow-list", "open"]);
        assert_eq!(offered("bathy run --net = "), ["none", "public", "allow-list", "open"]);
        assert_eq!(offered("bathy run --net ="), ["none", "public", "allow-list", "open"]);
        assert_eq!(offered("bathy run --net = pub"), ["public"]);
        assert_eq!(offered("bathy run --net=pub"), ["--net=public"]);
        assert_eq!(offered("bathy run -it --net=open --security "), ["default", "restricted"]);
        assert_eq!(offered("bathy exec --security re"), ["restricted"]);
        assert_eq!(offered("bathy policy set web "), ["none", "public", "allow-list", "open"]);
        assert_eq!(offered("bathy create --image "), ["default"]);
        assert_eq!(offered("bathy run --engine "), ["auto", "kvm", "uml"]);
        assert_eq!(offered("bathy code --lang py"), ["python"]);
        assert_eq!(offered("bathy kill -s US"), ["USR1", "USR2"]);
        assert_eq!(offered("bathy run --config "), [FILES]);
        assert_eq!(offered("bathy code "), [FILES]);
        assert_eq!(offered("bathy cp web : /e"), Vec::<String>::new());
    }

    #[test]
    fn verbs_and_options_are_offered_but_hidden_ones_are_not() {
        let verbs = offered("bathy ");
        assert!(verbs.contains(&"run".to_owned()) && verbs.contains(&"policy".to_owned()), "{verbs:?}");
        for hidden in ["monitor", "complete", "version", "init"] {
            assert!(!verbs.contains(&hidden.to_owned()), "{hidden}");
        }
        assert_eq!(offered("bathy policy s"), ["show", "set"]);
        let options = offered("bathy run --");
        assert!(options.contains(&"--memory".to_owned()), "{options:?}");
        for hidden in ["--kernel", "--ready-timeout"] {
            assert!(!options.contains(&hidden.to_owned()), "{hidden}");
        }
    }
}
