//! The IANA special-purpose address registries, and the metadata addresses of clouds.
//!
//! Sources: the IANA registries "IPv4 Special-Purpose Address Space" and "IPv6 Special-Purpose Address Space" with
//! every row, multicast, and the vendors' documentation of their metadata services. The longest prefix decides.
//! Rows that the registries call globally reachable are public here only if an ordinary host has such an address:
//! anycast addresses of the nearest router, tunnel relays and identifiers are not.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Class::{self, LinkLocal, Loopback, Metadata, Multicast, Private, Public, Special};

/// Address, prefix length, name, class.
pub(super) type Row<A> = (A, u32, &'static str, Class);

const fn v4(a: u8, b: u8, c: u8, d: u8) -> Ipv4Addr {
    Ipv4Addr::new(a, b, c, d)
}

/// The first five groups and the last, which is all that most rows need.
const fn v6([a, b, c, d, e, last]: [u16; 6]) -> Ipv6Addr {
    Ipv6Addr::new(a, b, c, d, e, 0, 0, last)
}

pub(super) const IPV4: [Row<Ipv4Addr>; 34] = [
    (v4(0, 0, 0, 0), 8, "this network", Special),
    // Linux connects a socket for this address to the host itself.
    (v4(0, 0, 0, 0), 32, "this host", Loopback),
    (v4(10, 0, 0, 0), 8, "private use", Private),
    (v4(100, 64, 0, 0), 10, "shared address space", Private),
    (v4(100, 100, 100, 200), 32, "metadata of Alibaba Cloud", Metadata),
    (v4(127, 0, 0, 0), 8, "loopback", Loopback),
    (v4(168, 63, 129, 16), 32, "wire server of Azure", Metadata),
    (v4(169, 254, 0, 0), 16, "link-local", LinkLocal),
    (v4(169, 254, 0, 23), 32, "metadata of Tencent Cloud", Metadata),
    (v4(169, 254, 42, 42), 32, "metadata of Scaleway", Metadata),
    // Metadata, time, DNS and activation: clouds use single addresses of these two networks, and add new ones.
    (v4(169, 254, 169, 0), 24, "metadata of most clouds", Metadata),
    (v4(169, 254, 170, 0), 24, "credentials of containers on AWS", Metadata),
    (v4(172, 16, 0, 0), 12, "private use", Private),
    (v4(192, 0, 0, 0), 24, "IETF protocol assignments", Special),
    (v4(192, 0, 0, 0), 29, "IPv4 service continuity", Special),
    (v4(192, 0, 0, 8), 32, "IPv4 dummy address", Special),
    (v4(192, 0, 0, 9), 32, "port control protocol anycast", Special),
    (v4(192, 0, 0, 10), 32, "TURN anycast", Special),
    (v4(192, 0, 0, 170), 32, "NAT64 and DNS64 discovery", Special),
    (v4(192, 0, 0, 171), 32, "NAT64 and DNS64 discovery", Special),
    (v4(192, 0, 0, 192), 32, "metadata of Oracle Cloud", Metadata),
    (v4(192, 0, 2, 0), 24, "documentation", Special),
    (v4(192, 31, 196, 0), 24, "AS112", Public),
    (v4(192, 52, 193, 0), 24, "automatic multicast tunnelling", Special),
    (v4(192, 88, 99, 0), 24, "6to4 relay anycast", Special),
    (v4(192, 88, 99, 2), 32, "6a44 relay anycast", Special),
    (v4(192, 168, 0, 0), 16, "private use", Private),
    (v4(192, 175, 48, 0), 24, "AS112", Public),
    (v4(198, 18, 0, 0), 15, "benchmarking", Special),
    (v4(198, 51, 100, 0), 24, "documentation", Special),
    (v4(203, 0, 113, 0), 24, "documentation", Special),
    (v4(224, 0, 0, 0), 4, "multicast", Multicast),
    (v4(240, 0, 0, 0), 4, "reserved", Special),
    (v4(255, 255, 255, 255), 32, "limited broadcast", Special),
];

pub(super) const IPV6: [Row<Ipv6Addr>; 35] = [
    // Only this eighth of the IPv6 address space is assigned to hosts.
    (v6([0, 0, 0, 0, 0, 0]), 0, "not assigned", Special),
    (v6([0x2000, 0, 0, 0, 0, 0]), 3, "global unicast", Public),
    (v6([0, 0, 0, 0, 0, 0]), 128, "unspecified", Loopback),
    (v6([0, 0, 0, 0, 0, 1]), 128, "loopback", Loopback),
    (Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0, 0), 96, "IPv4-mapped", Special),
    (v6([0x64, 0xff9b, 0, 0, 0, 0]), 96, "NAT64", Special),
    (v6([0x64, 0xff9b, 1, 0, 0, 0]), 48, "NAT64 for local use", Special),
    (v6([0x100, 0, 0, 0, 0, 0]), 64, "discard only", Special),
    (v6([0x100, 0, 0, 1, 0, 0]), 64, "dummy prefix", Special),
    (v6([0x2001, 0, 0, 0, 0, 0]), 23, "IETF protocol assignments", Special),
    (v6([0x2001, 0, 0, 0, 0, 0]), 32, "Teredo", Special),
    (v6([0x2001, 1, 0, 0, 0, 1]), 128, "port control protocol anycast", Special),
    (v6([0x2001, 1, 0, 0, 0, 2]), 128, "TURN anycast", Special),
    (v6([0x2001, 1, 0, 0, 0, 3]), 128, "DNS-SD service registration anycast", Special),
    (v6([0x2001, 2, 0, 0, 0, 0]), 48, "benchmarking", Special),
    (v6([0x2001, 3, 0, 0, 0, 0]), 32, "automatic multicast tunnelling", Special),
    (v6([0x2001, 4, 0x112, 0, 0, 0]), 48, "AS112", Public),
    (v6([0x2001, 0x10, 0, 0, 0, 0]), 28, "ORCHID", Special),
    (v6([0x2001, 0x20, 0, 0, 0, 0]), 28, "ORCHIDv2", Special),
    (v6([0x2001, 0x30, 0, 0, 0, 0]), 28, "drone remote identification", Special),
    (v6([0x2001, 0xdb8, 0, 0, 0, 0]), 32, "documentation", Special),
    (v6([0x2002, 0, 0, 0, 0, 0]), 16, "6to4", Special),
    (v6([0x2620, 0x4f, 0x8000, 0, 0, 0]), 48, "AS112", Public),
    (v6([0x3fff, 0, 0, 0, 0, 0]), 20, "documentation", Special),
    (v6([0x5f00, 0, 0, 0, 0, 0]), 16, "segment routing identifiers", Special),
    (v6([0xfc00, 0, 0, 0, 0, 0]), 7, "unique local", Private),
    (v6([0xfd00, 0x42, 0, 0, 0, 0x42]), 128, "metadata of Scaleway", Metadata),
    (Ipv6Addr::new(0xfd00, 0xc1, 0, 0, 0, 0, 0xa9fe, 0xa9fe), 128, "metadata of Oracle Cloud", Metadata),
    // Metadata, time, DNS and container credentials, each with an address of its own.
    (v6([0xfd00, 0xec2, 0, 0, 0, 0]), 32, "metadata of AWS", Metadata),
    (v6([0xfd00, 0xa9fe, 0xa9fe, 0, 0, 1]), 128, "metadata of Linode", Metadata),
    (v6([0xfd20, 0xce, 0, 0, 0, 0x254]), 128, "metadata of Google Cloud", Metadata),
    (v6([0xfe80, 0, 0, 0, 0, 0]), 10, "link-local", LinkLocal),
    (Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0xa9fe, 0xa9fe), 128, "metadata of OpenStack", Metadata),
    (v6([0xfec0, 0, 0, 0, 0, 0]), 10, "site-local", Private),
    (v6([0xff00, 0, 0, 0, 0, 0]), 8, "multicast", Multicast),
];

