//! A sandbox's network: the addresses of its link, and the messages between a gateway and its owner.
//!
//! The link connects only the guest and the gateway. Frames travel between the keeper and the gateway as
//! packets of a socket, one each. Messages of this module travel over another such socket, one packet each.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::MessageError;

/// The MAC address of the guest's network interface.
pub const GUEST_MAC: [u8; 6] = [0x02, 0x62, 0x61, 0x74, 0x68, 0x79];
/// The MAC address of the gateway.
pub const GATEWAY_MAC: [u8; 6] = [0x02, 0x62, 0x61, 0x74, 0x68, 0x01];
/// The guest's IPv4 address. The range is reserved for links like this one, so it conflicts with no other.
pub const GUEST_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 2);
/// The gateway's IPv4 address, which is also the DNS resolver's.
pub const GATEWAY_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 1);
/// The prefix length of the link's IPv4 network.
pub const PREFIX_V4: u8 = 29;
/// The guest's IPv6 address.
pub const GUEST_V6: Ipv6Addr = Ipv6Addr::new(0xfd62, 0x6174, 0x6879, 0, 0, 0, 0, 2);
/// The gateway's IPv6 address, which is also the DNS resolver's.
pub const GATEWAY_V6: Ipv6Addr = Ipv6Addr::new(0xfd62, 0x6174, 0x6879, 0, 0, 0, 0, 1);
/// The prefix length of the link's IPv6 network.
pub const PREFIX_V6: u8 = 64;
/// The MTU of the link in bytes: large packets make it fast.
pub const MTU: u16 = 65520;
/// The length of an Ethernet header.
pub const FRAME_HEADER: usize = 14;
/// The longest frame: a guest may send one that a hardware interface would have segmented, up to the maximum
/// packet.
pub const MAX_FRAME: usize = FRAME_HEADER + 65535;
/// The longest message in bytes.
pub const MAX_MESSAGE: usize = 128 * 1024;

/// Limits on a sandbox's network use. Rates have a burst of one second's worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NetworkLimits {
    /// Connections and datagram flows at once.
    pub connections: u32,
    /// New connections and flows per second.
    pub new_connections: u32,
    /// Bytes per second in each direction.
    pub bytes: u64,
    /// Packets per second in each direction.
    pub packets: u32,
    /// DNS queries per second.
    pub queries: u32,
}

impl Default for NetworkLimits {
    fn default() -> Self {
        Self { connections: 1024, new_connections: 250, bytes: 2 << 30, packets: 250_000, queries: 100 }
    }
}

/// A published port of the host. Its socket is bound, and listening if it is TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoundPort {
    /// The port in the guest.
    pub guest: u16,
    /// Whether it is a UDP port.
    pub udp: bool,
}

/// The configuration of a gateway, read at its start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GatewayLaunch {
    /// The network policies as JSON.
    pub policies: String,
    /// The host's DNS resolvers.
    pub resolvers: Vec<SocketAddr>,
    /// The limits on network use.
    pub limits: NetworkLimits,
    /// The published ports, whose sockets are inherited.
    pub ports: Vec<BoundPort>,
    /// The prefix of the command that allows a destination, such as `bathy policy allow web`.
    pub allow_command: String,
    /// The budgets used by earlier gateways, unless this is the first one.
    pub spent: Option<Spent>,
    /// The host's own addresses.
    pub own: Vec<OwnNetwork>,
}

/// Addresses of the host itself: a single one, or a network that is routed to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OwnNetwork {
    /// An address of the network.
    pub address: IpAddr,
    /// The prefix length in bits.
    pub prefix: u8,
}

impl OwnNetwork {
    /// Whether the network contains this address.
    pub fn contains(&self, address: IpAddr) -> bool {
        let differ = match (self.address, address) {
            (IpAddr::V4(own), IpAddr::V4(other)) => (own.to_bits() ^ other.to_bits()).leading_zeros(),
            (IpAddr::V6(own), IpAddr::V6(other)) => (own.to_bits() ^ other.to_bits()).leading_zeros(),
            _ => return false,
        };
        differ >= u32::from(self.prefix)
    }
}

