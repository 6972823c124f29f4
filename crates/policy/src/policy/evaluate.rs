//! One policy's answers.

use super::{Destination, NetworkPolicy, Preset, Read, Reason, Unmet, Verdict};
use crate::rule::{Match, Place};
use crate::{Action, Class, Direction, HostName, Protocol, Rule, Target, is_inner_name, is_metadata_name};

/// Ports on which something other than the gateway could tell the guest where a name is: DNS, DNS over TLS and QUIC,
/// multicast DNS, and LLMNR.
const RESOLVERS: [u16; 4] = [53, 853, 5353, 5355];

/// A verdict that does not yet say whose it is.
pub(super) type Answer = (Verdict, Reason);

impl NetworkPolicy {
    /// About a connection, before anything was read of it or after.
    pub(super) fn connect(&self, to: &Destination<'_>, read: Option<&Read<'_>>) -> Answer {
        let guarded = self.guards(to);
        let (mut may_allow, mut may_deny, mut unmet) = (None, None, None);
        let mut decided = None;
        for rule in &self.rules {
            match rule.concerning(to, read, guarded) {
                Match::No => {}
                Match::Missed(why) => unmet = unmet.or_else(|| Some((rule.clone(), why))),
                Match::Maybe if rule.action() == Action::Allow => may_allow = may_allow.or(Some(rule)),
                Match::Maybe => may_deny = may_deny.or(Some(rule)),
                Match::Blind => decided = Some((Verdict::Deny, Reason::Blind(rule.clone()))),
                Match::Yes => decided = Some((verdict(rule.action()), Reason::Rule(rule.clone()))),
            }
            if decided.is_some() {
                break;
            }
        }
        let rest = decided.unwrap_or_else(|| self.default_for(to, guarded, unmet));
        match (rest.0, may_allow, may_deny) {
            (Verdict::Deny, Some(rule), _) => (Verdict::IfRead, Reason::Rule(rule.clone())),
            (Verdict::Allow, _, Some(rule)) => (Verdict::UnlessRead, Reason::Rule(rule.clone())),
            _ => rest,
        }
    }

    /// Whether only a rule that mentions the port may allow it.
    fn guards(&self, to: &Destination<'_>) -> bool {
        self.preset != Preset::Open && to.protocol != Protocol::Icmp && RESOLVERS.contains(&to.port)
    }

    fn default_for(&self, to: &Destination<'_>, guarded: bool, unmet: Option<(Rule, Unmet)>) -> Answer {
        if guarded {
            return (Verdict::Deny, Reason::Resolvers(self.preset));
        }
        if self.preset.admits(to.place()) {
            return (Verdict::Allow, Reason::Preset(self.preset));
        }
        let reason = unmet.map_or(Reason::Preset(self.preset), |(rule, why)| Reason::Unmet(rule, why));
        (Verdict::Deny, reason)
    }

    /// About a question for a name. A question is a message to whoever answers for the name, so none is asked that could
    /// not lead anywhere.
    pub(super) fn resolve(&self, name: &HostName) -> Answer {
        let decides = |rule: &&Rule| match rule.action() {
            Action::Allow => leads_somewhere(rule.target(), name),
            Action::Deny => rule.is_total() && ends(rule.target(), name),
        };
        if let Some(rule) = self.outward().find(decides) {
            return (verdict(rule.action()), Reason::Rule(rule.clone()));
        }
        match self.preset {
            preset if !preset.resolves() => (Verdict::Deny, Reason::Preset(preset)),
            preset if is_metadata_name(name) => (Verdict::Deny, Reason::MetadataName(preset)),
            Preset::Public if is_inner_name(name) => (Verdict::Deny, Reason::InnerName(self.preset)),
            preset => (Verdict::Allow, Reason::Preset(preset)),
        }
    }

    /// Whether there is any way to reach an address that a name was resolved to.
    pub(super) fn reveals(&self, name: &HostName, place: Place) -> bool {
        for rule in self.outward() {
            let named = matches!(rule.target(), Target::Name(pattern) if pattern.matches(name));
            match rule.action() {
                Action::Allow if rule.target().admits(place) => return true,
                Action::Allow if named && Target::Public.admits(place) => return true,
                Action::Deny if rule.is_total() && (named || rule.target().covers(place)) => return false,
                _ => {}
            }
        }
        self.preset.admits(place)
    }

    /// About a peer that connects to a published port.
    pub(super) fn accept(&self, peer: Place, protocol: Protocol, port: u16) -> Answer {
        if let Some(rule) = self.rules.iter().find(|rule| rule.concerns_peer(peer, protocol, port)) {
            return (verdict(rule.action()), Reason::Rule(rule.clone()));
        }
        match self.preset {
            Preset::None => (Verdict::Deny, Reason::Preset(self.preset)),
            Preset::Public | Preset::AllowList | Preset::Open => (Verdict::Allow, Reason::Published),
        }
    }

    fn outward(&self) -> impl Iterator<Item = &Rule> {
        self.rules.iter().filter(|rule| rule.direction() == Direction::Out)
    }
}

const fn verdict(action: Action) -> Verdict {
    match action {
        Action::Allow => Verdict::Allow,
        Action::Deny => Verdict::Deny,
    }
}

/// Whether a name is worth asking for because of what is allowed. An address that is allowed by itself needs no name.
fn leads_somewhere(target: &Target, name: &HostName) -> bool {
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

/// Whether a name cannot lead anywhere because of what is denied.
fn ends(target: &Target, name: &HostName) -> bool {
    match target {
        Target::Name(pattern) => pattern.matches(name),
        target => *target == Target::Any,
    }
}