pub(super) fn class_of_v4(address: Ipv4Addr) -> Class {
    let holds = |row: &&Row<Ipv4Addr>| same_v4(row.0, address, row.1);
    IPV4.iter().filter(holds).max_by_key(|row| row.1).map_or(Public, |row| row.3)
}

pub(super) fn class_of_v6(address: Ipv6Addr) -> Class {
    let holds = |row: &&Row<Ipv6Addr>| same_v6(row.0, address, row.1);
    IPV6.iter().filter(holds).max_by_key(|row| row.1).map_or(Special, |row| row.3)
}

/// Whether a network lies within a row of a class, so that a rule for it names that class.
pub(crate) fn is_within(network: IpAddr, length: u32, class: Class) -> bool {
    match network {
        IpAddr::V4(v4) => {
            IPV4.iter().any(|row| row.3 == class && row.1 <= length && same_v4(row.0, v4, row.1))
        }
        IpAddr::V6(v6) => {
            IPV6.iter().any(|row| row.3 == class && row.1 <= length && same_v6(row.0, v6, row.1))
        }
    }
}

/// Whether the first bits of two addresses are equal.
pub(crate) fn same_v4(one: Ipv4Addr, other: Ipv4Addr, bits: u32) -> bool {
    (one.to_bits() ^ other.to_bits()).leading_zeros() >= bits
}

/// Whether the first bits of two addresses are equal.
pub(crate) fn same_v6(one: Ipv6Addr, other: Ipv6Addr, bits: u32) -> bool {
    (one.to_bits() ^ other.to_bits()).leading_zeros() >= bits
}
