//! Configures the sandbox's network interface, if it has one: addresses, default route and DNS resolvers. All
//! of it is fixed, so there is no DHCP. A guest that changes it only cuts itself off.

use std::fs;
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use bathy_protocol::network::{
    GATEWAY_MAC, GATEWAY_V4, GATEWAY_V6, GUEST_V4, GUEST_V6, PREFIX_V4, PREFIX_V6,
};
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

const INTERFACE: &str = "eth0";
const RESOLVERS: &str = "/etc/resolv.conf";

const NEW_LINK: u16 = 16;
const NEW_ADDRESS: u16 = 20;
const NEW_ROUTE: u16 = 24;
const NEW_NEIGHBOUR: u16 = 28;
const ERROR: u16 = 2;
/// A request with an acknowledgement.
const CHANGE: u16 = 0x1 | 0x4;
/// A request that creates the object or replaces it.
const CREATE: u16 = CHANGE | 0x100 | 0x400;

const HEADER: usize = 16;
const UP: u32 = 1;
const NO_DUPLICATE_CHECK: u8 = 2;
const MAIN_TABLE: u8 = 254;
const STATIC: u8 = 4;
const UNICAST: u8 = 1;
const PERMANENT: u16 = 0x80;

/// Configures the interface. A sandbox without one has only its loopback.
pub fn set_up() -> io::Result<()> {
    let index = match fs::read_to_string(format!("/sys/class/net/{INTERFACE}/ifindex")) {
        Ok(text) => text.trim().parse::<u32>().map_err(io::Error::other)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    // There are no router advertisements on the link, and the guest needs no generated address.
    for (setting, value) in [("accept_ra", "0"), ("router_solicitations", "0"), ("addr_gen_mode", "1")] {
        let path = format!("/proc/sys/net/ipv6/conf/{INTERFACE}/{setting}");
        match fs::write(path, value) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    // Protocol 0 of this family is for routes.
    let socket =
        rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    for request in requests(index) {
        rustix::net::sendto(&socket, &request, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
        let mut answer = [0u8; 4096];
        let (length, _) = rustix::net::recv(&socket, &mut answer, RecvFlags::empty())?;
        check(answer.get(..length).unwrap_or_default())?;
    }
    name_resolvers()
}

fn name_resolvers() -> io::Result<()> {
    let text = format!("nameserver {GATEWAY_V4}\nnameserver {GATEWAY_V6}\n");
    if fs::read_to_string(RESOLVERS).is_ok_and(|old| old == text) {
        return Ok(());
    }
    // An image may have a symbolic link there, to a file of a service that does not run here.
    if fs::symlink_metadata(RESOLVERS).is_ok_and(|file| !file.is_file()) {
        fs::remove_file(RESOLVERS)?;
    }
    if let Some(folder) = Path::new(RESOLVERS).parent() {
        // An image need not have it. The agent has no umask.
        fs::DirBuilder::new().recursive(true).mode(0o755).create(folder)?;
    }
    let mut file =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o644).open(RESOLVERS)?;
    file.write_all(text.as_bytes())
}

fn check(answer: &[u8]) -> io::Result<()> {
    let kind = answer.get(4..6).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes);
    let code = answer.get(HEADER..HEADER + 4).and_then(|bytes| bytes.try_into().ok()).map(i32::from_ne_bytes);
    match (kind, code) {
        (Some(ERROR), Some(0)) => Ok(()),
        (Some(ERROR), Some(code)) => Err(io::Error::from_raw_os_error(-code)),
        _ => Err(io::Error::other("the kernel's answer is invalid")),
    }
}

/// In this order: a route needs an address, and an address an interface.
fn requests(index: u32) -> Vec<Vec<u8>> {
    let mut all = vec![link_up(index)];
    for (own, gateway, prefix) in [
        (IpAddr::from(GUEST_V4), IpAddr::from(GATEWAY_V4), PREFIX_V4),
        (IpAddr::from(GUEST_V6), IpAddr::from(GATEWAY_V6), PREFIX_V6),
    ] {
        all.push(address(index, own, prefix));
        all.push(neighbour(index, gateway));
        all.push(default_route(index, gateway));
    }
    all
}

fn link_up(index: u32) -> Vec<u8> {
    let mut body = vec![0; 4];
    body.extend(index.to_ne_bytes());
    body.extend(UP.to_ne_bytes());
    body.extend(UP.to_ne_bytes());
    request(NEW_LINK, &body, &[])
}

fn address(index: u32, own: IpAddr, prefix: u8) -> Vec<u8> {
    const ADDRESS: u16 = 1;
    const LOCAL: u16 = 2;
    let mut body = vec![family(own), prefix, NO_DUPLICATE_CHECK, 0];
    body.extend(index.to_ne_bytes());
    let own = octets(own);
    request(NEW_ADDRESS, &body, &[(ADDRESS, &own), (LOCAL, &own)])
}

fn neighbour(index: u32, gateway: IpAddr) -> Vec<u8> {
    const DESTINATION: u16 = 1;
    const LINK_ADDRESS: u16 = 2;
    let mut body = vec![family(gateway), 0, 0, 0];
    body.extend(index.to_ne_bytes());
    body.extend(PERMANENT.to_ne_bytes());
    body.extend([0, 0]);
    request(NEW_NEIGHBOUR, &body, &[(DESTINATION, &octets(gateway)), (LINK_ADDRESS, &GATEWAY_MAC)])
}

fn default_route(index: u32, gateway: IpAddr) -> Vec<u8> {
    const OUT_INTERFACE: u16 = 4;
    const GATEWAY: u16 = 5;
    let mut body = vec![family(gateway), 0, 0, 0, MAIN_TABLE, STATIC, 0, UNICAST];
    body.extend([0; 4]);
    request(NEW_ROUTE, &body, &[(GATEWAY, &octets(gateway)), (OUT_INTERFACE, &index.to_ne_bytes())])
}

fn family(address: IpAddr) -> u8 {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    u8::try_from(family.as_raw()).unwrap_or(0)
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// A request with its header and attributes, each padded to four bytes.
fn request(kind: u16, body: &[u8], attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let mut rest = body.to_vec();
    for (number, value) in attributes {
        rest.extend(u16::try_from(4 + value.len()).unwrap_or(0).to_ne_bytes());
        rest.extend(number.to_ne_bytes());
        rest.extend(*value);
        rest.resize(rest.len().next_multiple_of(4), 0);
    }
    let mut whole = u32::try_from(HEADER + rest.len()).unwrap_or(0).to_ne_bytes().to_vec();
    whole.extend(kind.to_ne_bytes());
    // An interface exists already and cannot be replaced.
    let flags = if kind == NEW_LINK { CHANGE } else { CREATE };
    whole.extend(flags.to_ne_bytes());
    whole.extend([0; 8]);
    whole.extend(rest);
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_the_lengths_that_they_say() {
        for request in requests(2) {
            let length = u32::from_ne_bytes(request[..4].try_into().unwrap());
            assert_eq!(usize::try_from(length).unwrap(), request.len());
            assert_eq!(request.len() % 4, 0);
        }
        let route = default_route(7, GATEWAY_V4.into());
        assert_eq!(route.len(), HEADER + 12 + 8 + 8);
        assert_eq!(route[route.len() - 4..], 7u32.to_ne_bytes());
    }

    #[test]
    fn an_answer_is_an_error_or_none() {
        let answer = |kind: u16, code: i32| {
            let mut bytes = vec![0; 4];
            bytes.extend(kind.to_ne_bytes());
            bytes.resize(HEADER, 0);
            bytes.extend(code.to_ne_bytes());
            bytes
        };
        assert!(check(&answer(ERROR, 0)).is_ok());
        assert_eq!(check(&answer(ERROR, -17)).unwrap_err().raw_os_error(), Some(17));
        assert!(check(&answer(3, 0)).is_err());
        assert!(check(&[]).is_err());
    }
}