/// How much of a sandbox's budget for DNS names all of its gateways have used in the present window. Rates
/// are not carried over: a gateway that is not the first begins without burst.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spent {
    /// The age of the window in milliseconds.
    pub age_ms: u64,
    /// Bytes of names below all domains.
    pub total: u32,
    /// Bytes of names below the domain with the most. Other domains are not carried over: they are assumed to
    /// have as many.
    pub most: u32,
}

/// Messages to a gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToGateway {
    /// New policies as JSON, which apply immediately, also to open connections.
    Policies(String),
    /// Whether events cannot be recorded at present: then nothing new may begin. What was recorded before
    /// continues.
    Hold(bool),
    /// The host's own addresses, which replace the former ones.
    Own(Vec<OwnNetwork>),
}

/// Messages from a gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromGateway {
    /// The gateway is serving.
    Ready,
    /// The gateway cannot serve, for this reason.
    Failed(String),
    /// The policies of the last [`ToGateway::Policies`] are in effect.
    Changed {
        /// How many open connections the policies closed.
        closed: u32,
    },
    /// The keeper closed the link, so the gateway has nothing left to do.
    Unplugged,
    /// An event for the audit log.
    Event(NetEvent),
    /// The budget for DNS names that is used including the next query. The query is not sent before this
    /// message.
    Spent(Spent),
}

/// The transport protocol of a connection or flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// A connection over TCP.
    Tcp,
    /// A flow of UDP datagrams.
    Udp,
    /// Echo requests of ICMP.
    Icmp,
    /// Another protocol, by its number.
    Other(u8),
}

/// The peer of a connection or flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// The transport protocol used.
    pub transport: Transport,
    /// Whether the peer connected to a published port.
    pub inbound: bool,
    /// The address of the peer.
    pub address: IpAddr,
    /// The port of the peer; for an inbound connection, the guest's port.
    pub port: u16,
    /// The DNS name that the guest used, if known.
    pub name: Option<String>,
}

/// The number of a connection or flow that was allowed but never established.
pub const NEVER_BEGAN: u64 = 0;

/// An event in a sandbox's network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NetEvent {
    /// A connection or flow was allowed and begins.
    Allowed {
        /// Its number, which is unique within this gateway.
        number: u64,
        /// The peer of the connection.
        peer: Peer,
        /// The rule that allowed it.
        rule: String,
    },
    /// A connection or flow was denied.
    Denied {
        /// The peer of the connection.
        peer: Peer,
        /// The rule that denied it.
        rule: String,
        /// The target that would have to be allowed, if a rule can allow it.
        hint: Option<String>,
        /// How often this happened in a row.
        count: u32,
    },
    /// An allowed connection or flow has ended.
    Closed {
        /// The number with which it began; [`NEVER_BEGAN`] if it did not.
        number: u64,
        /// The peer of the connection.
        peer: Peer,
        /// Bytes from the guest.
        sent: u64,
        /// Bytes to the guest.
        received: u64,
        /// The duration in milliseconds.
        milliseconds: u64,
        /// The reason for its end.
        reason: String,
    },
    /// A DNS query was answered.
    Resolved {
        /// The name in the query.
        name: String,
        /// The type of the record.
        kind: String,
        /// The addresses in the answer to the guest.
        addresses: Vec<IpAddr>,
        /// Addresses that were removed from the answer.
        removed: Vec<IpAddr>,
    },
    /// A DNS query was not answered.
    Unresolved {
        /// The name in the query.
        name: String,
        /// The type of the record.
        kind: String,
        /// Why it was not answered.
        reason: String,
        /// Whether the policy denied it.
        denied: bool,
    },
    /// Invalid frames on the link were dropped.
    Dropped {
        /// Why the frames are invalid.
        reason: String,
        /// How many since the last event.
        count: u64,
    },
    /// A limit was reached.
    Limited {
        /// The name of the limit.
        limit: String,
        /// How many were rejected since the last event.
        count: u64,
    },
}

/// Encodes one message.
///
/// # Errors
/// The message is longer than [`MAX_MESSAGE`].
pub fn encode(message: &impl Serialize) -> Result<Vec<u8>, MessageError> {
    let bytes = postcard::to_allocvec(message).map_err(|_| MessageError::Malformed)?;
    if bytes.len() > MAX_MESSAGE { Err(MessageError::Malformed) } else { Ok(bytes) }
}

/// Decodes one message.
///
/// # Errors
/// The bytes do not decode.
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
