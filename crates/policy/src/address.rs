//! The one address classifier.
//!
//! An IPv6 address that embeds an IPv4 address is classified as the most dangerous of all its readings, and is
//! never public: which reading applies depends on translators and tunnels that only the host's network knows.
//! Translators with a prefix of their own (RFC 6052) cannot be told from ordinary addresses; a network that has one
//! must deny its prefix.

mod internal_names;
mod metadata_names;
mod registry;
#[cfg(test)]
mod tests;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub use internal_names::is_internal_name;
pub use metadata_names::is_metadata_name;
pub(crate) use registry::is_within;

/// What kind of network an address belongs to, ordered by the harm of reaching it unintentionally.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Globally routed unicast addresses.
    Public,
    /// Reserved or unassigned: documentation, benchmarking, tunnels.
    Special,
    /// Groups of hosts (multicast).
    Multicast,
    /// Private networks, also those of a provider (carrier-grade NAT).
    Private,
    /// Only reachable on the host's own link.
    LinkLocal,
    /// The host itself, only reachable from its own processes.
    Loopback,
    /// A cloud's metadata service, which hands out the machine's credentials.
    Metadata,
}

impl Class {
    /// The name of the class in rules and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Public => "public",
            Self::Special => "special-purpose",
            Self::Multicast => "multicast",
            Self::Private => "private",
            Self::LinkLocal => "link-local",
            Self::Loopback => "loopback",
            Self::Metadata => "metadata",
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

/// The class of an address, by the most dangerous of its [readings].
pub fn classify(address: IpAddr) -> Class {
    readings(address).map(|(_, class)| class).max().unwrap_or(Class::Special)
}

/// The IPv4 address of an IPv4-mapped IPv6 address; any other address unchanged.
///
/// Dual-stack sockets report IPv4 peers in the mapped form. It has no meaning on the wire, so [`classify`] does not
/// call it public.
pub fn canonical(address: IpAddr) -> IpAddr {
    address.to_canonical()
}

/// The address itself and every IPv4 address that it may embed, each with its class.
pub fn readings(address: IpAddr) -> impl Iterator<Item = (IpAddr, Class)> {
    let (own, inner) = match address {
        IpAddr::V4(v4) => (registry::class_of_v4(v4), [None; READINGS]),
        IpAddr::V6(v6) => {
            let inner = embedded(v6);
            let own = registry::class_of_v6(v6);
            let carries = inner.iter().any(Option::is_some);
            (if carries { own.max(Class::Special) } else { own }, inner)
        }
    };
    let inner = inner.into_iter().flatten().map(|v4| (IpAddr::V4(v4), registry::class_of_v4(v4)));
    std::iter::once((address, own)).chain(inner)
}

/// The most IPv4 addresses that one IPv6 address can embed: four of a translator, and one of ISATAP.
const READINGS: usize = 5;

/// The IPv4 addresses that an IPv6 address may embed.
fn embedded(address: Ipv6Addr) -> [Option<Ipv4Addr>; READINGS] {
    let byte = address.octets();
    let at = |a: usize, b: usize, c: usize, d: usize| Ipv4Addr::new(byte[a], byte[b], byte[c], byte[d]);
    let last = at(12, 13, 14, 15);
    // Zeros in the middle are padding of a longer prefix, not an address.
    let unless_padding = |v4: Ipv4Addr| Some(v4).filter(|v4| !v4.is_unspecified());

    let [first, second, third, fourth] = match address.segments() {
        // IPv4-compatible, IPv4-mapped and translated (RFC 2765) addresses.
        [0, 0, 0, 0, 0, 0, _, _] | [0, 0, 0, 0, 0, 0xffff, _, _] | [0, 0, 0, 0, 0xffff, 0, _, _] => {
            [Some(last), None, None, None]
        }
        // NAT64 with the well-known prefix.
        [0x64, 0xff9b, 0, 0, 0, 0, _, _] => [Some(last), None, None, None],
        // NAT64 with a local prefix, whose length only its operator knows. Byte 8 is always skipped.
        [0x64, 0xff9b, 1, ..] => [
            Some(last),
            unless_padding(at(6, 7, 9, 10)),
            unless_padding(at(7, 9, 10, 11)),
            unless_padding(at(9, 10, 11, 12)),
        ],
        // Teredo: the server, and the client with all bits inverted.
        [0x2001, 0, ..] => {
            let client = Ipv4Addr::from_bits(!last.to_bits());
            [Some(at(4, 5, 6, 7)), Some(client), None, None]
        }
        // 6to4.
        [0x2002, ..] => [Some(at(2, 3, 4, 5)), None, None, None],
        _ => [None; 4],
    };
    let isatap = matches!(address.segments(), [_, _, _, _, 0 | 0x200, 0x5efe, _, _]).then_some(last);
    [first, second, third, fourth, isatap]
}
