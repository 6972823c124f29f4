//! A whole gateway, and hostile guests. Servers are on the loopback interface, which the policy allows here.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test reports")]

mod decisions;
mod hold;
mod killed;
mod local;
mod scene;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use bathy_protocol::network::{GATEWAY_V4, NetEvent, ToGateway, encode};
use rustix::net::{SendFlags, send};
use smoltcp::wire::{TcpControl, TcpSeqNumber};

use scene::{Client, LOCAL, Scene, accepted, allow, counting_server, hello, policies};

#[test]
fn v9_a_guest_that_fills_the_first_window_twice_ends_nothing() {
    let (address, server) = counting_server(usize::MAX);
    let mut scene = Scene::new(&[&allow(address)]);
    // The first connections have such large buffers that it takes more segments.
    let others: Vec<_> =
        (0..32).map(|index| Client::open_unanswered(&scene, 20000 + index, address)).collect();
    scene.step();
    let mut client = Client::open(&mut scene, 30000, address, 65000);
    // Twice the advertised window, before the gateway has its turn.
    client.pour(&scene, &vec![7; 2 * 65480], 65480);
    scene.step();
    client.pour(&scene, &vec![7; 8 * 65480], 65480);
    for _ in 0..200 {
        scene.step();
        client.receive(&scene);
    }
    drop(others);
    // It still serves the others.
    let mut last = Client::open(&mut scene, 30001, address, 65000);
    last.pour(&scene, b"x", 1);
    scene.step();
    drop(scene);
    drop(server);
}

#[test]
fn r5_unread_responses_do_not_pile_up() {
    let mut scene = Scene::new(&[]);
    let names = SocketAddr::from((GATEWAY_V4, 53));
    let mut client = Client::open(&mut scene, 30000, names, 0);
    let mut query = vec![0, 29, 0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 4];
    query.extend(b"evil\x07example\0\0\x01\0\x01");
    query[1] = u8::try_from(query.len() - 2).unwrap();
    let many = query.repeat(50);
    let mut taken = 0;
    // The gateway's stack receives queries as long as it acknowledges them.
    let acknowledged = |scene: &Scene, taken: &mut usize, first: TcpSeqNumber| {
        while let Some((segment, _)) = scene.next_segment() {
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
    // Each response is at least as long as its query, and 64 KiB of responses may be unread; 8 KiB more are in its
    // own buffers.
    assert!(taken > 4096, "it takes some: {taken}");
    assert!(taken < 128 * 1024, "{taken} bytes of queries were taken");
}

#[test]
fn r5_inbound_peers_leave_half_of_the_connections_to_the_guest() {
    let (address, server) = counting_server(1);
    let port = TcpListener::bind((LOCAL, 0)).unwrap();
    port.set_nonblocking(true).unwrap();
    let published = port.local_addr().unwrap();
    let mut scene = Scene::with_ports(&[&allow(address)], vec![port], 8);
    let peers: Vec<_> = (0..8).map(|_| TcpStream::connect(published).unwrap()).collect();
    scene.until("some are rejected", |scene| {
        let is_logged =
            |event: &NetEvent| matches!(event, NetEvent::Limited { limit, count: 4 } if limit == "inbound connections at once");
        scene.events.iter().any(is_logged)
    });
    let mut client = Client::open(&mut scene, 30000, address, 65000);
    client.pour(&scene, b"x", 1);
    scene.until("the guest's own goes on", |_| server.is_finished());
    drop(peers);
}

#[test]
fn an_upload_that_is_read_does_not_stop_half_way() {
    let head = "POST / HTTP/1.1\r\nHost: x.example\r\nContent-Length: 450000\r\n\r\n";
    let whole = [head.as_bytes(), &vec![b'x'; 450_000]].concat();
    let (address, server) = counting_server(whole.len());
    let mut scene = Scene::new(&["deny bad.example", &allow(address)]);
    let mut client = Client::open(&mut scene, 30000, address, 65000);
    scene.until("the window", |scene| {
        client.receive(scene);
        scene.step();
        scene.events.iter().any(|event| matches!(event, NetEvent::Allowed { .. }))
    });
    // As soon as it may, and as much as it may: 512 KiB fit.
    client.pour(&scene, &whole[..1000], 1000);
    scene.until("the scaled window", |scene| {
        client.receive(scene);
        client.confirmed == Some(client.next)
    });
    client.pour(&scene, &whole[1000..], 64000);
    scene.until("all of it has arrived", |scene| {
        client.receive(scene);
        server.is_finished()
    });
    assert_eq!(server.join().unwrap(), whole.len());
}

#[test]
fn n8_an_uninspected_connection_is_closed_when_a_name_is_denied() {
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
        plain.receive(scene);
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
    // The other client has sent its name, which is not the one that is denied.
    other.write_all(b"hello").unwrap();
    scene.until("the other goes on", |scene| {
        named.receive(scene);
        named.received_bytes == b"hello"
    });
    let change = ToGateway::Policies(policies(&["deny good.example", &allow(address)]));
    send(&scene.owner, &encode(&change).unwrap(), SendFlags::empty()).unwrap();
    scene.until("until its own is", |scene| {
        named.receive(scene);
        named.ended
    });
}

#[test]
fn n8_a_connection_that_its_client_resets_while_dialing_is_logged_with_its_rule() {
    let listener = TcpListener::bind((LOCAL, 0)).unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let mut scene = Scene::new(&[&allow(address)]);
    let mut client = Client::open_unanswered(&scene, 30000, address);
    scene.until("the server accepts it", |_| listener.accept().is_ok());
    client.next += 1;
    let ended = |event: &NetEvent| matches!(event, NetEvent::Closed { reason, .. } if reason == "reset by the client");
    scene.until("it is broken off", |scene| {
        // Also after the gateway has noticed that the server has accepted.
        client.send_segment(scene, TcpControl::Rst, &[]);
        scene.events.iter().any(ended)
    });
    let [NetEvent::Allowed { peer, rule, .. }, NetEvent::Closed { .. }] = &scene.events[..] else {
        unreachable!("{:?}", scene.events)
    };
    assert_eq!((peer.port, rule.as_str()), (address.port(), allow(address).as_str()));
}
