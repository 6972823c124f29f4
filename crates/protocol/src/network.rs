//! A sandbox's network: the addresses of its one link, and what a gateway and whoever started it say to each other.
//!
//! The link has two ends, the guest and the gateway; nobody else is on it. Frames travel between the keeper and the gateway as
//! packets of a socket, one each. Messages of this module travel over another such socket, one packet each.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::MessageError;

/// The guest's network card.
pub const GUEST_MAC: [u8; 6] = [0x02, 0x62, 0x61, 0x74, 0x68, 0x79];
/// The gateway's.
pub const GATEWAY_MAC: [u8; 6] = [0x02, 0x62, 0x61, 0x74, 0x68, 0x01];
/// The guest's address. The range is set aside for links like this one, so that it is nobody else's.
pub const GUEST_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 2);
/// The gateway's address, which is also the resolver's.
pub const GATEWAY_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 1);
/// How long the common part of both is, in bits.
pub const PREFIX_V4: u8 = 29;
/// The guest's address.
pub const GUEST_V6: Ipv6Addr = Ipv6Addr::new(0xfd62, 0x6174, 0x6879, 0, 0, 0, 0, 2);
/// The gateway's address, which is also the resolver's.
pub const GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfd62, 0x6174, 0x6879, 0, 0, 0, 0, 1);
/// How long the common part of both is, in bits.
pub const PREFIX_V6: u8 = 64;
/// The longest packet on the link, in bytes: long ones are what makes it fast.
pub const MTU: u16 = 65520;
/// The header of a frame.
pub const FRAME_HEADER: usize = 14;
/// The longest frame: the guest may send one that the card would have split, of as many bytes as a packet can have.
pub const MAX_FRAME: usize = FRAME_HEADER + 65535;
/// The longest message.
pub const MAX_MESSAGE: usize = 128 * 1024;

/// How much of the network a sandbox may use. Rates have a burst of one second's worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NetworkLimits {
    /// Connections and flows of datagrams at once.
    pub connections: u32,
    /// New ones in a second.
    pub new_connections: u32,
    /// Bytes in a second, each way.
    pub bytes: u64,
    /// Packets in a second, each way.
    pub packets: u32,
    /// Questions for names in a second.
    pub queries: u32,
}

impl Default for NetworkLimits {
    fn default() -> Self {
        Self { connections: 1024, new_connections: 250, bytes: 2 << 30, packets: 250_000, queries: 100 }
    }
}

/// A port of the host that leads to one of the guest's. Its socket is bound, and listens if it is TCP's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoundPort {
    /// The guest's port.
    pub guest: u16,
    /// Whether it is UDP's.
    pub udp: bool,
}

/// A gateway's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GatewayLaunch {
    /// The policies, in JSON.
    pub policies: String,
    /// Who is asked for names.
    pub resolvers: Vec<SocketAddr>,
    /// How much may be used.
    pub limits: NetworkLimits,
    /// The published ports.
    pub ports: Vec<BoundPort>,
    /// The beginning of the command that allows a target, such as `bathy policy allow web`.
    pub cure: String,
    /// What the gateways before it have used of the sandbox's budgets, unless it is the first one.
    pub spent: Option<Spent>,
    /// The host's own addresses.
    pub own: Vec<OwnNetwork>,
}

/// Addresses that are the host's own: one, or a whole network that is routed to the host itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OwnNetwork {
    /// The first of them, or any.
    pub address: IpAddr,
    /// How many bits they have in common.
    pub prefix: u8,
}

impl OwnNetwork {
    /// Whether this address is one of them.
    pub fn contains(&self, address: IpAddr) -> bool {
        let differ = match (self.address, address) {
            (IpAddr::V4(own), IpAddr::V4(other)) => (own.to_bits() ^ other.to_bits()).leading_zeros(),
            (IpAddr::V6(own), IpAddr::V6(other)) => (own.to_bits() ^ other.to_bits()).leading_zeros(),
            _ => return false,
        };
        differ >= u32::from(self.prefix)
    }
}

/// What was used of a sandbox's budget for names in the present window, by all of its gateways together. Rates need no such
/// figures: whatever was used of them, a gateway that is not the first begins with none of its bursts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spent {
    /// How long ago the window began, in milliseconds.
    pub age_ms: u64,
    /// Bytes of names below all domains.
    pub total: u32,
    /// Bytes of names below the domain that has most of them. What the others have is not carried over: it is taken for as much.
    pub most: u32,
}

/// To the gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToGateway {
    /// From now on these policies hold, in JSON, also for what is open.
    Policies(String),
    /// Whether events cannot be recorded at present: then nothing new begins. What was recorded as begun goes on.
    Hold(bool),
    /// These are the host's own addresses from now on.
    Own(Vec<OwnNetwork>),
}

