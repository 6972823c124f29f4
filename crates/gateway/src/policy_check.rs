//! The policy of a sandbox, applied to what the gateway knows about a destination.

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

/// A remote endpoint, with what was known about it when it was looked up.
#[derive(Clone, Debug)]
pub struct Endpoint {
    pub protocol: Protocol,
    pub remote: SocketAddr,
    /// Whether the address is one of the host's own.
    pub is_host: bool,
    /// The names that this sandbox resolved to the address.
    pub names: Vec<HostName>,
}

impl Endpoint {
    /// An endpoint without names that is not the host.
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

/// The policies, and the names that the sandbox has resolved.
#[derive(Debug)]
pub struct PolicyCheck {
    policies: Policies,
    cache: NameCache,
    start: Instant,
    /// The command that allows a target, without the target.
    allow_command: String,
    /// The host's own addresses, as the owner reported them.
    host_networks: Vec<OwnNetwork>,
}

impl PolicyCheck {
    /// `allow_command` is the command that allows a target, without the target.
    pub fn new(policies: Policies, allow_command: String) -> Self {
        Self {
            policies,
            cache: NameCache::new(),
            start: Instant::now(),
            allow_command,
            host_networks: Vec::new(),
        }
    }

    pub fn with_host_networks(mut self, host_networks: Vec<OwnNetwork>) -> Self {
        self.host_networks = host_networks;
        self
    }

    pub fn set_host_networks(&mut self, host_networks: Vec<OwnNetwork>) {
        self.host_networks = host_networks;
    }

    /// Whether the address, in any of its [readings](bathy_policy::address::readings), is one of the host's own:
    /// translators may turn one into another. The owner's list may be stale, and the kernel does not know every
    /// address, so both are asked each time.
    pub fn is_host(&self, address: IpAddr) -> bool {
        let is_host_address = |address| {
            self.host_networks.iter().any(|network| network.contains(address))
                || host::is_host_address(address)
        };
        bathy_policy::address::readings(address).any(|(address, _)| is_host_address(address))
    }

    pub fn set_policies(&mut self, policies: Policies) {
        self.policies = policies;
    }

    pub fn time(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.start)
    }

    /// What is known about an endpoint now.
    pub fn endpoint(&self, protocol: Protocol, remote: SocketAddr, now: Instant) -> Endpoint {
        let names = self.cache.names(remote.ip(), self.time(now));
        Endpoint { protocol, remote, is_host: self.is_host(remote.ip()), names }
    }

    /// Whether the guest may connect, before its client has sent anything.
    pub fn connect(&self, endpoint: &Endpoint) -> Decision {
        self.policies.connect(&endpoint.destination())
    }

    /// Whether what the client asked for is allowed.
    pub fn decide(&self, endpoint: &Endpoint, target: &ParsedTarget) -> Decision {
        self.policies.decide(&endpoint.destination(), &target.inspected())
    }

    /// Whether an inbound peer may connect to a published port.
    pub fn accept(&self, remote: IpAddr, protocol: Protocol, guest_port: u16) -> Decision {
        self.policies.accept(remote, protocol, guest_port, self.is_host(remote))
    }

    /// Whether a name may be resolved.
    pub fn resolve(&self, name: &HostName) -> Decision {
        self.policies.resolve(name)
    }

    /// Whether a DNS response to the guest may hold this address for the name.
    pub fn reveal(&self, name: &HostName, address: IpAddr) -> bool {
        self.policies.reveal(name, address, self.is_host(address))
    }

    /// Records that the guest received this address for the name.
    pub fn record_name(&mut self, name: &HostName, address: IpAddr, ttl: Duration, now: Instant) {
        let time = self.time(now);
        self.cache.insert(name, address, ttl, time);
    }

    /// The target to allow, by name if it has one. None if no rule of the sandbox helps.
    pub fn fix(&self, endpoint: &Endpoint, name: Option<&HostName>) -> Option<String> {
        self.policies.fix(&endpoint.destination(), name.or_else(|| endpoint.names.first()))
    }

    /// The HTTP response to a denied request.
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
        let allow_command = self.fix(endpoint, name).map_or_else(
            || self.no_command().to_owned(),
            |target| format!("{} {}", self.allow_command, quoted(&target)),
        );
        denial(&Denial { destination: &destination, rule, command: &allow_command, without_body })
    }

    /// What to advise where no rule helps.
    fn no_command(&self) -> &'static str {
        if self.policies.own().has_network() {
            "none, as the operator of this host denies it for every sandbox"
        } else {
            "bathy policy set, with another preset than none"
        }
    }
}

/// Quoted for a shell.
fn quoted(target: &str) -> String {
    if target.contains([' ', '*', '[', '?']) { format!("'{target}'") } else { target.to_owned() }
}

/// The endpoint as events name it.
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
