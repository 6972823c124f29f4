//! Clients and the gateway: how they are connected, isolated from each other, and disconnected.

use std::io::Read as _;

use bathy_protocol::{Exit, INITIAL_WINDOW, StdChannel, ToGuest, ToHost, frame};

use super::*;
use crate::hub::MAX_CLIENTS;

/// Starts a command of this client on its stream 1; returns the agent's number for it.
fn run_command(bench: &mut Bench, client: &mut TestClient) -> u32 {
    client.send(1, &start(9, None));
    bench.settle();
    let received = bench.guest.messages();
    let [(number, ToGuest::Exec(_))] = received[..] else { panic!("{received:?}") };
    bench.guest.send(number, &ToHost::Started { pid: 5 });
    bench.settle();
    assert_eq!(client.receive(), [Received::Answer(1, Answer::Started { pid: 5 })]);
    number
}

#[test]
fn clients_receive_only_what_is_on_their_own_streams() {
    let mut bench = Bench::ready(false);
    let (mut one, mut other) = (bench.connect(), bench.connect());
    let (of_one, of_other) = (run_command(&mut bench, &mut one), run_command(&mut bench, &mut other));
    assert_ne!(of_one, of_other);
    bench.guest.output(of_other, Channel::Stdout, b"b");
    bench.guest.output(of_one, Channel::Stdout, b"a");
    bench.settle();
    assert_eq!(one.receive(), [Received::Bytes(1, Channel::Stdout, b"a".to_vec())]);
    assert_eq!(other.receive(), [Received::Bytes(1, Channel::Stdout, b"b".to_vec())]);
}

#[test]
fn a_client_that_connects_before_the_guest_is_ready_is_notified_when_it_is() {
    let mut bench = Bench::new(false);
    let mut client = bench.connect_unheeded();
    client.send(1, &start(9, None));
    bench.settle();
    assert_eq!(client.receive(), []);
    bench.guest.find_devices();
    bench.settle();
    bench.guest.open_port();
    bench.settle();
    let received = bench.guest.messages();
    let [(CONNECTION, ToGuest::Hello(hello)), (1, ToGuest::Exec(_))] = &received[..] else {
        panic!("{received:?}")
    };
    bench.guest.send(CONNECTION, &fake_guest::answer(hello));
    bench.settle();
    assert!(matches!(client.receive()[..], [Received::Keeper(FromKeeper::Ready(_))]));
}

#[test]
fn the_command_of_a_client_that_disconnects_is_abandoned_and_the_others_go_on() {
    let mut bench = Bench::ready(false);
    let (mut one, mut other) = (bench.connect(), bench.connect());
    let (of_one, of_other) = (run_command(&mut bench, &mut one), run_command(&mut bench, &mut other));
    drop(one);
    bench.settle();
    assert_eq!(bench.guest.messages(), [(of_one, ToGuest::Abandon)]);
    bench.guest.output(of_one, Channel::Stdout, b"too late");
    bench.guest.send(of_one, &ToHost::Exited(Exit::Signal(9)));
    bench.guest.output(of_other, Channel::Stdout, b"b");
    bench.settle();
    assert_eq!(other.receive(), [Received::Bytes(1, Channel::Stdout, b"b".to_vec())]);
    assert_eq!(bench.keeper.hub.usage().clients, 1);
}

#[test]
fn an_owner_that_disconnects_ends_the_sandbox() {
    let mut bench = Bench::ready(false);
    bench.owner.socket.shutdown(std::net::Shutdown::Both).unwrap();
    assert!(matches!(bench.end(), End::OwnerClosed));
}

#[test]
fn an_owner_that_asks_for_it_ends_the_sandbox() {
    let mut bench = Bench::ready(false);
    bench.owner.send(CONNECTION, &ToKeeper::Kill);
    assert_eq!(bench.cause(), Cause::Killed);
}

#[test]
fn c7_a_client_that_breaks_a_rule_is_disconnected_alone() {
    let violations: [&dyn Fn(&mut TestClient); 4] = [
        &|client| client.socket.write_all(&[0xff; 64]).unwrap(),
        &|client| client.send(CONNECTION, &ToKeeper::Kill),
        &|client| client.send(1, &start(1, None)),
        &|client| {
            let mut wire = Vec::new();
            frame::encode(1, Channel::Stdin, &[0; INITIAL_WINDOW as usize], &mut wire);
            frame::encode(1, Channel::Stdin, &[0], &mut wire);
            client.socket.set_nonblocking(false).unwrap();
            client.socket.write_all(&wire).unwrap();
            client.socket.set_nonblocking(true).unwrap();
        },
    ];
    for violation in violations {
        let mut bench = Bench::ready(false);
        let (mut one, mut other) = (bench.connect(), bench.connect());
        let (of_one, of_other) = (run_command(&mut bench, &mut one), run_command(&mut bench, &mut other));
        violation(&mut one);
        bench.settle();
        assert!(one.is_disconnected());
        assert!(bench.guest.messages().contains(&(of_one, ToGuest::Abandon)));
        bench.guest.output(of_other, Channel::Stdout, b"b");
        bench.settle();
        assert_eq!(other.receive(), [Received::Bytes(1, Channel::Stdout, b"b".to_vec())]);
    }
}

