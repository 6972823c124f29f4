//! Policies: rules in order of which the first that matches decides, and a preset for what none of them matches.

mod decision;
mod evaluate;
mod policies;
mod preset;
mod seen;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{Action, Direction, PublishedPort, Rule};

pub use decision::{Access, Author, DecidedBy, Decision, Reason, Unmet};
pub use policies::Policies;
pub use preset::{Preset, PresetError};
pub use seen::{Destination, Inspected, InspectedRequest};

/// The most rules of one policy. All of them are looked at for every connection.
pub const MAX_RULES: usize = 256;

/// Parts of a policy that do not go together.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum PolicyError {
    /// More rules than are looked at.
    #[error(
        "The policy has {0} rules. The most is {MAX_RULES}. A network such as 10.0.0.0/8, or *.example.org, stands for many"
    )]
    TooMany(usize),
    /// Something is allowed through a network that does not exist.
    #[error(
        "{0:?} needs a network, and the preset none has none. Take the preset allow-list: nothing but what rules allow"
    )]
    NoneAllows(String),
    /// A port is published on a network that does not exist.
    #[error(
        "Publishing {0} needs a network, and the preset none has none. Take the preset allow-list, where the sandbox itself reaches nothing"
    )]
    NonePublishes(PublishedPort),
    /// A rule is taken back that is not there.
    #[error("The policy has no rule {rule:?}. It has {}", listed(.has))]
    NoSuchRule {
        /// What was to be taken back.
        rule: String,
        /// What could be.
        has: Vec<String>,
    },
}

fn listed(rules: &[String]) -> String {
    if rules.is_empty() { "none at all".to_owned() } else { format!("{rules:?}") }
}

/// What a sandbox may do, or in the operator's hands what any sandbox may do at most.
///
/// The command line, the configuration and the spec all have this type. As text the preset may be left out, see
/// [`NetworkPolicy::from_options`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written")]
pub struct NetworkPolicy {
    /// What holds where no rule does.
    pub preset: Preset,
    /// The rules, of which the first that matches decides.
    pub rules: Vec<Rule>,
}

/// A policy as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    preset: Option<Preset>,
    #[serde(default)]
    rules: Vec<Rule>,
}

impl TryFrom<Written> for NetworkPolicy {
    type Error = PolicyError;

    fn try_from(written: Written) -> Result<Self, PolicyError> {
        Self::from_options(written.preset, written.rules)
    }
}

impl NetworkPolicy {
    /// Puts together what was asked for. Whoever allows something and chooses no preset wants that and nothing else.
    ///
    /// # Errors
    /// When there are too many rules, or rules that the preset contradicts.
    pub fn from_options(preset: Option<Preset>, rules: Vec<Rule>) -> Result<Self, PolicyError> {
        let allows = |rule: &&Rule| rule.action() == Action::Allow;
        if rules.len() > MAX_RULES {
            return Err(PolicyError::TooMany(rules.len()));
        }
        if preset == Some(Preset::None)
            && let Some(rule) = rules.iter().find(allows)
        {
            return Err(PolicyError::NoneAllows(rule.to_string()));
        }
        let listed = rules.iter().filter(allows).any(|rule| rule.direction() == Direction::Out);
        let preset = preset.unwrap_or(if listed { Preset::AllowList } else { Preset::Public });
        Ok(Self { preset, rules })
    }

    /// The same policy with one more rule, which comes before all others: the last word is what counts.
    ///
    /// # Errors
    /// As [`NetworkPolicy::from_options`].
    pub fn with_first(&self, rule: Rule) -> Result<Self, PolicyError> {
        // Said twice, it is meant once.
        let others = self.rules.iter().filter(|other| **other != rule).cloned();
        let rules = std::iter::once(rule.clone()).chain(others).collect();
        Self::from_options(Some(self.preset), rules)
    }

    /// The same policy without some of its rules.
    ///
    /// # Errors
    /// When one of them is not there.
    pub fn without(&self, rules: &[Rule]) -> Result<Self, PolicyError> {
        if let Some(rule) = rules.iter().find(|rule| !self.rules.contains(rule)) {
            let has = self.rules.iter().map(ToString::to_string).collect();
            return Err(PolicyError::NoSuchRule { rule: rule.to_string(), has });
        }
        let rest = self.rules.iter().filter(|rule| !rules.contains(rule)).cloned().collect();
        // What holds where no rule does stays as it is, also when nothing is allowed any more.
        Self::from_options(Some(self.preset), rest)
    }

    /// Whether ports can be published under this policy.
    ///
    /// # Errors
    /// When there is no network.
    pub fn check_published(&self, ports: &[PublishedPort]) -> Result<(), PolicyError> {
        match ports.first() {
            Some(port) if !self.has_network() => Err(PolicyError::NonePublishes(*port)),
            _ => Ok(()),
        }
    }

    /// Whether there is a network at all.
    pub fn has_network(&self) -> bool {
        self.preset != Preset::None || self.rules.iter().any(|rule| rule.action() == Action::Allow)
    }
}
