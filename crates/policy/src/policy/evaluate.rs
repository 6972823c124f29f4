//! Evaluates one policy: rules in order, then the preset.

use super::{Access, Destination, Inspected, NetworkPolicy, Preset, Reason, Unmet};
use crate::rule::{Match, RemoteAddress};
use crate::{Action, Class, Direction, HostName, Protocol, Rule, Target, is_internal_name, is_metadata_name};

/// The ports of resolvers other than the gateway's: DNS, DNS over TLS and QUIC, multicast DNS, and LLMNR.
const RESOLVERS: [u16; 4] = [53, 853, 5353, 5355];

/// What one policy decides, before its author is known.
pub(super) type Outcome = (Access, Reason);

impl NetworkPolicy {
    /// Decides about a connection, before or after inspection.
    pub(super) fn connect(&self, to: &Destination<'_>, inspected: Option<&Inspected<'_>>) -> Outcome {
        let is_resolver_port = self.guards_port(to);
        let (mut may_allow, mut may_deny, mut unmet) = (None, None, None);
        let mut decided = None;
        for rule in &self.rules {
            match rule.matches_outbound(to, inspected, is_resolver_port) {
                Match::No => {}
                Match::Missed(why) => unmet = unmet.or_else(|| Some((rule.clone(), why))),
                Match::Maybe if rule.action() == Action::Allow => may_allow = may_allow.or(Some(rule)),
                Match::Maybe => may_deny = may_deny.or(Some(rule)),
                Match::Hidden => decided = Some((Access::Deny, Reason::Hidden(rule.clone()))),
                Match::Yes => decided = Some((access(rule.action()), Reason::Rule(rule.clone()))),
            }
            if decided.is_some() {
                break;
            }
        }
        let rest = decided.unwrap_or_else(|| self.default_for(to, is_resolver_port, unmet));
        match (rest.0, may_allow, may_deny) {
            (Access::Deny, Some(rule), _) => (Access::InspectFirst, Reason::Rule(rule.clone())),
            (Access::Allow, _, Some(rule)) => (Access::AllowAndInspect, Reason::Rule(rule.clone())),
            _ => rest,
        }
    }

    /// Whether only a rule that mentions the port may allow it.
    fn guards_port(&self, to: &Destination<'_>) -> bool {
        self.preset != Preset::Open && to.protocol != Protocol::Icmp && RESOLVERS.contains(&to.port)
    }

    fn default_for(
        &self,
        to: &Destination<'_>,
        is_resolver_port: bool,
        unmet: Option<(Rule, Unmet)>,
    ) -> Outcome {
        if is_resolver_port {
            return (Access::Deny, Reason::Resolvers(self.preset));
        }
        if self.preset.admits(to.remote()) {
            return (Access::Allow, Reason::Preset(self.preset));
        }
        let reason = unmet.map_or(Reason::Preset(self.preset), |(rule, why)| Reason::Unmet(rule, why));
        (Access::Deny, reason)
    }

    /// Decides about a DNS query. A query is a message to the owner of the name (exfiltration), so none is sent for
    /// a name that no rule could allow.
    pub(super) fn resolve(&self, name: &HostName) -> Outcome {
        let decides = |rule: &&Rule| match rule.action() {
            Action::Allow => justifies_query(rule.target(), name),
            Action::Deny => rule.is_total() && rules_out(rule.target(), name),
        };
        if let Some(rule) = self.outbound_rules().find(decides) {
            return (access(rule.action()), Reason::Rule(rule.clone()));
        }
        match self.preset {
            preset if !preset.resolves() => (Access::Deny, Reason::Preset(preset)),
            preset if is_metadata_name(name) => (Access::Deny, Reason::MetadataName(preset)),
            Preset::Public if is_internal_name(name) => (Access::Deny, Reason::InternalName(self.preset)),
            preset => (Access::Allow, Reason::Preset(preset)),
        }
    }

    /// Whether any rule lets the sandbox reach an address that a name was resolved to.
    pub(super) fn reveals(&self, name: &HostName, remote: RemoteAddress) -> bool {
        for rule in self.outbound_rules() {
            let named = matches!(rule.target(), Target::Name(pattern) if pattern.matches(name));
            match rule.action() {
                Action::Allow if rule.target().admits(remote) => return true,
                Action::Allow if named && Target::Public.admits(remote) => return true,
                Action::Deny if rule.is_total() && (named || rule.target().covers(remote)) => return false,
                _ => {}
            }
        }
        self.preset.admits(remote)
    }

    /// Decides about an inbound peer at a published port.
    pub(super) fn accept(&self, peer: RemoteAddress, protocol: Protocol, port: u16) -> Outcome {
        if let Some(rule) = self.rules.iter().find(|rule| rule.matches_inbound(peer, protocol, port)) {
            return (access(rule.action()), Reason::Rule(rule.clone()));
        }
        match self.preset {
            Preset::None => (Access::Deny, Reason::Preset(self.preset)),
            Preset::Public | Preset::AllowList | Preset::Open => (Access::Allow, Reason::Published),
        }
    }

    fn outbound_rules(&self) -> impl Iterator<Item = &Rule> {
        self.rules.iter().filter(|rule| rule.direction() == Direction::Out)
    }
}

const fn access(action: Action) -> Access {
    match action {
        Action::Allow => Access::Allow,
        Action::Deny => Access::Deny,
    }
}

/// Whether an allow rule is a reason to resolve a name. A single allowed address needs no name.
fn justifies_query(target: &Target, name: &HostName) -> bool {
    match target {
        Target::Name(pattern) => pattern.matches(name),
        Target::Metadata => is_metadata_name(name),
        Target::Public | Target::Private | Target::Any => !is_metadata_name(name),
        Target::Net(net) => {
            let local = [Class::Loopback, Class::LinkLocal, Class::Metadata]
                .iter()
                .any(|class| net.is_within(*class));
            !net.is_single() && !local && !is_metadata_name(name)
        }
        Target::Loopback | Target::LinkLocal | Target::Host => false,
    }
}

/// Whether a deny rule makes a name useless.
fn rules_out(target: &Target, name: &HostName) -> bool {
    match target {
        Target::Name(pattern) => pattern.matches(name),
        target => *target == Target::Any,
    }
}