#[test]
fn a_client_is_disconnected_even_if_its_socket_has_a_copy() {
    let mut bench = Bench::ready(false);
    let (mut client, socket) = TestClient::new();
    // The monitor has one.
    bench.announce(&ToKeeper::Client, &socket);
    bench.settle();
    client.socket.write_all(&[0xff; 64]).unwrap();
    bench.settle();
    assert!(client.is_disconnected());
    // The copy would be reported as hung up in every turn.
    bench.settle();
    drop(socket);
}

#[test]
fn c8_a_client_too_many_is_hung_up_and_the_others_stay() {
    let mut bench = Bench::ready(false);
    let mut clients: Vec<_> = (0..MAX_CLIENTS).map(|_| bench.connect()).collect();
    let (mut refused, socket) = TestClient::new();
    bench.announce(&ToKeeper::Client, &socket);
    bench.settle();
    assert!(refused.is_disconnected(), "though the monitor has a copy of the socket");
    clients.pop();
    bench.settle();
    bench.connect();
    assert!(!clients[0].is_disconnected());
}

#[test]
fn a_socket_that_is_announced_and_missing_ends_the_sandbox() {
    for message in [ToKeeper::Client, ToKeeper::Link] {
        let mut bench = Bench::ready(false);
        bench.owner.send(CONNECTION, &message);
        let cause = bench.cause();
        assert!(matches!(&cause, Cause::Failed(how) if how.contains("without its socket")), "{cause:?}");
    }
}

/// Many small requests, as one piece of bytes.
fn flood(count: usize) -> Vec<u8> {
    let mut wire = Vec::new();
    (0..count).for_each(|_| encode(1, &Request::Signal(2), &mut wire).unwrap());
    wire
}

#[test]
fn c7_a_client_that_floods_small_frames_leaves_others_their_turn() {
    let mut bench = Bench::ready(false);
    let (mut one, mut other) = (bench.connect(), bench.connect());
    let of_one = run_command(&mut bench, &mut one);
    let many = 3 * MAX_FRAMES + 7;
    one.socket.write_all(&flood(many)).unwrap();
    other.send(1, &start(9, None));
    // Both are handled in one turn, at most two rounds of the flood before the other client.
    bench.turn().unwrap();
    let received = bench.guest.messages();
    let exec = received.iter().position(|(_, message)| matches!(message, ToGuest::Exec(_)));
    assert!(exec.is_some_and(|at| at <= 2 * MAX_FRAMES), "{exec:?} of {}", received.len());
    // Nothing of it is lost.
    let signals = |received: &[(u32, ToGuest)]| {
        received.iter().filter(|message| **message == (of_one, ToGuest::Signal(2))).count()
    };
    let mut count = signals(&received);
    for _ in 0..many {
        bench.settle();
        let more = bench.guest.messages();
        if more.is_empty() {
            break;
        }
        count += signals(&more);
    }
    assert_eq!(count, many);
}

#[test]
fn c7_what_is_left_of_a_flood_is_handled_without_another_event() {
    let mut bench = Bench::ready(false);
    let mut client = bench.connect();
    // Requests on a stream that is not open send the guest nothing.
    client.socket.write_all(&flood(3 * MAX_FRAMES)).unwrap();
    client.send(2, &start(9, None));
    bench.settle();
    let received = bench.guest.messages();
    assert!(matches!(received[..], [(_, ToGuest::Exec(_))]), "{received:?}");
}

#[test]
fn c7_a_guest_that_floods_small_frames_leaves_others_their_turn() {
    let mut bench = Bench::ready(false);
    let (mut client, mut other) = (bench.connect(), bench.connect());
    let number = run_command(&mut bench, &mut client);
    let many = 4 * MAX_FRAMES + 7;
    let mut wire = Vec::new();
    (0..many).for_each(|_| frame::encode(number, Channel::Stdout, b"x", &mut wire));
    assert_eq!(bench.guest.write(&wire), wire.len());
    other.send(1, &start(9, None));
    bench.turn().unwrap();
    let received = client.receive().len();
    assert!(received <= MAX_FRAMES, "{received} frames in one turn");
    assert!(matches!(bench.guest.messages()[..], [(_, ToGuest::Exec(_))]));
    bench.settle();
    assert_eq!(received + client.receive().len(), many);
}

#[test]
fn c7_while_the_guest_takes_nothing_clients_are_held_back_and_the_owner_is_served() {
    let mut bench = Bench::ready(false);
    let mut client = bench.connect();
    run_command(&mut bench, &mut client);
    let wire = flood(1000);
    let mut sent = 0;
    // The socket is full in the end, and not the keeper.
    while let Ok(count) = client.socket.write(&wire) {
        sent += count;
        bench.settle();
        assert!(sent < 64 << 20, "the client is never held back");
    }
    bench.settle();
    assert!(!bench.keeper.hub.takes_requests());
    assert!(bench.keeper.hub.for_guest().len() < 128 * 1024, "{}", bench.keeper.hub.for_guest().len());
    bench.owner.receive();
    bench.owner.send(CONNECTION, &ToKeeper::Usage);
    bench.settle();
    assert!(matches!(bench.sent_to_owner()[..], [FromKeeper::Usage(_)]));
    // A client that leaves meanwhile is noticed.
    drop(client);
    bench.settle();
    assert_eq!(bench.keeper.hub.usage().clients, 0);
}

