//! Starts a sandbox's gateway and exchanges messages with it.

use std::env;
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bathy_jail::spawn::{self, Program};
use bathy_jail::{Identity, SpawnError, Spawned};
use bathy_policy::{Policies, Protocol, PublishedPort};
use bathy_protocol::MessageError;
use bathy_protocol::descriptors::GatewayDescriptors;
use bathy_protocol::network::{
    BoundPort, FromGateway, GatewayLaunch, MAX_MESSAGE, NetworkLimits, ToGateway, decode, encode,
};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::net::sockopt::{set_ipv6_v6only, set_socket_reuseaddr, set_socket_send_buffer_size};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, getsockname, listen, recv, send,
    socket_with, socketpair,
};
use thiserror::Error;

use crate::addresses::{self, AddressesError, Watcher};
use crate::counts::ByteCounters;
use crate::ending;
use crate::ledger::Ledger;
use crate::resource_group::ResourceGroup;

/// Overrides the file with the host's resolvers.
pub(crate) const RESOLVERS_VARIABLE: &str = "BATHY_RESOLV_CONF";
const RESOLVERS_FILE: &str = "/etc/resolv.conf";
/// As many as the C library uses.
const MAX_RESOLVERS: usize = 3;
const NAMES_PORT: u16 = 53;
/// The backlog of a published port.
const BACKLOG: i32 = 128;
/// The socket buffer of the link: some of the longest frames.
const LINK_BUFFER: usize = 1 << 20;

