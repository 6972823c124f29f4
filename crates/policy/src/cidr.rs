//! Networks: an address and the number of bits that count.

#[cfg(test)]
mod tests;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use thiserror::Error;

use crate::address;

/// What is wrong with an address or a network.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum CidrError {
    /// Neither family.
    #[error(
        "{0:?} is not an address or a network. Write 192.168.1.7, 10.0.0.0/8, 2001:db8::7 or 2001:db8::/32"
    )]
    Address(String),
    /// An address with the name of an interface.
    #[error("{0:?} has a zone. Leave out what follows the %, a zone means nothing outside the host")]
    Zone(String),
    /// Not a number, or too large.
    #[error("{text:?} is not the length of a prefix. Write a number from 0 to {most} without leading zeros")]
    Length {
        /// As it was written.
        text: String,
        /// The bits of an address.
        most: u32,
    },
    /// An address in a network where the network's own is wanted.
    #[error("{written:?} has bits behind its prefix. Write {meant} for the network, or leave out the length")]
    HostBits {
        /// As it was written.
        written: String,
        /// The network.
        meant: Cidr,
    },
    /// IPv4 in IPv6 clothes.
    #[error("{written:?} is an IPv4-mapped address. Write the IPv4 form{}", meant.map(|v4| format!(", {v4}")).unwrap_or_default())]
    Mapped {
        /// As it was written.
        written: String,
        /// In IPv4, if the network is that small.
        meant: Option<Cidr>,
    },
}

/// A network. One address is a network of full length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cidr {
    network: IpAddr,
    length: u32,
}

impl Cidr {
    /// The network that consists of one address, which is taken in its canonical form.
    pub fn single(address: IpAddr) -> Self {
        let network = address::canonical(address);
        Self { network, length: bits(network) }
    }

    /// Whether it is one address only.
    pub fn is_single(&self) -> bool {
        self.length == bits(self.network)
    }

    /// Whether an address is in the network. A mapped address is taken for the IPv4 address.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.network == masked(address::canonical(address), self.length)
    }

    /// Whether all of the network is known to be of a class.
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
