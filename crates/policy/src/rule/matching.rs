//! Whether a rule is about a connection, before and after its first bytes were read.

use super::{Action, Direction, Location, Protocol, Rule, Target};
use crate::policy::{Destination, Inspected, Unmet};
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
    Hidden,
    /// It decides.
    Yes,
}

impl Rule {
    /// Whether it decides about a connection from the sandbox. With `read` it never says maybe.
    ///
    /// If the port is guarded, only a rule that mentions it can allow it.
    pub(crate) fn matches_outbound(
        &self,
        to: &Destination<'_>,
        inspected: Option<&Inspected<'_>>,
        is_resolver_port: bool,
    ) -> Match {
        if self.direction != Direction::Out || !self.matches_port(to.protocol, to.port) {
            return Match::No;
        }
        match self.action {
            Action::Allow if is_resolver_port && !self.ports.mention(to.port) => Match::No,
            Action::Allow => self.allow_outbound(to, inspected),
            Action::Deny => self.deny_outbound(to, inspected),
        }
    }

    /// Whether it decides about a peer that connects to a published port.
    pub(crate) fn matches_inbound(&self, peer: Location, protocol: Protocol, port: u16) -> bool {
        let about = match self.action {
            Action::Allow => self.target.admits_peer(peer),
            Action::Deny => self.target.covers(peer),
        };
        self.direction == Direction::In && self.matches_port(protocol, port) && about
    }

    fn matches_port(&self, protocol: Protocol, port: u16) -> bool {
        let port_fits =
            if protocol == Protocol::Icmp { self.ports.is_all() } else { self.ports.contains(port) };
        self.protocol.is_none_or(|own| own == protocol) && port_fits
    }

    fn allow_outbound(&self, to: &Destination<'_>, inspected: Option<&Inspected<'_>>) -> Match {
        match &self.target {
            Target::Name(pattern) => self.allow_name(pattern, to, inspected),
            target if target.admits(to.location()) => self.allow_request(inspected),
            _ => Match::No,
        }
    }

    fn allow_name(
        &self,
        pattern: &NamePattern,
        to: &Destination<'_>,
        inspected: Option<&Inspected<'_>>,
    ) -> Match {
        if !to.names.iter().any(|name| pattern.matches(name)) {
            return Match::No;
        }
        if to.protocol != Protocol::Tcp {
            return Match::Missed(Unmet::NotTcp);
        }
        if !Target::Public.admits(to.location()) {
            return Match::Missed(Unmet::NotPublic);
        }
        let Some(inspected) = inspected else { return Match::Maybe };
        match client_name(inspected) {
            Err(unmet) => Match::Missed(unmet),
            Ok(name) if !to.names.contains(name) => Match::Missed(Unmet::NotResolved(name.clone())),
            Ok(name) if !pattern.matches(name) => Match::No,
            Ok(_) => self.allow_request(Some(inspected)),
        }
    }

    fn allow_request(&self, inspected: Option<&Inspected<'_>>) -> Match {
        let Some(http) = &self.http else { return Match::Yes };
        match inspected {
            None => Match::Maybe,
            Some(Inspected::Http { request, .. }) if http.allows(request) => Match::Yes,
            Some(Inspected::Http { .. }) => Match::No,
            Some(Inspected::Tls { .. } | Inspected::Other) => Match::Missed(Unmet::NotHttp),
        }
    }

    fn deny_outbound(&self, to: &Destination<'_>, inspected: Option<&Inspected<'_>>) -> Match {
        let host = match &self.target {
            Target::Name(pattern) => deny_name(pattern, to, inspected),
            target if target.covers(to.location()) => Match::Yes,
            _ => Match::No,
        };
        match (host, &self.http, inspected) {
            (Match::Yes | Match::Maybe, Some(_), None) => Match::Maybe,
            (Match::Yes, Some(http), Some(Inspected::Http { request, .. })) if http.denies(request) => {
                Match::Yes
            }
            (_, Some(_), _) => Match::No,
            (host, None, _) => host,
        }
    }
}

/// Whether a denied name may be what the client wants. Names that an address has been resolved for count as well as the one
/// that the client gives.
fn deny_name(pattern: &NamePattern, to: &Destination<'_>, inspected: Option<&Inspected<'_>>) -> Match {
    let some = to.names.iter().any(|name| pattern.matches(name));
    if some && to.names.iter().all(|name| pattern.matches(name)) {
        return Match::Yes;
    }
    let decided = match (to.protocol, inspected) {
        (Protocol::Udp, _) if !some && to.port == QUIC => return Match::Hidden,
        (Protocol::Udp | Protocol::Icmp, _) => some,
        (Protocol::Tcp, None) => return Match::Maybe,
        (Protocol::Tcp, Some(Inspected::Other)) => false,
        (Protocol::Tcp, Some(Inspected::Tls { name: Some(name), encrypted_hello: true })) => {
            pattern.matches(name) || some
        }
        (Protocol::Tcp, Some(inspected)) => client_name(inspected).map_or(some, |name| pattern.matches(name)),
    };
    if decided { Match::Yes } else { Match::No }
}

/// The name that the client gives, if it is the one that the server will act on.
fn client_name<'a>(inspected: &Inspected<'a>) -> Result<&'a HostName, Unmet> {
    match inspected {
        Inspected::Tls { encrypted_hello: true, .. } => Err(Unmet::Encrypted),
        Inspected::Tls { name, .. } => name.ok_or(Unmet::NoName),
        Inspected::Http { host, .. } => host.ok_or(Unmet::NoName),
        Inspected::Other => Err(Unmet::Unreadable),
    }
}
