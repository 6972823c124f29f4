//! Sockets of the host: the only place that reaches out of the sandbox. What is dialled was decided before, as exactly this
//! address; no name is looked up here.

#[cfg(test)]
mod tests;

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, getsockname, ipproto, socket_with};

fn family(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 }
}

/// Begins a connection; the socket becomes writable when it stands or has failed.
///
/// # Errors
/// When it fails at once.
pub fn dial(remote: SocketAddr) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family(remote.ip()), SocketType::STREAM, flags, Some(ipproto::TCP))?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    match connect(&socket, &remote) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error),
    }
}

/// What became of a connection that was begun.
///
/// # Errors
/// When it has failed.
pub fn dialled(socket: &OwnedFd) -> Result<(), Errno> {
    match sockopt::socket_error(socket) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) | Err(error) => Err(error),
    }
}

/// A socket for datagrams to and from one address.
///
/// # Errors
/// When there is no way there.
pub fn datagrams(remote: SocketAddr) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family(remote.ip()), SocketType::DGRAM, flags, Some(ipproto::UDP))?;
    connect(&socket, &remote)?;
    Ok(socket)
}

/// The longest packet of IPv4. Of a host's interfaces only loopback, over which it reaches itself, takes such.
const LONGEST_PACKET: u32 = 65535;

/// Whether this address is one of the host's own: a connection to it would come from itself, or go over loopback, as it does
/// to a second address in a network whose first one is the source of everything. The host is asked each time, as its addresses
/// may change; nothing is sent. If it cannot answer, the address may be its own.
pub fn is_own(address: IpAddr) -> bool {
    let socket = match datagrams(SocketAddr::new(address, 9)) {
        Ok(socket) => socket,
        Err(error) => return is_shortage(error),
    };
    let own = getsockname(&socket).ok().and_then(|name| SocketAddr::try_from(name).ok());
    let longest = if address.is_ipv4() { sockopt::ip_mtu(&socket) } else { sockopt::ipv6_mtu(&socket) };
    own.is_none_or(|own| own.ip() == address) || longest.is_ok_and(|longest| longest >= LONGEST_PACKET)
}

/// Whether the host lacks something that it may have later.
pub fn is_shortage(error: Errno) -> bool {
    matches!(error, Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS)
}

/// In words that do not depend on the language of the host.
pub fn describe(error: Errno) -> &'static str {
    match error {
        Errno::CONNREFUSED => "refused",
        Errno::CONNRESET | Errno::PIPE => "reset",
        Errno::TIMEDOUT => "no answer in time",
        Errno::HOSTUNREACH | Errno::NETUNREACH | Errno::ADDRNOTAVAIL => "no way there",
        error if is_shortage(error) => "the host has no room",
        Errno::ACCESS | Errno::PERM => "the host does not permit it",
        _ => "an error of the host",
    }
}

/// Makes the other side notice that the connection broke, instead of ending well.
pub fn break_off(socket: &impl AsFd) {
    // If that fails it ends well, which is the lesser evil.
    let _ = sockopt::set_socket_linger(socket, Some(std::time::Duration::ZERO));
}
