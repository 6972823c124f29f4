use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Class::{self, LinkLocal, Loopback, Metadata, Multicast, Private, Public, Special};
use super::{classify, is_metadata_name, readings, registry};

fn address(text: &str) -> IpAddr {
    text.parse().unwrap_or_else(|_| panic!("{text} is not an address"))
}

#[test]
fn n1_an_address_inside_of_an_address_is_seen() {
    let table = [
        ("N1 mapped", "::ffff:127.0.0.1", Loopback),
        ("N1 mapped, in hexadecimal", "::ffff:7f00:1", Loopback),
        ("N1 mapped, public", "::ffff:8.8.8.8", Special),
        ("N1 compatible", "::127.0.0.1", Loopback),
        ("N1 compatible, metadata", "::a9fe:a9fe", Metadata),
        ("N1 compatible, public", "::8.8.8.8", Special),
        ("N1 translated", "::ffff:0:10.0.0.1", Private),
        ("N1 NAT64", "64:ff9b::7f00:1", Loopback),
        ("N1 NAT64, metadata", "64:ff9b::169.254.169.254", Metadata),
        ("N1 NAT64, private", "64:ff9b::10.0.0.1", Private),
        ("N1 NAT64, public", "64:ff9b::8.8.8.8", Special),
        ("N1 NAT64 for local use, /96", "64:ff9b:1::169.254.169.254", Metadata),
        ("N1 NAT64 for local use, /48", "64:ff9b:1:a9fe:a9:fe00::", Metadata),
        ("N1 NAT64 for local use, /56", "64:ff9b:1:7f:0:1::", Loopback),
        ("N1 NAT64 for local use, /64", "64:ff9b:1:0:a:0:100:0", Private),
        ("N1 6to4", "2002:7f00:1::", Loopback),
        ("N1 6to4, private", "2002:c0a8:101::1", Private),
        ("N1 6to4, public", "2002:808:808::1", Special),
        ("N1 Teredo, server", "2001:0:7f00:1::", Loopback),
        ("N1 Teredo, client", "2001:0:808:808:0:0:80ff:fffe", Loopback),
        ("N1 Teredo, public", "2001:0:808:808:0:0:f7f7:f7f7", Special),
        ("N1 ISATAP", "2a00::5efe:7f00:1", Loopback),
        ("N1 ISATAP, metadata", "2a00::200:5efe:169.254.169.254", Metadata),
        ("N1 ISATAP, link-local", "fe80::5efe:127.0.0.1", Loopback),
        ("N1 ISATAP, public", "2a00::5efe:808:808", Special),
    ];
    for (id, text, class) in table {
        assert_eq!(classify(address(text)), class, "{id}: {text}");
    }
}

#[test]
fn n1_the_address_itself_is_the_first_reading() {
    let table =
        [("10.0.0.1", Private), ("64:ff9b::10.0.0.1", Special), ("fd00::1", Private), ("2a00::1", Public)];
    for (text, class) in table {
        assert_eq!(readings(address(text)).next(), Some((address(text), class)), "{text}");
    }
}

#[test]
fn n2_every_class_of_the_attack_list_is_known() {
    let table = [
        ("0.0.0.0", Loopback),
        ("0.1.2.3", Special),
        ("10.1.2.3", Private),
        ("100.64.0.1", Private),
        ("127.0.0.1", Loopback),
        ("127.255.255.254", Loopback),
        ("169.254.1.1", LinkLocal),
        ("169.254.169.254", Metadata),
        ("169.254.170.2", Metadata),
        ("169.254.169.253", Metadata),
        ("169.254.169.123", Metadata),
        ("172.16.0.1", Private),
        ("172.31.255.254", Private),
        ("192.0.0.1", Special),
        ("192.0.0.192", Metadata),
        ("192.168.1.1", Private),
        ("198.18.0.1", Special),
        ("198.19.255.254", Special),
        ("224.0.0.251", Multicast),
        ("239.255.255.250", Multicast),
        ("240.0.0.1", Special),
        ("255.255.255.255", Special),
        ("192.0.2.1", Special),
        ("198.51.100.1", Special),
        ("203.0.113.1", Special),
        ("168.63.129.16", Metadata),
        ("100.100.100.200", Metadata),
        ("::", Loopback),
        ("::1", Loopback),
        ("fc00::1", Private),
        ("fd00:ec2::254", Metadata),
        ("fd20:ce::254", Metadata),
        ("fe80::1", LinkLocal),
        ("fe80::a9fe:a9fe", Metadata),
        ("ff02::fb", Multicast),
        ("ff0e::1", Multicast),
        ("2001:db8::1", Special),
        ("3fff::1", Special),
        ("fec0::1", Private),
        ("4000::1", Special),
        ("8.8.8.8", Public),
        ("2606:4700::1111", Public),
    ];
    for (text, class) in table {
        assert_eq!(classify(address(text)), class, "N2 {text}");
    }
}

