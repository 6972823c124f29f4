//! The host's own addresses, which a sandbox may only reach by a rule for the host. They are read here
//! because a gateway may only open IP sockets; the gateway is notified of changes while it runs.

mod netlink;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use bathy_protocol::network::{OwnNetwork, ToGateway, encode};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, bind, recv, send, shutdown,
    socket_with, sockopt,
};
use thiserror::Error;

use crate::sys;
use netlink::{GET_ADDRESS, GET_ROUTE, INET, INET6, NetlinkError};

/// `RTMGRP_IPV4_IFADDR`, `RTMGRP_IPV4_ROUTE`, `RTMGRP_IPV6_IFADDR` and `RTMGRP_IPV6_ROUTE`.
const CHANGES: u32 = 0x10 | 0x40 | 0x100 | 0x400;
/// As much as the kernel puts into one part of an answer.
const PART: usize = 64 * 1024;
/// How long the kernel may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How often to retry a list that changes while it is read, or for which the kernel has no buffer space.
const TRIES: u32 = 8;
/// The back-off before the second try; it grows with each further one.
const FIRST_BACK_OFF: Duration = Duration::from_millis(2);
/// The sequence number of every request: a socket is used for one request only.
const SEQUENCE: u32 = 1;
/// The most parts of an answer: more addresses than fit into a message to the gateway.
const MAX_PARTS: usize = 4096;
/// The most bytes of the list in a message to the gateway: 16,384 networks of IPv4 or 5,461 of IPv6.
const MAX_BYTES: usize = 96 * 1024;
/// The minimum interval between reads: a rate limit for hosts whose routes change all the time.
const MIN_INTERVAL: Duration = Duration::from_millis(200);
const STACK: usize = 256 * 1024;

/// The host's own addresses cannot be read.
#[derive(Debug, Error)]
pub enum AddressesError {
    #[error("Cannot query the kernel for this machine's addresses: {0}")]
    Socket(#[from] Errno),
    #[error(transparent)]
    Answer(#[from] NetlinkError),
    /// There are more than the gateway's message can hold.
    #[error(
        "This machine has {0} separate addresses and networks of its own, more than a sandbox's gateway can block. Use --net none"
    )]
    TooMany(usize),
}

impl AddressesError {
    /// Whether a retry may help: the list changed, or the socket had no space for a part of it.
    fn is_temporary(&self) -> bool {
        match self {
            Self::Socket(error) => *error == Errno::NOBUFS,
            Self::Answer(error) => error.is_temporary(),
            Self::TooMany(_) => false,
        }
    }
}

/// All addresses and networks of the host.
///
/// # Errors
/// The kernel cannot be queried.
pub fn read() -> Result<Vec<OwnNetwork>, AddressesError> {
    let mut own = Vec::new();
    for (kind, family) in [(GET_ADDRESS, INET), (GET_ADDRESS, INET6), (GET_ROUTE, INET), (GET_ROUTE, INET6)] {
        own.extend(with_retries(|| read_kind(kind, family))?);
    }
    shortest(own)
}

/// Retries while the error is a temporary one.
fn with_retries<T>(mut ask: impl FnMut() -> Result<T, AddressesError>) -> Result<T, AddressesError> {
    for pause in 1..TRIES {
        match ask() {
            Err(error) if error.is_temporary() => thread::sleep(FIRST_BACK_OFF * pause),
            answer => return answer,
        }
    }
    ask()
}

/// Removes networks that are contained in others. An error if the list is still too long for a message.
fn shortest(mut own: Vec<OwnNetwork>) -> Result<Vec<OwnNetwork>, AddressesError> {
    own.sort_unstable();
    // A network's first address sorts before all its other addresses.
    own.dedup_by(|next, previous| previous.prefix <= next.prefix && previous.contains(next.address));
    let length = |network: &OwnNetwork| if network.address.is_ipv4() { 6 } else { 18 };
    if own.iter().map(length).sum::<usize>() > MAX_BYTES {
        return Err(AddressesError::TooMany(own.len()));
    }
    Ok(own)
}

fn read_kind(kind: u16, family: u8) -> Result<Vec<OwnNetwork>, AddressesError> {
    // One socket for each try: the rest of an abandoned answer would get in the way of the next one.
    let socket = routing_socket(0, SocketFlags::empty())?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(ANSWER_TIMEOUT))?;
    // A kernel that cannot filter by table sends all of them.
    let _ = sys::set_strict_requests(&socket);
    send(&socket, &netlink::request(kind, family, SEQUENCE), SendFlags::empty())?;
    match read_parts(&socket) {
        // A network namespace that never had an address has no routing table yet.
        Err(AddressesError::Answer(error)) if kind == GET_ROUTE && error.is_absence() => Ok(Vec::new()),
        answer => answer,
    }
}

