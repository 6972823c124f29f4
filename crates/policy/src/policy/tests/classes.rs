//! Which addresses are reachable without names.

use super::{SERVER, SERVER_V6, address, allow_list, name, names, policies, tcp, tls, udp};
use crate::{Access, Destination, Preset, Protocol};

/// Addresses that must be named, and the narrowest class that names them.
const OWN_MACHINE: [(&str, &str); 22] = [
    ("0.0.0.0", "loopback"),
    ("127.0.0.1", "loopback"),
    ("127.8.9.10", "loopback"),
    ("::", "loopback"),
    ("::1", "loopback"),
    ("169.254.169.254", "metadata"),
    ("169.254.169.253", "metadata"),
    ("169.254.170.2", "metadata"),
    ("168.63.129.16", "metadata"),
    ("100.100.100.200", "metadata"),
    ("192.0.0.192", "metadata"),
    ("fd00:ec2::254", "metadata"),
    ("fd20:ce::254", "metadata"),
    ("fe80::a9fe:a9fe", "metadata"),
    ("::ffff:127.0.0.1", ""),
    ("::127.0.0.1", ""),
    ("64:ff9b::7f00:1", ""),
    ("64:ff9b:1::a9fe:a9fe", ""),
    ("2002:7f00:1::", ""),
    ("2001:0:7f00:1::", ""),
    ("2a00::5efe:7f00:1", ""),
    ("::ffff:169.254.169.254", ""),
];

/// Other addresses that are not public, and the class that names them.
const INWARD: [(&str, &str); 26] = [
    ("10.1.2.3", "private"),
    ("100.64.0.1", "private"),
    ("172.16.0.1", "private"),
    ("192.168.1.1", "private"),
    ("fc00::1", "private"),
    ("fd12:3456::1", "private"),
    ("fec0::1", "private"),
    ("169.254.1.1", "link-local"),
    ("fe80::1", "link-local"),
    ("0.1.2.3", "any"),
    ("192.0.0.1", "any"),
    ("198.18.0.1", "any"),
    ("224.0.0.251", "any"),
    ("240.0.0.1", "any"),
    ("255.255.255.255", "any"),
    ("192.0.2.1", "any"),
    ("198.51.100.1", "any"),
    ("203.0.113.1", "any"),
    ("ff02::1", "any"),
    ("2001:db8::1", "any"),
    ("3fff::1", "any"),
    ("64:ff9b::10.0.0.1", "any"),
    ("64:ff9b::808:808", "any"),
    ("2002:a00:1::", "any"),
    ("::ffff:10.0.0.1", ""),
    ("::ffff:8.8.8.8", ""),
];

#[test]
fn n2_nothing_but_public_addresses_is_public() {
    for (text, _) in OWN_MACHINE.into_iter().chain(INWARD) {
        for to in [
            tcp(text, 443, &[]),
            udp(text, 4433, &[]),
            Destination { protocol: Protocol::Icmp, ..tcp(text, 0, &[]) },
        ] {
            let public = policies(Preset::Public, &[]).connect(&to);
            assert_eq!(public.access, Access::Deny, "N2 {text}: preset public");
            assert_eq!(public.by.to_string(), "preset public");
            let rule = allow_list(&["allow public"]).connect(&to);
            assert_eq!(rule.access, Access::Deny, "N2 {text}: allow public");
        }
    }
    for text in [SERVER, SERVER_V6] {
        assert!(policies(Preset::Public, &[]).connect(&tcp(text, 443, &[])).allows(), "{text}");
        assert!(policies(Preset::Public, &[]).connect(&udp(text, 4433, &[])).allows(), "{text}");
    }
}

#[test]
fn n2_loopback_and_metadata_need_to_be_named() {
    for (text, class) in OWN_MACHINE {
        let to = tcp(text, 80, &[]);
        assert_eq!(policies(Preset::Open, &[]).connect(&to).access, Access::Deny, "N2 {text}: preset open");
        let wide = [
            "allow any",
            "allow private",
            "allow link-local",
            "allow public",
            "allow host",
            "allow 0.0.0.0/0",
            "allow ::/0",
        ];
        assert_eq!(policies(Preset::Open, &wide).connect(&to).access, Access::Deny, "N2 {text}: {wide:?}");
        let nets = [
            "allow 169.254.0.0/16",
            "allow 100.64.0.0/10",
            "allow 192.0.0.0/24",
            "allow fc00::/7",
            "allow 64:ff9b::/96",
        ];
        assert_eq!(policies(Preset::Open, &nets).connect(&to).access, Access::Deny, "N2 {text}: {nets:?}");
        let single = allow_list(&[&format!("allow {}", address(text).to_canonical())]).connect(&to).access;
        let mapped = text.starts_with("::ffff:");
        assert_eq!(single, if mapped { Access::Deny } else { Access::Allow }, "N2 {text}: itself");
        for other in ["loopback", "metadata"] {
            let by_class = allow_list(&[&format!("allow {other}")]).connect(&to);
            assert_eq!(by_class.allows(), other == class, "N2 {text}: {other}");
        }
    }
    let networks = allow_list(&["allow 127.0.0.0/8:80", "allow 169.254.169.0/24", "allow fd00:ec2::/32"]);
    for text in ["127.0.0.1", "169.254.169.254", "fd00:ec2::254"] {
        assert!(networks.connect(&tcp(text, 80, &[])).allows(), "{text}");
    }
    assert_eq!(networks.connect(&tcp("127.0.0.1", 81, &[])).access, Access::Deny);
}

