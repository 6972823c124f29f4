//! A whole gateway, and guests that mean no good by it. Servers are on the loopback interface, which the policy allows here.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test reports")]

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::thread;
use std::time::{Duration, Instant};

use bathy_gateway::Gateway;
use bathy_protocol::network::{
    BoundPort, FromGateway, GATEWAY_MAC, GATEWAY_V4, GUEST_MAC, GUEST_V4, GatewayLaunch, MAX_FRAME, NetEvent,
    NetworkLimits, ToGateway, decode, encode,
};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    IpAddress, IpProtocol, Ipv4Packet, Ipv4Repr, TcpControl, TcpPacket, TcpRepr, TcpSeqNumber,
    TcpTimestampRepr,
};

const LOCAL: Ipv4Addr = Ipv4Addr::LOCALHOST;
const MEBIBYTE: usize = 1 << 20;

struct Scene {
    gateway: Gateway,
    link: OwnedFd,
    owner: OwnedFd,
    events: Vec<NetEvent>,
}

fn pair() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (one, two) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    for end in [&one, &two] {
        rustix::net::sockopt::set_socket_send_buffer_size(end, MEBIBYTE).unwrap();
    }
    (one, two)
}

fn policies(rules: &[&str]) -> String {
    let rules = rules.iter().map(|rule| format!("{rule:?}")).collect::<Vec<_>>().join(",");
    format!(r#"{{"ceilings":[],"own":{{"preset":"allow-list","rules":[{rules}]}}}}"#)
}

impl Scene {
    fn new(rules: &[&str]) -> Self {
        Self::with_ports(rules, Vec::new(), NetworkLimits::default().connections)
    }

    /// With these published, which all lead to port 80, and so many connections at once.
    fn with_ports(rules: &[&str], ports: Vec<TcpListener>, connections: u32) -> Self {
        let (control, owner) = pair();
        let (its_link, link) = pair();
        let limits = NetworkLimits { connections, new_connections: 100_000, ..NetworkLimits::default() };
        let launch = GatewayLaunch {
            policies: policies(rules),
            resolvers: Vec::new(),
            limits,
            ports: vec![BoundPort { guest: 80, udp: false }; ports.len()],
            cure: String::new(),
        };
        let ports = ports.into_iter().map(OwnedFd::from).collect();
        let gateway = Gateway::new(launch, control, its_link, ports).unwrap();
        Self { gateway, link, owner, events: Vec::new() }
    }

    fn step(&mut self) {
        assert!(self.gateway.step(false).unwrap(), "it serves on");
        let mut message = vec![0; 65536];
        while let Ok((count, _)) = recv(&self.owner, &mut message, RecvFlags::empty()) {
            if let FromGateway::Event(event) = decode(&message[..count]).unwrap() {
                self.events.push(event);
            }
        }
    }

    /// Turns until something is so.
    #[track_caller]
    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !done(self) {
            assert!(Instant::now() < end, "{what} does not happen: {:?}", self.events);
            self.step();
            thread::sleep(Duration::from_micros(200));
        }
    }

    fn send(&self, segment: &TcpRepr<'_>, to: Ipv4Addr) {
        let ip = Ipv4Repr {
            src_addr: GUEST_V4,
            dst_addr: to,
            next_header: IpProtocol::Tcp,
            payload_len: segment.buffer_len(),
            hop_limit: 64,
        };
        let mut frame = [&GATEWAY_MAC[..], &GUEST_MAC, &[8, 0]].concat();
        let mut packet = vec![0; ip.buffer_len() + segment.buffer_len()];
        ip.emit(&mut Ipv4Packet::new_unchecked(&mut packet), &ChecksumCapabilities::default());
        let (from, to) = (IpAddress::Ipv4(GUEST_V4), IpAddress::Ipv4(to));
        segment.emit(
            &mut TcpPacket::new_unchecked(&mut packet[20..]),
            &from,
            &to,
            &ChecksumCapabilities::default(),
        );
        frame.extend(packet);
        send(&self.link, &frame, SendFlags::empty()).unwrap();
    }

    /// The next segment for the guest: flags and numbers, and what it carries.
    fn heard(&self) -> Option<(TcpPacket<Vec<u8>>, Vec<u8>)> {
        let mut frame = vec![0; MAX_FRAME];
        let (count, _) = recv(&self.link, &mut frame, RecvFlags::empty()).ok()?;
        let bytes = frame[34..count].to_vec();
        let payload = TcpPacket::new_checked(&bytes).unwrap().payload().to_vec();
        Some((TcpPacket::new_checked(bytes).unwrap(), payload))
    }
}

/// The guest's end of one connection, as plain as can be.
struct Client {
    port: u16,
    server: SocketAddr,
    next: TcpSeqNumber,
    acknowledged: Option<TcpSeqNumber>,
    window: u16,
    /// Up to where the other side has heard it, and says so in plain segments.
    confirmed: Option<TcpSeqNumber>,
    /// What came from the other side.
    came: Vec<u8>,
    ended: bool,
}

