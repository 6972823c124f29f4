//! Parses rules from text, with the column of each error.

use super::error::{RuleError, RuleProblem};
use super::http::{self, HttpMatch};
use super::ports::{Ports, PortsError};
use super::{Action, Direction, KEYWORDS, Protocol, Rule, Target, keyword_like};
use crate::suggest::Hint;
use crate::{Cidr, NamePattern};

/// The longest rule: a name of full length, and a path of some depth.
pub(super) const MAX_TEXT: usize = 2048;

const ACTIONS: [(&str, Action); 2] = [("allow", Action::Allow), ("deny", Action::Deny)];
const SCHEMES: [&str; 4] = ["tcp", "udp", "icmp", "http"];

/// A part of the text, with its offset for errors.
#[derive(Clone, Copy)]
struct Piece<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Piece<'a> {
    fn wrong(self, problem: RuleProblem) -> RuleError {
        RuleError { at: self.at, problem }
    }

    /// The parts before and after the first mark, without the mark.
    fn split(self, mark: &str) -> Option<(Self, Self)> {
        let (before, after) = self.text.split_once(mark)?;
        let after_at = self.at + before.len() + mark.len();
        Some((Self { text: before, at: self.at }, Piece { text: after, at: after_at }))
    }

    /// The parts before and from an offset on.
    fn cut(self, offset: usize) -> Option<(Self, Self)> {
        let (before, after) = self.text.split_at_checked(offset)?;
        Some((Self { text: before, at: self.at }, Piece { text: after, at: self.at + offset }))
    }
}

fn words(text: &str) -> Result<Vec<Piece<'_>>, RuleError> {
    if text.len() > MAX_TEXT {
        return Err(RuleError { at: MAX_TEXT, problem: RuleProblem::Long(text.len()) });
    }
    let mut found = Vec::new();
    let mut at = 0;
    for word in text.split([' ', '\t']) {
        if !word.is_empty() {
            found.push(Piece { text: word, at });
        }
        at += word.len() + 1;
    }
    Ok(found)
}

/// Parses a whole rule.
pub(super) fn rule(text: &str) -> Result<Rule, RuleError> {
    let words = words(text)?;
    let Some((first, rest)) = words.split_first() else {
        return Err(RuleError { at: 0, problem: RuleProblem::Empty });
    };
    let Some((_, action)) = ACTIONS.iter().find(|(word, _)| *word == first.text) else {
        let hint = Hint::of(first.text, &ACTIONS.map(|(word, _)| word));
        return Err(first.wrong(RuleProblem::Action(first.text.to_owned(), hint)));
    };
    from_words(*action, rest, text.len())
}

/// Parses a rule without its first word.
pub(super) fn rest_of_rule(action: Action, text: &str) -> Result<Rule, RuleError> {
    from_words(action, &words(text)?, text.len())
}

fn from_words(action: Action, words: &[Piece<'_>], end: usize) -> Result<Rule, RuleError> {
    let Some((last, before)) = words.split_last() else {
        return Err(RuleError { at: end, problem: RuleProblem::Empty });
    };
    let (direction, before) = match before.split_first() {
        Some((word, rest)) if word.text == "in" => (Direction::In, rest),
        Some((word, rest)) if word.text == "out" => (Direction::Out, rest),
        _ => (Direction::Out, before),
    };
    let methods = match before {
        [] => None,
        [word] => Some((*word, methods(*word)?)),
        [word, ..] => return Err(unknown_word(*word)),
    };
    let scheme = last.split("://");
    let (protocol, rest) = match scheme {
        None => (None, *last),
        Some((scheme, rest)) => (Some(protocol(scheme, rest)?), rest),
    };
    let is_http = scheme.is_some_and(|(scheme, _)| scheme.text == "http");
    let (authority, path) = if is_http { split_path(rest)? } else { (rest, None) };
    if let Some((word, _)) = methods.as_ref().filter(|_| !is_http) {
        return Err(word.wrong(RuleProblem::MethodNeedsHttp(rest.text.to_owned())));
    }
    let (target, ports) = target_and_ports(authority, is_http)?;
    if let Some(port) = ports.as_ref().filter(|_| protocol == Some(Protocol::Icmp)) {
        return Err(port.0.wrong(RuleProblem::IcmpPorts));
    }
    let http = is_http.then(|| HttpMatch::new(methods.map(|(_, list)| list).unwrap_or_default(), path));
    let default_ports = || if is_http { Ports::one(http::PORT) } else { Ports::all() };
    let ports = ports.map_or_else(default_ports, |(_, ports)| ports);
    let rule = Rule { action, direction, target, protocol, ports, http };
    contradiction(&rule).map_or(Ok(rule), |problem| Err(last.wrong(problem)))
}

/// Parts that are valid by themselves, but that no connection would match together.
fn contradiction(rule: &Rule) -> Option<RuleProblem> {
    let named = matches!(rule.target, Target::Name(_));
    let without_names = matches!(rule.protocol, Some(Protocol::Udp | Protocol::Icmp));
    match rule.direction {
        Direction::In if named => Some(RuleProblem::NameComesIn),
        Direction::In if rule.http.is_some() => Some(RuleProblem::HttpComesIn),
        Direction::Out if named && without_names && rule.action == Action::Allow => {
            Some(RuleProblem::NameNeedsTcp)
        }
        _ => None,
    }
}

fn unknown_word(word: Piece<'_>) -> RuleError {
    let known: Vec<&'static str> = ["in", "out"].into_iter().chain(http::METHODS).collect();
    word.wrong(RuleProblem::Word(word.text.to_owned(), Hint::of(word.text, &known)))
}

fn methods(word: Piece<'_>) -> Result<Vec<&'static str>, RuleError> {
    let mut at = word.at;
    let mut found = Vec::new();
    for part in word.text.split(',') {
        let Some(method) = http::METHODS.iter().find(|method| **method == part) else {
            let lone = !word.text.contains(',') && Hint::of(part, &http::METHODS).0.is_none();
            let problem = RuleProblem::Method(part.to_owned(), Hint::of(part, &http::METHODS));
            return Err(if lone { unknown_word(word) } else { RuleError { at, problem } });
        };
        found.push(*method);
        at += part.len() + 1;
    }
    Ok(found)
}

fn protocol(scheme: Piece<'_>, rest: Piece<'_>) -> Result<Protocol, RuleError> {
    match scheme.text {
        "tcp" | "http" => Ok(Protocol::Tcp),
        "udp" => Ok(Protocol::Udp),
        "icmp" => Ok(Protocol::Icmp),
        "https" => {
            let host = rest.text.split('/').next().unwrap_or_default();
            let port = if host.contains(':') { "" } else { ":443" };
            Err(scheme.wrong(RuleProblem::Https(format!("{host}{port}"))))
        }
        other => Err(scheme.wrong(RuleProblem::Scheme(other.to_owned(), Hint::of(other, &SCHEMES)))),
    }
}

/// Splits off the path of an `http://` target. A slash in brackets belongs to a network.
fn split_path(rest: Piece<'_>) -> Result<(Piece<'_>, Option<String>), RuleError> {
    let from = rest.text.find(']').unwrap_or(0);
    let slash = rest.text.get(from..).and_then(|tail| tail.find('/')).map(|slash| slash + from);
    let Some((authority, path)) = slash.and_then(|slash| rest.cut(slash)) else {
        return Ok((rest, None));
    };
    let stem = path.text.strip_suffix('*').unwrap_or(path.text);
    let plain = !stem.contains(['*', '%']) && http::plain_path(stem).is_some_and(|plain| plain == stem);
    if plain {
        Ok((authority, Some(path.text.to_owned())))
    } else {
        Err(path.wrong(RuleProblem::Path(path.text.to_owned())))
    }
}

type TargetAndPorts<'a> = (Target, Option<(Piece<'a>, Ports)>);

