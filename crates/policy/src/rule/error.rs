//! What is wrong with a rule, where, and what to write instead.

use thiserror::Error;

use crate::suggest::Hint;
use crate::{CidrError, NamePatternError};

/// A rule that cannot be read.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("Column {}: {problem}", at + 1)]
pub struct RuleError {
    /// Where, in bytes from the beginning of the text.
    pub at: usize,
    /// What.
    pub problem: RuleProblem,
}

/// What is wrong with a rule.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum RuleProblem {
    /// No target.
    #[error("A target is missing, such as public, api.example:443 or 10.0.0.0/8")]
    Empty,
    /// More than anybody writes.
    #[error("The rule has {0} characters. The most is {MAX_TEXT}", MAX_TEXT = super::parse::MAX_TEXT)]
    Long(usize),
    /// The first word is not an action.
    #[error("A rule begins with allow or deny, not with {0:?}{1}")]
    Action(String, Hint),
    /// A word that has no place.
    #[error("{0:?} is not in or out, nor a list of methods such as GET,HEAD{1}")]
    Word(String, Hint),
    /// Something in front of `://` that is not known.
    #[error("{0:?} is not a protocol. There are tcp, udp, icmp and http{1}")]
    Scheme(String, Hint),
    /// The gateway does not see into TLS.
    #[error("Methods and paths cannot be seen inside of TLS. Write {0} to allow or deny all of it")]
    Https(String),
    /// A typing error, or a host with an unlucky name.
    #[error(
        "{found:?} looks like {keyword:?}. Write {keyword}, or {found}. with a dot for the host of that name"
    )]
    Keyword {
        /// As it was written.
        found: String,
        /// As it was probably meant.
        keyword: &'static str,
    },
    /// An address or a network that is wrong.
    #[error("{0}")]
    Net(CidrError),
    /// A name that is wrong.
    #[error("{0}")]
    Name(NamePatternError),
    /// A bracket without its partner, or something after it.
    #[error(
        "After a bracket there is an address, a closing bracket, and a port if wanted: [2001:db8::7]:443"
    )]
    Bracket,
    /// Not a port.
    #[error(
        "{0:?} is not a port. Write a number from 1 to 65535, a list such as 80,443, or a range such as 8000-8100"
    )]
    Port(String),
    /// A range that runs backwards.
    #[error("The range {0}-{1} runs backwards. Write {1}-{0}")]
    PortOrder(u16, u16),
    /// ICMP with ports.
    #[error("ICMP has no ports. Leave out what follows the target")]
    IcmpPorts,
    /// Not a method.
    #[error("{0:?} is not a method. They are in capital letters, such as GET,HEAD{1}")]
    Method(String, Hint),
    /// Methods without HTTP.
    #[error("A method needs http:// in front of the target, such as http://{0}")]
    MethodNeedsHttp(String),
    /// A path without HTTP.
    #[error("A path needs http:// in front of the target: http://{0}")]
    PathNeedsHttp(String),
    /// A path that never comes, or a star in the middle.
    #[error(
        "{0:?} is not a path. It begins with a slash, has no query, no percent sign and no dot segments, and may end in a star"
    )]
    Path(String),
    /// No name is ever seen there.
    #[error(
        "Only TCP carries a name that can be checked. Allow the address instead, such as udp://192.0.2.7:123"
    )]
    NameNeedsTcp,
    /// Who connects has an address only.
    #[error(
        "Whoever connects from outside has an address and no name. Write an address, a network or a class"
    )]
    NameComesIn,
    /// Requests to a published port are not looked at.
    #[error("Requests to a published port are not looked at. Leave out http:// and the methods")]
    HttpComesIn,
}
