//! What reached a server.

use std::net::IpAddr;

use serde::Deserialize;

use super::Side;

/// How it was reached. A request over HTTP is a connection before, and is both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A connection was accepted.
    Tcp,
    /// A datagram came; `detail` has its beginning in hexadecimal.
    Udp,
    /// A question for a name; `detail` has its type and `udp` or `tcp`.
    Dns,
    /// A request; `name` is its `Host`, `detail` its method and target.
    Http,
    /// A greeting of TLS; `name` is the server that it asks for, if it names one.
    Tls,
    /// The end of what came to the discard port; `detail` has how many bytes that was.
    Discarded,
}

/// One line of the contact log.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contact {
    /// Where the server is.
    pub side: Side,
    /// How.
    pub kind: Kind,
    /// The address that was reached.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// Who reached it.
    pub peer: IpAddr,
    /// The port of that one.
    pub peer_port: u16,
    /// The name that was asked for.
    pub name: Option<String>,
    /// More about it.
    pub detail: Option<String>,
}

impl Contact {
    pub(super) fn from_line(line: &str) -> Self {
        serde_json::from_str(line).expect("servers write lines of JSON")
    }
}