/// The network of a sandbox could not be set up.
#[derive(Debug, Error)]
pub enum NetworkError {
    /// A port is already in use.
    #[error(
        "Port {port} of {address} is in use by another program or sandbox. Publish another one, such as -p {address}:0:{guest} for any that is free"
    )]
    PortInUse { address: IpAddr, port: u16, guest: u16 },
    /// A port cannot be bound.
    #[error("Port {port} of {address} cannot be published: {reason}")]
    Port { address: IpAddr, port: u16, reason: Errno },
    #[error("Cannot start the sandbox's gateway. `bathy doctor` shows what is missing")]
    Spawn(#[from] SpawnError),
    /// A socket or configuration cannot be created.
    #[error("Cannot prepare the sandbox's gateway")]
    Prepare(#[source] io::Error),
    /// The host's own addresses cannot be read.
    #[error(transparent)]
    Addresses(#[from] AddressesError),
    /// The policies are too long for a message.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The sandbox has no network: it was started without one.
    #[error("The sandbox was started without a network (preset none). Restart it to give it one")]
    NoNetwork,
    /// The gateway does not accept messages.
    #[error("The sandbox's gateway does not answer")]
    Silent,
    #[error("The sandbox's gateway cannot serve: {0}")]
    Failed(String),
}

/// Everything that a gateway is started and restarted with.
#[derive(Debug)]
pub struct Network {
    pub program: File,
    pub identity: Identity,
    /// The sandbox's control group.
    pub group: Arc<ResourceGroup>,
    pub policies: Policies,
    pub limits: NetworkLimits,
    /// The prefix of the command that allows a destination, for hints.
    pub allow_command: String,
    /// The published ports as bound.
    pub ports: Vec<(PublishedPort, OwnedFd)>,
    /// The gateway's end of the link, which is reused by the next gateway.
    pub link: OwnedFd,
    /// What is remembered over all gateways of the sandbox.
    pub ledger: Ledger,
    /// Sends changes of the host's addresses to the gateways.
    pub addresses: Watcher,
}

impl Network {
    /// Starts a gateway on the link. There must not be another one.
    pub fn start(&mut self) -> Result<RunningGateway, NetworkError> {
        let prepare = |error: Errno| NetworkError::Prepare(error.into());
        let bound = |(port, _): &(PublishedPort, OwnedFd)| BoundPort {
            guest: port.guest,
            udp: port.protocol == Protocol::Udp,
        };
        // The watcher was started before, so no change is missed.
        let own = addresses::read()?;
        let launch = GatewayLaunch {
            policies: policies_text(&self.policies)?,
            resolvers: resolvers(),
            limits: self.limits,
            ports: self.ports.iter().map(bound).collect(),
            allow_command: self.allow_command.clone(),
            spent: self.ledger.carried_over(Instant::now()),
            own: own.clone(),
        };
        let mut config = File::from(memfd_create("gateway-config", MemfdFlags::CLOEXEC).map_err(prepare)?);
        config.write_all(&encode(&launch)?).map_err(NetworkError::Prepare)?;
        rustix::fs::seek(&config, rustix::fs::SeekFrom::Start(0)).map_err(prepare)?;
        let (control, its_control) = pair()?;
        let counts = ByteCounters::new(self.limits.connections).map_err(NetworkError::Prepare)?;
        let descriptors = GatewayDescriptors {
            control: its_control.as_fd(),
            link: self.link.as_fd(),
            counts: counts.fd(),
            ports: self.ports.iter().map(|(_, socket)| socket.as_fd()).collect(),
        };
        let process = spawn::gateway(&Program {
            program: self.program.as_fd(),
            args: &[CString::from(c"bathy-gateway")],
            descriptors: &descriptors.in_order(config.as_fd()),
            identity: self.identity,
            entrance: Some(&self.group.gateway_entrance().map_err(NetworkError::Prepare)?),
            before_start: Some(&|pid| self.group.set_priority(pid)),
        })?;
        rustix::io::ioctl_fionbio(&control, true).map_err(prepare)?;
        let gateway = RunningGateway { control, process };
        self.ledger.begin(counts);
        self.addresses.serve(gateway.control.try_clone().map_err(NetworkError::Prepare)?, own);
        Ok(gateway)
    }
}

/// Creates a link: the keeper's end and the gateway's.
///
/// # Errors
/// The socket pair cannot be created.
pub fn link() -> Result<(OwnedFd, OwnedFd), NetworkError> {
    let (one, two) = pair()?;
    for end in [&one, &two] {
        // As much as the host allows.
        let _ = set_socket_send_buffer_size(end, LINK_BUFFER);
    }
    Ok((one, two))
}

fn pair() -> Result<(OwnedFd, OwnedFd), NetworkError> {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(|error| NetworkError::Prepare(error.into()))
}

/// A running gateway. Dropping it kills it.
#[derive(Debug)]
pub struct RunningGateway {
    control: OwnedFd,
    process: Spawned,
}

/// The result of reading from a gateway.
#[derive(Debug)]
pub enum Incoming {
    Message(FromGateway),
    Nothing,
    Closed,
}

impl RunningGateway {
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }

    /// Sends new policies to the gateway.
    pub fn change(&self, policies: &Policies) -> Result<(), NetworkError> {
        let message = encode(&ToGateway::Policies(policies_text(policies)?))?;
        match send(&self.control, &message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(_) => Ok(()),
            Err(_) => Err(NetworkError::Silent),
        }
    }

    /// Kills the gateway. Returns the messages that it had sent but that were not read.
    pub(crate) fn end_now(self) -> Vec<FromGateway> {
        ending::kill_or_log(&self.process);
        let mut messages = Vec::new();
        // At most what fits into a socket, because nothing more is sent.
        while let Incoming::Message(message) = receive(self.fd()) {
            messages.push(message);
        }
        messages
    }

    /// Describes how a gateway ended that closed its control socket.
    pub fn end(&self) -> String {
        match self.process.failure() {
            Some(reason) => format!("it could not {reason}"),
            None => {
                let end = ending::of_process(self.process.pidfd.as_fd());
                format!("it {}", end.as_deref().unwrap_or(ending::HUNG_UP))
            }
        }
    }
}

impl Drop for RunningGateway {
    fn drop(&mut self) {
        // It is the first and only process of its pid namespace.
        ending::kill_or_log(&self.process);
    }
}

/// How long a gateway may take to exit by itself.
pub(crate) const LEAVE_TIME: Duration = Duration::from_millis(1500);

/// Holds or releases a gateway: while it is held, because events cannot be recorded, it begins nothing new.
///
/// # Errors
/// The gateway does not accept the message.
pub fn hold(control: BorrowedFd<'_>, is_held: bool) -> Result<(), NetworkError> {
    let message = encode(&ToGateway::Hold(is_held))?;
    match send(control, &message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
        Ok(_) => Ok(()),
        Err(_) => Err(NetworkError::Silent),
    }
}

/// The next message on a control socket.
pub fn receive(control: BorrowedFd<'_>) -> Incoming {
    let mut bytes = vec![0; MAX_MESSAGE];
    loop {
        return match recv(control, &mut bytes, RecvFlags::empty()) {
            Ok((0, _)) => Incoming::Closed,
            // A gateway that sends an invalid message may be compromised.
            Ok((count, _)) => {
                decode(bytes.get(..count).unwrap_or_default()).map_or(Incoming::Closed, Incoming::Message)
            }
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => Incoming::Nothing,
            Err(_) => Incoming::Closed,
        };
    }
}

fn policies_text(policies: &Policies) -> Result<String, NetworkError> {
    serde_json::to_string(policies).map_err(|error| NetworkError::Prepare(error.into()))
}

/// Binds published ports before anything of the sandbox runs, so that a port in use is an error at once.
/// Where any free port was requested, the answer has the assigned one.
pub(crate) fn bind_ports(ports: &[PublishedPort]) -> Result<Vec<(PublishedPort, OwnedFd)>, NetworkError> {
    ports.iter().map(|port| bind_port(*port)).collect()
}

fn bind_port(mut port: PublishedPort) -> Result<(PublishedPort, OwnedFd), NetworkError> {
    let (address, guest) = (port.bind, port.guest);
    let failed = |reason: Errno| match reason {
        Errno::ADDRINUSE => NetworkError::PortInUse { address, port: port.host, guest },
        reason => NetworkError::Port { address, port: port.host, reason },
    };
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let stream = port.protocol != Protocol::Udp;
    let kind = if stream { SocketType::STREAM } else { SocketType::DGRAM };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, kind, flags, None).map_err(failed)?;
    if stream {
        // Connections in TIME_WAIT do not keep the port in use.
        set_socket_reuseaddr(&socket, true).map_err(failed)?;
    }
    if address.is_ipv6() {
        set_ipv6_v6only(&socket, true).map_err(failed)?;
    }
    bind(&socket, &SocketAddr::new(address, port.host)).map_err(failed)?;
    if stream {
        listen(&socket, BACKLOG).map_err(failed)?;
    }
    let own = getsockname(&socket).map_err(failed)?;
    if let Ok(own) = SocketAddr::try_from(own) {
        port.host = own.port();
    }
    Ok((port, socket))
}

