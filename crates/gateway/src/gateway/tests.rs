//! What wakes the loop, and what it admits, without a guest.

use std::io::Write;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use bathy_policy::Protocol;
use bathy_protocol::network::{
    BoundPort,
    FromGateway::{self, Event},
    GATEWAY_V4, GatewayLaunch,
    NetEvent::{Allowed, Closed},
    NetworkLimits, ToGateway, decode, encode,
};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

use super::{Gateway, Token, connection_number, flow_number};
use crate::connection::Connection;
use crate::counts::tests::{found, memory};
use crate::flows::FlowSocket;
use crate::link::{EtherType, Received};
use crate::policy_check::Endpoint;
use crate::stack::FourTuple;
use crate::stack::guest::Guest;

const LIMITS: NetworkLimits =
    NetworkLimits { connections: 4, new_connections: 100, bytes: 1000, packets: 1000, queries: 100 };
const SECOND: Duration = Duration::from_secs(1);

struct Scene {
    gateway: Gateway,
    link: OwnedFd,
    owner: OwnedFd,
}

fn pair() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

impl Scene {
    fn new(rules: &[&str], limits: NetworkLimits) -> Self {
        Self::with_ports(rules, limits, Vec::new(), Vec::new())
    }

    fn with_ports(rules: &[&str], limits: NetworkLimits, ports: Vec<OwnedFd>, bound: Vec<BoundPort>) -> Self {
        let own = serde_json::json!({"preset": "allow-list", "rules": rules});
        let launch = GatewayLaunch {
            policies: serde_json::json!({"ceilings": [], "own": own}).to_string(),
            resolvers: Vec::new(),
            limits,
            ports: bound,
            allow_command: String::new(),
            spent: None,
            own: Vec::new(),
        };
        let ((control, owner), (its_link, link)) = (pair(), pair());
        let gateway = Gateway::new(launch, control, its_link, ports).unwrap();
        Self { gateway, link, owner }
    }

    /// A gateway with nothing to do.
    fn idle(limits: NetworkLimits) -> Self {
        let mut scene = Self::new(&[], limits);
        assert!(scene.gateway.step(false).unwrap());
        scene
    }

    /// A published port, and a peer that has connected to it.
    fn called(rules: &[&str], limits: NetworkLimits) -> (Self, TcpStream) {
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        port.set_nonblocking(true).unwrap();
        let peer = TcpStream::connect(port.local_addr().unwrap()).unwrap();
        let bound = BoundPort { guest: 80, udp: false };
        (Self::with_ports(rules, limits, vec![port.into()], vec![bound]), peer)
    }

    fn wait(&mut self) -> Option<Duration> {
        let timeout = self.gateway.timeout()?;
        Some(timeout.try_into().unwrap())
    }

    /// Adds a connection from this port of the guest.
    fn connect(&mut self, guest_port: u16, inbound: bool) -> u64 {
        let now = self.gateway.now;
        let mut connection = Connection::dialing(tuple(guest_port), socket(), Vec::new(), now);
        connection.inbound = inbound;
        self.gateway.table.add(connection)
    }

    /// Adds a flow from this port of the guest.
    fn flow(&mut self, guest_port: u16, socket: FlowSocket) -> u64 {
        let remote = tuple(guest_port).remote;
        let endpoint = Endpoint { protocol: Protocol::Udp, remote, is_host: false, names: Vec::new() };
        self.gateway.flows.add(tuple(guest_port), endpoint, socket, self.gateway.now)
    }

    /// Fills the link: the keeper does not read.
    fn fill_link(&mut self) {
        while self.gateway.link.has_space() {
            self.gateway.link.send(EtherType::V4, 1000, |_| {});
        }
    }
}

/// The messages that the owner received.
fn messages(owner: &OwnedFd) -> Vec<FromGateway> {
    let mut buffer = vec![0; 65536];
    let next = || {
        let (count, _) = recv(owner, &mut *buffer, RecvFlags::empty()).ok()?;
        (count > 0).then(|| decode(&buffer[..count]).unwrap())
    };
    std::iter::from_fn(next).collect()
}

