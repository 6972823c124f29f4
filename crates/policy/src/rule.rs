//! Rules and their text, one line each.
//!
//! ```text
//! allow api.example:443                    a name, over TCP, on one port
//! allow *.example.org:443,8443             every name below it
//! deny private                             a class of addresses
//! allow private:8000-8100
//! allow tcp://10.1.2.3:22                  an address
//! allow 10.0.0.0/8:443                     a network
//! allow [2001:db8::/32]:443                the same in IPv6, in brackets because of the port
//! allow udp://1.1.1.1:53
//! allow GET,HEAD http://api.example/v1/*   by method and path, where the gateway sees them
//! deny in public                           who may connect to a published port
//! ```
//!
//! Ports of other resolvers (53, 853, 5353 and 5355) are allowed only by a rule that mentions them, as the end of a range at
//! least, unless the preset is `open`.
//!
//! A single word that is close to a keyword is refused as a typing error. A host that is really called so is written with
//! a dot at the end: `hosts.`.

mod error;
mod http;
mod matching;
mod parse;
mod ports;
mod reach;
#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

use crate::text::serde_as_text;
use crate::{Cidr, NamePattern, suggest};

pub use error::{RuleError, RuleProblem};
pub use http::{HttpMatch, plain_path};
pub(crate) use matching::Match;
pub use ports::Ports;
pub(crate) use reach::RemoteAddress;

/// What a rule does with the traffic that it matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Allows the connection or request.
    Allow,
    /// Denies the connection or request.
    Deny,
}

/// Which side opens the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// The sandbox connects to a remote host.
    Out,
    /// An inbound peer connects to a published port.
    In,
}

/// The transport protocol that a rule or destination has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// TCP, the only protocol whose host names are inspected.
    Tcp,
    /// UDP, whose payload is not inspected.
    Udp,
    /// ICMP of either family. It has no ports.
    Icmp,
}

impl Protocol {
    /// The name of the protocol in rules, in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Icmp => "icmp",
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

/// The remote hosts that a rule matches.
///
/// Outbound, an allow rule reaches the host's own addresses, loopback and metadata services only if it names them:
/// by class, as a single address, or as a network that consists of nothing else. A deny rule matches every
/// [reading](crate::address::readings) of an address.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// Public addresses, see [`Class::Public`](crate::Class::Public).
    Public,
    /// Private networks, see [`Class::Private`](crate::Class::Private).
    Private,
    /// Loopback addresses, see [`Class::Loopback`](crate::Class::Loopback).
    Loopback,
    /// Link-local addresses, see [`Class::LinkLocal`](crate::Class::LinkLocal).
    LinkLocal,
    /// Metadata services of clouds ([`Class::Metadata`](crate::Class::Metadata)).
    Metadata,
    /// The host's own addresses. Outbound this excludes loopback, because services there do not expect remote
    /// clients.
    Host,
    /// Every address that need not be named.
    Any,
    /// A network or a single address.
    Net(Cidr),
    /// A host name, or all names below it. It allows public addresses only, because the owner of the name decides
    /// where it points.
    Name(NamePattern),
}

/// The keywords for targets.
const KEYWORDS: [(&str, Target); 7] = [
    ("public", Target::Public),
    ("private", Target::Private),
    ("loopback", Target::Loopback),
    ("link-local", Target::LinkLocal),
    ("metadata", Target::Metadata),
    ("host", Target::Host),
    ("any", Target::Any),
];

/// The keyword that a word is, or is a typo of.
fn keyword_like(word: &str) -> Option<&'static str> {
    if word.contains('.') { None } else { suggest::closest(word, &KEYWORDS.map(|(word, _)| word)) }
}

impl fmt::Display for Target {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Net(net) => write!(out, "{net}"),
            Self::Name(pattern) => {
                let text = pattern.to_string();
                let dot = if keyword_like(&text).is_some() { "." } else { "" };
                write!(out, "{text}{dot}")
            }
            keyword => {
                let found = KEYWORDS.iter().find(|(_, target)| target == keyword);
                out.write_str(found.map_or("any", |(word, _)| word))
            }
        }
    }
}

/// One line of a policy. It can only be parsed from text, which checks that its parts fit together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Rule {
    action: Action,
    direction: Direction,
    target: Target,
    protocol: Option<Protocol>,
    ports: Ports,
    http: Option<HttpMatch>,
}

impl Rule {
    /// A rule that allows outbound connections to a target.
    pub(crate) const fn allowing(target: Target, protocol: Option<Protocol>, ports: Ports) -> Self {
        Self { action: Action::Allow, direction: Direction::Out, target, protocol, ports, http: None }
    }

    /// The text of the rule after `--allow` or `--deny`.
    pub fn after_action(&self) -> String {
        let text = self.to_string();
        text.split_once(' ').map_or(String::new(), |(_, rest)| rest.to_owned())
    }

    /// Parses what follows `--allow` or `--deny`: a rule without its first word.
    pub fn parse(action: Action, text: &str) -> Result<Self, RuleError> {
        parse::rest_of_rule(action, text)
    }

    /// Whether the rule allows or denies.
    pub const fn action(&self) -> Action {
        self.action
    }

    /// Which side opens the connections that the rule matches.
    pub const fn direction(&self) -> Direction {
        self.direction
    }

    /// The remote hosts that the rule matches.
    pub const fn target(&self) -> &Target {
        &self.target
    }

    /// The protocol that the rule matches; none for all.
    pub const fn protocol(&self) -> Option<Protocol> {
        self.protocol
    }

    /// The ports that the rule matches.
    pub const fn ports(&self) -> &Ports {
        &self.ports
    }

    /// The requests that the rule matches; none if it does not look at requests.
    pub const fn http(&self) -> Option<&HttpMatch> {
        self.http.as_ref()
    }

    /// Whether the rule matches every protocol, port and request.
    pub(crate) fn is_total(&self) -> bool {
        self.protocol.is_none() && self.ports.is_all() && self.http.is_none()
    }
}

impl FromStr for Rule {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        parse::rule(text)
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(if self.action == Action::Allow { "allow " } else { "deny " })?;
        if self.direction == Direction::In {
            out.write_str("in ")?;
        }
        match (&self.http, self.protocol) {
            (Some(http), _) => write!(out, "{}http://", http.methods_text())?,
            (None, Some(protocol)) => write!(out, "{protocol}://")?,
            (None, None) => {}
        }
        let ports = match &self.http {
            Some(_) if self.ports == Ports::one(http::PORT) => String::new(),
            Some(_) if self.ports.is_all() => ":1-65535".to_owned(),
            _ if self.ports.is_all() => String::new(),
            _ => format!(":{}", self.ports),
        };
        let in_brackets = match &self.target {
            Target::Net(net) if self.http.is_some() => net.is_ipv6() || !net.is_single(),
            Target::Net(net) => net.is_ipv6() && !ports.is_empty(),
            _ => false,
        };
        if in_brackets {
            write!(out, "[{}]{ports}", self.target)?;
        } else {
            write!(out, "{}{ports}", self.target)?;
        }
        self.http.as_ref().map_or(Ok(()), |http| out.write_str(http.path_text()))
    }
}

serde_as_text!(Rule);
