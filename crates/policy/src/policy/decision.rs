//! Decisions and their reasons.

use std::fmt;

use super::Preset;
use crate::{HostName, Rule};

/// The access that a policy grants, the strictest last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// The connection may be opened, and its content does not matter.
    Allow,
    /// The connection may be opened, and is inspected: a rule denies some name or request. What is neither TLS nor
    /// HTTP passes.
    AllowAndInspect,
    /// The client is inspected before anything is dialed: only names (in TLS or in an HTTP Host field) or requests
    /// that the rules allow are let through.
    InspectFirst,
    /// The connection is denied.
    Deny,
}

/// The access that a policy grants, and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The access that is granted.
    pub access: Access,
    /// The rule or preset that decided.
    pub by: DecidedBy,
}

impl Decision {
    /// Whether access is granted without inspection.
    pub fn allows(&self) -> bool {
        self.access == Access::Allow
    }
}

/// The author of the policy that decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Author {
    /// The policy of the sandbox itself.
    Sandbox,
    /// The operator's ceiling, which holds for every sandbox.
    Operator,
}

/// What decided. As text it is short enough for a log line: `deny private`, `operator: preset public`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecidedBy {
    /// The author of the policy.
    pub author: Author,
    /// The part of the policy.
    pub reason: Reason,
}

/// The part of a policy that decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A rule that matches.
    Rule(Rule),
    /// A rule that denies a name, where names cannot be inspected (QUIC).
    Hidden(Rule),
    /// No rule matches. This allow rule would have matched if its requirement were met.
    Unmet(Rule, Unmet),
    /// No rule matches, so the preset decides.
    Preset(Preset),
    /// No rule mentions the port, on which other resolvers would answer.
    Resolvers(Preset),
    /// No rule allows metadata services, and the name is known to be one's.
    MetadataName(Preset),
    /// No rule allows the name, which belongs to a private network.
    InternalName(Preset),
    /// No rule matches, and the port was published.
    Published,
}

/// A requirement of an allow rule that a connection does not meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unmet {
    /// The protocol is TCP, where a name can be inspected.
    NotTcp,
    /// The address is public: the owner of a name must not point it into a private network.
    NotPublic,
    /// The client sends a host name.
    NoName,
    /// The host name is not encrypted.
    Encrypted,
    /// The client speaks TLS or HTTP.
    Unreadable,
    /// The client speaks HTTP without TLS.
    NotHttp,
    /// The sandbox has resolved this name to the address.
    NotResolved(HostName),
}

impl fmt::Display for DecidedBy {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.author == Author::Operator {
            out.write_str("operator: ")?;
        }
        match &self.reason {
            Reason::Rule(rule) => write!(out, "{rule}"),
            Reason::Hidden(rule) => write!(out, "{rule}: names in QUIC cannot be inspected"),
            // The name is enough; which rule would have matched does not matter.
            Reason::Unmet(_, unmet @ Unmet::NotResolved(_)) => write!(out, "{unmet}"),
            Reason::Unmet(rule, unmet) => write!(out, "{unmet}, {rule} does not apply"),
            Reason::Preset(preset) => write!(out, "preset {preset}"),
            Reason::Resolvers(preset) => write!(out, "preset {preset}: other resolvers"),
            Reason::MetadataName(preset) => write!(out, "preset {preset}: name of a metadata service"),
            Reason::InternalName(preset) => write!(out, "preset {preset}: internal name"),
            Reason::Published => out.write_str("published port"),
        }
    }
}

impl fmt::Display for Unmet {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotTcp => out.write_str("names can only be checked in TCP"),
            Self::NotPublic => out.write_str("a name allows public addresses only"),
            Self::NoName => out.write_str("the client sent no host name"),
            Self::Encrypted => out.write_str("the host name is encrypted"),
            Self::Unreadable => out.write_str("neither TLS nor HTTP"),
            Self::NotHttp => out.write_str("the connection is not plain HTTP"),
            Self::NotResolved(name) => {
                write!(out, "the client's host name, {name}, was not resolved to this address")
            }
        }
    }
}
