//! Sockets of the host: the only way out of the sandbox. An address is dialed exactly as it was decided; no name is
//! resolved here.

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

/// Starts to connect; the socket becomes writable when that has succeeded or failed. `buffer` limits its send
/// buffer.
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

/// Limits a socket's send buffer, which is kernel memory that not every host accounts to the sandbox (attack R14).
///
/// # Errors
/// When the host refuses.
pub fn limit_buffer(socket: &impl AsFd, bytes: Option<usize>) -> Result<(), Errno> {
    bytes.map_or(Ok(()), |bytes| sockopt::set_socket_send_buffer_size(socket, bytes))
}

/// Whether the peer has acknowledged the FIN of a socket that both sides have closed, or the connection broke.
pub fn is_closed(socket: &impl AsFd) -> bool {
    // Until then the kernel knows its peer.
    getpeername(socket).is_err()
}

/// Leaves a closed connection to the kernel, which still delivers what was sent if the peer acknowledges it in
/// time.
pub fn linger(socket: OwnedFd, within: Duration) {
    // If it cannot be set, the kernel's own timeout holds.
    let _ = sockopt::set_tcp_user_timeout(&socket, u32::try_from(within.as_millis()).unwrap_or(u32::MAX));
}

/// The result of connecting a socket that has become writable.
///
/// # Errors
/// When it has failed.
pub fn connect_result(socket: &OwnedFd) -> Result<(), Errno> {
    match sockopt::socket_error(socket) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) | Err(error) => Err(error),
    }
}

/// A UDP socket connected to one address.
///
/// # Errors
/// When there is no route.
pub fn udp_socket(remote: SocketAddr) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family(remote.ip()), SocketType::DGRAM, flags, Some(ipproto::UDP))?;
    connect(&socket, &remote)?;
    Ok(socket)
}

/// The longest IPv4 packet. Only loopback, over which the host reaches itself, has such an MTU.
const LONGEST_PACKET: u32 = 65535;

/// Whether this address is one of the host's own: its route has the address itself as the source, or leads over
/// loopback, as it does for a secondary address. The kernel is asked each time, because addresses change; no packet
/// is sent. If it cannot answer, the address counts as the host's (fail closed).
pub fn is_host_address(address: IpAddr) -> bool {
    let socket = match udp_socket(SocketAddr::new(address, 9)) {
        Ok(socket) => socket,
        Err(error) => return is_shortage(error),
    };
    let own = getsockname(&socket).ok().and_then(|name| SocketAddr::try_from(name).ok());
    let longest = if address.is_ipv4() { sockopt::ip_mtu(&socket) } else { sockopt::ipv6_mtu(&socket) };
    own.is_none_or(|own| own.ip() == address) || longest.is_ok_and(|longest| longest >= LONGEST_PACKET)
}

/// Whether the host is short of something that it may have later.
pub fn is_shortage(error: Errno) -> bool {
    matches!(error, Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS)
}

/// A text that does not depend on the host's locale.
pub fn describe(error: Errno) -> &'static str {
    match error {
        Errno::CONNREFUSED => "refused",
        Errno::CONNRESET | Errno::PIPE => "reset",
        Errno::TIMEDOUT => "timed out",
        Errno::HOSTUNREACH | Errno::NETUNREACH | Errno::ADDRNOTAVAIL => "no route",
        error if is_shortage(error) => "the host is short of memory or descriptors",
        Errno::ACCESS | Errno::PERM => "the host does not permit it",
        _ => "a host error",
    }
}

/// Makes the kernel send a reset instead of a FIN when the socket is closed.
pub fn reset_on_close(socket: &impl AsFd) {
    // If that fails the peer gets a FIN, which is the lesser evil.
    let _ = sockopt::set_socket_linger(socket, Some(Duration::ZERO));
}