#[test]
fn c7_held_back_requests_are_handled_when_the_guest_goes_on() {
    let mut bench = Bench::ready(false);
    let mut client = bench.connect();
    run_command(&mut bench, &mut client);
    let wire = flood(30_000);
    let mut sent = 0;
    let mut count = 0;
    for _ in 0..10_000 {
        sent += client.socket.write(&wire[sent..]).unwrap_or(0);
        bench.settle();
        count += bench.guest.messages().len();
        if count == 30_000 {
            break;
        }
    }
    assert_eq!((sent, count), (wire.len(), 30_000));
}

#[test]
fn c7_a_client_that_reads_nothing_it_granted_is_disconnected() {
    let mut bench = Bench::ready(false);
    let mut client = bench.connect();
    let number = run_command(&mut bench, &mut client);
    let mut sent = 0;
    while bench.keeper.hub.usage().clients == 1 {
        assert!(sent < 64 << 20, "the keeper buffers without end");
        for _ in 0..INITIAL_WINDOW / 4096 {
            bench.guest.output(number, Channel::Stdout, &[b'x'; 4096]);
        }
        sent += INITIAL_WINDOW;
        bench.settle();
        // It lies about having read it.
        let grant = Request::Grant { channel: StdChannel::Stdout, bytes: INITIAL_WINDOW };
        let mut wire = Vec::new();
        encode(1, &grant, &mut wire).unwrap();
        let _ = client.socket.write_all(&wire);
        bench.settle();
        bench.guest.receive();
    }
    assert!(sent > 1 << 20, "{sent} bytes are no reason");
}

#[test]
fn c1_output_beyond_a_window_ends_the_sandbox() {
    let mut bench = Bench::ready(false);
    let mut client = bench.connect();
    let number = run_command(&mut bench, &mut client);
    for _ in 0..INITIAL_WINDOW / 4096 {
        bench.guest.output(number, Channel::Stdout, &[b'x'; 4096]);
        bench.settle();
    }
    bench.guest.output(number, Channel::Stdout, b"x");
    assert!(matches!(bench.cause(), Cause::Violation(_)));
}

#[test]
fn usage_counts_clients_commands_and_occupied_memory() {
    let mut bench = Bench::ready(false);
    let mut client = bench.connect();
    run_command(&mut bench, &mut client);
    bench.owner.receive();
    bench.owner.send(CONNECTION, &ToKeeper::Usage);
    bench.settle();
    let messages = bench.sent_to_owner();
    let [FromKeeper::Usage(usage)] = &messages[..] else { panic!("{messages:?}") };
    assert_eq!((usage.clients, usage.commands), (1, 1));
    assert!((1..=RAM).contains(&usage.memory), "{usage:?}");
}

/// A frame of this length, of an Ethernet type for experiments.
fn ethernet_frame(length: usize) -> Vec<u8> {
    let mut frame = vec![0; length];
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
    frame
}

#[test]
fn frames_of_the_gateway_wait_in_the_card_for_the_guests_driver() {
    let mut bench = Bench::ready(false);
    let gateway = bench.gateway.as_mut().unwrap();
    gateway.write_all(&ethernet_frame(60)).unwrap();
    gateway.write_all(&ethernet_frame(1000)).unwrap();
    // Too short for a frame: the gateway's mistake, which harms nothing.
    gateway.write_all(&[0; 5]).unwrap();
    bench.settle();
    let waiting = bench.keeper.devices.with_network(|nic| nic.save().to_guest).unwrap();
    assert_eq!(waiting, [ethernet_frame(60), ethernet_frame(1000)]);
}

#[test]
fn a_gateway_that_exits_takes_the_link_down_and_another_one_brings_it_up() {
    let mut bench = Bench::ready(false);
    let link_up = |bench: &mut Bench| bench.keeper.devices.with_network(|nic| nic.save().link_up).unwrap();
    assert!(link_up(&mut bench));
    // Closing alone would not do while a process that another test starts has a copy.
    bench.gateway.take().unwrap().shutdown(std::net::Shutdown::Both).unwrap();
    bench.settle();
    assert!(!link_up(&mut bench));
    let pair = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::NONBLOCK | SocketFlags::CLOEXEC,
        None,
    );
    let (gateway, link) = pair.unwrap();
    bench.announce(&ToKeeper::Link, &link);
    bench.settle();
    assert!(link_up(&mut bench));
    let mut gateway = UnixStream::from(gateway);
    gateway.write_all(&ethernet_frame(60)).unwrap();
    bench.settle();
    assert_eq!(bench.keeper.devices.with_network(|nic| nic.save().to_guest.len()), Some(1));
    // Nothing comes back: the guest has sent nothing.
    assert!(gateway.read(&mut [0; 100]).is_err());
}