/// Block, class inside, class before its first address, class behind its last one.
type Edges = (&'static str, Class, Option<Class>, Option<Class>);

const EDGES_V4: [Edges; 34] = [
    ("0.0.0.0/32", Loopback, None, Some(Special)),
    ("0.0.0.0/8", Special, None, Some(Public)),
    ("10.0.0.0/8", Private, Some(Public), Some(Public)),
    ("100.64.0.0/10", Private, Some(Public), Some(Public)),
    ("100.100.100.200/32", Metadata, Some(Private), Some(Private)),
    ("127.0.0.0/8", Loopback, Some(Public), Some(Public)),
    ("168.63.129.16/32", Metadata, Some(Public), Some(Public)),
    ("169.254.0.0/16", LinkLocal, Some(Public), Some(Public)),
    ("169.254.0.23/32", Metadata, Some(LinkLocal), Some(LinkLocal)),
    ("169.254.42.42/32", Metadata, Some(LinkLocal), Some(LinkLocal)),
    ("169.254.169.0/24", Metadata, Some(LinkLocal), Some(Metadata)),
    ("169.254.170.0/24", Metadata, Some(Metadata), Some(LinkLocal)),
    ("172.16.0.0/12", Private, Some(Public), Some(Public)),
    ("192.0.0.0/24", Special, Some(Public), Some(Public)),
    ("192.0.0.0/29", Special, Some(Public), Some(Special)),
    ("192.0.0.8/32", Special, Some(Special), Some(Special)),
    ("192.0.0.9/32", Special, Some(Special), Some(Special)),
    ("192.0.0.10/32", Special, Some(Special), Some(Special)),
    ("192.0.0.170/32", Special, Some(Special), Some(Special)),
    ("192.0.0.171/32", Special, Some(Special), Some(Special)),
    ("192.0.0.192/32", Metadata, Some(Special), Some(Special)),
    ("192.0.2.0/24", Special, Some(Public), Some(Public)),
    ("192.31.196.0/24", Public, Some(Public), Some(Public)),
    ("192.52.193.0/24", Special, Some(Public), Some(Public)),
    ("192.88.99.0/24", Special, Some(Public), Some(Public)),
    ("192.88.99.2/32", Special, Some(Special), Some(Special)),
    ("192.168.0.0/16", Private, Some(Public), Some(Public)),
    ("192.175.48.0/24", Public, Some(Public), Some(Public)),
    ("198.18.0.0/15", Special, Some(Public), Some(Public)),
    ("198.51.100.0/24", Special, Some(Public), Some(Public)),
    ("203.0.113.0/24", Special, Some(Public), Some(Public)),
    ("224.0.0.0/4", Multicast, Some(Public), Some(Special)),
    ("240.0.0.0/4", Special, Some(Multicast), None),
    ("255.255.255.255/32", Special, Some(Special), None),
];

const EDGES_V6: [Edges; 34] = [
    ("::/128", Loopback, None, Some(Loopback)),
    ("::1/128", Loopback, Some(Loopback), Some(Special)),
    ("::ffff:0.0.0.0/96", Special, Some(Special), Some(Special)),
    ("64:ff9b::/96", Special, Some(Special), Some(Special)),
    ("64:ff9b:1::/48", Special, Some(Special), Some(Special)),
    ("100::/64", Special, Some(Special), Some(Special)),
    ("100:0:0:1::/64", Special, Some(Special), Some(Special)),
    ("2000::/3", Public, Some(Special), Some(Special)),
    ("2001::/32", Special, Some(Public), Some(Special)),
    ("2001::/23", Special, Some(Public), Some(Public)),
    ("2001:1::1/128", Special, Some(Special), Some(Special)),
    ("2001:1::2/128", Special, Some(Special), Some(Special)),
    ("2001:1::3/128", Special, Some(Special), Some(Special)),
    ("2001:2::/48", Special, Some(Special), Some(Special)),
    ("2001:3::/32", Special, Some(Special), Some(Special)),
    ("2001:4:112::/48", Public, Some(Special), Some(Special)),
    ("2001:10::/28", Special, Some(Special), Some(Special)),
    ("2001:20::/28", Special, Some(Special), Some(Special)),
    ("2001:30::/28", Special, Some(Special), Some(Special)),
    ("2001:db8::/32", Special, Some(Public), Some(Public)),
    ("2002::/16", Special, Some(Public), Some(Public)),
    ("2620:4f:8000::/48", Public, Some(Public), Some(Public)),
    ("3fff::/20", Special, Some(Public), Some(Public)),
    ("5f00::/16", Special, Some(Special), Some(Special)),
    ("fc00::/7", Private, Some(Special), Some(Special)),
    ("fd00:42::42/128", Metadata, Some(Private), Some(Private)),
    ("fd00:c1::a9fe:a9fe/128", Metadata, Some(Private), Some(Private)),
    ("fd00:ec2::/32", Metadata, Some(Private), Some(Private)),
    ("fd00:a9fe:a9fe::1/128", Metadata, Some(Private), Some(Private)),
    ("fd20:ce::254/128", Metadata, Some(Private), Some(Private)),
    ("fe80::/10", LinkLocal, Some(Special), Some(Private)),
    ("fe80::a9fe:a9fe/128", Metadata, Some(LinkLocal), Some(LinkLocal)),
    ("fec0::/10", Private, Some(LinkLocal), Some(Multicast)),
    ("ff00::/8", Multicast, Some(Private), None),
];

#[test]
fn n2_ipv4_blocks_begin_and_end_where_the_registry_says() {
    for (block, inside, before, behind) in EDGES_V4 {
        let (first, length) = block.split_once('/').expect("a length");
        let first = first.parse::<Ipv4Addr>().expect("an address").to_bits();
        let last = first | u32::MAX.checked_shr(length.parse().expect("a number")).unwrap_or(0);
        let class = |bits: u32| classify(Ipv4Addr::from_bits(bits).into());
        // The first address of this block is a block of its own.
        assert_eq!(class(first), if block == "0.0.0.0/8" { Loopback } else { inside }, "{block}: first");
        assert_eq!(class(last), inside, "{block}: last");
        assert_eq!(before, first.checked_sub(1).map(class), "{block}: before");
        assert_eq!(behind, last.checked_add(1).map(class), "{block}: behind");
    }
}

#[test]
fn n2_ipv6_blocks_begin_and_end_where_the_registry_says() {
    for (block, inside, before, behind) in EDGES_V6 {
        let (first, length) = block.split_once('/').expect("a length");
        let first = first.parse::<Ipv6Addr>().expect("an address").to_bits();
        let last = first | u128::MAX.checked_shr(length.parse().expect("a number")).unwrap_or(0);
        let class = |bits: u128| registry::class_of_v6(Ipv6Addr::from_bits(bits));
        assert_eq!(class(first), inside, "{block}: first");
        assert_eq!(class(last), inside, "{block}: last");
        assert_eq!(before, first.checked_sub(1).map(class), "{block}: before");
        assert_eq!(behind, last.checked_add(1).map(class), "{block}: behind");
    }
}

#[test]
fn n2_every_block_of_the_registry_has_its_edges_tested() {
    let tested = |block: String| EDGES_V4.iter().chain(&EDGES_V6).any(|row| row.0 == block);
    for (first, length, name, _) in registry::IPV4 {
        assert!(tested(format!("{first}/{length}")), "{first}/{length} {name}");
    }
    // The first row covers all of IPv6.
    for (first, length, name, _) in &registry::IPV6[1..] {
        assert!(tested(format!("{first}/{length}")), "{first}/{length} {name}");
    }
}

#[test]
fn n2_names_of_metadata_services_are_known() {
    let table = [
        ("metadata.google.internal", true),
        ("a.metadata.google.internal", true),
        ("metadata.goog", true),
        ("metadata", true),
        ("instance-data", true),
        ("instance-data.ec2.internal", true),
        ("metadata.c.project.internal", true),
        ("metadata.tencentyun.com", true),
        ("notmetadata.goog", false),
        ("metadata.example", false),
        ("metadata.goog.example", false),
        ("internal", false),
        ("api.metadata", false),
    ];
    for (name, known) in table {
        assert_eq!(is_metadata_name(&name.parse().expect("a name")), known, "N2 {name}");
    }
}

#[test]
fn classes_that_rules_can_name_are_printed_as_rules_write_them() {
    for class in [Public, Private, LinkLocal, Loopback, Metadata] {
        let rule: crate::Rule = format!("deny {class}").parse().expect("a rule");
        assert_eq!(rule.to_string(), format!("deny {}", class.name()));
    }
    assert_eq!([Special, Multicast].map(|class| class.to_string()), ["special-purpose", "multicast"]);
}
