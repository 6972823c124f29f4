//! What is known of a connection when it is decided about.

use std::net::IpAddr;

use crate::rule::Location;
use crate::{HostName, Protocol};

/// Where a guest wants to go.
#[derive(Clone, Copy, Debug)]
pub struct Destination<'a> {
    /// How.
    pub protocol: Protocol,
    /// The address, as the guest sent it and as it will be dialled.
    pub address: IpAddr,
    /// The port. ICMP has none.
    pub port: u16,
    /// Whether it is one of the host's own addresses, or [can be read](crate::address::readings) as one.
    pub is_host: bool,
    /// The names that this sandbox resolved to this address and that still hold.
    pub names: &'a [HostName],
}

impl Destination<'_> {
    pub(crate) const fn location(&self) -> Location {
        Location { address: self.address, is_host: self.is_host }
    }
}

/// A request that was read.
#[derive(Clone, Copy, Debug)]
pub struct InspectedRequest<'a> {
    /// The method as the client wrote it.
    pub method: &'a str,
    /// The path without query. None if it has no single plain spelling.
    pub path: Option<&'a str>,
    /// Whether a header asks the server to act on another method or path. No rule that looks at either allows that.
    pub rewrites: bool,
}

/// What was read of a connection.
#[derive(Clone, Copy, Debug)]
pub enum Inspected<'a> {
    /// A TLS ClientHello.
    Tls {
        /// The server's name in it.
        name: Option<&'a HostName>,
        /// Whether another hello is hidden in it, whose name nobody can read.
        encrypted_hello: bool,
    },
    /// A request of plain HTTP. Each one of a connection is judged.
    Http {
        /// The name in the Host field.
        host: Option<&'a HostName>,
        /// Whether the Host field has the address instead of a name.
        host_is_address: bool,
        /// The request.
        request: InspectedRequest<'a>,
    },
    /// Something else.
    Other,
}
