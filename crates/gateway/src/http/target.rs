//! The destination of a request: its authority, and its path in canonical spelling.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bathy_policy::HostName;
use thiserror::Error;

use super::{Form, HttpRefusal};

/// The default port of `http://`.
const HTTP_PORT: u16 = 80;

/// The host in a URL or Host field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    Name(HostName),
    Address(IpAddr),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authority {
    pub host: Host,
    /// The port, if the client wrote one.
    pub port: Option<u16>,
}

impl fmt::Display for Authority {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Name(name) => write!(out, "{name}")?,
            Host::Address(IpAddr::V4(address)) => write!(out, "{address}")?,
            Host::Address(IpAddr::V6(address)) => write!(out, "[{address}]")?,
        }
        self.port.map_or(Ok(()), |port| write!(out, ":{port}"))
    }
}

#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum PathProblem {
    /// `*` has no path.
    #[error("The request has no path")]
    None,
    /// Servers interpret it differently.
    #[error("Servers read the path in different ways: {0}")]
    Ambiguous(&'static str),
}

/// A request target, merged with the Host field.
pub(super) struct Target {
    pub(super) form: Form,
    pub(super) authority: Option<Authority>,
    pub(super) path: Result<String, PathProblem>,
}

pub(super) fn read(method: &str, target: &str, host: Option<Authority>) -> Result<Target, HttpRefusal> {
    if target.contains('#') {
        return Err(HttpRefusal::Target("it has a fragment"));
    }
    if method == "CONNECT" {
        return Err(HttpRefusal::Connect);
    }
    if target == "*" && method == "OPTIONS" {
        return Ok(Target { form: Form::Asterisk, authority: host, path: Err(PathProblem::None) });
    }
    if target.starts_with('/') {
        return Ok(Target { form: Form::Origin, authority: host, path: rule_path(without_query(target)) });
    }
    let rest = after_scheme(target).ok_or(HttpRefusal::Target("it is neither a path nor an http:// URL"))?;
    let (named, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
    let named = authority(named).ok_or(HttpRefusal::Target("its host is neither a name nor an address"))?;
    let port = |authority: &Authority| authority.port.unwrap_or(HTTP_PORT);
    if host.is_some_and(|host| host.host != named.host || port(&host) != port(&named)) {
        return Err(HttpRefusal::Host("it is not the host of the URL in the request line"));
    }
    let path = without_query(path);
    let path = rule_path(if path.is_empty() { "/" } else { path });
    Ok(Target { form: Form::Absolute, authority: Some(named), path })
}

fn without_query(target: &str) -> &str {
    target.split_once('?').map_or(target, |(path, _)| path)
}

fn after_scheme(target: &str) -> Option<&str> {
    const SCHEME: &str = "http://";
    let (scheme, rest) = target.split_at_checked(SCHEME.len())?;
    scheme.eq_ignore_ascii_case(SCHEME).then_some(rest)
}

/// `HOST` or `HOST:PORT`. User names, zone identifiers and empty ports are refused.
pub(super) fn authority(text: &str) -> Option<Authority> {
    let (host, rest) = match text.strip_prefix('[') {
        Some(text) => {
            let (address, rest) = text.split_once(']')?;
            (Host::Address(address.parse::<Ipv6Addr>().ok()?.into()), rest)
        }
        None => {
            let (name, rest) = text.split_at(text.find(':').unwrap_or(text.len()));
            let address = name.parse::<Ipv4Addr>().ok().map(|address| Host::Address(address.into()));
            (address.or_else(|| name.parse().ok().map(Host::Name))?, rest)
        }
    };
    let port = if rest.is_empty() { None } else { Some(port(rest.strip_prefix(':')?)?) };
    Some(Authority { host, port })
}

fn port(text: &str) -> Option<u16> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten().filter(|port| *port != 0)
}

/// The canonical spelling of a path: only what has to be percent-encoded is, in capital letters. A rule's own path
/// has the same spelling.
///
/// # Errors
/// If servers could interpret the path differently: dot segments, empty segments, parameters behind a semicolon,
/// backslashes, and the encoded forms of these.
pub fn rule_path(path: &str) -> Result<String, PathProblem> {
    use PathProblem::Ambiguous;

    if !path.starts_with('/') {
        return Err(Ambiguous("it does not start with a slash"));
    }
    let mut plain = String::with_capacity(path.len());
    let mut decoded = Vec::with_capacity(path.len());
    let mut rest = path.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            if !byte.is_ascii_graphic() {
                return Err(Ambiguous("it has characters that must be encoded"));
            }
            plain.push(char::from(byte));
            decoded.push(byte);
            continue;
        }
        let digits =
            [rest.next(), rest.next()].map(|digit| digit.and_then(|digit| char::from(digit).to_digit(16)));
        let [Some(high), Some(low)] = digits else {
            return Err(Ambiguous("a percent sign is not followed by two hexadecimal digits"));
        };
        let byte = u8::try_from(high * 16 + low).unwrap_or(b'%');
        decoded.push(byte);
        match byte {
            b'/' | b'\\' | b'%' | b';' => {
                return Err(Ambiguous("a slash, backslash, semicolon or percent sign is encoded"));
            }
            byte if byte.is_ascii_control() => return Err(Ambiguous("a control character is encoded")),
            byte if byte.is_ascii_graphic() && byte != b'?' && byte != b'#' => plain.push(char::from(byte)),
            byte => plain.push_str(&format!("%{byte:02X}")),
        }
    }
    // Careless decoders turn overlong UTF-8 into a slash or a dot.
    if str::from_utf8(&decoded).is_err() {
        return Err(Ambiguous("it is not encoded UTF-8"));
    }
    if plain.contains(['\\', ';']) {
        return Err(Ambiguous("it has a backslash or a semicolon"));
    }
    if plain.contains("//") {
        return Err(Ambiguous("it has an empty segment"));
    }
    if plain.split('/').any(|segment| segment == "." || segment == "..") {
        return Err(Ambiguous("it has a dot segment"));
    }
    Ok(plain)
}
