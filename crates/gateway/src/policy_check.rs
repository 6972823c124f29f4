//! What a sandbox may reach, and what it is told when it may not.

#[cfg(test)]
mod tests;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use bathy_policy::{Decision, Destination, HostName, Policies, Protocol};
use bathy_protocol::network::{OwnNetwork, Peer, Transport};

use crate::dns::NameBook;
use crate::host;
use crate::http::{Denial, denial};
use crate::inspect::Found;

/// A destination, with all that is known about it at this moment.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Where.
    pub remote: SocketAddr,
    /// Whether it is one of the host's own addresses.
    pub is_host: bool,
    /// What this sandbox knows it as.
    pub names: Vec<HostName>,
}

impl Endpoint {
    /// An address of which nothing else is known or of interest.
    pub fn unnamed(protocol: Protocol, remote: SocketAddr) -> Self {
        Self { protocol, remote, is_host: false, names: Vec::new() }
    }

    fn destination(&self) -> Destination<'_> {
        Destination {
            protocol: self.protocol,
            address: self.remote.ip(),
            port: self.remote.port(),
            is_host: self.is_host,
            names: &self.names,
        }
    }
}

/// Knows the policies and the names that were resolved.
#[derive(Debug)]
pub struct PolicyCheck {
    policies: Policies,
    book: NameBook,
    start: Instant,
    /// The beginning of the command that allows a target.
    command: String,
    /// The host's own addresses, as its owner read them.
    own: Vec<OwnNetwork>,
}

impl PolicyCheck {
    /// By these policies. What they deny is allowed by this command with a target behind it.
    pub fn new(policies: Policies, command: String) -> Self {
        Self { policies, book: NameBook::new(), start: Instant::now(), command, own: Vec::new() }
    }

    /// With these as the host's own addresses.
    pub fn knowing(mut self, own: Vec<OwnNetwork>) -> Self {
        self.own = own;
        self
    }

    /// From now on these are the host's own addresses.
    pub fn know(&mut self, own: Vec<OwnNetwork>) {
        self.own = own;
    }

    /// Whether it is one of the host's own addresses, in any of its readings: a translator may turn one into another. The
    /// owner's list says so, or the kernel, which is asked each time: it knows an address at once, but not each.
    pub fn is_host(&self, address: IpAddr) -> bool {
        let is_own = |address| self.own.iter().any(|own| own.contains(address)) || host::is_own(address);
        bathy_policy::address::readings(address).any(|(address, _)| is_own(address))
    }

    /// From now on these hold.
    pub fn change(&mut self, policies: Policies) {
        self.policies = policies;
    }

    /// How long it has been since the beginning.
    pub fn time(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.start)
    }

    /// What is known about a destination.
    pub fn place(&self, protocol: Protocol, remote: SocketAddr, now: Instant) -> Endpoint {
        let names = self.book.names(remote.ip(), self.time(now));
        Endpoint { protocol, remote, is_host: self.is_host(remote.ip()), names }
    }

    /// Whether the guest may begin there.
    pub fn connect(&self, place: &Endpoint) -> Decision {
        self.policies.connect(&place.destination())
    }

    /// Whether what was read may pass.
    pub fn decide(&self, place: &Endpoint, found: &Found) -> Decision {
        self.policies.judge(&place.destination(), &found.read())
    }

    /// Whether somebody may call at a published port.
    pub fn accept(&self, caller: IpAddr, protocol: Protocol, guest_port: u16) -> Decision {
        self.policies.accept(caller, protocol, guest_port, self.is_host(caller))
    }

    /// Whether a name may be asked for.
    pub fn resolve(&self, name: &HostName) -> Decision {
        self.policies.resolve(name)
    }

    /// Whether the guest may know that a name has this address.
    pub fn reveal(&self, name: &HostName, address: IpAddr) -> bool {
        self.policies.reveal(name, address, self.is_host(address))
    }

    /// The guest was told that a name has this address for so long.
    pub fn learn(&mut self, name: &HostName, address: IpAddr, ttl: Duration, now: Instant) {
        let time = self.time(now);
        self.book.learn(name, address, ttl, time);
    }

    /// The target that would have to be allowed: by its name, if it has one.
    pub fn cure(&self, place: &Endpoint, name: Option<&HostName>) -> Option<String> {
        self.policies.cure(&place.destination(), name.or_else(|| place.names.first()))
    }

    /// The answer to a request that is denied.
    pub fn explain(
        &self,
        place: &Endpoint,
        name: Option<&HostName>,
        rule: &str,
        without_body: bool,
    ) -> Vec<u8> {
        let destination = name.or_else(|| place.names.first()).map_or_else(
            || place.remote.to_string(),
            |name| format!("{name}:{} ({})", place.remote.port(), place.remote.ip()),
        );
        let command = self.cure(place, name).map_or_else(
            || self.no_command().to_owned(),
            |target| format!("{} {}", self.command, quoted(&target)),
        );
        denial(&Denial { destination: &destination, rule, command: &command, without_body })
    }

    /// What to do where no rule helps.
    fn no_command(&self) -> &'static str {
        if self.policies.own().has_network() {
            "none, as the operator of this host denies it for every sandbox"
        } else {
            "bathy policy set, with another preset than none"
        }
    }
}

/// As a shell takes it.
fn quoted(target: &str) -> String {
    if target.contains([' ', '*', '[', '?']) { format!("'{target}'") } else { target.to_owned() }
}

/// As it is written down.
pub fn peer(place: &Endpoint, name: Option<&HostName>) -> Peer {
    let name = name.or_else(|| place.names.first());
    Peer {
        transport: match place.protocol {
            Protocol::Tcp => Transport::Tcp,
            Protocol::Udp => Transport::Udp,
            Protocol::Icmp => Transport::Icmp,
        },
        inbound: false,
        address: place.remote.ip(),
        port: place.remote.port(),
        name: name.map(ToString::to_string),
    }
}
