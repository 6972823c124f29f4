//! Contacts: what reached a server.

use std::net::IpAddr;

use serde::Deserialize;

use super::Side;

/// The kind of a contact. An HTTP request is preceded by a connection, which is a contact of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A connection was accepted.
    Tcp,
    /// A datagram arrived; `detail` has its beginning in hexadecimal.
    Udp,
    /// A DNS query; `detail` has its type and `udp` or `tcp`.
    Dns,
    /// A request; `name` is its `Host`, `detail` its method and target.
    Http,
    /// A TLS ClientHello; `name` is its SNI, if it has one.
    Tls,
    /// The end of a stream to the discard port; `detail` has its number of bytes.
    Discarded,
}

/// One line of the contact log.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contact {
    /// Where the server is.
    pub side: Side,
    pub kind: Kind,
    /// The address that was reached.
    pub address: IpAddr,
    pub port: u16,
    pub peer: IpAddr,
    pub peer_port: u16,
    pub name: Option<String>,
    pub detail: Option<String>,
}

impl Contact {
    pub(super) fn from_line(line: &str) -> Self {
        serde_json::from_str(line).expect("servers write lines of JSON")
    }
}
