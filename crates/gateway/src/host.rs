//! Sockets of the host: the only place that reaches out of the sandbox. What is dialled was decided before, as exactly this
//! address; no name is looked up here.

#[cfg(test)]
mod tests;

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, connect, getpeername, getsockname, ipproto, socket_with,
};

fn family(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 }
}

/// Begins a connection; the socket becomes writable when it stands or has failed. `buffer` is how many bytes may wait in it, if
/// that is limited.
///
/// # Errors
/// When it fails at once.
pub fn dial(remote: SocketAddr, buffer: Option<usize>) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family(remote.ip()), SocketType::STREAM, flags, Some(ipproto::TCP))?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    limit_buffer(&socket, buffer)?;
    match connect(&socket, &remote) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error),
    }
}

/// Limits how many bytes may wait in a socket to be sent: they are the kernel's memory, which not every host counts for the
/// sandbox (attack R14).
///
/// # Errors
/// When the host refuses.
pub fn limit_buffer(socket: &impl AsFd, bytes: Option<usize>) -> Result<(), Errno> {
    bytes.map_or(Ok(()), |bytes| sockopt::set_socket_send_buffer_size(socket, bytes))
}

/// Whether the other side has acknowledged the end of a connection that both sides have ended, or it broke.
pub fn is_closed(socket: &impl AsFd) -> bool {
    // The kernel knows a peer until then.
    getpeername(socket).is_err()
}

/// Leaves a connection that both sides have ended to the host: what was sent still arrives, if that does not take long.
pub fn linger(socket: OwnedFd, within: Duration) {
    // If it cannot be set, the host's own time counts.
    let _ = sockopt::set_tcp_user_timeout(&socket, u32::try_from(within.as_millis()).unwrap_or(u32::MAX));
}

/// What became of a connection that was begun.
///
/// # Errors
/// When it has failed.
pub fn connect_result(socket: &OwnedFd) -> Result<(), Errno> {
    match sockopt::socket_error(socket) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) | Err(error) => Err(error),
    }
}

/// A socket for datagrams to and from one address.
///
/// # Errors
/// When there is no way there.
pub fn udp_socket(remote: SocketAddr) -> Result<OwnedFd, Errno> {
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
pub fn is_host_address(address: IpAddr) -> bool {
    let socket = match udp_socket(SocketAddr::new(address, 9)) {
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
pub fn reset_on_close(socket: &impl AsFd) {
    // If that fails it ends well, which is the lesser evil.
    let _ = sockopt::set_socket_linger(socket, Some(Duration::ZERO));
}
