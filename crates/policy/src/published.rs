//! Ports of the host that are forwarded to a sandbox: `[BIND:]HOST:GUEST[/udp]`.

#[cfg(test)]
mod tests;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use thiserror::Error;

use crate::suggest::Hint;
use crate::text::{self, serde_as_text};
use crate::{Protocol, address};

/// The default address to bind to: only the host itself can reach it.
const BIND: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Why a text is not a published port.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum PublishedPortError {
    /// The text is empty.
    #[error("A published port is missing, such as 8080:80")]
    Empty,
    /// There is only one port number.
    #[error("{written:?} has one port only. Write {meant} for the same port on the host and in the sandbox")]
    One {
        /// The text as written.
        written: String,
        /// The same port on both sides.
        meant: String,
    },
    /// There are too many colons.
    #[error("{0:?} has too many parts. Write [BIND:]HOST:GUEST, such as 127.0.0.1:8080:80")]
    Parts(String),
    /// The host's port is not valid.
    #[error("{0:?} is not a port of the host. Write a number from 1 to 65535, or 0 for any that is free")]
    Host(String),
    /// The guest's port is not valid.
    #[error("{0:?} is not a port of the sandbox. Write a number from 1 to 65535")]
    Guest(String),
    /// It is a range of ports.
    #[error("{0:?} is a range of ports. Publish each port by itself")]
    Range(String),
    /// The protocol is neither tcp nor udp.
    #[error("{0:?} is not a protocol that can be published. There are tcp and udp{1}")]
    Protocol(String, Hint),
    /// An IPv6 address without brackets, or an unbalanced bracket.
    #[error("An IPv6 address to bind to needs brackets: [::1]:8080:80")]
    Brackets,
    /// The address to bind to is not valid.
    #[error(
        "{0:?} is not an address to bind to. Write 127.0.0.1 for this host only, or 0.0.0.0 for every interface"
    )]
    Bind(String),
}

/// A port of the host that is forwarded to one of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PublishedPort {
    /// The host's address to bind to.
    pub bind: IpAddr,
    /// The host's port; 0 for any free one.
    pub host: u16,
    /// The port in the guest.
    pub guest: u16,
    /// The transport, TCP or UDP.
    pub protocol: Protocol,
}

impl FromStr for PublishedPort {
    type Err = PublishedPortError;

    fn from_str(written: &str) -> Result<Self, PublishedPortError> {
        if written.is_empty() {
            return Err(PublishedPortError::Empty);
        }
        let (ports, protocol) = match written.split_once('/') {
            None => (written, Protocol::Tcp),
            Some((ports, "tcp")) => (ports, Protocol::Tcp),
            Some((ports, "udp")) => (ports, Protocol::Udp),
            Some((_, other)) => {
                return Err(PublishedPortError::Protocol(other.to_owned(), Hint::of(other, &["tcp", "udp"])));
            }
        };
        let (bind, ports) = split_bind(ports)?;
        let Some((host, guest)) = ports.split_once(':') else {
            return Err(match text::port(ports) {
                Some(port) => PublishedPortError::One {
                    written: written.to_owned(),
                    meant: Self { bind, host: port, guest: port, protocol }.to_string(),
                },
                None => PublishedPortError::Guest(ports.to_owned()),
            });
        };
        if guest.contains(':') {
            return Err(PublishedPortError::Parts(written.to_owned()));
        }
        if let Some(range) = [host, guest].into_iter().find(|port| port.contains('-')) {
            return Err(PublishedPortError::Range(range.to_owned()));
        }
        let host = if host == "0" { Some(0) } else { text::port(host) }
            .ok_or_else(|| PublishedPortError::Host(host.to_owned()))?;
        let guest = text::port(guest).ok_or_else(|| PublishedPortError::Guest(guest.to_owned()))?;
        Ok(Self { bind, host, guest, protocol })
    }
}

/// Splits off the address to bind to, if there is one.
fn split_bind(text: &str) -> Result<(IpAddr, &str), PublishedPortError> {
    if let Some(rest) = text.strip_prefix('[') {
        let (inner, ports) = rest.split_once("]:").ok_or(PublishedPortError::Brackets)?;
        let v6: Ipv6Addr = inner.parse().map_err(|_| PublishedPortError::Bind(inner.to_owned()))?;
        let plain = Some(IpAddr::V6(v6)).filter(|v6| address::canonical(*v6) == *v6);
        return Ok((plain.ok_or_else(|| PublishedPortError::Bind(inner.to_owned()))?, ports));
    }
    let (bind, ports) = match text.matches(':').count() {
        0 | 1 => return Ok((BIND, text)),
        2 => text.split_once(':').unwrap_or((text, "")),
        _ if looks_like_v6(text) => return Err(PublishedPortError::Brackets),
        _ => return Err(PublishedPortError::Parts(text.to_owned())),
    };
    let v4: Ipv4Addr = bind.parse().map_err(|_| {
        if looks_like_v6(text) {
            PublishedPortError::Brackets
        } else {
            PublishedPortError::Bind(bind.to_owned())
        }
    })?;
    Ok((v4.into(), ports))
}

/// Whether an address has a double colon, or more hexadecimal groups than a port list.
fn looks_like_v6(text: &str) -> bool {
    let hex = text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b':');
    text.contains("::") || (hex && text.matches(':').count() > 3)
}

impl fmt::Display for PublishedPort {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bind {
            BIND => {}
            IpAddr::V4(v4) => write!(out, "{v4}:")?,
            IpAddr::V6(v6) => write!(out, "[{v6}]:")?,
        }
        let protocol = if self.protocol == Protocol::Udp { "/udp" } else { "" };
        write!(out, "{}:{}{protocol}", self.host, self.guest)
    }
}

serde_as_text!(PublishedPort);
