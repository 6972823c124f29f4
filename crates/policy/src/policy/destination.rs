//! What is known about a connection when the policy decides.

use std::net::IpAddr;

use crate::rule::RemoteAddress;
use crate::{HostName, Protocol};

/// The destination of a connection from the guest.
#[derive(Clone, Copy, Debug)]
pub struct Destination<'a> {
    /// The transport protocol of the connection.
    pub protocol: Protocol,
    /// The address, as the guest sent it and as it will be dialed.
    pub address: IpAddr,
    /// The port; ignored for ICMP.
    pub port: u16,
    /// Whether it is one of the host's own addresses, or [can be read](crate::address::readings) as one.
    pub is_host: bool,
    /// The names that this sandbox resolved to this address and that have not expired.
    pub names: &'a [HostName],
}

impl Destination<'_> {
    pub(crate) const fn remote(&self) -> RemoteAddress {
        RemoteAddress { address: self.address, is_host: self.is_host }
    }
}

/// An HTTP request of the client.
#[derive(Clone, Copy, Debug)]
pub struct InspectedRequest<'a> {
    /// The method as the client wrote it.
    pub method: &'a str,
    /// The path without query. None if it has no canonical spelling.
    pub path: Option<&'a str>,
    /// Whether a header field may override the method or path. No allow rule with either matches such a request.
    pub rewrites: bool,
}

/// The result of inspecting a client's first bytes.
#[derive(Clone, Copy, Debug)]
pub enum Inspected<'a> {
    /// The first bytes are a TLS ClientHello.
    Tls {
        /// The server name (SNI).
        name: Option<&'a HostName>,
        /// Whether there is an encrypted ClientHello, whose name cannot be inspected.
        encrypted_hello: bool,
    },
    /// A plain HTTP request. Each request of a connection is decided.
    Http {
        /// The name in the Host field.
        host: Option<&'a HostName>,
        /// Whether the Host field has the address instead of a name.
        host_is_address: bool,
        /// The method and path of the request.
        request: InspectedRequest<'a>,
    },
    /// Neither TLS nor HTTP.
    Other,
}