/// From the gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromGateway {
    /// It serves.
    Ready,
    /// It cannot serve.
    Failed(String),
    /// The policies of the last [`ToGateway::Policies`] hold, and so many connections were closed for it.
    Changed {
        /// How many.
        closed: u32,
    },
    /// The keeper is gone, and with it the gateway's work.
    Unplugged,
    /// Something that is to be written down.
    Event(NetEvent),
    /// A name is about to be asked for, and this is then used. It is not asked for before this was sent.
    Spent(Spent),
}

/// What travels over the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// A connection.
    Tcp,
    /// Datagrams.
    Udp,
    /// Echo requests.
    Icmp,
    /// Something else, by its number.
    Other(u8),
}

/// One end of what was decided about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// How.
    pub transport: Transport,
    /// Whether the other side began, at a published port.
    pub inbound: bool,
    /// The other side.
    pub address: IpAddr,
    /// Its port, or the guest's if the other side began.
    pub port: u16,
    /// What the guest calls it, as far as that is known.
    pub name: Option<String>,
}

/// The number of a connection or flow that was allowed and never began.
pub const NEVER_BEGAN: u64 = 0;

/// Something that happened in a sandbox's network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NetEvent {
    /// Something was allowed, and begins.
    Allowed {
        /// Its number, which no other connection or flow of this gateway has.
        number: u64,
        /// Which.
        peer: Peer,
        /// By what.
        rule: String,
    },
    /// Something was not allowed.
    Denied {
        /// Which.
        peer: Peer,
        /// By what.
        rule: String,
        /// The target that would have to be allowed, if a rule can do that.
        cure: Option<String>,
        /// How often in a row.
        count: u32,
    },
    /// Something that was allowed has ended.
    Closed {
        /// The number with which it began; [`NEVER_BEGAN`] if it did not.
        number: u64,
        /// Which.
        peer: Peer,
        /// Bytes from the guest.
        sent: u64,
        /// Bytes to the guest.
        received: u64,
        /// How long it was.
        milliseconds: u64,
        /// Why.
        reason: String,
    },
    /// A name was asked for and answered.
    Resolved {
        /// The name.
        name: String,
        /// The kind of record.
        kind: String,
        /// The addresses that the guest was told.
        addresses: Vec<IpAddr>,
        /// Those that were kept from it.
        removed: Vec<IpAddr>,
    },
    /// A name was asked for and not answered.
    Unresolved {
        /// The name.
        name: String,
        /// The kind of record.
        kind: String,
        /// Why not.
        reason: String,
        /// Whether that was a decision of ours.
        denied: bool,
    },
    /// Frames that break the rules of the link were dropped.
    Dropped {
        /// What is wrong with them.
        reason: String,
        /// How many since the last time.
        count: u64,
    },
    /// A limit was reached.
    Limited {
        /// Which.
        limit: String,
        /// How many were turned away since the last time.
        count: u64,
    },
}

/// Encodes one message.
///
/// # Errors
/// When it is longer than [`MAX_MESSAGE`].
pub fn encode(message: &impl Serialize) -> Result<Vec<u8>, MessageError> {
    let bytes = postcard::to_allocvec(message).map_err(|_| MessageError::Malformed)?;
    if bytes.len() > MAX_MESSAGE { Err(MessageError::Malformed) } else { Ok(bytes) }
}

/// Decodes one message.
///
/// # Errors
/// When it is none.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, MessageError> {
    postcard::from_bytes(bytes).map_err(|_| MessageError::Malformed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn n10_a_network_contains_its_addresses_and_no_others() {
        for (network, prefix, address, expected) in [
            ("93.184.78.2", 32, "93.184.78.2", true),
            ("93.184.78.2", 32, "93.184.78.3", false),
            ("127.0.0.0", 8, "127.255.255.255", true),
            ("127.0.0.0", 8, "128.0.0.0", false),
            ("10.0.0.255", 25, "10.0.0.128", true),
            ("10.0.0.255", 25, "10.0.0.127", false),
            ("0.0.0.0", 0, "8.8.8.8", true),
            ("0.0.0.0", 0, "::1", false),
            ("::", 0, "2606::1", true),
            ("fd00::", 8, "fdff::1", true),
            ("fd00::", 8, "fe00::1", false),
            ("::1", 128, "::1", true),
            ("::1", 128, "::2", false),
            ("1.1.1.1", 255, "1.1.1.1", false),
        ] {
            let own = OwnNetwork { address: network.parse().unwrap(), prefix };
            assert_eq!(own.contains(address.parse().unwrap()), expected, "{network}/{prefix} {address}");
        }
    }
}
