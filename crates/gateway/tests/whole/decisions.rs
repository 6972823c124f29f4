//! What happens to connections by policy and by what their clients send.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};

use bathy_protocol::network::NetEvent;
use smoltcp::wire::{IpProtocol, TcpControl};

use crate::scene::{Client, LOCAL, Scene, accepted, allow, hello};

/// The TLS alert `access_denied`, fatal.
const TLS_DENIED: [u8; 7] = [21, 3, 3, 0, 2, 2, 49];

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind((LOCAL, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

fn silent_listener() -> (TcpListener, SocketAddr) {
    let (listener, address) = listener();
    listener.set_nonblocking(true).unwrap();
    (listener, address)
}

fn assert_never_dialed(listener: &TcpListener) {
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock, "nothing was dialed");
}

/// Runs the loop until the client's connection has ended, and returns what it received.
#[track_caller]
fn until_ended(scene: &mut Scene, client: &mut Client) -> Vec<u8> {
    scene.until("its end", |scene| {
        client.receive(scene);
        client.ended
    });
    std::mem::take(&mut client.received_bytes)
}

/// Runs the loop until the server has received this.
#[track_caller]
fn until_read(scene: &mut Scene, server: &mut TcpStream, expected: &[u8]) {
    let mut received_bytes = Vec::new();
    scene.until("its arrival", |_| {
        let mut buffer = [0; 4096];
        if let Ok(count) = server.read(&mut buffer) {
            received_bytes.extend_from_slice(&buffer[..count]);
        }
        received_bytes.len() >= expected.len()
    });
    assert_eq!(received_bytes.escape_ascii().to_string(), expected.escape_ascii().to_string());
}

fn denials(scene: &Scene) -> Vec<&str> {
    let rules = scene.events.iter().map(|event| match event {
        NetEvent::Denied { rule, .. } => Some(rule.as_str()),
        _ => None,
    });
    rules.flatten().collect()
}

fn endings(scene: &Scene) -> Vec<&str> {
    let reasons = scene.events.iter().map(|event| match event {
        NetEvent::Closed { reason, .. } => Some(reason.as_str()),
        _ => None,
    });
    reasons.flatten().collect()
}

fn get(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: x.example\r\n\r\n").into_bytes()
}

#[test]
fn a_denied_connection_is_reset_and_its_server_is_not_dialed() {
    let (listener, address) = silent_listener();
    let mut scene = Scene::new(&[]);
    let mut client = Client::open_unanswered(&scene, 30000, address);
    assert_eq!(until_ended(&mut scene, &mut client), b"");
    assert!(client.acknowledged.is_none(), "it never was established");
    let [NetEvent::Denied { peer, rule, hint, count: 1 }] = &scene.events[..] else {
        unreachable!("{:?}", scene.events)
    };
    assert_eq!((peer.address, peer.port, peer.inbound), (address.ip(), address.port(), false));
    assert_eq!(
        (rule.as_str(), hint.as_deref()),
        ("preset allow-list", Some(&allow(address)["allow ".len()..]))
    );
    assert_never_dialed(&listener);
}

#[test]
fn a_denied_connection_to_port_80_is_answered_with_the_reason() {
    let mut scene = Scene::new(&[]);
    let mut client = Client::open(&mut scene, 30000, SocketAddr::from(([93, 184, 216, 34], 80)), 65000);
    client.pour(&scene, &get("/"), 1000);
    let answer = String::from_utf8(until_ended(&mut scene, &mut client)).unwrap();
    assert!(answer.starts_with("HTTP/1.1 403 ") && answer.contains("preset allow-list"), "{answer}");
    assert_eq!(denials(&scene), ["preset allow-list"]);
}

#[test]
fn each_request_is_decided_and_nothing_is_dialed_before_the_first_is_allowed() {
    let (listener, address) = silent_listener();
    let rule = format!("allow GET http://{address}/open");
    let mut scene = Scene::new(&[&rule]);
    let mut client = Client::open(&mut scene, 30000, address, 65000);
    for _ in 0..20 {
        scene.step();
    }
    assert_never_dialed(&listener);
    assert_eq!(scene.events, [], "nothing was decided");
    client.pour(&scene, &get("/open"), 1000);
    let mut server = None;
    scene.until("the dial", |_| {
        server = listener.accept().ok();
        server.is_some()
    });
    let mut server = server.unwrap().0;
    server.set_nonblocking(true).unwrap();
    until_read(&mut scene, &mut server, &get("/open"));

    client.pour(&scene, &get("/closed"), 1000);
    scene.until("the denial", |scene| !denials(scene).is_empty());
    // The server's response to the first request precedes the denial of the second.
    server.write_all(b"HTTP/1.1 204 Good\r\n\r\n").unwrap();
    scene.until("the end of requests", |_| matches!(server.read(&mut [0; 100]), Ok(0)));
    drop(server);
    let answers = String::from_utf8(until_ended(&mut scene, &mut client)).unwrap();
    let (first, second) = answers.split_at("HTTP/1.1 204 Good\r\n\r\n".len());
    assert_eq!(first, "HTTP/1.1 204 Good\r\n\r\n");
    assert!(second.starts_with("HTTP/1.1 403 "), "{second}");
    let allowed = |event: &NetEvent| matches!(event, NetEvent::Allowed { rule: by, .. } if *by == rule);
    assert_eq!(scene.events.iter().filter(|event| allowed(event)).count(), 1);
}

#[test]
fn a_client_is_denied_in_its_own_protocol() {
    // What the client sends, how the answer begins, and whether it is a page with a text.
    let rows: [(Vec<u8>, &[u8], bool); 4] = [
        (get("/closed"), b"HTTP/1.1 403 ", true),
        (b"HEAD /closed HTTP/1.1\r\nHost: x.example\r\n\r\n".into(), b"HTTP/1.1 403 ", false),
        (hello("x.example"), &TLS_DENIED, false),
        (b"SSH-2.0-OpenSSH_9.2p1\r\n".into(), b"", false),
    ];
    for (sent, begins, has_text) in rows {
        let (listener, address) = silent_listener();
        let mut scene = Scene::new(&[&format!("allow GET http://{address}/open")]);
        let mut client = Client::open(&mut scene, 30000, address, 65000);
        client.pour(&scene, &sent, 1000);
        let answer = until_ended(&mut scene, &mut client);
        let what = sent.escape_ascii();
        assert!(answer.starts_with(begins), "{what}: {}", answer.escape_ascii());
        assert_eq!(answer.is_empty(), begins.is_empty(), "{what}: {}", answer.escape_ascii());
        let text = answer.windows(4).position(|four| four == b"\r\n\r\n").map(|end| &answer[end + 4..]);
        assert_eq!(text.is_some_and(|text| !text.is_empty()), has_text, "{what}: {}", answer.escape_ascii());
        assert_eq!(denials(&scene).len(), 1, "{what}: {:?}", scene.events);
        assert_never_dialed(&listener);
    }
}

#[test]
fn a_denied_name_does_not_reach_a_server_that_is_dialed_already() {
    let (listener, address) = listener();
    let mut scene = Scene::new(&["deny bad.example", &allow(address)]);
    for (port, name, denied) in [(30000, "bad.example", true), (30001, "good.example", false)] {
        let mut client = Client::open(&mut scene, port, address, 65000);
        let mut server = accepted(&listener);
        client.pour(&scene, &hello(name), 1000);
        if denied {
            assert_eq!(until_ended(&mut scene, &mut client), TLS_DENIED);
            scene.until(
                "the server's end",
                |_| !matches!(server.read(&mut [0; 1]), Err(error) if error.kind() == ErrorKind::WouldBlock),
            );
        } else {
            until_read(&mut scene, &mut server, &hello(name));
        }
    }
    assert_eq!(denials(&scene), ["deny bad.example"]);
}

#[test]
fn a_client_that_closes_without_sending_anything_is_logged() {
    let (listener, address) = silent_listener();
    let mut scene = Scene::new(&[&format!("allow GET http://{address}/open")]);
    let client = Client::open(&mut scene, 30000, address, 65000);
    client.send_segment(&scene, TcpControl::Fin, &[]);
    scene.until("its end", |scene| !endings(scene).is_empty());
    assert_eq!(endings(&scene), ["the client closed without a ClientHello or request"]);
    assert_never_dialed(&listener);
}

#[test]
fn a_server_that_refuses_is_logged_and_the_client_is_reset() {
    let (listener, address) = listener();
    drop(listener);
    let mut scene = Scene::new(&[&allow(address)]);
    let mut client = Client::open_unanswered(&scene, 30000, address);
    assert_eq!(until_ended(&mut scene, &mut client), b"");
    scene.until("the record", |scene| scene.events.len() >= 2);
    assert_eq!(endings(&scene), ["not connected: refused"]);
    assert!(matches!(&scene.events[0], NetEvent::Allowed { rule, .. } if *rule == allow(address)));
}

#[test]
fn both_ends_are_closed_one_after_the_other_and_every_byte_is_counted() {
    let (listener, address) = listener();
    let mut scene = Scene::new(&[&allow(address)]);
    let mut client = Client::open(&mut scene, 30000, address, 65000);
    let mut server = accepted(&listener);
    client.pour(&scene, b"question", 1000);
    client.send_segment(&scene, TcpControl::Fin, &[]);
    client.next += 1;
    until_read(&mut scene, &mut server, b"question");
    scene.until("the client's end", |_| matches!(server.read(&mut [0; 1]), Ok(0)));
    server.write_all(b"the answer").unwrap();
    drop(server);
    assert_eq!(until_ended(&mut scene, &mut client), b"the answer");
    client.acknowledged = client.acknowledged.map(|number| number + 1);
    client.send_segment(&scene, TcpControl::None, &[]);
    scene.until("the record", |scene| !endings(scene).is_empty());
    let [NetEvent::Allowed { .. }, NetEvent::Closed { sent: 8, received: 10, reason, .. }] =
        &scene.events[..]
    else {
        unreachable!("{:?}", scene.events)
    };
    assert_eq!(reason, "ended");
}

#[test]
fn a_denied_peer_is_rejected_at_a_published_port() {
    for (rules, denied) in [(&["deny in any"][..], true), (&[], false)] {
        let port = TcpListener::bind((LOCAL, 0)).unwrap();
        port.set_nonblocking(true).unwrap();
        let published = port.local_addr().unwrap();
        let mut scene = Scene::with_ports(rules, vec![port], 8);
        let peer = TcpStream::connect(published).unwrap();
        let mut saw_syn = false;
        scene.until("a decision", |scene| {
            saw_syn |=
                scene.next_segment().is_some_and(|(segment, _)| segment.syn() && segment.dst_port() == 80);
            saw_syn || !denials(scene).is_empty()
        });
        assert_eq!((denials(&scene).len(), saw_syn), if denied { (1, false) } else { (0, true) });
        drop(peer);
    }
}

#[test]
fn datagrams_reach_an_allowed_server_and_its_answers_come_back() {
    let server = UdpSocket::bind((LOCAL, 0)).unwrap();
    server.set_nonblocking(true).unwrap();
    let port = server.local_addr().unwrap().port();
    let mut scene = Scene::new(&[&format!("allow udp://{LOCAL}:{port}")]);
    let mut buffer = [0; 100];
    for datagram in [&b"one"[..], b"another"] {
        scene.send_datagram(30000, (LOCAL, port), datagram);
        let mut received_bytes = None;
        scene.until("its arrival", |_| {
            received_bytes = server.recv_from(&mut buffer).ok();
            received_bytes.is_some()
        });
        let (count, from) = received_bytes.unwrap();
        assert_eq!(&buffer[..count], datagram);
        server.send_to(b"answer", from).unwrap();
        let mut answer = None;
        scene.until("the answer", |scene| {
            answer = scene.received();
            answer.is_some()
        });
        let ports = [port, 30000].map(u16::to_be_bytes).concat();
        let (protocol, bytes) = answer.unwrap();
        assert_eq!((protocol, &bytes[..4], &bytes[8..]), (IpProtocol::Udp, &ports[..], &b"answer"[..]));
    }
    let allowed = |event: &NetEvent| matches!(event, NetEvent::Allowed { .. });
    assert_eq!(scene.events.iter().filter(|event| allowed(event)).count(), 1, "one flow: {:?}", scene.events);
}

#[test]
fn denied_datagrams_reach_no_server_and_the_guest_gets_an_icmp_error() {
    let server = UdpSocket::bind((LOCAL, 0)).unwrap();
    server.set_nonblocking(true).unwrap();
    let mut scene = Scene::new(&[]);
    scene.send_datagram(30000, (LOCAL, server.local_addr().unwrap().port()), b"secret");
    scene.until("the denial", |scene| !denials(scene).is_empty());
    assert_eq!(denials(&scene), ["preset allow-list"]);
    let (protocol, bytes) = scene.received().unwrap();
    assert_eq!((protocol, bytes[0]), (IpProtocol::Icmp, 3), "the destination is unreachable");
    assert_eq!(server.recv_from(&mut [0; 100]).unwrap_err().kind(), ErrorKind::WouldBlock);
}

#[test]
fn open_connections_are_logged_when_the_sandbox_ends() {
    let (listener, address) = listener();
    let server = UdpSocket::bind((LOCAL, 0)).unwrap();
    let port = server.local_addr().unwrap().port();
    let mut scene = Scene::new(&[&allow(address), &format!("allow udp://{LOCAL}:{port}")]);
    let _client = Client::open(&mut scene, 30000, address, 65000);
    let mut peer = accepted(&listener);
    scene.send_datagram(30001, (LOCAL, port), b"x");
    scene.until("both", |scene| scene.events.len() == 2);
    scene.unplug();
    assert!(!scene.gateway.step(false).unwrap(), "there is nothing left to serve");
    scene.read_events();
    assert_eq!(endings(&scene), ["the sandbox ended"; 2]);
    assert_eq!(peer.read(&mut [0; 1]).unwrap_err().kind(), ErrorKind::ConnectionReset);
}
