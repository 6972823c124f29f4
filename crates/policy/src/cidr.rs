//! Networks in CIDR notation.

#[cfg(test)]
mod tests;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use thiserror::Error;

use crate::address;

/// Why a text is not an address or a network.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum CidrError {
    /// The text is neither an IPv4 nor an IPv6 address.
    #[error(
        "{0:?} is not an address or a network. Write 192.168.1.7, 10.0.0.0/8, 2001:db8::7 or 2001:db8::/32"
    )]
    Address(String),
    /// The address has a zone, the name of an interface.
    #[error("{0:?} has a zone. Leave out what follows the %, a zone means nothing outside the host")]
    Zone(String),
    /// The prefix length is not a number or too large.
    #[error("{text:?} is not the length of a prefix. Write a number from 0 to {most} without leading zeros")]
    Length {
        /// The length as written.
        text: String,
        /// The bits of an address of this family.
        most: u32,
    },
    /// There are bits behind the prefix.
    #[error("{written:?} has bits behind its prefix. Write {meant} for the network, or leave out the length")]
    HostBits {
        /// The network as written.
        written: String,
        /// The network with these bits cleared.
        meant: Cidr,
    },
    /// The address is IPv4-mapped.
    #[error("{written:?} is an IPv4-mapped address. Write the IPv4 form{}", meant.map(|v4| format!(", {v4}")).unwrap_or_default())]
    Mapped {
        /// The network as written.
        written: String,
        /// The IPv4 form, if the prefix is long enough.
        meant: Option<Cidr>,
    },
}

/// A network, or a single address as a network of full length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cidr {
    network: IpAddr,
    length: u32,
}

impl Cidr {
    /// The network of a single address, in its [canonical](address::canonical) form.
    pub fn single(address: IpAddr) -> Self {
        let network = address::canonical(address);
        Self { network, length: bits(network) }
    }

    /// Whether the network is a single address.
    pub fn is_single(&self) -> bool {
        self.length == bits(self.network)
    }

    /// Whether an address is in the network. An IPv4-mapped address counts as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.network == masked(address::canonical(address), self.length)
    }

    /// Whether the whole network is known to belong to a class.
    pub(crate) fn is_within(&self, class: address::Class) -> bool {
        address::is_within(self.network, self.length, class)
    }

    pub(crate) fn is_ipv6(&self) -> bool {
        self.network.is_ipv6()
    }
}

fn bits(address: IpAddr) -> u32 {
    if address.is_ipv4() { Ipv4Addr::BITS } else { Ipv6Addr::BITS }
}

fn masked(address: IpAddr, length: u32) -> IpAddr {
    match address {
        IpAddr::V4(v4) => {
            let mask = u32::MAX.checked_shl(Ipv4Addr::BITS.saturating_sub(length)).unwrap_or(0);
            Ipv4Addr::from_bits(v4.to_bits() & mask).into()
        }
        IpAddr::V6(v6) => {
            let mask = u128::MAX.checked_shl(Ipv6Addr::BITS.saturating_sub(length)).unwrap_or(0);
            Ipv6Addr::from_bits(v6.to_bits() & mask).into()
        }
    }
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let (address, length) = text.split_once('/').map_or((text, None), |(one, two)| (one, Some(two)));
        if address.contains('%') {
            return Err(CidrError::Zone(text.to_owned()));
        }
        let address: IpAddr = address.parse().map_err(|_| CidrError::Address(text.to_owned()))?;
        let most = bits(address);
        let length = length.map_or(Ok(most), |length| prefix_length(length, most))?;
        if let IpAddr::V6(v6) = address
            && let Some(v4) = v6.to_ipv4_mapped()
        {
            let meant =
                length.checked_sub(96).map(|length| Self { network: masked(v4.into(), length), length });
            return Err(CidrError::Mapped { written: text.to_owned(), meant });
        }
        let network = masked(address, length);
        if network != address {
            return Err(CidrError::HostBits { written: text.to_owned(), meant: Self { network, length } });
        }
        Ok(Self { network, length })
    }
}

fn prefix_length(text: &str, most: u32) -> Result<u32, CidrError> {
    let plain = text == "0" || (text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0'));
    let length = text.parse().ok().filter(|length| plain && *length <= most);
    length.ok_or_else(|| CidrError::Length { text: text.to_owned(), most })
}

impl fmt::Display for Cidr {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.network)?;
        if self.is_single() { Ok(()) } else { write!(out, "/{}", self.length) }
    }
}
