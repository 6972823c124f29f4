//! A sandbox's policy below the operator's ceilings: all have to agree.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::evaluate::Outcome;
use super::{Access, Author, DecidedBy, Decision, Destination, Inspected, NetworkPolicy};
use crate::rule::RemoteAddress;
use crate::{Cidr, HostName, NamePattern, Ports, Protocol, Rule, Target, address};

/// All policies that hold for one sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policies {
    // Required when deserializing: a missing field must not mean that there is no ceiling.
    ceilings: Vec<NetworkPolicy>,
    own: NetworkPolicy,
}

impl Policies {
    /// The operator's ceilings, all of which have to agree, and the sandbox's own policy.
    pub fn new(ceilings: impl IntoIterator<Item = NetworkPolicy>, own: NetworkPolicy) -> Self {
        Self { ceilings: ceilings.into_iter().collect(), own }
    }

    /// The operator's policies, all of which have to agree.
    pub fn ceilings(&self) -> &[NetworkPolicy] {
        &self.ceilings
    }

    /// The sandbox's own policy.
    pub const fn own(&self) -> &NetworkPolicy {
        &self.own
    }

    /// Decides about a connection before the client has sent anything.
    pub fn connect(&self, to: &Destination<'_>) -> Decision {
        self.strictest(|policy| policy.connect(to, None))
    }

    /// Decides about a connection after inspection: [`Access::Allow`] or [`Access::Deny`] only.
    pub fn decide(&self, to: &Destination<'_>, inspected: &Inspected<'_>) -> Decision {
        self.strictest(|policy| policy.connect(to, Some(inspected)))
    }

    /// Decides about a DNS query: [`Access::Allow`] or [`Access::Deny`] only.
    pub fn resolve(&self, name: &HostName) -> Decision {
        self.strictest(|policy| policy.resolve(name))
    }

    /// Whether a DNS response to the guest may hold this address for this name. Addresses that the sandbox cannot
    /// reach anyway are removed, so that a name cannot be pointed at a private network (DNS rebinding).
    pub fn reveal(&self, name: &HostName, address: IpAddr, is_host: bool) -> bool {
        let remote = RemoteAddress { address, is_host };
        self.own.reveals(name, remote) && self.ceilings.iter().all(|ceiling| ceiling.reveals(name, remote))
    }

    /// Decides about an inbound peer at a published port: [`Access::Allow`] or [`Access::Deny`] only.
    pub fn accept(&self, peer: IpAddr, protocol: Protocol, guest_port: u16, is_host: bool) -> Decision {
        // A dual-stack socket reports IPv4 peers as IPv4-mapped addresses.
        let peer = RemoteAddress { address: address::canonical(peer), is_host };
        self.strictest(|policy| policy.accept(peer, protocol, guest_port))
    }

    /// Whether the sandbox has a network at all.
    pub fn has_network(&self) -> bool {
        self.own.has_network() && self.ceilings.iter().all(NetworkPolicy::has_network)
    }

    /// The rule that would allow a connection, as text for `--allow`. None if no rule of the sandbox can.
    ///
    /// `name` is the name that the client sent, or would send.
    pub fn fix(&self, to: &Destination<'_>, name: Option<&HostName>) -> Option<String> {
        let ports = if to.protocol == Protocol::Icmp { Ports::all() } else { Ports::one(to.port) };
        let by_name = name.map(|name| Rule::allowing(exactly(name), None, ports.clone()));
        let single = Target::Net(Cidr::single(to.address));
        let by_address = Rule::allowing(single, Some(to.protocol), ports);
        let inspected =
            name.map_or(Inspected::Other, |name| Inspected::Tls { name: Some(name), encrypted_hello: false });
        let helps =
            |rule: &Rule| self.with_first(rule).is_some_and(|with| with.decide(to, &inspected).allows());
        by_name.into_iter().chain([by_address]).find(helps).map(|rule| rule.after_action())
    }

    /// The rule that would allow a name to be resolved, as text for `--allow`.
    pub fn fix_for_name(&self, name: &HostName) -> Option<String> {
        let rule = Rule::allowing(exactly(name), None, Ports::all());
        let with = self.with_first(&rule)?;
        with.resolve(name).allows().then(|| rule.after_action())
    }

    /// The same policies with one more rule of the sandbox. A running sandbox without a network cannot get one.
    fn with_first(&self, rule: &Rule) -> Option<Self> {
        let rules = std::iter::once(rule.clone()).chain(self.own.rules.iter().cloned()).collect();
        let own = NetworkPolicy { preset: self.own.preset, rules };
        self.has_network().then(|| Self { ceilings: self.ceilings.clone(), own })
    }

    /// The strictest of all decisions. On a tie it is the operator's denial, which no rule of the sandbox can
    /// change, and otherwise the sandbox's own decision, which is more specific.
    fn strictest(&self, ask: impl Fn(&NetworkPolicy) -> Outcome) -> Decision {
        let decision =
            |author, (access, reason): Outcome| Decision { access, by: DecidedBy { author, reason } };
        let own = decision(Author::Sandbox, ask(&self.own));
        let ceilings = self.ceilings.iter().map(|ceiling| decision(Author::Operator, ask(ceiling)));
        match ceilings.max_by_key(|ceiling| ceiling.access) {
            Some(ceiling) if ceiling.access > own.access || ceiling.access == Access::Deny => ceiling,
            _ => own,
        }
    }
}

fn exactly(name: &HostName) -> Target {
    Target::Name(NamePattern::Exact(name.clone()))
}