fn tuple(guest_port: u16) -> FourTuple {
    FourTuple { guest_port, remote: SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 7)), 443) }
}

fn socket() -> OwnedFd {
    std::os::unix::net::UnixDatagram::unbound().unwrap().into()
}

fn back() -> FlowSocket {
    FlowSocket::Inbound(0, tuple(1).remote)
}

#[test]
fn a_token_is_found_again_by_its_number() {
    let mut numbers = Vec::new();
    for number in [0, 1, 7, u64::from(u32::MAX)] {
        let all = [Token::Port(number), Token::Connection(number), Token::Flow(number), Token::Query(number)];
        for token in all.into_iter().chain([Token::Control, Token::Link]) {
            assert_eq!(Token::of(token.number()), token);
            numbers.push(token.number());
        }
    }
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), 4 * 4 + 2, "no two have the same");
}

#[test]
fn n9_what_begins_is_counted_in_the_owners_memory_until_it_ends() {
    let mut scene = Scene::idle(LIMITS);
    let (counts, file) = memory(2);
    scene.gateway = scene.gateway.counting_in(counts);
    let connection = scene.connect(1, true);
    let flow = scene.flow(2, back());
    let peer = crate::policy_check::peer(&scene.gateway.flows.get_mut(flow).unwrap().endpoint, None);
    scene.gateway.table.get_mut(connection).unwrap().meter.add_received(3);
    assert_eq!(found(&file), [], "nothing was reported as begun");
    scene.gateway.log_open(connection);
    scene.gateway.log_flow(flow, peer, String::new());
    scene.gateway.flows.get_mut(flow).unwrap().meter.add_sent(5);
    scene.gateway.flows.get_mut(flow).unwrap().received(7, Instant::now());
    scene.gateway.table.get_mut(connection).unwrap().meter.add_sent(4);
    let (first, second) = (connection_number(connection), flow_number(flow));
    let counted = [(first, 4, 3), (second, 5, 7)];
    assert_eq!(found(&file), counted);
    scene.gateway.end(connection, "ended");
    scene.gateway.end_flow(flow, "ended");
    assert_eq!(found(&file), counted, "the owner may not have been sent the ends yet");
    // A connection that ends while it is dialed is logged as allowed and closed at once.
    let third = scene.connect(3, false);
    scene.gateway.end(third, "not connected");
    assert_eq!(found(&file), [(connection_number(third), 0, 0), counted[1]]);
}

#[test]
fn a_gateway_serves_until_the_keeper_has_closed_the_link() {
    let Scene { gateway, link, owner } = Scene::new(&[], LIMITS);
    drop(link);
    gateway.run().unwrap();
    assert_eq!(messages(&owner), [FromGateway::Ready, FromGateway::Unplugged]);
}

