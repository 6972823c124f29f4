//! A sandbox's policy below the operator's: both have to agree.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::evaluate::Outcome;
use super::{Access, Author, DecidedBy, Decision, Destination, Inspected, NetworkPolicy};
use crate::rule::Location;
use crate::{Cidr, HostName, NamePattern, Ports, Protocol, Rule, Target, address};

/// Everything that decides what one sandbox may reach.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policies {
    // One that was left out is not one that does not exist.
    ceilings: Vec<NetworkPolicy>,
    own: NetworkPolicy,
}

impl Policies {
    /// The operator's policies, of which every one has to agree, and the sandbox's.
    pub fn new(ceilings: impl IntoIterator<Item = NetworkPolicy>, own: NetworkPolicy) -> Self {
        Self { ceilings: ceilings.into_iter().collect(), own }
    }

    /// The operator's.
    pub fn ceilings(&self) -> &[NetworkPolicy] {
        &self.ceilings
    }

    /// The sandbox's.
    pub const fn own(&self) -> &NetworkPolicy {
        &self.own
    }

    /// Whether a connection may be made, as far as that is known before the client has said anything.
    pub fn connect(&self, to: &Destination<'_>) -> Decision {
        self.strictest(|policy| policy.connect(to, None))
    }

    /// The same after reading: [`Verdict::Allow`] or [`Verdict::Deny`] only.
    pub fn decide(&self, to: &Destination<'_>, inspected: &Inspected<'_>) -> Decision {
        self.strictest(|policy| policy.connect(to, Some(inspected)))
    }

    /// Whether a name may be asked for: [`Verdict::Allow`] or [`Verdict::Deny`] only.
    pub fn resolve(&self, name: &HostName) -> Decision {
        self.strictest(|policy| policy.resolve(name))
    }

    /// Whether an address may be told to the guest in an answer for this name. An address that cannot be reached anyway is
    /// left out, so that a name cannot be pointed at somebody's network.
    pub fn reveal(&self, name: &HostName, address: IpAddr, is_host: bool) -> bool {
        let location = Location { address, is_host };
        self.own.reveals(name, location)
            && self.ceilings.iter().all(|ceiling| ceiling.reveals(name, location))
    }

    /// Whether a peer may connect to a published port: [`Verdict::Allow`] or [`Verdict::Deny`] only.
    pub fn accept(&self, peer: IpAddr, protocol: Protocol, guest_port: u16, is_host: bool) -> Decision {
        // A socket for both families reports IPv4 peers as mapped addresses.
        let peer = Location { address: address::canonical(peer), is_host };
        self.strictest(|policy| policy.accept(peer, protocol, guest_port))
    }

    /// Whether there is a network at all.
    pub fn has_network(&self) -> bool {
        self.own.has_network() && self.ceilings.iter().all(NetworkPolicy::has_network)
    }

    /// What would have to be allowed for this, as it is written behind `--allow`. None if no rule of the sandbox helps.
    ///
    /// The name is the one that the client gave, or would give.
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

    /// The same for a name that may not be asked for.
    pub fn fix_for_name(&self, name: &HostName) -> Option<String> {
        let rule = Rule::allowing(exactly(name), None, Ports::all());
        let with = self.with_first(&rule)?;
        with.resolve(name).allows().then(|| rule.after_action())
    }

    /// With one more rule of the sandbox. A sandbox without a network does not get one while it runs.
    fn with_first(&self, rule: &Rule) -> Option<Self> {
        let rules = std::iter::once(rule.clone()).chain(self.own.rules.iter().cloned()).collect();
        let own = NetworkPolicy { preset: self.own.preset, rules };
        self.has_network().then(|| Self { ceilings: self.ceilings.clone(), own })
    }

    /// The strictest of all answers. For equal ones it is the operator's denial, which no rule of the sandbox can change,
    /// and the sandbox's permission, which is closer to what somebody wrote for it.
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