/// The host's DNS resolvers.
fn resolvers() -> Vec<SocketAddr> {
    let path = env::var_os(RESOLVERS_VARIABLE).map_or_else(|| PathBuf::from(RESOLVERS_FILE), PathBuf::from);
    fs::read_to_string(path).map(|text| named(&text)).unwrap_or_default()
}

fn named(text: &str) -> Vec<SocketAddr> {
    let address = |line: &str| {
        let mut words = line.split_whitespace();
        (words.next() == Some("nameserver")).then(|| words.next()?.parse::<IpAddr>().ok()).flatten()
    };
    let found: Vec<_> = text.lines().filter_map(address).take(MAX_RESOLVERS).collect();
    found.into_iter().map(|address| SocketAddr::new(address, NAMES_PORT)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolvers_are_read_as_the_c_library_does() {
        let text = "# nameserver 9.9.9.9\nsearch x\n nameserver 127.0.0.53\nnameserver\tfd00::1\nnameserver bad\n\
                    nameserver 10.0.0.1 x\nnameserver 10.0.0.2\n";
        let found: Vec<_> = named(text).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["127.0.0.53:53", "[fd00::1]:53", "10.0.0.1:53"]);
    }

    #[test]
    fn a_port_that_is_taken_is_named_with_a_way_out() {
        let any: PublishedPort = "127.0.0.1:0:80".parse().unwrap();
        let (bound, _socket) = bind_port(any).unwrap();
        assert_ne!(bound.host, 0);
        let error = bind_port(bound).unwrap_err();
        let words = error.to_string();
        assert!(matches!(error, NetworkError::PortInUse { .. }), "{words}");
        assert!(words.contains(&bound.host.to_string()) && words.contains("-p 127.0.0.1:0:80"), "{words}");
    }
}