impl Client {
    fn open(scene: &mut Scene, port: u16, server: SocketAddr, window: u16) -> Self {
        let mut client = Self {
            port,
            server,
            next: TcpSeqNumber(1000),
            acknowledged: None,
            window,
            confirmed: None,
            came: Vec::new(),
            ended: false,
        };
        client.say(scene, TcpControl::Syn, &[]);
        client.next += 1;
        scene.until("the connection", |scene| {
            client.hear(scene);
            client.acknowledged.is_some()
        });
        client.say(scene, TcpControl::None, &[]);
        client
    }

    fn say(&self, scene: &Scene, control: TcpControl, payload: &[u8]) {
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

    fn hear(&mut self, scene: &Scene) {
        while let Some((segment, payload)) = scene.heard() {
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
                self.came.extend(&payload);
                self.acknowledged = Some(segment.seq_number() + payload.len());
            }
        }
    }

    /// Sends all of it in segments of this length, without waiting for anybody.
    fn pour(&mut self, scene: &Scene, bytes: &[u8], each: usize) {
        for part in bytes.chunks(each) {
            self.say(scene, TcpControl::Psh, part);
            self.next += part.len();
        }
    }
}

/// A server that tells how many bytes came once the client says the last of them.
fn counting_server(total: usize) -> (SocketAddr, thread::JoinHandle<usize>) {
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

fn accepted(listener: &TcpListener) -> TcpStream {
    let (stream, _) = listener.accept().unwrap();
    stream.set_nonblocking(true).unwrap();
    stream
}

fn allow(address: SocketAddr) -> String {
    format!("allow tcp://{address}")
}

#[test]
fn v9_a_guest_that_fills_the_first_window_twice_ends_nothing() {
    let (address, server) = counting_server(usize::MAX);
    let mut scene = Scene::new(&[&allow(address)]);
    // The first connections have so much room that it takes more segments.
    let others: Vec<_> =
        (0..32).map(|index| Client::open_unanswered(&scene, 20000 + index, address)).collect();
    scene.step();
    let mut client = Client::open(&mut scene, 30000, address, 65000);
    // The window that it was told, twice over, before the gateway has its turn.
    client.pour(&scene, &vec![7; 2 * 65480], 65480);
    scene.step();
    client.pour(&scene, &vec![7; 8 * 65480], 65480);
    for _ in 0..200 {
        scene.step();
        client.hear(&scene);
    }
    drop(others);
    // It still serves the others.
    let mut last = Client::open(&mut scene, 30001, address, 65000);
    last.pour(&scene, b"x", 1);
    scene.step();
    drop(scene);
    drop(server);
}

impl Client {
    /// Begins and leaves it at that.
    fn open_unanswered(scene: &Scene, port: u16, server: SocketAddr) -> Self {
        let client = Self {
            port,
            server,
            next: TcpSeqNumber(1000),
            acknowledged: None,
            window: 65000,
            confirmed: None,
            came: Vec::new(),
            ended: false,
        };
        client.say(scene, TcpControl::Syn, &[]);
        client
    }
}

#[test]
fn r5_answers_that_nobody_reads_do_not_pile_up() {
    let mut scene = Scene::new(&[]);
    let names = SocketAddr::from((GATEWAY_V4, 53));
    let mut client = Client::open(&mut scene, 30000, names, 0);
    let mut question = vec![0, 29, 0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 4];
    question.extend(b"evil\x07example\0\0\x01\0\x01");
    question[1] = u8::try_from(question.len() - 2).unwrap();
    let many = question.repeat(50);
    let mut taken = 0;
    // The gateway's end takes questions as long as it acknowledges them.
    let acknowledged = |scene: &Scene, taken: &mut usize, first: TcpSeqNumber| {
        while let Some((segment, _)) = scene.heard() {
            if segment.ack() && !segment.rst() {
                *taken = (*taken).max(segment.ack_number() - first);
            }
        }
    };
    let first = client.next;
    for _ in 0..3000 {
        let sent = client.next - first;
        if sent < taken + 2 * many.len() {
            client.pour(&scene, &many, many.len());
        }
        scene.step();
        acknowledged(&scene, &mut taken, first);
        thread::sleep(Duration::from_micros(200));
    }
    // Each answer is at least as long as its question, and 64 KiB of answers may wait; 8 KiB more lie in its own buffers.
    assert!(taken > 4096, "it takes some: {taken}");
    assert!(taken < 128 * 1024, "{taken} bytes of questions were taken");
}

#[test]
fn r5_callers_leave_half_of_the_connections_to_the_guest() {
    let (address, server) = counting_server(1);
    let port = TcpListener::bind((LOCAL, 0)).unwrap();
    port.set_nonblocking(true).unwrap();
    let published = port.local_addr().unwrap();
    let mut scene = Scene::with_ports(&[&allow(address)], vec![port], 8);
    let callers: Vec<_> = (0..8).map(|_| TcpStream::connect(published).unwrap()).collect();
    scene.until("some are turned away", |scene| {
        let is_told =
            |event: &NetEvent| matches!(event, NetEvent::Limited { limit, count: 4 } if limit == "callers at once");
        scene.events.iter().any(is_told)
    });
    let mut client = Client::open(&mut scene, 30000, address, 65000);
    client.pour(&scene, b"x", 1);
    scene.until("the guest's own goes on", |_| server.is_finished());
    drop(callers);
}

#[test]
fn an_upload_that_is_read_does_not_stop_half_way() {
    let head = "POST / HTTP/1.1\r\nHost: x.example\r\nContent-Length: 450000\r\n\r\n";
    let whole = [head.as_bytes(), &vec![b'x'; 450_000]].concat();
    let (address, server) = counting_server(whole.len());
    let mut scene = Scene::new(&["deny bad.example", &allow(address)]);
    let mut client = Client::open(&mut scene, 30000, address, 65000);
    scene.until("the window", |scene| {
        client.hear(scene);
        scene.step();
        scene.events.iter().any(|event| matches!(event, NetEvent::Allowed { .. }))
    });
    // As soon as it may, and as much as it may: 512 KiB fit.
    client.pour(&scene, &whole[..1000], 1000);
    scene.until("the scaled window", |scene| {
        client.hear(scene);
        client.confirmed == Some(client.next)
    });
    client.pour(&scene, &whole[1000..], 64000);
    scene.until("all of it has arrived", |scene| {
        client.hear(scene);
        server.is_finished()
    });
    assert_eq!(server.join().unwrap(), whole.len());
}

#[test]
fn n8_a_connection_that_nobody_has_read_is_ended_when_a_name_is_denied() {
    let listener = TcpListener::bind((LOCAL, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let mut scene = Scene::new(&[&allow(address)]);
    let mut plain = Client::open(&mut scene, 30000, address, 65000);
    let mut server = accepted(&listener);
    plain.pour(&scene, b"GET / HTTP/1.1\r\nHost: x.example\r\n\r\n", 1000);
    scene.until("it arrives", |_| server.read(&mut [0; 100]).is_ok_and(|count| count > 0));
    let mut named = Client::open(&mut scene, 30001, address, 65000);
    let mut other = accepted(&listener);
    named.pour(&scene, &hello("good.example"), 1000);
    scene.until("it arrives", |_| other.read(&mut [0; 1000]).is_ok_and(|count| count > 0));

    let change = ToGateway::Policies(policies(&["deny bad.example", &allow(address)]));
    send(&scene.owner, &encode(&change).unwrap(), SendFlags::empty()).unwrap();
    scene.until("the one is ended", |scene| {
        plain.hear(scene);
        plain.ended
    });
    let reason = |event: &NetEvent| match event {
        NetEvent::Closed { reason, .. } => Some(reason.clone()),
        _ => None,
    };
    assert_eq!(
        scene.events.iter().filter_map(reason).collect::<Vec<_>>(),
        ["the policy was changed: deny bad.example"]
    );
    // The other has said its name, which is not the one that is denied.
    other.write_all(b"hello").unwrap();
    scene.until("the other goes on", |scene| {
        named.hear(scene);
        named.came == b"hello"
    });
    let change = ToGateway::Policies(policies(&["deny good.example", &allow(address)]));
    send(&scene.owner, &encode(&change).unwrap(), SendFlags::empty()).unwrap();
    scene.until("until its own is", |scene| {
        named.hear(scene);
        named.ended
    });
}

#[test]
fn n8_a_call_that_its_client_breaks_off_before_it_stands_is_told_with_its_rule() {
    let listener = TcpListener::bind((LOCAL, 0)).unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let mut scene = Scene::new(&[&allow(address)]);
    let mut client = Client::open_unanswered(&scene, 30000, address);
    scene.until("somebody outside hears of it", |_| listener.accept().is_ok());
    client.next += 1;
    let ended = |event: &NetEvent| matches!(event, NetEvent::Closed { reason, .. } if reason == "the client broke it off");
    scene.until("it is broken off", |scene| {
        // Also after the gateway has noticed that it was heard outside.
        client.say(scene, TcpControl::Rst, &[]);
        scene.events.iter().any(ended)
    });
    let [NetEvent::Allowed { peer, rule }, NetEvent::Closed { .. }] = &scene.events[..] else {
        unreachable!("{:?}", scene.events)
    };
    assert_eq!((peer.port, rule.as_str()), (address.port(), allow(address).as_str()));
}

/// A ClientHello with this name, and nothing else that matters.
fn hello(name: &str) -> Vec<u8> {
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