#[test]
fn the_loop_waits_for_as_long_as_there_is_nothing_to_do() {
    type Prepare = fn(&mut Scene);
    let table: [(&str, Prepare, Option<Duration>); 13] = [
        ("nothing", |_| {}, None),
        ("frames of the guest", |scene| scene.gateway.link_readable = true, Some(Duration::ZERO)),
        (
            "a connection's turn",
            |scene| {
                scene.connect(1, false);
            },
            Some(Duration::ZERO),
        ),
        (
            "more datagrams",
            |scene| {
                scene.gateway.flows_pending.insert(7);
            },
            Some(Duration::ZERO),
        ),
        (
            "peers of a port",
            |scene| {
                scene.gateway.ports_pending.insert(0);
            },
            Some(Duration::ZERO),
        ),
        (
            "peers after a pause",
            |scene| {
                scene.gateway.ports_pending.insert(0);
                scene.gateway.accept_after = scene.gateway.now + SECOND / 4;
            },
            Some(SECOND / 4),
        ),
        (
            "peers that nothing may begin for",
            |scene| {
                scene.gateway.ports_pending.insert(0);
                scene.gateway.event_log.hold(true);
            },
            None,
        ),
        (
            "a connection's timer",
            |scene| {
                let number = scene.connect(1, false);
                scene.gateway.table.next_queued();
                scene.gateway.table.set_timer(number, scene.gateway.now);
            },
            Some(Duration::from_secs(60)),
        ),
        (
            "frames of a guest that is too fast",
            |scene| {
                scene.gateway.link_readable = true;
                scene.gateway.quota.up.0.take(1499);
            },
            Some(SECOND / 2),
        ),
        (
            "a turn of a connection that is too fast",
            |scene| {
                scene.connect(1, false);
                scene.gateway.quota.down.0.take(1499);
            },
            Some(SECOND / 2),
        ),
        (
            "a turn of a connection while the keeper takes nothing",
            |scene| {
                scene.connect(1, false);
                scene.fill_link();
            },
            None,
        ),
        (
            "frames of the guest while the keeper takes nothing",
            |scene| {
                scene.gateway.link_readable = true;
                scene.fill_link();
            },
            Some(Duration::ZERO),
        ),
        (
            "a flow that may be idle",
            |scene| {
                scene.flow(1, back());
            },
            Some(Duration::from_secs(5)),
        ),
    ];
    for (what, prepare, expected) in table {
        let mut scene = Scene::idle(LIMITS);
        // All times are measured from one moment.
        let now = Instant::now();
        scene.gateway = Gateway { now, accept_after: now, ..scene.gateway };
        scene.gateway.flows = crate::flows::Flows::new(now);
        scene.gateway.quota = crate::limits::Quota::new(&LIMITS, now);
        prepare(&mut scene);
        assert_eq!(scene.wait(), expected, "{what}");
    }
}

#[test]
fn f1_while_the_event_queue_is_full_frames_do_not_wake_the_gateway() {
    let mut scene = Scene::idle(LIMITS);
    scene.gateway.link_readable = true;
    while_room(&mut scene.gateway);
    assert_eq!(scene.wait(), None);
}

#[test]
fn frames_stay_in_the_link_while_the_guest_is_throttled() {
    type Prepare = fn(&mut Gateway);
    let table: [(&str, Prepare, bool); 3] = [
        ("nothing", |_| {}, true),
        ("f1: events that wait", |gateway| while_room(gateway), false),
        ("r5: its rate", |gateway| gateway.quota.up.0.take(1_000_000_000), false),
    ];
    for (what, prepare, is_taken) in table {
        let mut scene = Scene::new(&[], LIMITS);
        send(&scene.link, &[7; 60], SendFlags::empty()).unwrap();
        prepare(&mut scene.gateway);
        assert!(scene.gateway.step(false).unwrap());
        let left = matches!(scene.gateway.link.receive(&mut [0; 100]), Received::Frame(_));
        assert_eq!(left, !is_taken, "{what}");
    }
}

/// Sends the owner, which does not read, as many events as may be queued.
fn while_room(gateway: &mut Gateway) {
    while gateway.event_log.has_space() {
        gateway.event_log.send(&FromGateway::Ready);
    }
}

#[test]
fn the_end_does_not_wait_for_an_owner_that_does_not_read() {
    let Scene { mut gateway, link, owner: _owner } = Scene::new(&[], LIMITS);
    while gateway.event_log.is_sent() {
        gateway.event_log.send(&FromGateway::Ready);
    }
    drop(link);
    let (done, is_done) = mpsc::channel();
    thread::spawn(move || done.send(gateway.run().is_ok()).unwrap());
    assert_eq!(is_done.recv_timeout(Duration::from_secs(20)), Ok(true));
}

#[test]
fn sockets_are_ready_once_and_not_again_until_something_happens() {
    let scene = Scene::idle(LIMITS);
    let mut events = [const { MaybeUninit::uninit() }; 8];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    let (ready, _) = epoll::wait(&scene.gateway.epoll, &mut events, Some(&at_once)).unwrap();
    assert_eq!(ready.len(), 0);
}

#[test]
fn r5_the_guest_is_sent_something_only_if_the_link_and_its_rate_allow_it() {
    for (is_full, is_fast) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut scene = Scene::idle(LIMITS);
        if is_full {
            scene.fill_link();
        }
        if is_fast {
            scene.gateway.quota.down.0.take(1_000_000);
        }
        assert_eq!(scene.gateway.may_receive(), !is_full && !is_fast, "{is_full} {is_fast}");
    }
}

