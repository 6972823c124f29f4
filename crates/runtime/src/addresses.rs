//! The host's own addresses, which only a rule for the host lets a sandbox reach. The kernel is asked on this side, since a
//! gateway may open no sockets but those of IP, and the gateway is told of changes as long as it lives.

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
const ANSWER_TIME: Duration = Duration::from_secs(5);
/// How often a list is asked for that changes meanwhile, or that the kernel has no room for.
const TRIES: u32 = 8;
/// How long is waited before the second try; longer before each further one.
const TRY_PAUSE: Duration = Duration::from_millis(2);
/// The number of every request: it is the only one on its socket.
const SEQUENCE: u32 = 1;
/// How many parts an answer has at most: more addresses than a message to the gateway can hold.
const MOST_PARTS: usize = 4096;
/// How long the list may be in a message to the gateway, which has other things to be told: 16,384 networks of IPv4, or 5,461 of IPv6.
const MOST_BYTES: usize = 96 * 1024;
/// How soon after a look the next one is taken: on a host whose routes change all the time, not more often than this.
const PAUSE: Duration = Duration::from_millis(200);
const STACK: usize = 256 * 1024;

/// The host's own addresses cannot be read.
#[derive(Debug, Error)]
pub enum AddressesError {
    #[error("Cannot ask the kernel for this machine's addresses: {0}")]
    Socket(#[from] Errno),
    #[error(transparent)]
    Answer(#[from] NetlinkError),
    /// More than can be told.
    #[error(
        "This machine has {0} separate addresses and networks of its own, more than a sandbox's gateway can be told to keep off. Use --net none"
    )]
    TooMany(usize),
}

impl AddressesError {
    /// Whether it may be gone in a moment: the list changed, or the socket had no room for a part of it.
    fn passes(&self) -> bool {
        match self {
            Self::Socket(error) => *error == Errno::NOBUFS,
            Self::Answer(error) => error.passes(),
            Self::TooMany(_) => false,
        }
    }
}

/// All addresses and networks that are the host's own now.
///
/// # Errors
/// When the kernel does not tell.
pub fn read() -> Result<Vec<OwnNetwork>, AddressesError> {
    let mut own = Vec::new();
    for (kind, family) in [(GET_ADDRESS, INET), (GET_ADDRESS, INET6), (GET_ROUTE, INET), (GET_ROUTE, INET6)] {
        own.extend(patiently(|| read_kind(kind, family))?);
    }
    shortest(own)
}

/// Asks again while the answer is one that another moment's may differ from.
fn patiently<T>(mut ask: impl FnMut() -> Result<T, AddressesError>) -> Result<T, AddressesError> {
    for pause in 1..TRIES {
        match ask() {
            Err(error) if error.passes() => thread::sleep(TRY_PAUSE * pause),
            answer => return answer,
        }
    }
    ask()
}

/// A list of the same addresses without what others of it contain, if it is short enough to be told.
fn shortest(mut own: Vec<OwnNetwork>) -> Result<Vec<OwnNetwork>, AddressesError> {
    own.sort_unstable();
    // A network's first address comes before all others of it.
    own.dedup_by(|next, kept| kept.prefix <= next.prefix && kept.contains(next.address));
    let length = |network: &OwnNetwork| if network.address.is_ipv4() { 6 } else { 18 };
    if own.iter().map(length).sum::<usize>() > MOST_BYTES {
        return Err(AddressesError::TooMany(own.len()));
    }
    Ok(own)
}

fn read_kind(kind: u16, family: u8) -> Result<Vec<OwnNetwork>, AddressesError> {
    // One of its own for each try: what is left of an answer that was given up would be in the next one's way.
    let socket = routing_socket(0, SocketFlags::empty())?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(ANSWER_TIME))?;
    // A kernel that cannot choose the table sends all of them.
    let _ = sys::set_strict_requests(&socket);
    send(&socket, &netlink::request(kind, family, SEQUENCE), SendFlags::empty())?;
    match read_parts(&socket) {
        // A network namespace that never had an address has no table for them yet.
        Err(AddressesError::Answer(error)) if kind == GET_ROUTE && error.is_absence() => Ok(Vec::new()),
        answer => answer,
    }
}