fn read_parts(socket: &OwnedFd) -> Result<Vec<OwnNetwork>, AddressesError> {
    let (mut own, mut buffer) = (Vec::new(), vec![0; PART]);
    for _ in 0..MAX_PARTS {
        let length = match recv(socket, &mut buffer[..], RecvFlags::TRUNC) {
            Ok((_, length)) => length,
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        };
        let part = buffer.get(..length).ok_or(NetlinkError::Malformed)?;
        if netlink::read_answer(part, SEQUENCE, &mut own)? {
            return Ok(own);
        }
    }
    Err(NetlinkError::Malformed.into())
}

fn routing_socket(groups: u32, flags: SocketFlags) -> Result<OwnedFd, Errno> {
    let flags = flags | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
    bind(&socket, &SocketAddrNetlink::new(0, groups))?;
    Ok(socket)
}

/// The present gateway, and the addresses that it has.
#[derive(Debug)]
struct NotifiedGateway {
    control: OwnedFd,
    own: Vec<OwnNetwork>,
}

#[derive(Debug)]
struct Shared {
    gateway: Mutex<Option<NotifiedGateway>>,
    is_over: Mutex<bool>,
    wake: OwnedFd,
}

impl Shared {
    fn gateway(&self) -> MutexGuard<'_, Option<NotifiedGateway>> {
        self.gateway.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self) -> MutexGuard<'_, bool> {
        self.is_over.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // The counter is far from overflowing.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}

/// Sends a sandbox's gateways each change of the host's addresses. Dropping it ends it.
#[derive(Debug)]
pub struct Watcher {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    /// Starts watching.
    ///
    /// # Errors
    /// The host has no socket or thread for that.
    pub fn start() -> io::Result<Self> {
        let changes = routing_socket(CHANGES, SocketFlags::NONBLOCK)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let shared = Arc::new(Shared { gateway: Mutex::new(None), is_over: Mutex::new(false), wake });
        let its = Arc::clone(&shared);
        let thread = thread::Builder::new().name("addresses".to_owned()).stack_size(STACK);
        let thread = Some(sys::apart_from_signals(|| thread.spawn(move || watch(&changes, &its)))?);
        Ok(Self { shared, thread })
    }

    /// Notifies this gateway from now on. It was started with the addresses `own`.
    pub fn serve(&self, control: OwnedFd, own: Vec<OwnNetwork>) {
        *self.shared.gateway() = Some(NotifiedGateway { control, own });
        // They may have changed since.
        self.shared.wake();
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        *self.shared.is_over() = true;
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            // A panic would have ended the program.
            let _ = thread.join();
        }
    }
}

fn watch(changes: &OwnedFd, shared: &Shared) {
    let mut is_current = true;
    loop {
        let pause = Timespec { tv_sec: 0, tv_nsec: MIN_INTERVAL.subsec_nanos().into() };
        let mut fds = [PollFd::new(changes, PollFlags::IN), PollFd::new(&shared.wake, PollFlags::IN)];
        // The result does not matter: the addresses are read again either way.
        let _ = poll(&mut fds, if is_current { None } else { Some(&pause) });
        drain(changes);
        let _ = rustix::io::read(&shared.wake, &mut [0; 8]);
        if *shared.is_over() {
            return;
        }
        is_current = shared.gateway().as_mut().is_none_or(notify);
        // Only the end of the watcher interrupts this pause.
        let _ = poll(&mut [PollFd::new(&shared.wake, PollFlags::IN)], Some(&pause));
    }
}

/// Discards the notifications: their content does not matter, nor whether some were lost.
fn drain(changes: &OwnedFd) {
    let mut buffer = vec![0; PART];
    for _ in 0..MAX_PARTS {
        match recv(changes, &mut buffer[..], RecvFlags::DONTWAIT) {
            Ok(_) | Err(Errno::INTR | Errno::NOBUFS) => {}
            Err(_) => return,
        }
    }
}