#[test]
fn r5_connections_and_flows_of_the_guest_have_one_limit_together() {
    for (connections, expected) in [(3, true), (2, false)] {
        let mut scene = Scene::idle(NetworkLimits { connections, ..LIMITS });
        scene.connect(1, false);
        scene.flow(2, FlowSocket::Outbound(socket()));
        assert_eq!(scene.gateway.admits_outbound(), expected, "{connections}");
    }
    let mut scene = Scene::idle(NetworkLimits { connections: 100, new_connections: 2, ..LIMITS });
    let results: Vec<_> = (0..3).map(|_| scene.gateway.admits_outbound()).collect();
    assert_eq!(results, [true, true, false], "so many begin in a second");
}

#[test]
fn r5_inbound_peers_have_half_of_what_there_is() {
    for (connections, expected) in [(6, true), (5, false), (4, false)] {
        let mut scene = Scene::idle(NetworkLimits { connections, ..LIMITS });
        scene.connect(1, true);
        scene.flow(2, back());
        assert_eq!(scene.gateway.admits_inbound(), expected, "{connections}");
    }
    for (connections, expected) in [(5, true), (4, false)] {
        let mut scene = Scene::idle(NetworkLimits { connections, ..LIMITS });
        scene.connect(1, false);
        for port in [2, 3, 4] {
            scene.flow(port, FlowSocket::Outbound(socket()));
        }
        assert_eq!(scene.gateway.admits_inbound(), expected, "the guest has four of {connections}");
    }
    let mut scene = Scene::idle(NetworkLimits { connections: 100, new_connections: 2, ..LIMITS });
    let results: Vec<_> = (0..3).map(|_| scene.gateway.admits_inbound()).collect();
    assert_eq!(results, [true, true, false], "so many begin in a second");
}

#[test]
fn an_inbound_peer_waits_while_it_cannot_be_served() {
    type Prepare = fn(&mut Gateway);
    let table: [(&str, Prepare, bool); 6] = [
        ("at once", |_| {}, true),
        ("in the moment when a pause ends", |gateway| gateway.accept_after = gateway.now, true),
        ("during a pause", |gateway| gateway.accept_after = gateway.now + SECOND, false),
        ("after a pause", |gateway| gateway.now = gateway.accept_after + SECOND, true),
        ("while events are not recorded", |gateway| gateway.event_log.hold(true), false),
        ("while the guest is sent too much", |gateway| gateway.quota.down.0.take(1_000_000), false),
    ];
    for (what, prepare, is_served) in table {
        let (mut scene, _peer) = Scene::called(&[], LIMITS);
        prepare(&mut scene.gateway);
        scene.gateway.on_port(0);
        assert_eq!(scene.gateway.table.count(), usize::from(is_served), "{what}");
        assert_eq!(scene.gateway.ports_pending.contains(&0), !is_served, "{what}");
    }
}

#[test]
fn an_inbound_connection_never_blocks_and_comes_from_the_gateways_own_ports() {
    let (mut scene, _peer) = Scene::called(&[], LIMITS);
    scene.gateway.on_port(0);
    let (_, connection) = scene.gateway.table.all_mut().next().unwrap();
    assert!(fcntl_getfl(connection.socket().unwrap()).unwrap().contains(OFlags::NONBLOCK));
    assert_eq!(connection.tuple.guest_port, 80);
    assert!((32768..61000).contains(&connection.tuple.remote.port()), "{:?}", connection.tuple);

    scene.gateway.end(1, "the test ended");
    let [Event(Closed { peer, .. })] = &messages(&scene.owner)[..] else { unreachable!("it ended") };
    assert_eq!((peer.inbound, peer.port), (true, 80), "it is recorded as what the peer called");
    assert_eq!(peer.address, IpAddr::from(Ipv4Addr::LOCALHOST));
}