fn read_parts(socket: &OwnedFd) -> Result<Vec<OwnNetwork>, AddressesError> {
    let (mut own, mut buffer) = (Vec::new(), vec![0; PART]);
    for _ in 0..MOST_PARTS {
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

/// Whom to tell, and what it knows.
#[derive(Debug)]
struct Told {
    control: OwnedFd,
    own: Vec<OwnNetwork>,
}

#[derive(Debug)]
struct Shared {
    gateway: Mutex<Option<Told>>,
    is_over: Mutex<bool>,
    wake: OwnedFd,
}

impl Shared {
    fn gateway(&self) -> MutexGuard<'_, Option<Told>> {
        self.gateway.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self) -> MutexGuard<'_, bool> {
        self.is_over.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // The counter is far from full.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}

/// Tells a sandbox's gateways of each change of the host's addresses. Dropping it ends it.
#[derive(Debug)]
pub struct Watcher {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    /// Watches from now on.
    ///
    /// # Errors
    /// When the host has no socket or thread for that.
    pub fn start() -> io::Result<Self> {
        let changes = routing_socket(CHANGES, SocketFlags::NONBLOCK)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let shared = Arc::new(Shared { gateway: Mutex::new(None), is_over: Mutex::new(false), wake });
        let its = Arc::clone(&shared);
        let thread = thread::Builder::new().name("addresses".to_owned()).stack_size(STACK);
        let thread = Some(sys::apart_from_signals(|| thread.spawn(move || watch(&changes, &its)))?);
        Ok(Self { shared, thread })
    }

    /// From now on this gateway is told, which was started with these addresses.
    pub fn serve(&self, control: OwnedFd, own: Vec<OwnNetwork>) {
        *self.shared.gateway() = Some(Told { control, own });
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
    let mut is_told = true;
    loop {
        let pause = Timespec { tv_sec: 0, tv_nsec: PAUSE.subsec_nanos().into() };
        let mut fds = [PollFd::new(changes, PollFlags::IN), PollFd::new(&shared.wake, PollFlags::IN)];
        // Interrupted or not: it is looked at again.
        let _ = poll(&mut fds, if is_told { None } else { Some(&pause) });
        drain(changes);
        let _ = rustix::io::read(&shared.wake, &mut [0; 8]);
        if *shared.is_over() {
            return;
        }
        is_told = shared.gateway().as_mut().is_none_or(tell);
        // Only the end is waited for meanwhile.
        let _ = poll(&mut [PollFd::new(&shared.wake, PollFlags::IN)], Some(&pause));
    }
}

/// What a change is does not matter; nor that some were lost, because there were too many.
fn drain(changes: &OwnedFd) {
    let mut buffer = vec![0; PART];
    for _ in 0..MOST_PARTS {
        match recv(changes, &mut buffer[..], RecvFlags::DONTWAIT) {
            Ok(_) | Err(Errno::INTR | Errno::NOBUFS) => {}
            Err(_) => return,
        }
    }
}

/// Tells a gateway what it does not know yet. False if it is to be tried again.
fn tell(told: &mut Told) -> bool {
    let message = read().map_err(|error| error.to_string()).and_then(|own| {
        let message = encode(&ToGateway::Own(own.clone())).map_err(|error| error.to_string())?;
        Ok((own, message))
    });
    let Ok((own, message)) = message else {
        // It must not go on with addresses that may be old: it ends, and the next one begins with what can be read then.
        let _ = shutdown(&told.control, Shutdown::Both);
        return true;
    };
    if own == told.own {
        return true;
    }
    match send(&told.control, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        Ok(_) => {
            told.own = own;
            true
        }
        // One that does not read decides nothing either.
        Err(Errno::AGAIN | Errno::NOBUFS | Errno::INTR) => false,
        // It is gone.
        Err(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn n10_the_kernel_tells_its_own_addresses() {
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
        // An answer in many parts.
        let lines = (0..2000_u32).map(|at| format!("address add 10.{}.{}.1/32 dev lo\n", at / 250, at % 250));
        let batch = format!("link set lo up\n{}", lines.collect::<String>());
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), batch).unwrap();
        let done = std::process::Command::new("ip").arg("-batch").arg(file.path()).status().unwrap();
        assert!(done.success());
        let own = read().unwrap();
        // Loopback has a network of each family besides.
        assert_eq!(own.iter().filter(|network| network.prefix == 32).count(), 2000);
        assert!(own.len() < 2010, "{}", own.len());
    }

    #[test]
    fn n10_a_list_that_changes_is_asked_for_again_and_not_for_ever() {
        let busy = || NetlinkError::Refused(Errno::BUSY.raw_os_error()).into();
        let interrupted = || NetlinkError::Interrupted.into();
        let passing: [&dyn Fn() -> AddressesError; 3] = [&busy, &interrupted, &|| Errno::NOBUFS.into()];
        for error in passing {
            let mut asked = 0;
            let answer = patiently(|| {
                asked += 1;
                if asked < TRIES { Err(error()) } else { Ok(asked) }
            });
            assert_eq!(answer.unwrap(), TRIES);
            asked = 0;
            let never = patiently(|| {
                asked += 1;
                Err::<(), _>(error())
            });
            assert!(never.is_err() && asked == TRIES, "{never:?} {asked}");
        }
        let mut asked = 0;
        let refused = patiently(|| {
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
        assert!(encode(&ToGateway::Own(longest)).unwrap().len() < MOST_BYTES + 8);
        assert!(matches!(shortest(many(16_385)), Err(AddressesError::TooMany(16_385))));
        let v6 = |at: u128| OwnNetwork { address: IpAddr::V6((at * 2).into()), prefix: 128 };
        let longest = shortest((0..5461).map(v6).collect()).unwrap();
        assert!(encode(&ToGateway::Own(longest)).unwrap().len() < MOST_BYTES + 8);
    }

    #[test]
    fn n10_a_gateway_is_told_what_it_was_not_started_with() {
        let (control, gateway) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let minute = Some(Duration::from_secs(60));
        sockopt::set_socket_timeout(&gateway, sockopt::Timeout::Recv, minute).unwrap();
        let watcher = Watcher::start().unwrap();
        watcher.serve(control, Vec::new());
        let mut message = vec![0; PART];
        let (length, _) = recv(&gateway, &mut message[..], RecvFlags::empty()).unwrap();
        let told: ToGateway = bathy_protocol::network::decode(&message[..length]).unwrap();
        assert_eq!(told, ToGateway::Own(read().unwrap()));
        drop(watcher);
        assert_eq!(recv(&gateway, &mut message[..], RecvFlags::empty()).unwrap().0, 0, "its end is closed");
    }

    #[test]
    fn n10_a_kernel_that_cannot_be_asked_is_an_error_and_not_an_empty_list() {
        const INSIDE: &str = "BATHY_TEST_FEW";
        if std::env::var_os(INSIDE).is_none() {
            let name =
                "addresses::tests::n10_a_kernel_that_cannot_be_asked_is_an_error_and_not_an_empty_list";
            let mut again = std::process::Command::new("prlimit");
            again.arg("--nofile=3").arg(std::env::current_exe().unwrap());
            let output = again.args(["--exact", name]).env(INSIDE, "1").output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
            return;
        }
        assert!(matches!(read(), Err(AddressesError::Socket(Errno::MFILE))));
    }
}
