//! Decisions about real addresses, by policies in text form.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use bathy_policy::{Access, HostName, Policies, Protocol};
use bathy_protocol::network::{OwnNetwork, Transport};

use super::{Endpoint, PolicyCheck, peer, quoted};
use crate::inspect::ParsedTarget;

const PUBLIC: IpAddr = IpAddr::V4(Ipv4Addr::new(93, 184, 216, 34));
const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const TTL: Duration = Duration::from_secs(300);

fn policies(ceiling: Option<&str>, preset: &str, rules: &[&str]) -> Policies {
    let ceilings: Vec<_> =
        ceiling.iter().map(|rule| serde_json::json!({"preset": "open", "rules": [rule]})).collect();
    let own = serde_json::json!({"preset": preset, "rules": rules});
    serde_json::from_value(serde_json::json!({"ceilings": ceilings, "own": own})).unwrap()
}

fn policy_check(rules: &[&str]) -> PolicyCheck {
    PolicyCheck::new(policies(None, "allow-list", rules), "bathy policy allow web".to_owned())
}

fn name(text: &str) -> HostName {
    text.parse().unwrap()
}

fn tls(name: &str) -> ParsedTarget {
    ParsedTarget::Tls { name: Some(name.parse().unwrap()), encrypted_hello: false }
}

#[test]
fn an_address_has_a_name_for_as_long_as_the_answer_said() {
    let mut policy_check = policy_check(&["allow api.example:443"]);
    let now = Instant::now();
    let remote = SocketAddr::new(PUBLIC, 443);
    assert_eq!(policy_check.endpoint(Protocol::Tcp, remote, now).names, []);
    policy_check.record_name(&name("api.example"), PUBLIC, TTL, now);
    let endpoint = policy_check.endpoint(Protocol::Tcp, remote, now + TTL);
    assert_eq!(
        (endpoint.names.as_slice(), endpoint.remote, endpoint.is_host),
        (&[name("api.example")][..], remote, false)
    );
    assert_eq!(policy_check.endpoint(Protocol::Tcp, remote, now + 2 * TTL).names, []);
    assert_eq!(policy_check.endpoint(Protocol::Tcp, SocketAddr::new(LOCAL, 443), now).names, []);
    assert_eq!(policy_check.time(now + TTL) - policy_check.time(now), TTL);
}

#[test]
fn the_clients_sni_or_host_decides_where_a_name_is_allowed() {
    let now = Instant::now();
    let mut policy_check = policy_check(&["allow api.example:443"]);
    policy_check.record_name(&name("api.example"), PUBLIC, TTL, now);
    let endpoint = policy_check.endpoint(Protocol::Tcp, SocketAddr::new(PUBLIC, 443), now);
    assert_eq!(policy_check.connect(&endpoint).access, Access::InspectFirst);
    let table = [
        (tls("api.example"), Access::Allow),
        (tls("other.example"), Access::Deny),
        (ParsedTarget::Other, Access::Deny),
    ];
    for (target, access) in table {
        assert_eq!(policy_check.decide(&endpoint, &target).access, access, "{target:?}");
    }
    policy_check.set_policies(policies(None, "allow-list", &[]));
    assert_eq!(policy_check.connect(&endpoint).access, Access::Deny);
    assert_eq!(policy_check.decide(&endpoint, &tls("api.example")).access, Access::Deny);
}

#[test]
fn names_and_peers_are_decided_by_the_policies() {
    let policy_check = policy_check(&["allow api.example:443", "deny in 203.0.113.0/24"]);
    assert_eq!(policy_check.resolve(&name("api.example")).access, Access::Allow);
    assert_eq!(policy_check.resolve(&name("other.example")).access, Access::Deny);
    assert!(policy_check.reveal(&name("api.example"), PUBLIC));
    assert!(!policy_check.reveal(&name("api.example"), LOCAL), "a name that is pointed at the host");
    assert!(!policy_check.reveal(&name("other.example"), PUBLIC));
    let peer = |text: &str| policy_check.accept(text.parse().unwrap(), Protocol::Tcp, 80).access;
    assert_eq!((peer("203.0.113.9"), peer("198.51.100.9")), (Access::Deny, Access::Allow));
}

#[test]
fn the_hosts_own_addresses_are_known_in_every_reading() {
    for (address, own) in [
        ("127.0.0.1", true),
        ("::1", true),
        ("::ffff:127.0.0.1", true),
        ("64:ff9b::127.0.0.1", true),
        ("93.184.216.34", false),
        ("::ffff:93.184.216.34", false),
    ] {
        assert_eq!(policy_check(&[]).is_host(address.parse().unwrap()), own, "{address}");
    }
}