#[test]
fn a_port_of_the_gateway_is_used_once_at_a_time() {
    let (mut scene, peer) = Scene::called(&[], NetworkLimits { connections: 100, ..LIMITS });
    let _others: Vec<_> = (0..3).map(|_| TcpStream::connect(peer.peer_addr().unwrap()).unwrap()).collect();
    scene.gateway.next_port = 28230;
    let taken = FourTuple { guest_port: 80, remote: SocketAddr::new(GATEWAY_V4.into(), 32769) };
    let now = scene.gateway.now;
    scene.gateway.table.add(Connection::dialing(taken, socket(), Vec::new(), now));
    scene.gateway.on_port(0);
    let inbound = scene.gateway.table.all().filter(|(_, connection)| connection.inbound);
    let ports: Vec<_> = inbound.map(|(_, connection)| connection.tuple.remote.port()).collect();
    assert_eq!(ports, [60999, 32768, 32770, 32771], "they go around, and leave out what is taken");
}

#[test]
fn datagrams_to_the_guest_count_against_its_rate() {
    let mut scene = Scene::new(&[], LIMITS);
    let left = |scene: &Scene| {
        let (bytes, packets) = &scene.gateway.quota.down;
        (bytes.left(), packets.left())
    };
    let before = left(&scene);
    scene.gateway.deliver(tuple(1).remote, 1, &[7; 100]);
    assert_eq!(left(&scene), (before.0 - 100, before.1 - 1));
}

#[test]
fn bytes_of_connections_to_the_guest_count_against_its_rate() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let remote = listener.local_addr().unwrap();
    let tuple = FourTuple { guest_port: 30000, remote };
    let limits = NetworkLimits { bytes: 1 << 20, ..LIMITS };
    let Scene { mut gateway, link, owner } = Scene::new(&[&format!("allow tcp://{remote}")], limits);
    let mut guest = Guest::over(link, tuple);
    let syn = guest.syn();
    guest.send(&syn);
    until(&mut gateway, || !guest.segments().is_empty());
    let ack = guest.ack();
    guest.send(&ack);
    until(&mut gateway, || !messages(&owner).is_empty());
    let (mut server, _) = listener.accept().unwrap();
    server.write_all(&[7; 1000]).unwrap();
    let connection = gateway.table.get_mut(1).unwrap();
    connection.wake();
    let patience = Timespec { tv_sec: 20, tv_nsec: 0 };
    let socket = connection.socket().unwrap();
    assert_eq!(poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&patience)), Ok(1));

    // Within one moment, so that no bucket is refilled.
    let left = |gateway: &Gateway| (gateway.quota.down.0.left(), gateway.quota.down.1.left());
    let before = left(&gateway);
    gateway.turn(1);
    assert_eq!(guest.segments().len(), 1);
    assert_eq!(guest.received.len(), 1000);
    assert_eq!(left(&gateway), (before.0 - 1000, before.1 - 1));
}

/// Runs the loop until a condition holds.
#[track_caller]
fn until(gateway: &mut Gateway, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < end, "it does not happen");
        gateway.step(false).unwrap();
    }
}

