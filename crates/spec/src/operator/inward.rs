//! Finds rules that reach further than the preset `public`: private networks, the host, other DNS resolvers.
//!
//! This only examines the policy itself. What is only known when connecting, such as the addresses of a name,
//! is decided by the gateway.

use std::net::{IpAddr, UdpSocket};

use bathy_policy::{
    Access, Action, Class, Destination, Direction, HostName, NamePattern, NetworkPolicy, Policies, Preset,
    Protocol, Rule, Target, classify,
};

const SOMEWHERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(8, 8, 8, 8));
/// Ports that the preset leaves to the gateway's own resolver.
const RESOLVERS: [u16; 4] = [53, 853, 5353, 5355];

/// The first part of a policy that reaches further, as written.
pub fn part(policy: &NetworkPolicy) -> Option<String> {
    if policy.preset == Preset::Open {
        return Some(policy.preset.to_string());
    }
    let outward = |rule: &&Rule| rule.action() == Action::Allow && rule.direction() == Direction::Out;
    policy.rules.iter().filter(outward).find(|rule| leads_further(rule)).map(ToString::to_string)
}

fn leads_further(rule: &Rule) -> bool {
    match rule.target() {
        Target::Public => asks_resolvers(rule, SOMEWHERE),
        // A name rule allows only public addresses, and only TLS or HTTP. It must be a name that the preset
        // would also resolve.
        Target::Name(NamePattern::Exact(name)) => !is_asked_for(name),
        Target::Name(NamePattern::Below(name)) => {
            format!("a.{name}").parse().map_or(true, |below| !is_asked_for(&below))
        }
        Target::Net(net) => {
            let single = net.to_string().parse().ok().filter(|address| is_public(*address));
            single.is_none_or(|address| asks_resolvers(rule, address))
        }
        Target::Private
        | Target::Loopback
        | Target::LinkLocal
        | Target::Metadata
        | Target::Host
        | Target::Any => true,
    }
}

fn is_asked_for(name: &HostName) -> bool {
    let public = NetworkPolicy { preset: Preset::Public, rules: Vec::new() };
    Policies::new([], public).resolve(name).allows()
}

/// Whether an address is public and not one of the host's own, to which a socket could be bound.
fn is_public(address: IpAddr) -> bool {
    classify(address) == Class::Public && UdpSocket::bind((address, 0)).is_err()
}

/// Whether a rule allows DNS queries to a resolver other than the gateway.
fn asks_resolvers(rule: &Rule, address: IpAddr) -> bool {
    let alone = NetworkPolicy { preset: Preset::AllowList, rules: vec![rule.clone()] };
    let policies = Policies::new([], alone);
    let ways = [Protocol::Tcp, Protocol::Udp].into_iter().flat_map(|way| RESOLVERS.map(|port| (way, port)));
    ways.into_iter().any(|(protocol, port)| {
        let to = Destination { protocol, address, port, is_host: false, names: &[] };
        policies.connect(&to).access != Access::Deny
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(preset: Preset, rules: &[&str]) -> NetworkPolicy {
        NetworkPolicy { preset, rules: rules.iter().map(|rule| rule.parse().unwrap()).collect() }
    }

    #[test]
    fn what_the_preset_public_reaches_leads_no_further() {
        for rules in [
            &[][..],
            &["allow public"],
            &["allow public:443"],
            &["allow api.example:443", "allow *.example.org"],
            &["allow 8.8.8.8:443", "allow tcp://9.9.9.9:22"],
            &["allow GET http://api.example/v1/*"],
            &["deny private", "deny host", "deny 10.0.0.0/8"],
            // Inbound connections to a published port are no way out.
            &["allow in private", "deny in any"],
        ] {
            for preset in [Preset::None, Preset::Public, Preset::AllowList] {
                assert_eq!(part(&policy(preset, rules)), None, "{preset} {rules:?}");
            }
        }
    }

    #[test]
    fn what_leads_further_is_named_as_it_is_written() {
        assert_eq!(part(&policy(Preset::Open, &[])).as_deref(), Some("open"));
        for rule in [
            "allow private",
            "allow loopback",
            "allow link-local",
            "allow metadata",
            "allow host:80",
            "allow any:443",
            "allow 10.0.0.5",
            "allow 127.0.0.1:80",
            "allow 169.254.169.254",
            "allow 192.168.0.0/16",
            "allow 0.0.0.0/0",
            "allow ::/0",
            "allow 64:ff9b::a00:1",
            // Most of it is public, but not all.
            "allow 8.0.0.0/6",
            "allow public:53",
            "allow udp://8.8.8.8:53",
            "allow GET http://private/",
            "allow metadata.google.internal",
        ] {
            let Ok(parsed) = rule.parse::<Rule>() else { panic!("{rule}") };
            let found = part(&policy(Preset::Public, &["allow api.example", rule]));
            assert_eq!(found, Some(parsed.to_string()), "{rule}");
        }
    }
}
