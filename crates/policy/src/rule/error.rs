//! What is wrong with a rule, where, and how to fix it.

use thiserror::Error;

use crate::suggest::Hint;
use crate::{CidrError, NamePatternError};

/// A rule that cannot be parsed.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("Column {}: {problem}", at + 1)]
pub struct RuleError {
    /// The offset of the error in bytes, from the start of the text.
    pub at: usize,
    /// What is wrong at that offset.
    pub problem: RuleProblem,
}

/// What is wrong with a rule.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum RuleProblem {
    /// The target is missing.
    #[error("A target is missing, such as public, api.example:443 or 10.0.0.0/8")]
    Empty,
    /// The text is too long.
    #[error("The rule has {0} characters. The most is {MAX_TEXT}", MAX_TEXT = super::parse::MAX_TEXT)]
    Long(usize),
    /// The first word is not an action.
    #[error("A rule begins with allow or deny, not with {0:?}{1}")]
    Action(String, Hint),
    /// A word is neither a direction nor a list of methods.
    #[error("{0:?} is not in or out, nor a list of methods such as GET,HEAD{1}")]
    Word(String, Hint),
    /// The scheme in front of `://` is unknown.
    #[error("{0:?} is not a protocol. There are tcp, udp, icmp and http{1}")]
    Scheme(String, Hint),
    /// A rule for `https://`: the gateway does not decrypt TLS.
    #[error("Methods and paths cannot be seen inside of TLS. Write {0} to allow or deny all of it")]
    Https(String),
    /// The target looks like a mistyped keyword.
    #[error(
        "{found:?} looks like {keyword:?}. Write {keyword}, or {found}. with a dot for the host of that name"
    )]
    Keyword {
        /// The target as written.
        found: String,
        /// The keyword that was probably meant.
        keyword: &'static str,
    },
    /// The address or network is not valid.
    #[error("{0}")]
    Net(CidrError),
    /// The name is not valid.
    #[error("{0}")]
    Name(NamePatternError),
    /// A bracket is unbalanced, or followed by something other than a port.
    #[error(
        "After a bracket there is an address, a closing bracket, and a port if wanted: [2001:db8::7]:443"
    )]
    Bracket,
    /// The port is not valid.
    #[error(
        "{0:?} is not a port. Write a number from 1 to 65535, a list such as 80,443, or a range such as 8000-8100"
    )]
    Port(String),
    /// The range of ports is reversed.
    #[error("The range {0}-{1} runs backwards. Write {1}-{0}")]
    PortOrder(u16, u16),
    /// The rule has ports for ICMP.
    #[error("ICMP has no ports. Leave out what follows the target")]
    IcmpPorts,
    /// The method is not known.
    #[error("{0:?} is not a method. They are in capital letters, such as GET,HEAD{1}")]
    Method(String, Hint),
    /// The rule has methods but no `http://`.
    #[error("A method needs http:// in front of the target, such as http://{0}")]
    MethodNeedsHttp(String),
    /// The rule has a path but no `http://`.
    #[error("A path needs http:// in front of the target: http://{0}")]
    PathNeedsHttp(String),
    /// The path never occurs in canonical spelling, or has a star before its end.
    #[error(
        "{0:?} is not a path. It begins with a slash, has no query, no percent sign and no dot segments, and may end in a star"
    )]
    Path(String),
    /// The rule allows a name over UDP or ICMP, where it cannot be inspected.
    #[error(
        "Only TCP carries a name that can be checked. Allow the address instead, such as udp://192.0.2.7:123"
    )]
    NameNeedsTcp,
    /// The rule has a name for inbound peers, of which only the address is known.
    #[error("An inbound peer has an address and no name. Write an address, a network or a class")]
    NameComesIn,
    /// The rule has methods or a path for inbound connections, which are not inspected.
    #[error("Requests to a published port are not inspected. Leave out http:// and the methods")]
    HttpComesIn,
}