#[test]
fn a_new_policy_is_acknowledged_with_how_much_it_closed() {
    let mut scene = Scene::new(&["allow any", "allow in any"], LIMITS);
    scene.connect(1, false);
    scene.connect(2, false);
    scene.flow(3, FlowSocket::Outbound(socket()));
    let change = |rules: &str| {
        let text = format!(r#"{{"ceilings":[],"own":{{"preset":"allow-list","rules":[{rules}]}}}}"#);
        encode(&ToGateway::Policies(text)).unwrap()
    };
    send(&scene.owner, &change(r#""deny any""#), SendFlags::empty()).unwrap();
    scene.gateway.step(false).unwrap();
    assert!(messages(&scene.owner).contains(&FromGateway::Changed { closed: 3 }));
    send(&scene.owner, &change("7"), SendFlags::empty()).unwrap();
    scene.gateway.step(false).unwrap();
    assert!(matches!(messages(&scene.owner)[..], [FromGateway::Failed(_)]));
}

#[test]
fn the_end_of_a_peers_datagrams_is_recorded_with_the_address_of_their_beginning() {
    let mut scene = Scene::new(&[], LIMITS);
    // As a dual-stack socket reports it.
    let SocketAddr::V4(remote) = tuple(1).remote else { unreachable!("it is IPv4") };
    let mapped = SocketAddr::new(remote.ip().to_ipv6_mapped().into(), remote.port());
    let number = scene.flow(1, FlowSocket::Inbound(0, mapped));
    scene.gateway.end_flow(number, "idle");
    let [Event(Closed { peer, .. })] = &messages(&scene.owner)[..] else { unreachable!("it ended") };
    assert_eq!((peer.inbound, peer.address, peer.port), (true, IpAddr::V4(*remote.ip()), 1));
}

#[test]
fn datagrams_of_a_peer_reach_the_guest_if_the_policy_lets_them() {
    for (rules, is_let_in) in [(&[][..], true), (&["deny in udp://any:80"][..], false)] {
        let port = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        port.set_nonblocking(true).unwrap();
        let peer = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        peer.connect(port.local_addr().unwrap()).unwrap();
        peer.set_nonblocking(true).unwrap();
        let bound = BoundPort { guest: 80, udp: true };
        let mut scene = Scene::with_ports(rules, LIMITS, vec![port.into()], vec![bound]);
        for payload in [&b"one"[..], b"two"] {
            peer.send(payload).unwrap();
            scene.gateway.on_port(0);
        }
        assert_eq!(scene.gateway.flows.count(), usize::from(is_let_in), "{rules:?}");
        let mut frame = vec![0; 2000];
        for payload in [&b"one"[..], b"two"] {
            let received = recv(&scene.link, &mut *frame, RecvFlags::empty()).map(|(count, _)| count);
            assert_eq!(received.is_ok(), is_let_in, "{rules:?}");
            let carried = received.map_or(&[][..], |count| &frame[count - 3..count]);
            assert_eq!(carried, if is_let_in { payload } else { b"" }, "{rules:?}");
        }
        assert!(scene.gateway.ports_pending.is_empty(), "there is no more");
        let number = scene.gateway.flows.all().next().map(|(number, _)| number);
        if let Some(number) = number {
            let Gateway { flows, ports, now, .. } = &mut scene.gateway;
            flows.get_mut(number).unwrap().send(b"back", ports, *now);
            let mut answer = [0; 10];
            assert_eq!(peer.recv(&mut answer).unwrap(), 4);
            scene.gateway.end_flow(number, "idle");
            let [Event(Allowed { peer: allowed, .. }), Event(Closed { peer: closed, sent, received, .. })] =
                &messages(&scene.owner)[..]
            else {
                unreachable!("it began and ended")
            };
            assert_eq!((closed, *sent, *received), (allowed, 4, 6));
            assert_eq!((closed.inbound, closed.port), (true, 80));
            assert_eq!(closed.address, IpAddr::from(Ipv4Addr::LOCALHOST));
        }
    }
}

#[test]
fn n9_a_gateway_that_is_not_the_first_begins_without_bursts() {
    let launch = GatewayLaunch {
        policies: serde_json::json!({"ceilings": [], "own": {"preset": "allow-list", "rules": []}})
            .to_string(),
        resolvers: Vec::new(),
        limits: LIMITS,
        ports: Vec::new(),
        allow_command: String::new(),
        spent: Some(bathy_protocol::network::Spent::default()),
        own: Vec::new(),
    };
    let ((control, _owner), (link, _guest)) = (pair(), pair());
    let mut gateway = Gateway::new(launch, control, link, Vec::new()).unwrap();
    assert!(!gateway.admits_outbound() && !gateway.admits_inbound());
}

#[test]
fn r14_a_socket_that_its_peer_has_not_acknowledged_counts_as_a_connection() {
    let mut scene = Scene::idle(LIMITS);
    (1..LIMITS.connections).for_each(|_| scene.gateway.closing.add(socket(), scene.gateway.now));
    assert!(scene.gateway.admits_outbound());
    scene.gateway.closing.add(socket(), scene.gateway.now);
    assert!(!scene.gateway.admits_outbound() && !scene.gateway.admits_inbound());
}
