//! Options that describe a sandbox's network. The order of rules matters across `--allow` and `--deny`, and a derived
//! parser would lose it.

use crate::args::choice::choice;
use bathy_policy::{Action, NetworkPolicy, PolicyError, Preset, PublishedPort, Rule};
use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches};

const HEADING: &str = "Network";

/// The names of the presets.
pub const PRESETS: &[&str] =
    &[Preset::None.name(), Preset::Public.name(), Preset::AllowList.name(), Preset::Open.name()];

/// The network given as options.
#[derive(Clone, Debug, Default)]
pub struct NetArgs {
    preset: Option<Preset>,
    rules: Vec<Rule>,
    ports: Vec<PublishedPort>,
}

impl NetArgs {
    /// The policy, if any option sets one.
    pub fn policy(&self) -> Result<Option<NetworkPolicy>, PolicyError> {
        if self.preset.is_none() && self.rules.is_empty() {
            return Ok(None);
        }
        NetworkPolicy::from_options(self.preset, self.rules.clone()).map(Some)
    }

    /// The published ports, if any.
    pub fn ports(&self) -> Option<&[PublishedPort]> {
        Some(self.ports.as_slice()).filter(|ports| !ports.is_empty())
    }
}

fn rule(action: Action) -> impl Fn(&str) -> Result<Rule, String> + Clone + Send + Sync + 'static {
    move |text| Rule::parse(action, text).map_err(|error| error.to_string())
}

impl clap::Args for NetArgs {
    fn augment_args(command: Command) -> Command {
        let option = |name: &'static str, value: &'static str| {
            Arg::new(name).long(name).value_name(value).help_heading(HEADING)
        };
        command
            .arg(option("net", "PRESET").value_parser(choice(PRESETS, str::parse::<Preset>)).hide_possible_values(true).help(
                "What the sandbox may reach where no rule matches: none (no network at all), public (public addresses only), \
                 allow-list (nothing), or open (private networks as well). [default: public, or allow-list with --allow]",
            ))
            .arg(option("allow", "TARGET").action(ArgAction::Append).value_parser(rule(Action::Allow)).help(
                "Allow connections to a target, such as api.example:443, *.example.org, 10.1.2.0/24:22 or \"GET \
                 http://api.example/v1/*\". Can be repeated; the first rule that matches decides.",
            ))
            .arg(option("deny", "TARGET").action(ArgAction::Append).value_parser(rule(Action::Deny)).help(
                "Deny connections to a target. Can be repeated; the first rule that matches decides.",
            ))
            .arg(
                option("publish", "[BIND:]HOST:GUEST[/udp]")
                    .short('p')
                    .action(ArgAction::Append)
                    .value_parser(|text: &str| text.parse::<PublishedPort>())
                    .help(
                        "Publish a port of the sandbox on a port of the host, at the host's loopback address unless BIND \
                         names another. Can be repeated.",
                    ),
            )
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for NetArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut rules: Vec<(usize, Rule)> = Vec::new();
        for name in ["allow", "deny"] {
            let places = matches.indices_of(name).into_iter().flatten();
            let found = matches.get_many::<Rule>(name).into_iter().flatten().cloned();
            rules.extend(places.zip(found));
        }
        rules.sort_by_key(|(place, _)| *place);
        Ok(Self {
            preset: matches.get_one("net").copied(),
            rules: rules.into_iter().map(|(_, rule)| rule).collect(),
            ports: matches.get_many("publish").into_iter().flatten().copied().collect(),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        net: NetArgs,
    }

    fn args(line: &[&str]) -> Result<NetArgs, clap::Error> {
        Line::try_parse_from([&["test"], line].concat()).map(|line| line.net)
    }

    #[test]
    fn rules_keep_their_order_over_both_options() {
        let line =
            ["--deny", "a.example", "--allow", "*.example", "--deny", "public", "--allow", "b.test:443"];
        let policy = args(&line).unwrap().policy().unwrap().unwrap();
        let rules: Vec<_> = policy.rules.iter().map(ToString::to_string).collect();
        assert_eq!(rules, ["deny a.example", "allow *.example", "deny public", "allow b.test:443"]);
        assert_eq!(policy.preset, Preset::AllowList);
    }

    #[test]
    fn without_an_option_there_is_no_policy_and_none_allows_nothing() {
        assert_eq!(args(&[]).unwrap().policy(), Ok(None));
        assert!(args(&["--net", "none", "--allow", "public"]).unwrap().policy().is_err());
        let only_denied = args(&["--deny", "a.example"]).unwrap().policy().unwrap().unwrap();
        assert_eq!(only_denied.preset, Preset::Public);
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (line, word) in [
            (["--net", "pubic"], "public"),
            (["--allow", "api.example:http"], "port"),
            (["--deny", "pubilc"], "public"),
            (["--publish", "8080"], "8080:8080"),
        ] {
            let error = args(&line).unwrap_err().to_string();
            assert!(error.contains(word), "{line:?}: {error}");
        }
    }
}