fn target_and_ports(authority: Piece<'_>, is_http: bool) -> Result<TargetAndPorts<'_>, RuleError> {
    if authority.text.starts_with('[') {
        return in_brackets(authority);
    }
    // More than one colon means an IPv6 address, whose port would need brackets.
    let lone_colon = authority.text.matches(':').count() == 1;
    let (host, ports) = match authority.split(":").filter(|_| lone_colon) {
        Some((host, list)) => (host, Some((list, ports(list)?))),
        None => (authority, None),
    };
    Ok((target(host, authority, is_http)?, ports))
}

fn in_brackets(authority: Piece<'_>) -> Result<TargetAndPorts<'_>, RuleError> {
    let bracket = || authority.wrong(RuleProblem::Bracket);
    let (inner, rest) = authority.cut(1).and_then(|(_, inner)| inner.split("]")).ok_or_else(bracket)?;
    let target = Target::Net(net(inner)?);
    match rest.split(":") {
        Some((nothing, list)) if nothing.text.is_empty() => Ok((target, Some((list, ports(list)?)))),
        None if rest.text.is_empty() => Ok((target, None)),
        _ => Err(rest.wrong(RuleProblem::Bracket)),
    }
}

fn ports(list: Piece<'_>) -> Result<Ports, RuleError> {
    Ports::parse(list.text).map_err(|error| match error {
        PortsError::Number(offset) => {
            let part = list.text.get(offset..).and_then(|rest| rest.split(',').next()).unwrap_or_default();
            RuleError { at: list.at + offset, problem: RuleProblem::Port(part.to_owned()) }
        }
        PortsError::Order(offset, from, to) => {
            RuleError { at: list.at + offset, problem: RuleProblem::PortOrder(from, to) }
        }
    })
}

fn net(text: Piece<'_>) -> Result<Cidr, RuleError> {
    text.text.parse().map_err(|error| text.wrong(RuleProblem::Net(error)))
}

fn target(host: Piece<'_>, authority: Piece<'_>, is_http: bool) -> Result<Target, RuleError> {
    let text = host.text;
    if text.is_empty() {
        return Err(host.wrong(RuleProblem::Empty));
    }
    if let Some((_, target)) = KEYWORDS.iter().find(|(word, _)| *word == text) {
        return Ok(target.clone());
    }
    if let Some((before, _)) = host.split("/") {
        let numeric = before.text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.')
            || before.text.contains(':');
        let is_net = numeric && !is_http;
        let path = || host.wrong(RuleProblem::PathNeedsHttp(authority.text.to_owned()));
        return if is_net { Ok(Target::Net(net(host)?)) } else { Err(path()) };
    }
    if text.contains(':') || text.parse::<std::net::Ipv4Addr>().is_ok() {
        return Ok(Target::Net(net(host)?));
    }
    if let Some(keyword) = keyword_like(text) {
        return Err(host.wrong(RuleProblem::Keyword { found: text.to_owned(), keyword }));
    }
    let pattern: Result<NamePattern, _> = text.parse();
    pattern.map(Target::Name).map_err(|error| {
        let at = host.at + error.at();
        RuleError { at, problem: RuleProblem::Name(error) }
    })
}
