//! Whether a rule matches a connection, before and after inspection.

use super::{Action, Direction, Protocol, RemoteAddress, Rule, Target};
use crate::policy::{Destination, Inspected, Unmet};
use crate::{HostName, NamePattern};

/// The port of QUIC, which encrypts the name that the client sends.
const QUIC: u16 = 443;

/// How a rule matches a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Match {
    /// It does not match.
    No,
    /// It would allow the connection if this requirement were met.
    Missed(Unmet),
    /// It depends on the client's first bytes.
    Maybe,
    /// It denies, because the name that it denies cannot be inspected.
    Hidden,
    /// It matches and decides.
    Yes,
}

impl Rule {
    /// Matches a connection from the sandbox. After inspection the result is never [`Match::Maybe`].
    ///
    /// If the port is that of resolvers, only a rule that mentions it can allow it.
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

    /// Whether the rule decides about an inbound peer at a published port.
    pub(crate) fn matches_inbound(&self, peer: RemoteAddress, protocol: Protocol, port: u16) -> bool {
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
            target if target.admits(to.remote()) => self.allow_request(inspected),
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
        if !Target::Public.admits(to.remote()) {
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
            target if target.covers(to.remote()) => Match::Yes,
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

/// Matches a denied name against the name that the client sends and the names that were resolved to the address.
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

/// The name that the client sends, if it is the one that the server will use.
fn client_name<'a>(inspected: &Inspected<'a>) -> Result<&'a HostName, Unmet> {
    match inspected {
        Inspected::Tls { encrypted_hello: true, .. } => Err(Unmet::Encrypted),
        Inspected::Tls { name, .. } => name.ok_or(Unmet::NoName),
        Inspected::Http { host, .. } => host.ok_or(Unmet::NoName),
        Inspected::Other => Err(Unmet::Unreadable),
    }
}
