//! A whole gateway, its owner, and the guest's ends of connections.

use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::thread;
use std::time::{Duration, Instant};

use bathy_gateway::Gateway;
use bathy_protocol::network::{
    BoundPort, FromGateway, GATEWAY_MAC, GUEST_MAC, GUEST_V4, GatewayLaunch, MAX_FRAME, NetEvent,
    NetworkLimits, decode,
};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    IpAddress, IpProtocol, Ipv4Packet, Ipv4Repr, TcpControl, TcpPacket, TcpRepr, TcpSeqNumber,
    TcpTimestampRepr,
};

pub(crate) const LOCAL: Ipv4Addr = Ipv4Addr::LOCALHOST;
pub(crate) const MEBIBYTE: usize = 1 << 20;

pub(crate) struct Scene {
    pub(crate) gateway: Gateway,
    pub(crate) link: OwnedFd,
    pub(crate) owner: OwnedFd,
    pub(crate) events: Vec<NetEvent>,
}

pub(crate) fn pair() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (one, two) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    for end in [&one, &two] {
        rustix::net::sockopt::set_socket_send_buffer_size(end, MEBIBYTE).unwrap();
    }
    (one, two)
}

pub(crate) fn policies(rules: &[&str]) -> String {
    let rules = rules.iter().map(|rule| format!("{rule:?}")).collect::<Vec<_>>().join(",");
    format!(r#"{{"ceilings":[],"own":{{"preset":"allow-list","rules":[{rules}]}}}}"#)
}

impl Scene {
    pub(crate) fn new(rules: &[&str]) -> Self {
        Self::with_ports(rules, Vec::new(), NetworkLimits::default().connections)
    }

    /// With these published ports, which all lead to port 80, and so many connections at once.
    pub(crate) fn with_ports(rules: &[&str], ports: Vec<TcpListener>, connections: u32) -> Self {
        Self::launched(rules, ports, connections, Vec::new())
    }

    /// With these resolvers of the host.
    pub(crate) fn with_resolvers(rules: &[&str], resolvers: Vec<SocketAddr>) -> Self {
        Self::launched(rules, Vec::new(), NetworkLimits::default().connections, resolvers)
    }

    fn launched(
        rules: &[&str],
        ports: Vec<TcpListener>,
        connections: u32,
        resolvers: Vec<SocketAddr>,
    ) -> Self {
        let (control, owner) = pair();
        let (its_link, link) = pair();
        let limits = NetworkLimits { connections, new_connections: 100_000, ..NetworkLimits::default() };
        let launch = GatewayLaunch {
            policies: policies(rules),
            resolvers,
            limits,
            ports: vec![BoundPort { guest: 80, udp: false }; ports.len()],
            allow_command: String::new(),
            spent: None,
            own: Vec::new(),
        };
        let ports = ports.into_iter().map(OwnedFd::from).collect();
        let gateway = Gateway::new(launch, control, its_link, ports).unwrap();
        Self { gateway, link, owner, events: Vec::new() }
    }

    pub(crate) fn step(&mut self) {
        assert!(self.gateway.step(false).unwrap(), "it serves on");
        self.read_events();
    }

    /// The keeper closes its end of the link.
    pub(crate) fn unplug(&mut self) {
        (self.link, _) = pair();
    }

    pub(crate) fn read_events(&mut self) {
        let mut message = vec![0; 65536];
        while let Ok((count, _)) = recv(&self.owner, &mut message, RecvFlags::empty())
            && count > 0
        {
            if let FromGateway::Event(event) = decode(&message[..count]).unwrap() {
                self.events.push(event);
            }
        }
    }

    /// Runs the loop until a condition holds.
    #[track_caller]
    pub(crate) fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !done(self) {
            assert!(Instant::now() < end, "{what} does not happen: {:?}", self.events);
            self.step();
            thread::sleep(Duration::from_micros(200));
        }
    }

    pub(crate) fn send(&self, segment: &TcpRepr<'_>, to: Ipv4Addr) {
        let mut bytes = vec![0; segment.buffer_len()];
        segment.emit(
            &mut TcpPacket::new_unchecked(&mut bytes),
            &IpAddress::Ipv4(GUEST_V4),
            &IpAddress::Ipv4(to),
            &ChecksumCapabilities::default(),
        );
        self.send_packet(IpProtocol::Tcp, to, &bytes);
    }

    /// A datagram from the guest, without a checksum.
    pub(crate) fn send_datagram(&self, from: u16, to: (Ipv4Addr, u16), payload: &[u8]) {
        let length = u16::try_from(8 + payload.len()).unwrap();
        let numbers = [from, to.1, length, 0].map(u16::to_be_bytes).concat();
        self.send_packet(IpProtocol::Udp, to.0, &[&numbers, payload].concat());
    }

    pub(crate) fn send_packet(&self, next_header: IpProtocol, dst_addr: Ipv4Addr, ip_payload: &[u8]) {
        let payload_len = ip_payload.len();
        let ip = Ipv4Repr { src_addr: GUEST_V4, dst_addr, next_header, payload_len, hop_limit: 64 };
        let mut header = vec![0; ip.buffer_len()];
        // The length of the payload is in the header, but only the header is here.
        ip.emit(&mut Ipv4Packet::new_unchecked(&mut header), &ChecksumCapabilities::default());
        let frame = [&GATEWAY_MAC[..], &GUEST_MAC, &[8, 0], &header, ip_payload].concat();
        send(&self.link, &frame, SendFlags::empty()).unwrap();
    }

    /// The next packet for the guest: its IPv4 payload, and its protocol.
    pub(crate) fn received(&self) -> Option<(IpProtocol, Vec<u8>)> {
        let mut frame = vec![0; MAX_FRAME];
        let (count, _) = recv(&self.link, &mut frame, RecvFlags::empty()).ok()?;
        Some((frame[23].into(), frame[34..count].to_vec()))
    }

    /// The next segment for the guest: its header and its payload.
    pub(crate) fn next_segment(&self) -> Option<(TcpPacket<Vec<u8>>, Vec<u8>)> {
        let mut frame = vec![0; MAX_FRAME];
        let (count, _) = recv(&self.link, &mut frame, RecvFlags::empty()).ok()?;
        let bytes = frame[34..count].to_vec();
        let payload = TcpPacket::new_checked(&bytes).unwrap().payload().to_vec();
        Some((TcpPacket::new_checked(bytes).unwrap(), payload))
    }
}

