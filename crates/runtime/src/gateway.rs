//! A sandbox's gateway, from the side of whoever started it: started, told of new policies, heard, and started again.

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
use crate::counts::Counts;
use crate::ending;
use crate::ledger::Ledger;
use crate::resource_group::ResourceGroup;

/// Names another file with the host's resolvers.
pub const RESOLVERS_VARIABLE: &str = "BATHY_RESOLV_CONF";
const RESOLVERS_FILE: &str = "/etc/resolv.conf";
/// As many as the C library asks.
const MOST_RESOLVERS: usize = 3;
const NAMES_PORT: u16 = 53;
/// How many callers wait at a published port until they are taken.
const BACKLOG: i32 = 128;
/// What fits on the link at once: some of the longest frames.
const LINK_BUFFER: usize = 1 << 20;

/// The network of a sandbox could not be made.
#[derive(Debug, Error)]
pub enum GatewayError {
    /// A port that somebody else has.
    #[error(
        "Port {port} of {address} is in use by another program or sandbox. Publish another one, such as -p {address}:0:{guest} for any that is free"
    )]
    PortInUse {
        address: IpAddr,
        port: u16,
        guest: u16,
    },
    /// A port that cannot be had.
    #[error("Port {port} of {address} cannot be published: {reason}")]
    Port {
        address: IpAddr,
        port: u16,
        reason: Errno,
    },
    #[error("Cannot start the sandbox's gateway. `bathy doctor` tells what this machine lacks")]
    Spawn(#[from] SpawnError),
    /// A socket or configuration.
    #[error("Cannot prepare the sandbox's gateway")]
    Prepare(#[source] io::Error),
    /// What the host's own addresses are.
    #[error(transparent)]
    Addresses(#[from] AddressesError),
    /// Policies that are too long to be told.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// There is nothing to be changed.
    #[error("The sandbox was started without a network (preset none). Restart it to give it one")]
    NoNetwork,
    /// It does not take what it is told.
    #[error("The sandbox's gateway does not answer")]
    Silent,
    #[error("The sandbox's gateway cannot serve: {0}")]
    Failed(String),
}

/// What a gateway is started with, and with what again.
#[derive(Debug)]
pub struct Network {
    pub program: File,
    pub identity: Identity,
    /// The sandbox's control group.
    pub group: Arc<ResourceGroup>,
    /// What the sandbox may reach.
    pub policies: Policies,
    /// How much of it.
    pub limits: NetworkLimits,
    /// The beginning of the command that allows a target.
    pub cure: String,
    /// The published ports as they are bound.
    pub ports: Vec<(PublishedPort, OwnedFd)>,
    /// The gateway's end of the link, which the next gateway can go on with.
    pub link: OwnedFd,
    /// What is known of the network from all of its gateways.
    pub ledger: Ledger,
    /// Tells its gateways of the host's addresses.
    pub addresses: Watcher,
}

impl Network {
    /// Starts a gateway at the link. There is no other one.
    pub fn start(&mut self) -> Result<Gateway, GatewayError> {
        let prepare = |error: Errno| GatewayError::Prepare(error.into());
        let bound = |(port, _): &(PublishedPort, OwnedFd)| BoundPort {
            guest: port.guest,
            udp: port.protocol == Protocol::Udp,
        };
        // It has been watching for changes since before this.
        let own = addresses::read()?;
        let launch = GatewayLaunch {
            policies: policies_text(&self.policies)?,
            resolvers: resolvers(),
            limits: self.limits,
            ports: self.ports.iter().map(bound).collect(),
            cure: self.cure.clone(),
            spent: self.ledger.carried_over(Instant::now()),
            own: own.clone(),
        };
        let mut config = File::from(memfd_create("gateway-config", MemfdFlags::CLOEXEC).map_err(prepare)?);
        config.write_all(&encode(&launch)?).map_err(GatewayError::Prepare)?;
        rustix::fs::seek(&config, rustix::fs::SeekFrom::Start(0)).map_err(prepare)?;
        let (control, its_control) = pair()?;
        let counts = Counts::new(self.limits.connections).map_err(GatewayError::Prepare)?;
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
            entrance: Some(&self.group.gateway_entrance().map_err(GatewayError::Prepare)?),
            before_start: Some(&|pid| self.group.set_priority(pid)),
        })?;
        rustix::io::ioctl_fionbio(&control, true).map_err(prepare)?;
        let gateway = Gateway { control, process };
        self.ledger.begin(counts);
        self.addresses.serve(gateway.control.try_clone().map_err(GatewayError::Prepare)?, own);
        Ok(gateway)
    }
}

/// A link's two ends: the keeper's and the gateway's.
///
/// # Errors
/// When the host gives none.
pub fn link() -> Result<(OwnedFd, OwnedFd), GatewayError> {
    let (one, two) = pair()?;
    for end in [&one, &two] {
        // As much as the host allows.
        let _ = set_socket_send_buffer_size(end, LINK_BUFFER);
    }
    Ok((one, two))
}