#[test]
fn n2_other_classes_are_reached_as_their_rules_say() {
    for (text, class) in INWARD {
        let to = tcp(text, 443, &[]);
        let open = policies(Preset::Open, &[]).connect(&to);
        assert_eq!(open.allows(), class == "private", "N2 {text}: preset open");
        assert_eq!(allow_list(&["allow any"]).connect(&to).allows(), !class.is_empty(), "N2 {text}: any");
        for other in ["private", "link-local"] {
            let by_class = allow_list(&[&format!("allow {other}")]).connect(&to);
            assert_eq!(by_class.allows(), other == class, "N2 {text}: {other}");
        }
    }
    let by_network = allow_list(&["allow 64:ff9b::/96"]);
    assert!(by_network.connect(&tcp("64:ff9b::808:808", 443, &[])).allows());
    assert!(
        !by_network.connect(&tcp("64:ff9b::10.0.0.1", 443, &[])).allows(),
        "N1: what it leads to was not named"
    );
}

#[test]
fn n2_the_hosts_own_addresses_need_to_be_named() {
    for text in [SERVER, SERVER_V6, "192.168.1.7", "fd12::7", "169.254.7.7"] {
        let host = Destination { is_host: true, ..tcp(text, 22, &[]) };
        let wide = [
            "allow any",
            "allow public",
            "allow private",
            "allow link-local",
            "allow loopback",
            "allow 0.0.0.0/0",
            "allow ::/0",
        ];
        let denied = policies(Preset::Open, &wide).connect(&host);
        assert_eq!(denied.access, Access::Deny, "N2 {text}");
        for rule in ["allow host".to_owned(), format!("allow {text}")] {
            assert!(allow_list(&[&rule]).connect(&host).allows(), "N2 {text}: {rule}");
        }
        let named = names(&["api.example"]);
        let host = Destination { names: &named, ..host };
        let by_name = allow_list(&["allow api.example"]);
        assert_eq!(by_name.connect(&host).access, Access::Deny, "N3 {text}: a name leads to the host");
        assert!(!by_name.decide(&host, &tls(&name("api.example"))).allows());
    }
    let loopback = Destination { is_host: true, ..tcp("127.0.0.1", 80, &[]) };
    assert!(
        !allow_list(&["allow host"]).connect(&loopback).allows(),
        "services there expect no remote clients"
    );
    assert!(allow_list(&["allow loopback"]).connect(&loopback).allows());
}

#[test]
fn n1_a_deny_rule_sees_every_reading() {
    let table = [
        ("deny private", "64:ff9b::10.0.0.1", "allow 64:ff9b::a00:1"),
        ("deny 10.0.0.0/8", "64:ff9b::10.0.0.1", "allow 64:ff9b::a00:1"),
        ("deny 10.0.0.1", "2002:a00:1::", "allow 2002:a00:1::"),
        ("deny loopback", "2002:7f00:1::", "allow 2002:7f00:1::"),
        ("deny host", "64:ff9b::7f00:1", "allow 64:ff9b::7f00:1"),
        ("deny metadata", "64:ff9b:1::a9fe:a9fe", "allow 64:ff9b:1::a9fe:a9fe"),
        ("deny link-local", "169.254.169.254", "allow metadata"),
        ("deny private", "100.100.100.200", "allow metadata"),
        ("deny public", "64:ff9b::808:808", "allow any"),
        ("deny any", "64:ff9b::808:808", "allow any"),
    ];
    for (deny, text, allow) in table {
        let to = tcp(text, 443, &[]);
        assert!(allow_list(&[allow]).connect(&to).allows(), "N1 {text}: {allow}");
        let decision = allow_list(&[deny, allow]).connect(&to);
        assert_eq!((decision.access, decision.by.to_string()), (Access::Deny, deny.to_owned()), "N1 {text}");
    }
}

#[test]
fn the_first_rule_that_matches_decides() {
    let policies = policies(
        Preset::Public,
        &["allow 10.0.0.5:443", "deny private", "allow 10.0.0.6", "deny 8.8.8.8:80"],
    );
    let table = [
        ("10.0.0.5", 443, Access::Allow, "allow 10.0.0.5:443"),
        ("10.0.0.5", 80, Access::Deny, "deny private"),
        ("10.0.0.6", 443, Access::Deny, "deny private"),
        ("8.8.8.8", 80, Access::Deny, "deny 8.8.8.8:80"),
        ("8.8.8.8", 443, Access::Allow, "preset public"),
        ("169.254.1.1", 443, Access::Deny, "preset public"),
    ];
    for (text, port, access, by) in table {
        let decision = policies.connect(&tcp(text, port, &[]));
        assert_eq!((decision.access, decision.by.to_string().as_str()), (access, by), "{text}:{port}");
    }
}

#[test]
fn n5_protocols_and_ports_are_kept_apart() {
    let policies = allow_list(&[
        "allow tcp://1.2.3.4:443",
        "allow udp://1.2.3.4:123",
        "allow 1.2.3.5:80",
        "allow icmp://1.2.3.6",
    ]);
    let icmp = |text| Destination { protocol: Protocol::Icmp, ..tcp(text, 0, &[]) };
    let table = [
        (tcp("1.2.3.4", 443, &[]), true),
        (udp("1.2.3.4", 443, &[]), false),
        (tcp("1.2.3.4", 80, &[]), false),
        (udp("1.2.3.4", 123, &[]), true),
        (tcp("1.2.3.4", 123, &[]), false),
        (tcp("1.2.3.5", 80, &[]), true),
        (udp("1.2.3.5", 80, &[]), true),
        (icmp("1.2.3.5"), false),
        (icmp("1.2.3.6"), true),
        (tcp("1.2.3.6", 443, &[]), false),
    ];
    for (to, allowed) in table {
        assert_eq!(policies.connect(&to).allows(), allowed, "N5 {to:?}");
    }
}