/// Sends a gateway the addresses if they have changed. False if it has to be retried.
fn notify(gateway: &mut NotifiedGateway) -> bool {
    let message = read().map_err(|error| error.to_string()).and_then(|own| {
        let message = encode(&ToGateway::Own(own.clone())).map_err(|error| error.to_string())?;
        Ok((own, message))
    });
    let Ok((own, message)) = message else {
        // The gateway must not continue with stale addresses: it ends, and the next one reads them anew.
        let _ = shutdown(&gateway.control, Shutdown::Both);
        return true;
    };
    if own == gateway.own {
        return true;
    }
    match send(&gateway.control, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        Ok(_) => {
            gateway.own = own;
            true
        }
        // A gateway that does not read makes no decisions either.
        Err(Errno::AGAIN | Errno::NOBUFS | Errno::INTR) => false,
        // The gateway has exited.
        Err(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn n10_the_kernel_lists_its_own_addresses() {
        let own = read().unwrap();
        let contains = |text: &str| own.iter().any(|network| network.contains(text.parse().unwrap()));
        assert!(contains("127.0.0.1") && contains("127.77.0.1"), "{own:?}");
        assert!(!contains("93.184.215.14"), "{own:?}");
    }

    #[test]
    fn n10_a_network_without_addresses_has_an_empty_list_and_one_with_many_a_whole_one() {
        const INSIDE: &str = "BATHY_TEST_NETWORK";
        if std::env::var_os(INSIDE).is_none() {
            let name = "addresses::tests::n10_a_network_without_addresses_has_an_empty_list_and_one_with_many_a_whole_one";
            let mut again = std::process::Command::new("unshare");
            again.args(["--map-root-user", "--net"]).arg(std::env::current_exe().unwrap());
            let output = again.args(["--exact", name]).env(INSIDE, "1").output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
            return;
        }
        assert_eq!(read().unwrap(), []);
        // The answer has many parts.
        let lines = (0..2000_u32).map(|at| format!("address add 10.{}.{}.1/32 dev lo\n", at / 250, at % 250));
        let batch = format!("link set lo up\n{}", lines.collect::<String>());
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), batch).unwrap();
        let done = std::process::Command::new("ip").arg("-batch").arg(file.path()).status().unwrap();
        assert!(done.success());
        let own = read().unwrap();
        // Loopback has a network of each family as well.
        assert_eq!(own.iter().filter(|network| network.prefix == 32).count(), 2000);
        assert!(own.len() < 2010, "{}", own.len());
    }

    #[test]
    fn n10_a_list_that_changes_is_read_again_and_not_for_ever() {
        let busy = || NetlinkError::Refused(Errno::BUSY.raw_os_error()).into();
        let interrupted = || NetlinkError::Interrupted.into();
        let passing: [&dyn Fn() -> AddressesError; 3] = [&busy, &interrupted, &|| Errno::NOBUFS.into()];
        for error in passing {
            let mut asked = 0;
            let answer = with_retries(|| {
                asked += 1;
                if asked < TRIES { Err(error()) } else { Ok(asked) }
            });
            assert_eq!(answer.unwrap(), TRIES);
            asked = 0;
            let never = with_retries(|| {
                asked += 1;
                Err::<(), _>(error())
            });
            assert!(never.is_err() && asked == TRIES, "{never:?} {asked}");
        }
        let mut asked = 0;
        let refused = with_retries(|| {
            asked += 1;
            Err::<(), _>(NetlinkError::Refused(Errno::PERM.raw_os_error()).into())
        });
        assert!(refused.is_err() && asked == 1);
    }

    #[test]
    fn n10_a_list_has_nothing_twice_and_is_refused_if_it_is_too_long() {
        let network = |address: u32, prefix| OwnNetwork { address: IpAddr::V4(address.into()), prefix };
        let own = vec![
            network(0x7f00_0001, 32),
            network(0x7f00_0000, 8),
            network(0x7f00_0000, 32),
            network(0x8000_0000, 32),
            network(0x7f00_0001, 32),
        ];
        assert_eq!(shortest(own).unwrap(), [network(0x7f00_0000, 8), network(0x8000_0000, 32)]);
        let many = |count: u32| (0..count).map(|at| network(at * 2, 32)).collect::<Vec<_>>();
        let longest = shortest(many(16_384)).unwrap();
        assert!(encode(&ToGateway::Own(longest)).unwrap().len() < MAX_BYTES + 8);
        assert!(matches!(shortest(many(16_385)), Err(AddressesError::TooMany(16_385))));
        let v6 = |at: u128| OwnNetwork { address: IpAddr::V6((at * 2).into()), prefix: 128 };
        let longest = shortest((0..5461).map(v6).collect()).unwrap();
        assert!(encode(&ToGateway::Own(longest)).unwrap().len() < MAX_BYTES + 8);
    }

    #[test]
    fn n10_a_gateway_is_notified_of_changed_addresses() {
        let (control, gateway) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let minute = Some(Duration::from_secs(60));
        sockopt::set_socket_timeout(&gateway, sockopt::Timeout::Recv, minute).unwrap();
        let watcher = Watcher::start().unwrap();
        watcher.serve(control, Vec::new());
        let mut message = vec![0; PART];
        let (length, _) = recv(&gateway, &mut message[..], RecvFlags::empty()).unwrap();
        let received: ToGateway = bathy_protocol::network::decode(&message[..length]).unwrap();
        assert_eq!(received, ToGateway::Own(read().unwrap()));
        drop(watcher);
        assert_eq!(recv(&gateway, &mut message[..], RecvFlags::empty()).unwrap().0, 0, "its end is closed");
    }

    #[test]
    fn n10_a_kernel_that_cannot_be_queried_is_an_error_and_not_an_empty_list() {
        const INSIDE: &str = "BATHY_TEST_FEW";
        if std::env::var_os(INSIDE).is_none() {
            let name =
                "addresses::tests::n10_a_kernel_that_cannot_be_queried_is_an_error_and_not_an_empty_list";
            let mut again = std::process::Command::new("prlimit");
            again.arg("--nofile=3").arg(std::env::current_exe().unwrap());
            let output = again.args(["--exact", name]).env(INSIDE, "1").output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
            return;
        }
        assert!(matches!(read(), Err(AddressesError::Socket(Errno::MFILE))));
    }
}
