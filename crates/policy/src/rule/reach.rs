//! Which addresses a target stands for: few if it allows, many if it denies.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Target;
use crate::address::{self, Class, classify, readings};

/// The other side's address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Location {
    pub(crate) address: IpAddr,
    pub(crate) is_host: bool,
}

impl Location {
    /// A mapped address has no meaning on the wire, and a socket would take it for another one: nothing allows it.
    fn is_mapped(self) -> bool {
        address::canonical(self.address) != self.address
    }

    /// What the address is by itself, if no other reading of it is worse.
    fn plain_class(self) -> Option<Class> {
        let own = readings(self.address).next().map(|(_, class)| class);
        own.filter(|own| !self.is_mapped() && *own == classify(self.address))
    }

    /// Whether only a rule that names it may lead there.
    fn must_be_named(self) -> bool {
        self.is_host || is_own_machine(classify(self.address))
    }
}

const fn is_own_machine(class: Class) -> bool {
    matches!(class, Class::Loopback | Class::Metadata)
}

impl Target {
    const fn class(&self) -> Option<Class> {
        match self {
            Self::Public => Some(Class::Public),
            Self::Private => Some(Class::Private),
            Self::Loopback => Some(Class::Loopback),
            Self::LinkLocal => Some(Class::LinkLocal),
            Self::Metadata => Some(Class::Metadata),
            Self::Host | Self::Any | Self::Net(_) | Self::Name(_) => None,
        }
    }

    /// Whether an allow rule for this target lets the sandbox reach an address.
    pub(crate) fn admits(&self, location: Location) -> bool {
        let mapped = location.is_mapped();
        match self {
            Self::Net(net) if net.is_single() => !mapped && net.contains(location.address),
            Self::Net(net) => {
                let named = |class: Class| {
                    if is_own_machine(class) { net.is_within(class) } else { !location.is_host }
                };
                net.contains(location.address) && location.plain_class().is_some_and(named)
            }
            Self::Any => !mapped && !location.must_be_named(),
            Self::Host => !mapped && location.is_host && !is_own_machine(classify(location.address)),
            Self::Loopback | Self::Metadata => location.plain_class() == self.class(),
            Self::Public | Self::Private | Self::LinkLocal => {
                !location.is_host && location.plain_class() == self.class()
            }
            Self::Name(_) => false,
        }
    }

    /// Whether a deny rule for this target takes an address in, by any of its readings.
    pub(crate) fn covers(&self, location: Location) -> bool {
        let mut found = readings(location.address);
        match self {
            Self::Any => true,
            Self::Host => location.is_host || found.any(|(_, class)| class == Class::Loopback),
            Self::Net(net) => found.any(|(reading, _)| net.contains(reading)),
            Self::Name(_) => false,
            Self::Public | Self::Private | Self::Loopback | Self::LinkLocal | Self::Metadata => {
                let Some(wanted) = self.class() else { return false };
                // A metadata service in a private network is in the private network, too.
                found.any(|(reading, class)| {
                    class == wanted || address::is_within(reading, bits(reading), wanted)
                })
            }
        }
    }

    /// Whether an allow rule for this target lets a peer in.
    pub(crate) fn admits_peer(&self, peer: Location) -> bool {
        match self {
            Self::Any => true,
            Self::Host => peer.is_host || peer.plain_class() == Some(Class::Loopback),
            Self::Net(net) => net.contains(peer.address),
            Self::Name(_) => false,
            Self::Public | Self::Private | Self::Loopback | Self::LinkLocal | Self::Metadata => {
                peer.plain_class() == self.class()
            }
        }
    }
}

const fn bits(address: IpAddr) -> u32 {
    if address.is_ipv4() { Ipv4Addr::BITS } else { Ipv6Addr::BITS }
}