/// The guest's end of one connection, as plain as can be.
pub(crate) struct Client {
    pub(crate) port: u16,
    pub(crate) server: SocketAddr,
    pub(crate) next: TcpSeqNumber,
    pub(crate) acknowledged: Option<TcpSeqNumber>,
    pub(crate) window: u16,
    /// The sequence number up to which the gateway has acknowledged.
    pub(crate) confirmed: Option<TcpSeqNumber>,
    /// What the guest received.
    pub(crate) received_bytes: Vec<u8>,
    pub(crate) ended: bool,
}

impl Client {
    pub(crate) fn open(scene: &mut Scene, port: u16, server: SocketAddr, window: u16) -> Self {
        let mut client = Self {
            port,
            server,
            next: TcpSeqNumber(1000),
            acknowledged: None,
            window,
            confirmed: None,
            received_bytes: Vec::new(),
            ended: false,
        };
        client.send_segment(scene, TcpControl::Syn, &[]);
        client.next += 1;
        scene.until("the connection", |scene| {
            client.receive(scene);
            client.acknowledged.is_some()
        });
        client.send_segment(scene, TcpControl::None, &[]);
        client
    }

    pub(crate) fn send_segment(&self, scene: &Scene, control: TcpControl, payload: &[u8]) {
        let segment = TcpRepr {
            src_port: self.port,
            dst_port: self.server.port(),
            control,
            seq_number: self.next,
            ack_number: self.acknowledged,
            window_len: self.window,
            window_scale: (control == TcpControl::Syn).then_some(7),
            max_seg_size: (control == TcpControl::Syn).then_some(65480),
            sack_permitted: false,
            sack_ranges: [None; 3],
            timestamp: None::<TcpTimestampRepr>,
            payload,
        };
        let IpAddr::V4(to) = self.server.ip() else { unreachable!("servers here have IPv4") };
        scene.send(&segment, to);
    }

    pub(crate) fn receive(&mut self, scene: &Scene) {
        while let Some((segment, payload)) = scene.next_segment() {
            if segment.dst_port() != self.port {
                continue;
            }
            self.ended |= segment.rst() || segment.fin();
            if !segment.syn() {
                self.confirmed = Some(segment.ack_number());
            }
            if segment.syn() {
                self.acknowledged = Some(segment.seq_number() + 1);
            } else if self.acknowledged == Some(segment.seq_number()) && self.window > 0 {
                self.received_bytes.extend(&payload);
                self.acknowledged = Some(segment.seq_number() + payload.len());
            }
        }
    }

    /// Sends all of it in segments of this length, without waiting for acknowledgements.
    pub(crate) fn pour(&mut self, scene: &Scene, bytes: &[u8], each: usize) {
        for part in bytes.chunks(each) {
            self.send_segment(scene, TcpControl::Psh, part);
            self.next += part.len();
        }
    }
}

/// A server that reports how many bytes it received once the client has sent the last one.
pub(crate) fn counting_server(total: usize) -> (SocketAddr, thread::JoinHandle<usize>) {
    let listener = TcpListener::bind((LOCAL, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let (mut count, mut buffer) = (0, vec![0; 65536]);
        while count < total {
            match stream.read(&mut buffer) {
                Ok(0) | Err(_) => break,
                Ok(length) => count += length,
            }
        }
        count
    });
    (address, server)
}

pub(crate) fn accepted(listener: &TcpListener) -> TcpStream {
    let (stream, _) = listener.accept().unwrap();
    stream.set_nonblocking(true).unwrap();
    stream
}

pub(crate) fn allow(address: SocketAddr) -> String {
    format!("allow tcp://{address}")
}

impl Client {
    /// Sends a SYN and nothing else.
    pub(crate) fn open_unanswered(scene: &Scene, port: u16, server: SocketAddr) -> Self {
        let client = Self {
            port,
            server,
            next: TcpSeqNumber(1000),
            acknowledged: None,
            window: 65000,
            confirmed: None,
            received_bytes: Vec::new(),
            ended: false,
        };
        client.send_segment(scene, TcpControl::Syn, &[]);
        client
    }
}

/// A minimal ClientHello with this name.
pub(crate) fn hello(name: &str) -> Vec<u8> {
    let short = |length: usize| u16::try_from(length).unwrap().to_be_bytes();
    let server_name = [&short(name.len() + 3)[..], &[0], &short(name.len()), name.as_bytes()].concat();
    let versions = [2, 3, 4];
    let mut extensions = [&[0, 0][..], &short(server_name.len()), &server_name].concat();
    extensions.extend([&[0, 43][..], &short(versions.len()), &versions].concat());
    let mut body = [&[3, 3][..], &[9; 32], &[0], &[0, 2, 0x13, 1], &[1, 0]].concat();
    body.extend([&short(extensions.len())[..], &extensions].concat());
    let message = [&[1, 0][..], &short(body.len()), &body].concat();
    [&[22, 3, 1][..], &short(message.len()), &message].concat()
}
