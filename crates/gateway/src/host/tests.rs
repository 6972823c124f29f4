//! Only the host's loopback; no packet leaves the host.

use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use super::{connect_result, describe, dial, is_host_address, is_shortage, reset_on_close, udp_socket};

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Waits for the result of a dial.
fn outcome(socket: &OwnedFd) -> Result<(), Errno> {
    let mut wait = [rustix::event::PollFd::new(socket, rustix::event::PollFlags::OUT)];
    rustix::event::poll(&mut wait, None).unwrap();
    connect_result(socket)
}

#[test]
fn a_dial_returns_at_once_and_reports_its_result_later() {
    let (listener, address) = listener();
    let socket = dial(address, None).unwrap();
    assert_eq!(outcome(&socket), Ok(()));
    assert_eq!(
        recv(&socket, &mut [0; 1], RecvFlags::empty()).map(|_| ()),
        Err(Errno::AGAIN),
        "it never waits"
    );
    drop(listener);
    assert_eq!(dial(address, None).and_then(|socket| outcome(&socket)), Err(Errno::CONNREFUSED));
}

#[test]
fn waiting_for_datagrams_never_blocks() {
    let (_, address) = listener();
    let socket = udp_socket(address).unwrap();
    assert_eq!(recv(&socket, &mut [0; 1], RecvFlags::empty()).map(|_| ()), Err(Errno::AGAIN));
}

#[test]
fn an_aborted_connection_sends_a_reset_and_no_fin() {
    for (broken, expected) in [(false, Ok(0)), (true, Err(ErrorKind::ConnectionReset))] {
        let (listener, address) = listener();
        let socket = dial(address, None).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        if broken {
            reset_on_close(&socket);
        }
        drop(socket);
        assert_eq!(server.read(&mut [0; 1]).map_err(|error| error.kind()), expected);
    }
}

#[test]
fn the_hosts_own_addresses_are_distinguished_from_others() {
    for (address, own) in [("127.0.0.1", true), ("127.9.9.9", true), ("::1", true), ("93.184.216.34", false)]
    {
        assert_eq!(is_host_address(address.parse().unwrap()), own, "{address}");
    }
}

#[test]
fn errors_are_described_by_what_they_mean() {
    let table = [
        (Errno::CONNREFUSED, "refused"),
        (Errno::CONNRESET, "reset"),
        (Errno::PIPE, "reset"),
        (Errno::TIMEDOUT, "timed out"),
        (Errno::HOSTUNREACH, "no route"),
        (Errno::NETUNREACH, "no route"),
        (Errno::ADDRNOTAVAIL, "no route"),
        (Errno::MFILE, "the host is short of memory or descriptors"),
        (Errno::ACCESS, "the host does not permit it"),
        (Errno::PERM, "the host does not permit it"),
        (Errno::IO, "a host error"),
    ];
    for (error, text) in table {
        assert_eq!(describe(error), text);
        assert_eq!(is_shortage(error), text == "the host is short of memory or descriptors", "{error}");
    }
}

/// Runs a test of this file again, in a process of its own that is started with these words.
fn again(name: &str, inside: &str, words: &[&str]) -> bool {
    if std::env::var_os(inside).is_some() {
        return false;
    }
    let mut command = std::process::Command::new(words[0]);
    command.args(&words[1..]).arg(std::env::current_exe().unwrap());
    let output =
        command.args(["--exact", &format!("host::tests::{name}")]).env(inside, "1").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    true
}

#[test]
fn n10_an_address_that_cannot_be_looked_up_counts_as_the_hosts_own() {
    let name = "n10_an_address_that_cannot_be_looked_up_counts_as_the_hosts_own";
    if again(name, "BATHY_TEST_FEW", &["prlimit", "--nofile=3"]) {
        return;
    }
    assert!(is_host_address("93.184.216.34".parse().unwrap()));
}

#[test]
fn n10_the_source_of_everything_is_the_hosts_own_whatever_the_mtu_of_loopback() {
    let name = "n10_the_source_of_everything_is_the_hosts_own_whatever_the_mtu_of_loopback";
    if again(name, "BATHY_TEST_MTU", &["unshare", "--map-root-user", "--net"]) {
        return;
    }
    let ip = ["link", "set", "lo", "up", "mtu", "1500"];
    assert!(std::process::Command::new("ip").args(ip).status().unwrap().success());
    assert!(is_host_address("127.0.0.1".parse().unwrap()));
}
