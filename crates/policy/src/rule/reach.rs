//! Which addresses a target matches: few if it allows, many if it denies.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Target;
use crate::address::{self, Class, classify, readings};

/// A remote address, and whether it is the host's own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemoteAddress {
    pub(crate) address: IpAddr,
    pub(crate) is_host: bool,
}

impl RemoteAddress {
    /// A mapped address has no meaning on the wire, and a socket would use another one: no rule allows it.
    fn is_mapped(self) -> bool {
        address::canonical(self.address) != self.address
    }

    /// The class of the address itself, unless another reading is more dangerous.
    fn plain_class(self) -> Option<Class> {
        let own = readings(self.address).next().map(|(_, class)| class);
        own.filter(|own| !self.is_mapped() && *own == classify(self.address))
    }

    /// Whether only a rule that names it may allow it.
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

    /// Whether an allow rule for this target matches an outbound address.
    pub(crate) fn admits(&self, remote: RemoteAddress) -> bool {
        let mapped = remote.is_mapped();
        match self {
            Self::Net(net) if net.is_single() => !mapped && net.contains(remote.address),
            Self::Net(net) => {
                let named = |class: Class| {
                    if is_own_machine(class) { net.is_within(class) } else { !remote.is_host }
                };
                net.contains(remote.address) && remote.plain_class().is_some_and(named)
            }
            Self::Any => !mapped && !remote.must_be_named(),
            Self::Host => !mapped && remote.is_host && !is_own_machine(classify(remote.address)),
            Self::Loopback | Self::Metadata => remote.plain_class() == self.class(),
            Self::Public | Self::Private | Self::LinkLocal => {
                !remote.is_host && remote.plain_class() == self.class()
            }
            Self::Name(_) => false,
        }
    }

    /// Whether a deny rule for this target matches any reading of an address.
    pub(crate) fn covers(&self, remote: RemoteAddress) -> bool {
        let mut found = readings(remote.address);
        match self {
            Self::Any => true,
            Self::Host => remote.is_host || found.any(|(_, class)| class == Class::Loopback),
            Self::Net(net) => found.any(|(reading, _)| net.contains(reading)),
            Self::Name(_) => false,
            Self::Public | Self::Private | Self::Loopback | Self::LinkLocal | Self::Metadata => {
                let Some(wanted) = self.class() else { return false };
                // A metadata service within a private network is also in that network.
                found.any(|(reading, class)| {
                    class == wanted || address::is_within(reading, bits(reading), wanted)
                })
            }
        }
    }

    /// Whether an allow rule for this target matches an inbound peer.
    pub(crate) fn admits_peer(&self, peer: RemoteAddress) -> bool {
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
