//! The turns of a connection between a guest and a socket of the host.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use smoltcp::wire::TcpControl;

use super::super::answering::ANSWER_TIME;
use super::super::dialing::DIAL_TIME;
use super::super::open::HALF_OPEN_TIME;
use super::super::reading::READING_TIME;
use super::super::resolving::QUERY_IDLE_TIME;
use super::super::{Connection, NewStacks, TURN, TurnOutcome};
use super::tuple;
use crate::counts::Meter;
use crate::inspect::{AppProtocol, Inspector, ParsedTarget};
use crate::link::Link;
use crate::stack::guest::Guest;
use crate::stack::{Clock, Stack};

const BUFFER_SIZE: usize = 512 * 1024;
const PLENTY: u64 = 1 << 30;
const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: x.example\r\n\r\n";

struct Scene {
    connection: Connection,
    guest: Guest,
    link: Link,
    now: Instant,
    clock: Clock,
}

/// A connected pair: the gateway's socket and the server.
fn sockets() -> (UnixStream, UnixStream) {
    let (socket, server) = UnixStream::pair().unwrap();
    for end in [&socket, &server] {
        end.set_nonblocking(true).unwrap();
        sockopt::set_socket_send_buffer_size(end, 1 << 20).unwrap();
    }
    (socket, server)
}

impl Scene {
    fn new(connection: impl FnOnce(&mut Guest, &mut Link, Clock, Instant) -> Connection) -> Self {
        let (mut guest, mut link) = Guest::new(tuple());
        let (now, clock) = (Instant::now(), Clock::new());
        let connection = connection(&mut guest, &mut link, clock, now);
        Self { connection, guest, link, now, clock }
    }

    /// A connection that is dialed, and its server.
    fn dialing() -> (Self, UnixStream) {
        let (socket, server) = sockets();
        let dialing = |guest: &mut Guest, _: &mut Link, _, now| {
            Connection::dialing(tuple(), socket.into(), guest.syn(), now)
        };
        (Self::new(dialing), server)
    }

    /// A connection that is established on both sides and logged, and its server.
    fn open() -> (Self, UnixStream) {
        let (mut scene, server) = Self::dialing();
        scene.connection.wake();
        scene.establish();
        assert!(matches!(scene.pump(), TurnOutcome::Opened));
        scene.connection.is_logged = true;
        (scene, server)
    }

    /// A connection whose client has sent a byte that begins no ClientHello, so that nothing is inspected.
    fn unread() -> (Self, UnixStream) {
        let (mut scene, mut server) = Self::open();
        scene.send(b"x");
        scene.settle();
        assert_eq!(read(&mut server), b"x");
        scene.connection.meter = Meter::default();
        (scene, server)
    }

    /// A connection whose guest is established, in the state that `stage` makes of a stack.
    fn local(stage: impl FnOnce(Stack, Instant) -> Connection) -> Self {
        let mut scene = Self::new(|guest, link, clock, now| {
            let mut stack = Stack::listen(tuple(), BUFFER_SIZE, clock, link).unwrap();
            stack.on_packet(&guest.syn(), now, link);
            stage(stack, now)
        });
        scene.establish();
        scene
    }

    fn reading() -> Self {
        Self::local(|stack, now| Connection::reading(tuple(), stack, now))
    }

    /// The guest completes the handshake.
    fn establish(&mut self) {
        self.pump();
        self.guest.segments();
        let ack = self.guest.ack();
        self.on_packet(&ack);
    }

    /// Sends the acknowledgement, without which the guest may send no more than the first window.
    fn settle(&mut self) {
        self.pump();
        self.now += Duration::from_millis(20);
        self.pump();
        assert!(!self.guest.segments().is_empty());
    }

    /// Makes the send buffer of the host's socket small.
    fn narrow(&mut self) {
        let socket = self.connection.socket().unwrap();
        sockopt::set_socket_send_buffer_size(socket, 16 * 1024).unwrap();
    }

    fn on_packet(&mut self, packet: &[u8]) {
        self.connection.on_packet(packet, self.now, &mut self.link);
    }

    fn send(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(60_000) {
            let packet = self.guest.packet(TcpControl::Psh, part);
            self.on_packet(&packet);
        }
    }

    fn pump(&mut self) -> TurnOutcome {
        self.pump_within(&mut PLENTY.clone())
    }

    fn pump_within(&mut self, down: &mut u64) -> TurnOutcome {
        let new_stacks = NewStacks { clock: self.clock, buffer_size: BUFFER_SIZE };
        self.connection.pump(self.now, new_stacks, &mut self.link, down)
    }