fn pair() -> Result<(OwnedFd, OwnedFd), GatewayError> {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(|error| GatewayError::Prepare(error.into()))
}

/// A running gateway. Dropping it ends it.
#[derive(Debug)]
pub struct Gateway {
    control: OwnedFd,
    process: Spawned,
}

/// What a gateway says, or that it says nothing more.
#[derive(Debug)]
pub enum Received {
    Message(FromGateway),
    Nothing,
    Closed,
}

impl Gateway {
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }

    /// Tells it what holds from now on.
    pub fn change(&self, policies: &Policies) -> Result<(), GatewayError> {
        let message = encode(&ToGateway::Policies(policies_text(policies)?))?;
        match send(&self.control, &message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(_) => Ok(()),
            Err(_) => Err(GatewayError::Silent),
        }
    }

    /// Ends it at once. What it had sent by then, and was not read.
    pub fn end_now(self) -> Vec<FromGateway> {
        ending::kill_or_say(&self.process);
        let mut messages = Vec::new();
        // No more than fits into a socket, now that nothing is added.
        while let Received::Message(message) = receive(self.fd()) {
            messages.push(message);
        }
        messages
    }

    /// How one ended that has closed its control socket.
    pub fn end(&self) -> String {
        match self.process.failure() {
            Some(words) => format!("it could not {words}"),
            None => {
                std::thread::sleep(PATIENCE);
                format!("it {}", ending::of_process(self.process.pidfd.as_fd()))
            }
        }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        // The first process of its pid namespace, and the only one.
        ending::kill_or_say(&self.process);
    }
}

/// How long a gateway may take to end by itself.
pub const LEAVE_TIME: Duration = Duration::from_millis(1500);

/// How long a gateway's process takes to end after its socket was closed.
const PATIENCE: Duration = Duration::from_millis(20);

/// Tells a gateway by its control socket whether events cannot be recorded at present.
///
/// # Errors
/// When it does not take that.
pub fn hold(control: BorrowedFd<'_>, is_held: bool) -> Result<(), GatewayError> {
    let message = encode(&ToGateway::Hold(is_held))?;
    match send(control, &message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
        Ok(_) => Ok(()),
        Err(_) => Err(GatewayError::Silent),
    }
}

/// The next message on a control socket.
pub fn receive(control: BorrowedFd<'_>) -> Received {
    let mut bytes = vec![0; MAX_MESSAGE];
    loop {
        return match recv(control, &mut bytes, RecvFlags::empty()) {
            Ok((0, _)) => Received::Closed,
            // One that does not speak our language is not ours any more.
            Ok((count, _)) => {
                decode(bytes.get(..count).unwrap_or_default()).map_or(Received::Closed, Received::Message)
            }
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => Received::Nothing,
            Err(_) => Received::Closed,
        };
    }
}

fn policies_text(policies: &Policies) -> Result<String, GatewayError> {
    serde_json::to_string(policies).map_err(|error| GatewayError::Prepare(error.into()))
}

/// Binds published ports, before anything of the sandbox runs: a port that is taken is an error at once. Where any free port
/// was asked for, the answer has the one that was found.
pub fn bind_ports(ports: &[PublishedPort]) -> Result<Vec<(PublishedPort, OwnedFd)>, GatewayError> {
    ports.iter().map(|port| bind_port(*port)).collect()
}

fn bind_port(mut port: PublishedPort) -> Result<(PublishedPort, OwnedFd), GatewayError> {
    let (address, guest) = (port.bind, port.guest);
    let failed = |reason: Errno| match reason {
        Errno::ADDRINUSE => GatewayError::PortInUse { address, port: port.host, guest },
        reason => GatewayError::Port { address, port: port.host, reason },
    };
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let stream = port.protocol != Protocol::Udp;
    let kind = if stream { SocketType::STREAM } else { SocketType::DGRAM };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, kind, flags, None).map_err(failed)?;
    if stream {
        // What is left of connections of before does not keep the port.
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

/// Whom the host asks for names.
fn resolvers() -> Vec<SocketAddr> {
    let path = env::var_os(RESOLVERS_VARIABLE).map_or_else(|| PathBuf::from(RESOLVERS_FILE), PathBuf::from);
    fs::read_to_string(path).map(|text| named(&text)).unwrap_or_default()
}

fn named(text: &str) -> Vec<SocketAddr> {
    let address = |line: &str| {
        let mut words = line.split_whitespace();
        (words.next() == Some("nameserver")).then(|| words.next()?.parse::<IpAddr>().ok()).flatten()
    };
    let found: Vec<_> = text.lines().filter_map(address).take(MOST_RESOLVERS).collect();
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
        assert!(matches!(error, GatewayError::PortInUse { .. }), "{words}");
        assert!(words.contains(&bound.host.to_string()) && words.contains("-p 127.0.0.1:0:80"), "{words}");
    }
}
