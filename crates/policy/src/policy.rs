//! Policies: the first matching rule decides, and the preset if none matches.

mod decision;
mod destination;
mod evaluate;
mod policies;
mod preset;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{Action, Direction, PublishedPort, Rule};

pub use decision::{Access, Author, DecidedBy, Decision, Reason, Unmet};
pub use destination::{Destination, Inspected, InspectedRequest};
pub use policies::Policies;
pub use preset::{Preset, PresetError};

/// The most rules of one policy. Every connection is matched against all of them.
pub const MAX_RULES: usize = 256;

/// Why a policy is inconsistent.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum PolicyError {
    /// There are more than [`MAX_RULES`] rules.
    #[error(
        "The policy has {0} rules. The most is {MAX_RULES}. A network such as 10.0.0.0/8, or *.example.org, stands for many"
    )]
    TooMany(usize),
    /// A rule allows something although the preset has no network.
    #[error(
        "{0:?} needs a network, and the preset none has none. Take the preset allow-list: nothing but what rules allow"
    )]
    NoneAllows(String),
    /// A port is published although the preset has no network.
    #[error(
        "Publishing {0} needs a network, and the preset none has none. Take the preset allow-list, where the sandbox itself reaches nothing"
    )]
    NonePublishes(PublishedPort),
    /// A rule to be removed is not in the policy.
    #[error("The policy has no rule {rule:?}. It has {}", listed(.has))]
    NoSuchRule {
        /// The rule to be removed.
        rule: String,
        /// The rules that the policy has.
        has: Vec<String>,
    },
}

fn listed(rules: &[String]) -> String {
    if rules.is_empty() { "none at all".to_owned() } else { format!("{rules:?}") }
}

/// What a sandbox may do; as an operator's policy, the ceiling for every sandbox.
///
/// The command line, the configuration and the spec all use this type. In text the preset may be omitted, see
/// [`NetworkPolicy::from_options`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written")]
pub struct NetworkPolicy {
    /// What decides where no rule matches.
    pub preset: Preset,
    /// The rules; the first that matches decides.
    pub rules: Vec<Rule>,
}

/// A policy as it is deserialized.
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
    /// Builds a policy. Without a preset, outbound allow rules imply an allow-list: only what they name is allowed.
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

    /// The same policy with a rule that precedes all others, so that the latest rule decides.
    ///
    /// # Errors
    /// As [`NetworkPolicy::from_options`].
    pub fn with_first(&self, rule: Rule) -> Result<Self, PolicyError> {
        // A rule that is there already is moved, not repeated.
        let others = self.rules.iter().filter(|other| **other != rule).cloned();
        let rules = std::iter::once(rule.clone()).chain(others).collect();
        Self::from_options(Some(self.preset), rules)
    }

    /// The same policy without some of its rules.
    ///
    /// # Errors
    /// When one of them is not in the policy.
    pub fn without(&self, rules: &[Rule]) -> Result<Self, PolicyError> {
        if let Some(rule) = rules.iter().find(|rule| !self.rules.contains(rule)) {
            let has = self.rules.iter().map(ToString::to_string).collect();
            return Err(PolicyError::NoSuchRule { rule: rule.to_string(), has });
        }
        let rest = self.rules.iter().filter(|rule| !rules.contains(rule)).cloned().collect();
        // The preset stays, even if no allow rule is left.
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

    /// Whether the sandbox has a network at all.
    pub fn has_network(&self) -> bool {
        self.preset != Preset::None || self.rules.iter().any(|rule| rule.action() == Action::Allow)
    }
}