    /// What the guest received in a turn.
    fn received(&mut self) -> Vec<u8> {
        self.pump();
        self.guest.segments();
        std::mem::take(&mut self.guest.received)
    }

    /// The reason with which the connection ends in a turn.
    #[track_caller]
    fn ended(&mut self) -> String {
        match self.pump() {
            TurnOutcome::Ended(why) => why,
            outcome => unreachable!("{outcome:?}"),
        }
    }

    /// Whether the guest gets a reset.
    fn is_reset(&mut self) -> bool {
        self.connection.send_final(self.now, &mut self.link);
        self.guest.segments().iter().any(|segment| segment.rst())
    }
}

/// What the server received.
fn read(server: &mut UnixStream) -> Vec<u8> {
    let mut bytes = vec![0; 1 << 20];
    let count = server.read(&mut bytes).unwrap();
    bytes.truncate(count);
    bytes
}

/// The number of bytes that the server received, until its socket would block.
fn drain(server: &mut UnixStream) -> usize {
    let mut buffer = vec![0; 1 << 16];
    std::iter::from_fn(|| server.read(&mut buffer).ok().filter(|count| *count > 0)).sum()
}

fn has_nothing(server: &mut UnixStream) -> bool {
    server.read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

#[test]
fn the_guest_gets_no_answer_before_the_server_has_one() {
    let (mut scene, _server) = Scene::dialing();
    assert!(matches!(scene.pump(), TurnOutcome::Idle));
    assert!(scene.guest.segments().is_empty());
    assert_eq!(scene.connection.due(scene.now), Some(scene.now + DIAL_TIME));
    scene.connection.wake();
    assert!(matches!(scene.pump(), TurnOutcome::Idle));
    assert!(scene.guest.segments()[0].syn());
    assert!(!scene.connection.is_dialing());
    let due = scene.connection.due(scene.now).unwrap();
    assert!(due <= scene.now + HALF_OPEN_TIME, "the guest has its time");
}

#[test]
fn an_established_connection_has_no_deadline_and_is_logged_once() {
    let (mut scene, _server) = Scene::open();
    assert!(matches!(scene.pump(), TurnOutcome::Idle));
    scene.now += 2 * DIAL_TIME;
    assert!(matches!(scene.pump(), TurnOutcome::Idle), "it may be silent");
}

#[test]
fn a_guest_that_does_not_complete_the_connection_is_reset() {
    let (mut scene, _server) = Scene::dialing();
    scene.connection.wake();
    scene.pump();
    scene.now += HALF_OPEN_TIME;
    assert_eq!(scene.ended(), "handshake not completed in time");
    assert!(scene.is_reset());
}

#[test]
fn a_turn_ends_when_its_bytes_are_used_up_and_goes_on_later() {
    let (mut scene, mut server) = Scene::unread();
    let (up, down) = (vec![b'u'; 150_000], vec![b'd'; 150_000]);
    server.write_all(&down).unwrap();
    scene.send(&up);
    scene.connection.wake();
    assert!(matches!(scene.pump(), TurnOutcome::More), "there is more to do");
    assert_eq!(scene.connection.meter.bytes(), (150_000, TURN as u64 - 150_000));
    assert!(matches!(scene.pump(), TurnOutcome::Idle));
    assert_eq!(scene.connection.meter.bytes(), (150_000, 150_000));
    assert_eq!(drain(&mut server), up.len());
}

#[test]
fn a_guest_alone_uses_up_a_turn_too() {
    let (mut scene, mut server) = Scene::unread();
    scene.send(&vec![b'u'; TURN + 1000]);
    scene.connection.wake();
    assert!(matches!(scene.pump(), TurnOutcome::More), "there is more to do");
    assert_eq!(scene.connection.meter.bytes(), (TURN as u64, 0));
    assert!(matches!(scene.pump(), TurnOutcome::Idle));
    assert_eq!(drain(&mut server), TURN + 1000);
}

#[test]
fn a_turn_that_its_bytes_just_suffice_for_goes_on_too() {
    let (mut scene, mut server) = Scene::unread();
    server.write_all(&vec![b'd'; TURN / 2]).unwrap();
    scene.send(&vec![b'u'; TURN / 2]);
    scene.connection.wake();
    assert!(matches!(scene.pump(), TurnOutcome::More), "it does not know whether there is more");
    assert!(matches!(scene.pump(), TurnOutcome::Idle));
    assert_eq!(scene.connection.meter.bytes(), (TURN as u64 / 2, TURN as u64 / 2));
}

#[test]
fn no_more_than_the_shared_quota_comes_from_the_server_in_a_turn() {
    let (mut scene, mut server) = Scene::open();
    server.write_all(b"0123456789").unwrap();
    scene.connection.wake();
    let mut share = 4;
    assert!(matches!(scene.pump_within(&mut share), TurnOutcome::More), "there is more to do");
    assert_eq!((share, scene.connection.meter.bytes()), (0, (0, 4)));
    assert!(matches!(scene.pump_within(&mut share), TurnOutcome::More), "it waits for its share");
    assert_eq!(scene.connection.meter.bytes(), (0, 4));
    let mut share = 100;
    assert!(matches!(scene.pump_within(&mut share), TurnOutcome::Idle));
    assert_eq!((share, scene.connection.meter.bytes()), (94, (0, 10)));
    assert_eq!(scene.received(), b"0123456789");
}

#[test]
fn what_the_server_cannot_receive_stays_in_the_guests_stack() {
    let (mut scene, mut server) = Scene::unread();
    scene.narrow();
    let sent = BUFFER_SIZE - 60_000;
    scene.send(&vec![b'u'; sent]);
    scene.connection.wake();
    while matches!(scene.pump(), TurnOutcome::More) {}
    let taken = scene.connection.meter.bytes().0;
    assert!(taken > 0 && taken < sent as u64, "the socket's buffer is full: {taken}");
    assert!(matches!(scene.pump(), TurnOutcome::Idle), "nothing can be moved now");
    assert_eq!(scene.connection.meter.bytes().0, taken);
    let mut received = 0;
    while scene.connection.meter.bytes().0 < sent as u64 {
        received += drain(&mut server);
        scene.connection.wake();
        scene.pump();
    }
    received += drain(&mut server);
    assert_eq!((received, scene.connection.meter.bytes().0), (sent, sent as u64));
}

#[test]
fn a_full_inspector_continues_when_it_has_space_again() {
    let mut scene = Scene::reading();
    let space = Inspector::new(tuple().remote.ip()).space();
    let (head, body) = ("POST / HTTP/1.1\r\nHost: x.example\r\nContent-Length: 300000\r\n\r\n", 3 * space);
    scene.send(head.as_bytes());
    let target = parsed(&mut scene);
    assert!(scene.connection.accept(target), "it is to be dialed");
    let (socket, mut server) = sockets();
    scene.connection.dialed(socket.into(), scene.now);
    scene.settle();
    scene.send(&vec![b'x'; body]);
    scene.connection.wake();
    assert!(matches!(scene.pump(), TurnOutcome::Opened));
    scene.connection.is_logged = true;
    let mut received = drain(&mut server);
    assert!(matches!(scene.pump(), TurnOutcome::More), "more is queued than the inspector had space for");
    received += drain(&mut server);
    while matches!(scene.pump(), TurnOutcome::More) {}
    received += drain(&mut server);
    assert!(matches!(scene.pump(), TurnOutcome::Idle));
    assert_eq!((received, scene.connection.meter.bytes().0), (head.len() + body, (head.len() + body) as u64));
}

#[test]
fn a_full_inspector_waits_for_the_servers_response() {
    let (mut scene, mut server) = Scene::open();
    scene.connection.inspect();
    let socket = b"GET / HTTP/1.1\r\nHost: x.example\r\nUpgrade: websocket\r\n\r\n";
    scene.send(socket);
    let target = parsed(&mut scene);
    scene.connection.accept(target);
    scene.connection.wake();
    scene.settle();
    assert_eq!(read(&mut server), socket);
    let space = Inspector::new(tuple().remote.ip()).space();
    scene.send(&vec![b'x'; 2 * space]);
    assert!(matches!(scene.pump(), TurnOutcome::Idle), "whether the protocol changes is not known");
    assert_eq!(scene.connection.meter.bytes().0, (socket.len() + space) as u64);
    assert!(has_nothing(&mut server));
    server.write_all(b"HTTP/1.1 101 Switching Protocols\r\n\r\n").unwrap();
    scene.connection.wake();
    while scene.connection.meter.bytes().0 < (socket.len() + 2 * space) as u64 {
        scene.pump();
    }
    scene.pump();
    assert_eq!(drain(&mut server), 2 * space);
}

#[track_caller]
fn parsed(scene: &mut Scene) -> ParsedTarget {
    match scene.pump() {
        TurnOutcome::Decide(target) => target,
        outcome => unreachable!("{outcome:?}"),
    }
}

#[test]
fn nothing_is_logged_and_nothing_is_dialed_while_the_client_is_inspected() {
    let mut scene = Scene::reading();
    assert!(
        matches!(scene.pump(), TurnOutcome::Idle),
        "it is not established as far as anybody else is concerned"
    );
    assert!(scene.connection.is_undecided() && scene.connection.has_not_begun());
    let due = scene.connection.due(scene.now).unwrap();
    assert!(due <= scene.now + READING_TIME, "it has to say what it wants");
    scene.send(REQUEST);
    assert!(matches!(parsed(&mut scene), ParsedTarget::Http { .. }));
    assert_eq!(scene.connection.app_protocol(), AppProtocol::Http);
    assert_eq!(scene.connection.meter.bytes().0, REQUEST.len() as u64);
}

#[test]
fn an_accepted_client_may_reset_while_its_server_is_dialed() {
    let mut scene = Scene::reading();
    scene.send(REQUEST);
    let target = parsed(&mut scene);
    scene.connection.accept(target);
    let (socket, mut server) = sockets();
    scene.connection.dialed(socket.into(), scene.now);
    assert!(!scene.connection.is_undecided());
    assert!(matches!(scene.pump(), TurnOutcome::Idle), "it is dialing");
    assert!(has_nothing(&mut server));
    assert_eq!(scene.connection.due(scene.now).map(|due| due <= scene.now + DIAL_TIME), Some(true));
    let reset = scene.guest.packet(TcpControl::Rst, &[]);
    scene.on_packet(&reset);
    assert_eq!(scene.ended(), "reset by the client");
}

#[test]
fn dialing_an_accepted_clients_server_times_out() {
    let mut scene = Scene::reading();
    scene.send(REQUEST);
    let target = parsed(&mut scene);
    scene.connection.accept(target);
    let (socket, _server) = sockets();
    scene.connection.dialed(socket.into(), scene.now);
    scene.now += DIAL_TIME - Duration::from_millis(1);
    assert!(matches!(scene.pump(), TurnOutcome::Idle));
    scene.now += Duration::from_millis(1);
    assert_eq!(scene.ended(), "not connected: timed out");
}

#[test]
fn a_denied_client_is_answered_whatever_else_it_sends() {
    let mut scene = Scene::reading();
    scene.send(REQUEST);
    parsed(&mut scene);
    scene.settle();
    scene.connection.deny(b"no".to_vec(), scene.now);
    assert!(scene.connection.is_local() && !scene.connection.has_not_begun());
    assert!(scene.connection.due(scene.now).is_some_and(|due| due <= scene.now + ANSWER_TIME));
    scene.send(&vec![b'x'; BUFFER_SIZE / 2]);
    assert_eq!(scene.received(), b"no");
    // All of that was discarded, so the same amount fits again.
    scene.send(&vec![b'x'; BUFFER_SIZE / 2]);
    scene.send(&vec![b'x'; BUFFER_SIZE / 4]);
    scene.received();
    let fin = scene.guest.fin();
    scene.on_packet(&fin);
    assert_eq!(scene.ended(), "ended");
}

#[test]
fn a_client_that_is_denied_without_an_answer_is_reset() {
    let mut scene = Scene::reading();
    scene.send(b"SSH-2.0-x\r\n");
    assert_eq!(parsed(&mut scene), ParsedTarget::Other);
    scene.connection.deny(Vec::new(), scene.now);
    assert!(scene.is_reset());
}

#[test]
fn what_was_allowed_before_goes_out_and_what_is_denied_does_not() {
    let (mut scene, mut server) = Scene::open();
    scene.connection.inspect();
    let both = [REQUEST, b"GET /secret HTTP/1.1\r\nHost: x.example\r\n\r\n"].concat();
    scene.send(&both);
    let target = parsed(&mut scene);
    scene.connection.accept(target);
    assert!(has_nothing(&mut server), "it was accepted and not yet sent");
    parsed(&mut scene);
    scene.connection.deny(b"no".to_vec(), scene.now);
    assert_eq!(read(&mut server), REQUEST);
    assert_eq!(read(&mut server), b"", "and the server gets a FIN");
    server.write_all(b"yes").unwrap();
    scene.connection.wake();
    assert_eq!(scene.received(), b"yes", "the server comes first");
    drop(server);
    scene.connection.wake();
    assert_eq!(scene.received(), b"no");
}

#[test]
fn a_query_over_tcp_is_answered_over_tcp() {
    let mut scene = Scene::local(|stack, now| Connection::resolving(tuple(), stack, now));
    scene.send(&[0, 3, 1, 2, 3, 0, 1, 9]);
    for expected in [vec![1, 2, 3], vec![9]] {
        let outcome = scene.pump();
        assert!(matches!(&outcome, TurnOutcome::Query(bytes) if *bytes == expected), "{outcome:?}");
    }
    assert!(matches!(scene.pump(), TurnOutcome::Idle));
    scene.now += QUERY_IDLE_TIME - Duration::from_secs(1);
    scene.connection.on_dns_response(&[7, 7], scene.now);
    assert_eq!(scene.received(), [0, 2, 7, 7]);
    let fin = scene.guest.fin();
    scene.on_packet(&fin);
    assert!(matches!(scene.pump(), TurnOutcome::Idle), "one is still to be answered");
    scene.now += QUERY_IDLE_TIME - Duration::from_secs(1);
    assert!(matches!(scene.pump(), TurnOutcome::Idle), "its time begins anew with each answer");
    scene.connection.on_dns_response(&[8], scene.now);
    scene.pump();
    let closes = scene.guest.segments().iter().any(|segment| segment.fin());
    assert_eq!((scene.guest.received.as_slice(), closes), (&[0, 1, 8][..], true));
}

#[test]
fn r5_a_connection_has_sixteen_queries_at_once() {
    let mut scene = Scene::local(|stack, now| Connection::resolving(tuple(), stack, now));
    scene.send(&[0, 1, 9].repeat(18));
    let mut taken = 0;
    while matches!(scene.pump(), TurnOutcome::Query(_)) {
        taken += 1;
    }
    assert_eq!(taken, 16);
    scene.connection.on_dns_response(&[7], scene.now);
    assert!(matches!(scene.pump(), TurnOutcome::Query(_)), "one more for each answer");
    assert!(matches!(scene.pump(), TurnOutcome::Idle));
}

#[test]
fn a_fin_of_one_side_is_forwarded_to_the_other() {
    let (mut scene, mut server) = Scene::open();
    scene.send(b"last");
    let fin = scene.guest.fin();
    scene.on_packet(&fin);
    assert!(matches!(scene.pump(), TurnOutcome::Idle), "the other way is open");
    assert_eq!((read(&mut server), read(&mut server)), (b"last".to_vec(), Vec::new()));
    server.write_all(b"answer").unwrap();
    drop(server);
    scene.connection.wake();
    assert!(matches!(scene.pump(), TurnOutcome::Idle), "the guest has not taken it");
    assert!(scene.guest.segments().iter().any(|segment| segment.fin()));
    assert_eq!(scene.guest.received, b"answer");
    let ack = scene.guest.ack();
    scene.on_packet(&ack);
    assert_eq!(scene.ended(), "ended");
}

#[test]
fn the_server_gets_all_bytes_before_the_clients_fin() {
    let (mut scene, mut server) = Scene::open();
    scene.narrow();
    let payload = vec![b'x'; 60_000];
    scene.send(&payload);
    let fin = scene.guest.fin();
    scene.on_packet(&fin);
    let mut received = 0;
    while received < payload.len() {
        scene.connection.wake();
        assert!(matches!(scene.pump(), TurnOutcome::Idle | TurnOutcome::More), "it goes on: {received}");
        received += drain(&mut server);
    }
    scene.pump();
    assert_eq!((received, server.read(&mut [0]).unwrap()), (payload.len(), 0));
}

#[test]
fn a_client_may_reset_the_connection_after_its_fin() {
    let (mut scene, mut server) = Scene::open();
    let fin = scene.guest.fin();
    scene.on_packet(&fin);
    assert!(matches!(scene.pump(), TurnOutcome::Idle));
    assert_eq!(read(&mut server), b"", "the server gets a FIN");
    let reset = scene.guest.packet(TcpControl::Rst, &[]);
    scene.on_packet(&reset);
    assert_eq!(scene.ended(), "reset by the client");
}

#[test]
fn a_reset_inbound_connection_says_whether_it_was_established() {
    for (is_logged, expected) in
        [(false, "the sandbox does not listen on this port"), (true, "reset by the sandbox")]
    {
        let (socket, mut server) = sockets();
        let mut scene = Scene::new(|_, link, clock, now| {
            let stack = Stack::connect(tuple(), BUFFER_SIZE, clock, link).unwrap();
            Connection::inbound(tuple(), tuple().remote, socket.into(), stack, now)
        });
        assert!(matches!(scene.pump(), TurnOutcome::Idle));
        assert!(scene.guest.segments()[0].syn());
        if is_logged {
            let answer = scene.guest.syn();
            scene.on_packet(&answer);
            assert!(matches!(scene.pump(), TurnOutcome::Opened));
            scene.connection.is_logged = true;
        }
        let reset = scene.guest.packet(TcpControl::Rst, &[]);
        scene.on_packet(&reset);
        assert_eq!(scene.ended(), expected);
        drop(scene);
        assert_eq!(read(&mut server), b"");
    }
}
