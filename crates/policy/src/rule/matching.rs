//! Whether a rule is about a connection, before and after its first bytes were read.

use super::{Action, Direction, Place, Protocol, Rule, Target};
use crate::policy::{Destination, Read, Unmet};
use crate::{HostName, NamePattern};

/// The port of QUIC, whose names only its two ends can read.
const QUIC: u16 = 443;

/// What a rule has to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Match {
    /// It is about something else.
    No,
    /// It would have allowed it, if not for this.
    Missed(Unmet),
    /// That depends on what the client says first.
    Maybe,
    /// It denies because nobody could see the name that it denies.
    Blind,
    /// It decides.
    Yes,
}

impl Rule {
    /// Whether it decides about a connection from the sandbox. With `read` it never says maybe.
    ///
    /// If the port is guarded, only a rule that mentions it can allow it.
    pub(crate) fn concerning(&self, to: &Destination<'_>, read: Option<&Read<'_>>, guarded: bool) -> Match {
        if self.direction != Direction::Out || !self.takes(to.protocol, to.port) {
            return Match::No;
        }
        match self.action {
            Action::Allow if guarded && !self.ports.mention(to.port) => Match::No,
            Action::Allow => self.allowing_out(to, read),
            Action::Deny => self.denying_out(to, read),
        }
    }

    /// Whether it decides about a peer that connects to a published port.
    pub(crate) fn concerns_peer(&self, peer: Place, protocol: Protocol, port: u16) -> bool {
        let about = match self.action {
            Action::Allow => self.target.admits_peer(peer),
            Action::Deny => self.target.covers(peer),
        };
        self.direction == Direction::In && self.takes(protocol, port) && about
    }

    fn takes(&self, protocol: Protocol, port: u16) -> bool {
        let port_fits =
            if protocol == Protocol::Icmp { self.ports.is_all() } else { self.ports.contains(port) };
        self.protocol.is_none_or(|own| own == protocol) && port_fits
    }

    fn allowing_out(&self, to: &Destination<'_>, read: Option<&Read<'_>>) -> Match {
        match &self.target {
            Target::Name(pattern) => self.allowing_name(pattern, to, read),
            target if target.admits(to.place()) => self.allowing_request(read),
            _ => Match::No,
        }
    }

    fn allowing_name(&self, pattern: &NamePattern, to: &Destination<'_>, read: Option<&Read<'_>>) -> Match {
        if !to.names.iter().any(|name| pattern.matches(name)) {
            return Match::No;
        }
        if to.protocol != Protocol::Tcp {
            return Match::Missed(Unmet::NotTcp);
        }
        if !Target::Public.admits(to.place()) {
            return Match::Missed(Unmet::NotPublic);
        }
        let Some(read) = read else { return Match::Maybe };
        match given_name(read) {
            Err(unmet) => Match::Missed(unmet),
            Ok(name) if !to.names.contains(name) => Match::Missed(Unmet::NotResolved(name.clone())),
            Ok(name) if !pattern.matches(name) => Match::No,
            Ok(_) => self.allowing_request(Some(read)),
        }
    }

    fn allowing_request(&self, read: Option<&Read<'_>>) -> Match {
        let Some(http) = &self.http else { return Match::Yes };
        match read {
            None => Match::Maybe,
            Some(Read::Http { request, .. }) if http.allows(request) => Match::Yes,
            Some(Read::Http { .. }) => Match::No,
            Some(Read::Tls { .. } | Read::Other) => Match::Missed(Unmet::NotHttp),
        }
    }

    fn denying_out(&self, to: &Destination<'_>, read: Option<&Read<'_>>) -> Match {
        let host = match &self.target {
            Target::Name(pattern) => denying_name(pattern, to, read),
            target if target.covers(to.place()) => Match::Yes,
            _ => Match::No,
        };
        match (host, &self.http, read) {
            (Match::Yes | Match::Maybe, Some(_), None) => Match::Maybe,
            (Match::Yes, Some(http), Some(Read::Http { request, .. })) if http.denies(request) => Match::Yes,
            (_, Some(_), _) => Match::No,
            (host, None, _) => host,
        }
    }
}

/// Whether a denied name may be what the client wants. Names that an address has been resolved for count as well as the one
/// that the client gives.
fn denying_name(pattern: &NamePattern, to: &Destination<'_>, read: Option<&Read<'_>>) -> Match {
    let some = to.names.iter().any(|name| pattern.matches(name));
    if some && to.names.iter().all(|name| pattern.matches(name)) {
        return Match::Yes;
    }
    let decided = match (to.protocol, read) {
        (Protocol::Udp, _) if !some && to.port == QUIC => return Match::Blind,
        (Protocol::Udp | Protocol::Icmp, _) => some,
        (Protocol::Tcp, None) => return Match::Maybe,
        (Protocol::Tcp, Some(Read::Other)) => false,
        (Protocol::Tcp, Some(Read::Tls { name: Some(name), encrypted_hello: true })) => {
            pattern.matches(name) || some
        }
        (Protocol::Tcp, Some(read)) => given_name(read).map_or(some, |name| pattern.matches(name)),
    };
    if decided { Match::Yes } else { Match::No }
}

/// The name that the client gives, if it is the one that the server will act on.
fn given_name<'a>(read: &Read<'a>) -> Result<&'a HostName, Unmet> {
    match read {
        Read::Tls { encrypted_hello: true, .. } => Err(Unmet::Encrypted),
        Read::Tls { name, .. } => name.ok_or(Unmet::NoName),
        Read::Http { host, .. } => host.ok_or(Unmet::NoName),
        Read::Other => Err(Unmet::Unreadable),
    }
}
