//! What the gateway itself answers: DNS queries, echo requests, and packets that never leave a sandbox.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};

use bathy_protocol::network::{GATEWAY_V4, NetEvent, ToGateway, Transport, encode};
use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{Name, RData, Record, RecordType};
use rustix::net::{SendFlags, send};
use smoltcp::wire::{Icmpv4Message, Icmpv4Packet, IpProtocol};

use crate::scene::{Client, LOCAL, Scene};

const PUBLIC: Ipv4Addr = Ipv4Addr::new(93, 184, 216, 34);

fn query(name: &str) -> Vec<u8> {
    let mut message = Message::new(0x0707, MessageType::Query, OpCode::Query);
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), RecordType::A));
    message.to_vec().unwrap()
}

/// A resolver of the host.
fn upstream() -> (UdpSocket, SocketAddr) {
    let socket = UdpSocket::bind((LOCAL, 0)).unwrap();
    socket.set_nonblocking(true).unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

/// Runs the loop until the resolver gets a query, and responds with one address.
fn answer(scene: &mut Scene, upstream: &UdpSocket) {
    let mut buffer = [0; 1000];
    let mut asked = None;
    scene.until("the query", |_| {
        asked = upstream.recv_from(&mut buffer).ok();
        asked.is_some()
    });
    let (count, from) = asked.unwrap();
    let query = Message::from_vec(&buffer[..count]).unwrap();
    let mut answer = Message::response(query.metadata.id, OpCode::Query);
    answer.queries.clone_from(&query.queries);
    answer.answers = vec![Record::from_rdata(query.queries[0].name.clone(), 60, RData::A(A(PUBLIC)))];
    upstream.send_to(&answer.to_vec().unwrap(), from).unwrap();
}

/// Runs the loop until the guest gets a packet.
#[track_caller]
fn received(scene: &mut Scene) -> (IpProtocol, Vec<u8>) {
    let mut packet = None;
    scene.until("a packet", |scene| {
        packet = scene.received();
        packet.is_some()
    });
    packet.unwrap()
}

/// The names that were resolved, and those that were denied.
fn names(scene: &Scene) -> (Vec<&str>, Vec<&str>) {
    let resolved = scene.events.iter().filter_map(|event| match event {
        NetEvent::Resolved { name, addresses, .. } if *addresses == [PUBLIC] => Some(name.as_str()),
        _ => None,
    });
    let denied = scene.events.iter().filter_map(|event| match event {
        NetEvent::Unresolved { name, denied: true, .. } => Some(name.as_str()),
        _ => None,
    });
    (resolved.collect(), denied.collect())
}

#[test]
fn n4_queries_in_datagrams_are_answered_by_the_policy() {
    let (upstream, address) = upstream();
    let mut scene = Scene::with_resolvers(&["allow good.example"], vec![address]);
    for (name, code) in [("good.example", ResponseCode::NoError), ("bad.example", ResponseCode::Refused)] {
        scene.send_datagram(30000, (GATEWAY_V4, 53), &query(name));
        if code == ResponseCode::NoError {
            answer(&mut scene, &upstream);
        }
        let (protocol, bytes) = received(&mut scene);
        let ports = [53_u16, 30000].map(u16::to_be_bytes).concat();
        assert_eq!((protocol, &bytes[..4]), (IpProtocol::Udp, &ports[..]));
        let message = Message::from_vec(&bytes[8..]).unwrap();
        assert_eq!((message.metadata.id, message.metadata.response_code), (0x0707, code), "{name}");
    }
    assert_eq!(names(&scene), (vec!["good.example"], vec!["bad.example"]));
    assert!(upstream.recv_from(&mut [0; 1]).is_err(), "the denied name was not forwarded");
}

#[test]
fn n4_queries_over_tcp_are_answered_by_the_policy() {
    let (upstream, address) = upstream();
    let mut scene = Scene::with_resolvers(&["allow good.example"], vec![address]);
    let mut client = Client::open(&mut scene, 30000, SocketAddr::from((GATEWAY_V4, 53)), 65000);
    for (name, code) in [("bad.example", ResponseCode::Refused), ("good.example", ResponseCode::NoError)] {
        let query = query(name);
        let length = u16::try_from(query.len()).unwrap().to_be_bytes();
        client.pour(&scene, &[&length[..], &query].concat(), 1000);
        if code == ResponseCode::NoError {
            answer(&mut scene, &upstream);
        }
        scene.until("the answer", |scene| {
            client.receive(scene);
            client.received_bytes.len() > 2
        });
        let message = Message::from_vec(&std::mem::take(&mut client.received_bytes)[2..]).unwrap();
        assert_eq!(message.metadata.response_code, code, "{name}");
    }
    assert_eq!(names(&scene), (vec!["good.example"], vec!["bad.example"]));
}

#[test]
fn datagrams_to_other_ports_of_the_gateway_are_prohibited() {
    let mut scene = Scene::new(&["allow any"]);
    scene.send_datagram(30000, (GATEWAY_V4, 54), &query("good.example"));
    let (protocol, bytes) = received(&mut scene);
    assert_eq!((protocol, bytes[0]), (IpProtocol::Icmp, 3), "the destination is unreachable");
    assert_eq!(scene.events, [], "no name was resolved, and no flow began");
}

fn echo() -> Vec<u8> {
    let mut bytes = vec![8, 0, 0, 0, 0, 7, 0, 9, b'x'];
    Icmpv4Packet::new_unchecked(&mut bytes).fill_checksum();
    bytes
}

#[test]
fn echo_requests_are_answered_for_the_gateway_and_never_forwarded() {
    let mut scene = Scene::new(&["allow any"]);
    scene.send_packet(IpProtocol::Icmp, GATEWAY_V4, &echo());
    let (protocol, bytes) = received(&mut scene);
    assert_eq!((protocol, bytes[0], &bytes[4..]), (IpProtocol::Icmp, 0, &[0, 7, 0, 9, b'x'][..]));
    assert_eq!(scene.events, []);

    let elsewhere = [
        (IpProtocol::Icmp, echo(), Transport::Icmp, "echo requests do not leave a sandbox"),
        (IpProtocol::Unknown(47), vec![0; 8], Transport::Other(47), "only TCP and UDP leave a sandbox"),
    ];
    for (protocol, ip_payload, transport, expected) in elsewhere {
        scene.events.clear();
        scene.send_packet(protocol, PUBLIC, &ip_payload);
        let (protocol, bytes) = received(&mut scene);
        let message = Icmpv4Packet::new_checked(&bytes).unwrap().msg_type();
        assert_eq!((protocol, message), (IpProtocol::Icmp, Icmpv4Message::DstUnreachable));
        scene.until("its event", |scene| !scene.events.is_empty());
        let [NetEvent::Denied { peer, rule, .. }] = &scene.events[..] else {
            unreachable!("{:?}", scene.events)
        };
        assert_eq!((peer.transport, peer.address, rule.as_str()), (transport, PUBLIC.into(), expected));
    }
}

#[test]
fn f1_while_events_cannot_be_recorded_nothing_is_rejected_and_no_name_is_resolved() {
    let (upstream, address) = upstream();
    let mut scene = Scene::with_resolvers(&["allow good.example"], vec![address]);
    send(&scene.owner, &encode(&ToGateway::Hold(true)).unwrap(), SendFlags::empty()).unwrap();
    scene.step();
    scene.send_packet(IpProtocol::Icmp, PUBLIC, &echo());
    scene.send_datagram(30000, (GATEWAY_V4, 53), &query("good.example"));
    scene.send_datagram(30000, (GATEWAY_V4, 53), &query("bad.example"));
    // They follow the others, and are answered in any case: so the others were handled.
    scene.send_packet(IpProtocol::Icmp, GATEWAY_V4, &echo());
    let (protocol, bytes) = received(&mut scene);
    assert_eq!((protocol, bytes[0]), (IpProtocol::Icmp, 0));
    assert!(scene.received().is_none());
    assert_eq!(scene.events, []);
    assert!(upstream.recv_from(&mut [0; 1]).is_err());
}