#[test]
fn n10_addresses_that_the_owner_reports_are_the_hosts_own_from_then_on() {
    let network = |text: &str, prefix| OwnNetwork { address: text.parse().unwrap(), prefix };
    let mut policy_check = PolicyCheck::new(policies(None, "public", &[]), String::new())
        .with_host_networks(vec![network("93.184.216.34", 32)]);
    let access = |policy_check: &PolicyCheck, text: &str| {
        let endpoint =
            policy_check.endpoint(Protocol::Tcp, SocketAddr::new(text.parse().unwrap(), 80), Instant::now());
        policy_check.connect(&endpoint).access
    };
    assert_eq!(access(&policy_check, "93.184.216.34"), Access::Deny);
    assert_eq!(access(&policy_check, "93.184.216.35"), Access::Allow);
    assert!(policy_check.is_host("::ffff:93.184.216.34".parse().unwrap()));
    assert!(!policy_check.reveal(&name("api.example"), PUBLIC));
    policy_check.set_host_networks(vec![network("93.184.216.35", 32), network("2606:2800::", 32)]);
    assert_eq!(access(&policy_check, "93.184.216.34"), Access::Allow, "it is not any more");
    assert_eq!(access(&policy_check, "93.184.216.35"), Access::Deny);
    assert_eq!(access(&policy_check, "2606:2800:1::1"), Access::Deny);
}

#[test]
fn a_denial_names_the_destination_the_rule_and_the_command_that_allows_it() {
    let now = Instant::now();
    let mut policy_check = policy_check(&[]);
    let remote = SocketAddr::new(PUBLIC, 80);
    let endpoint = policy_check.endpoint(Protocol::Tcp, remote, now);
    let text = |policy_check: &PolicyCheck, endpoint: &Endpoint, name, without_body| {
        String::from_utf8(policy_check.denial_response(endpoint, name, "preset allow-list", without_body))
            .unwrap()
    };

    let unnamed = text(&policy_check, &endpoint, None, false);
    assert!(unnamed.contains("93.184.216.34:80") && unnamed.contains("preset allow-list"), "{unnamed}");
    assert!(unnamed.contains("bathy policy allow web tcp://93.184.216.34:80"), "{unnamed}");

    policy_check.record_name(&name("api.example"), PUBLIC, TTL, now);
    let endpoint = policy_check.endpoint(Protocol::Tcp, remote, now);
    let known = text(&policy_check, &endpoint, None, false);
    assert!(known.contains("api.example:80 (93.184.216.34)"), "{known}");
    assert!(known.contains("bathy policy allow web api.example:80"), "{known}");
    let (head, body) = known.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 403 ") && !body.is_empty(), "{known}");

    let given = name("given.example");
    assert!(text(&policy_check, &endpoint, Some(&given), false).contains("given.example:80 (93.184.216.34)"));
    let without_body = text(&policy_check, &endpoint, Some(&given), true);
    assert!(without_body.ends_with("\r\n\r\n"), "{without_body}");
}

#[test]
fn where_no_rule_helps_the_denial_says_whose_decision_it_is() {
    for (ceiling, preset, expected) in [
        (Some("deny any"), "allow-list", "the operator of this host denies it"),
        (None, "none", "with another preset than none"),
    ] {
        let policy_check =
            PolicyCheck::new(policies(ceiling, preset, &[]), "bathy policy allow web".to_owned());
        let endpoint = policy_check.endpoint(Protocol::Tcp, SocketAddr::new(PUBLIC, 80), Instant::now());
        assert_eq!(policy_check.fix(&endpoint, None), None);
        let text = String::from_utf8(policy_check.denial_response(&endpoint, None, "x", false)).unwrap();
        assert!(text.contains(expected) && !text.contains("bathy policy allow"), "{text}");
    }
}

#[test]
fn targets_are_quoted_where_a_shell_would_read_more_into_them() {
    for (target, expected) in [
        ("api.example:443", "api.example:443"),
        ("*.example:443", "'*.example:443'"),
        ("[2001:db8::1]:443", "'[2001:db8::1]:443'"),
        ("GET http://a.example/", "'GET http://a.example/'"),
    ] {
        assert_eq!(quoted(target), expected);
    }
}

#[test]
fn events_carry_the_name_that_was_given_or_else_the_one_that_was_resolved() {
    let mut endpoint = Endpoint {
        protocol: Protocol::Tcp,
        remote: SocketAddr::new(PUBLIC, 443),
        is_host: false,
        names: vec![name("resolved.example")],
    };
    let table =
        [(Protocol::Tcp, Transport::Tcp), (Protocol::Udp, Transport::Udp), (Protocol::Icmp, Transport::Icmp)];
    for (protocol, transport) in table {
        endpoint.protocol = protocol;
        let peer = peer(&endpoint, None);
        assert_eq!((peer.transport, peer.inbound, peer.address, peer.port), (transport, false, PUBLIC, 443));
        assert_eq!(peer.name.as_deref(), Some("resolved.example"));
    }
    assert_eq!(peer(&endpoint, Some(&name("given.example"))).name.as_deref(), Some("given.example"));
}
