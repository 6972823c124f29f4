//! What was decided, and by what.

use std::fmt;

use super::Preset;
use crate::{HostName, Rule};

/// What was decided, the strictest last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// Yes.
    Allow,
    /// Yes, unless the client gives a name or makes a request that a rule denies. What can be read is judged; what is
    /// neither TLS nor HTTP passes.
    AllowAndInspect,
    /// Only if the client gives a name (in TLS or in an HTTP Host field) or makes requests that the rules allow. Nothing
    /// may go out before that was read.
    InspectFirst,
    /// No.
    Deny,
}

/// A verdict and its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// What.
    pub access: Access,
    /// By what.
    pub by: DecidedBy,
}

impl Decision {
    /// Whether it is a plain yes.
    pub fn allows(&self) -> bool {
        self.access == Access::Allow
    }
}

/// Whose policy decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Author {
    /// The sandbox's own.
    Sandbox,
    /// The operator's, which holds for every sandbox.
    Operator,
}

/// What decided. As text it is short enough for a log line: `deny private`, `operator: preset public`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecidedBy {
    /// In whose policy.
    pub author: Author,
    /// What in it.
    pub reason: Reason,
}

/// What in a policy decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A rule.
    Rule(Rule),
    /// A rule that denies a name, where names cannot be seen.
    Hidden(Rule),
    /// No rule. This one would have allowed it, if not for what is said here.
    Unmet(Rule, Unmet),
    /// No rule, so what the preset says.
    Preset(Preset),
    /// No rule mentions the port, on which other resolvers would answer.
    Resolvers(Preset),
    /// No rule allows metadata services, and the name is known to be one's.
    MetadataName(Preset),
    /// No rule allows the name, which is one of an inner network.
    InnerName(Preset),
    /// No rule, and the port was published.
    Published,
}

/// What a rule needs that a connection does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unmet {
    /// A name that can be read while it passes.
    NotTcp,
    /// An address that the owner of a name cannot point into somebody's network.
    NotPublic,
    /// A name at all.
    NoName,
    /// A name in the clear.
    Encrypted,
    /// TLS or HTTP.
    Unreadable,
    /// HTTP without TLS.
    NotHttp,
    /// This name among those that the sandbox resolved to the address.
    NotResolved(HostName),
}

impl fmt::Display for DecidedBy {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.author == Author::Operator {
            out.write_str("operator: ")?;
        }
        match &self.reason {
            Reason::Rule(rule) => write!(out, "{rule}"),
            Reason::Hidden(rule) => write!(out, "{rule}: names in QUIC cannot be read"),
            // The name tells all: which rule it would have been does not matter.
            Reason::Unmet(_, unmet @ Unmet::NotResolved(_)) => write!(out, "{unmet}"),
            Reason::Unmet(rule, unmet) => write!(out, "{unmet}, {rule} does not apply"),
            Reason::Preset(preset) => write!(out, "preset {preset}"),
            Reason::Resolvers(preset) => write!(out, "preset {preset}: other resolvers"),
            Reason::MetadataName(preset) => write!(out, "preset {preset}: name of a metadata service"),
            Reason::InnerName(preset) => write!(out, "preset {preset}: name of an inner network"),
            Reason::Published => out.write_str("published port"),
        }
    }
}

impl fmt::Display for Unmet {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotTcp => out.write_str("names can only be checked in TCP"),
            Self::NotPublic => out.write_str("a name allows public addresses only"),
            Self::NoName => out.write_str("the client gave no name"),
            Self::Encrypted => out.write_str("the name given is encrypted"),
            Self::Unreadable => out.write_str("neither TLS nor HTTP was spoken"),
            Self::NotHttp => out.write_str("the connection is not plain HTTP"),
            Self::NotResolved(name) => {
                write!(out, "the name given, {name}, was not resolved to this address")
            }
        }
    }
}
