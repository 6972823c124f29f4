//! What a sandbox may reach, and what it is told when it may not.

#[cfg(test)]
mod tests;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use bathy_policy::{Decision, Destination, HostName, Policies, Protocol};
use bathy_protocol::network::{OwnNetwork, Peer, Transport};

use crate::dns::NameCache;
use crate::host;
use crate::http::{Denial, denial};
use crate::inspect::ParsedTarget;

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
    cache: NameCache,
    start: Instant,
    /// The beginning of the command that allows a target.
    fix_command: String,
    /// The host's own addresses, as its owner read them.
    own: Vec<OwnNetwork>,
}

impl PolicyCheck {
    /// By these policies. What they deny is allowed by this command with a target behind it.
    pub fn new(policies: Policies, fix_command: String) -> Self {
        Self { policies, cache: NameCache::new(), start: Instant::now(), fix_command, own: Vec::new() }
    }

    /// With these as the host's own addresses.
    pub fn with_host_networks(mut self, own: Vec<OwnNetwork>) -> Self {
        self.own = own;
        self
    }

    /// From now on these are the host's own addresses.
    pub fn set_host_networks(&mut self, own: Vec<OwnNetwork>) {
        self.own = own;
    }

    /// Whether it is one of the host's own addresses, in any of its readings: a translator may turn one into another. The
    /// owner's list says so, or the kernel, which is asked each time: it knows an address at once, but not each.
    pub fn is_host(&self, address: IpAddr) -> bool {
        let is_host_address =
            |address| self.own.iter().any(|own| own.contains(address)) || host::is_host_address(address);
        bathy_policy::address::readings(address).any(|(address, _)| is_host_address(address))
    }

    /// From now on these hold.
    pub fn set_policies(&mut self, policies: Policies) {
        self.policies = policies;
    }

    /// How long it has been since the beginning.
    pub fn time(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.start)
    }

    /// What is known about a destination.
    pub fn endpoint(&self, protocol: Protocol, remote: SocketAddr, now: Instant) -> Endpoint {
        let names = self.cache.names(remote.ip(), self.time(now));
        Endpoint { protocol, remote, is_host: self.is_host(remote.ip()), names }
    }

    /// Whether the guest may begin there.
    pub fn connect(&self, endpoint: &Endpoint) -> Decision {
        self.policies.connect(&endpoint.destination())
    }

    /// Whether what was read may pass.
    pub fn decide(&self, endpoint: &Endpoint, target: &ParsedTarget) -> Decision {
        self.policies.decide(&endpoint.destination(), &target.read())
    }

    /// Whether somebody may call at a published port.
    pub fn accept(&self, remote: IpAddr, protocol: Protocol, guest_port: u16) -> Decision {
        self.policies.accept(remote, protocol, guest_port, self.is_host(remote))
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
    pub fn record_name(&mut self, name: &HostName, address: IpAddr, ttl: Duration, now: Instant) {
        let time = self.time(now);
        self.cache.insert(name, address, ttl, time);
    }

    /// The target that would have to be allowed: by its name, if it has one.
    pub fn fix(&self, endpoint: &Endpoint, name: Option<&HostName>) -> Option<String> {
        self.policies.fix(&endpoint.destination(), name.or_else(|| endpoint.names.first()))
    }

    /// The answer to a request that is denied.
    pub fn denial_response(
        &self,
        endpoint: &Endpoint,
        name: Option<&HostName>,
        rule: &str,
        without_body: bool,
    ) -> Vec<u8> {
        let destination = name.or_else(|| endpoint.names.first()).map_or_else(
            || endpoint.remote.to_string(),
            |name| format!("{name}:{} ({})", endpoint.remote.port(), endpoint.remote.ip()),
        );
        let fix_command = self.fix(endpoint, name).map_or_else(
            || self.no_command().to_owned(),
            |target| format!("{} {}", self.fix_command, quoted(&target)),
        );
        denial(&Denial { destination: &destination, rule, command: &fix_command, without_body })
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
pub fn peer(endpoint: &Endpoint, name: Option<&HostName>) -> Peer {
    let name = name.or_else(|| endpoint.names.first());
    Peer {
        transport: match endpoint.protocol {
            Protocol::Tcp => Transport::Tcp,
            Protocol::Udp => Transport::Udp,
            Protocol::Icmp => Transport::Icmp,
        },
        inbound: false,
        address: endpoint.remote.ip(),
        port: endpoint.remote.port(),
        name: name.map(ToString::to_string),
    }
}
