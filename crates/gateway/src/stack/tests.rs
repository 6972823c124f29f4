//! Stacks and the guests that they serve, in memory.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use bathy_protocol::network::MTU;
use smoltcp::wire::{TcpControl, TcpSeqNumber};

use super::guest::Guest;
use super::{Clock, FourTuple, GUEST_TIMEOUT, IPV4_HEADER, IPV6_HEADER, KEEP_ALIVE, Stack, WindowGuard};
use crate::link::{EtherType, Link};

mod hostile;

const V4: FourTuple = FourTuple {
    guest_port: 30000,
    remote: SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(192, 0, 2, 7)), 443),
};
const V6: FourTuple = FourTuple {
    guest_port: 30000,
    remote: SocketAddr::new(std::net::IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 7)), 443),
};
const BUFFER_SIZE: usize = 256 * 1024;
const TCP_HEADER: usize = 20;

struct Pair {
    stack: Stack,
    guest: Guest,
    link: Link,
    now: Instant,
}

impl Pair {
    /// A stack that listens for the guest's SYN.
    fn waiting(tuple: FourTuple) -> Self {
        let (guest, mut link) = Guest::new(tuple);
        let clock = Clock::new();
        let stack = Stack::listen(tuple, BUFFER_SIZE, clock, &mut link).unwrap();
        Self { stack, guest, link, now: Instant::now() }
    }

    fn established(tuple: FourTuple) -> Self {
        let mut pair = Self::waiting(tuple);
        let syn = pair.guest.syn();
        pair.on_packet(&syn);
        pair.guest.segments();
        let ack = pair.guest.ack();
        pair.on_packet(&ack);
        pair
    }

    fn on_packet(&mut self, packet: &[u8]) {
        self.stack.on_packet(packet, self.now, &mut self.link);
        self.stack.transmit(self.now, &mut self.link);
    }

    /// Whether it is established, reset and closed.
    fn state(&mut self) -> (bool, bool, bool) {
        (self.stack.is_established(), self.stack.is_reset(), self.stack.is_over())
    }
}

const OPENING: (bool, bool, bool) = (false, false, false);
const ESTABLISHED: (bool, bool, bool) = (true, false, false);
const OVER: (bool, bool, bool) = (true, false, true);
const RESET: (bool, bool, bool) = (false, true, true);

#[test]
fn a_guest_opens_a_connection_and_resets_it() {
    for tuple in [V4, V6] {
        let mut pair = Pair::waiting(tuple);
        assert_eq!(pair.state(), RESET, "nothing has come yet");
        let syn = pair.guest.syn();
        pair.on_packet(&syn);
        assert_eq!(pair.state(), OPENING);
        let segments = pair.guest.segments();
        assert_eq!(segments.len(), 1);
        assert!(segments[0].syn() && segments[0].ack());
        assert_eq!((segments[0].src_port(), segments[0].dst_port()), (443, 30000));
        let ack = pair.guest.ack();
        pair.on_packet(&ack);
        assert_eq!(pair.state(), ESTABLISHED);
        assert!(!pair.stack.guest_has_finished());
        let reset = pair.guest.packet(TcpControl::Rst, &[]);
        pair.on_packet(&reset);
        assert_eq!(pair.state(), RESET);
        assert!(!pair.stack.guest_has_finished(), "it did not say so");
    }
}

#[test]
fn a_guest_accepts_a_connection() {
    for tuple in [V4, V6] {
        let (guest, mut link) = Guest::new(tuple);
        let stack = Stack::connect(tuple, BUFFER_SIZE, Clock::new(), &mut link).unwrap();
        let mut pair = Pair { stack, guest, link, now: Instant::now() };
        pair.stack.transmit(pair.now, &mut pair.link);
        assert_eq!(pair.state(), OPENING);
        let segments = pair.guest.segments();
        assert!(segments[0].syn() && !segments[0].ack());
        assert_eq!((segments[0].src_port(), segments[0].dst_port()), (443, 30000));
        let answer = pair.guest.syn();
        pair.on_packet(&answer);
        assert_eq!(pair.state(), ESTABLISHED);
    }
}

#[test]
fn a_guest_has_finished_when_all_that_it_sent_was_taken() {
    let mut pair = Pair::established(V4);
    let segment = pair.guest.packet(TcpControl::Psh, b"last");
    pair.on_packet(&segment);
    let fin = pair.guest.fin();
    pair.on_packet(&fin);
    assert!(!pair.stack.guest_has_finished(), "four bytes wait");
    assert_eq!(pair.stack.tcp().recv(|bytes| (bytes.len(), bytes.to_vec())).unwrap(), b"last");
    assert!(pair.stack.guest_has_finished());
    assert_eq!(pair.state(), ESTABLISHED, "the other way is open");
}

#[test]
fn a_connection_is_over_when_both_sides_have_closed_it() {
    let mut pair = Pair::established(V4);
    pair.stack.tcp().close();
    pair.stack.transmit(pair.now, &mut pair.link);
    assert!(pair.guest.segments().iter().any(|segment| segment.fin()));
    assert_eq!(pair.state(), ESTABLISHED, "the guest has not closed its side");
    let fin = pair.guest.fin();
    pair.on_packet(&fin);
    assert_eq!(pair.state(), OVER);
}

#[test]
fn what_is_sent_fits_the_link_and_is_as_long_as_the_link_takes() {
    for (tuple, header) in [(V4, IPV4_HEADER), (V6, IPV6_HEADER)] {
        let mut pair = Pair::established(tuple);
        let sent: Vec<u8> = (0..BUFFER_SIZE).map(|index| u8::try_from(index % 251).unwrap()).collect();
        assert_eq!(pair.stack.tcp().send_slice(&sent), Ok(BUFFER_SIZE));
        while pair.guest.received.len() < BUFFER_SIZE {
            pair.stack.transmit(pair.now, &mut pair.link);
            pair.link.flush();
            let segments = pair.guest.segments();
            assert!(!segments.is_empty(), "{} of {BUFFER_SIZE} bytes came", pair.guest.received.len());
            let ack = pair.guest.ack();
            pair.on_packet(&ack);
        }
        assert!(pair.guest.received == sent);
        assert_eq!(pair.guest.longest, usize::from(MTU) - header - TCP_HEADER);
    }
}

#[test]
fn nothing_is_sent_while_the_keeper_does_not_read() {
    let mut pair = Pair::established(V4);
    // The link's own buffer, and then one queued frame.
    while pair.link.has_space() {
        pair.link.send(EtherType::V4, 1000, |_| {});
    }
    let sent = pair.link.sent;
    pair.stack.tcp().send_slice(b"later").unwrap();
    pair.stack.transmit(pair.now, &mut pair.link);
    assert_eq!((pair.link.sent, pair.link.dropped), (sent, 0));
}

#[test]
fn a_guests_own_checksums_do_not_matter() {
    let mut pair = Pair::waiting(V4);
    let mut syn = pair.guest.syn();
    // The checksums of the IP header and of the segment.
    for at in [10, IPV4_HEADER + 16] {
        syn[at] ^= 0xff;
    }
    pair.on_packet(&syn);
    assert_eq!(pair.guest.segments().len(), 1);
}

#[test]
fn an_idle_guest_is_probed_and_reset_without_an_answer() {
    let mut pair = Pair::established(V4);
    let due = pair.stack.due(pair.now).unwrap();
    assert!(due > pair.now && due <= pair.now + KEEP_ALIVE, "{:?}", due - pair.now);
    pair.now += KEEP_ALIVE + Duration::from_millis(1);
    pair.stack.transmit(pair.now, &mut pair.link);
    assert_eq!(pair.guest.segments().len(), 1, "it is probed");
    let ack = pair.guest.ack();
    pair.on_packet(&ack);
    pair.now += KEEP_ALIVE + Duration::from_millis(1);
    pair.stack.transmit(pair.now, &mut pair.link);
    assert_eq!(pair.guest.segments().len(), 1, "it is probed again");
    assert_eq!(pair.state(), ESTABLISHED, "a guest that answers may be silent for as long as it likes");
    pair.now += GUEST_TIMEOUT;
    pair.stack.transmit(pair.now, &mut pair.link);
    assert_eq!(pair.state(), RESET);
}

#[test]
fn times_of_the_stack_are_times_of_the_clock() {
    let clock = Clock::new();
    for time in [Duration::ZERO, Duration::from_micros(1), Duration::from_secs(3)] {
        let now = clock.start + time;
        assert_eq!(clock.outside(clock.stack(now)), now);
    }
    assert_eq!(
        clock.outside(clock.stack(clock.start - Duration::from_secs(1))),
        clock.start,
        "never before it"
    );
}

/// A segment with this sequence number and so many bytes of payload.
fn segment(tuple: FourTuple, first: i32, length: usize) -> Vec<u8> {
    let (mut guest, _) = Guest::new(tuple);
    (guest.next, guest.acknowledged) = (TcpSeqNumber(first), Some(TcpSeqNumber(1)));
    guest.packet(TcpControl::None, &vec![7; length])
}

#[test]
fn v9_only_what_fits_into_the_buffer_is_admitted() {
    let half = i32::MAX;
    for (window_end, first, length, expected) in [
        (1000, 990, 10, true),
        (1000, 990, 11, false),
        (1000, 1000, 1, false),
        (1000, 1000, 0, true),
        (1000, 50_000, 0, true),
        (1000, -100, 90, true),
        (5, -5, 10, true),
        (5, -5, 11, false),
        (half.cast_unsigned(), -1, 1, true),
        (half.cast_unsigned(), -2, 1, false),
    ] {
        for (tuple, kind) in [(V4, EtherType::V4), (V6, EtherType::V6)] {
            let packet = segment(tuple, first, length);
            let row = (window_end, first, length);
            let guard = WindowGuard { window_end: Some(window_end), ..WindowGuard::default() };
            assert_eq!(guard.admits(kind, &packet), expected, "{row:?}");
            let nothing = WindowGuard::default();
            assert_eq!(nothing.admits(kind, &packet), length == 0, "before a window was sent: {row:?}");
        }
    }
}

#[test]
fn v9_the_windows_end_is_the_last_acknowledged_number_and_the_space_behind_it() {
    let (mut guest, _) = Guest::new(V4);
    let mut guard = WindowGuard::default();
    let mut edge_after = |packet: &[u8], space: usize| {
        guard.sent(EtherType::V4, packet);
        guard.update_window(space);
        guard.window_end
    };
    assert_eq!(edge_after(&guest.syn(), 500), None, "one that acknowledges nothing has no edge");
    guest.acknowledged = Some(TcpSeqNumber(7000));
    assert_eq!(edge_after(&guest.syn(), 500), Some(7500), "whatever window it names");
    for no_window in [&guest.packet(TcpControl::Rst, &[]), &[0; 30][..]] {
        assert_eq!(edge_after(no_window, 900), Some(7500), "nothing was acknowledged");
    }
    guest.acknowledged = Some(TcpSeqNumber(7400));
    assert_eq!(edge_after(&guest.ack(), 100), Some(7500));
    assert_eq!(edge_after(&guest.ack(), 300), Some(7700));
    guest.acknowledged = Some(TcpSeqNumber(-100));
    assert_eq!(edge_after(&guest.ack(), 300), Some(200), "numbers begin again");
}

#[test]
fn v9_what_goes_beyond_the_buffer_is_dropped_before_the_stack_sees_it() {
    let mut pair = Pair::waiting(V4);
    let syn = pair.guest.syn();
    pair.on_packet(&syn);
    pair.guest.segments();
    let ack = pair.guest.ack();
    pair.stack.on_packet(&ack, pair.now, &mut pair.link);
    // Before the stack has sent anything else.
    let half = vec![7; usize::from(u16::MAX) / 2];
    for _ in 0..2 * BUFFER_SIZE / half.len() {
        let packet = pair.guest.packet(TcpControl::Psh, &half);
        pair.stack.on_packet(&packet, pair.now, &mut pair.link);
    }
    assert_eq!(pair.stack.tcp().recv_queue(), BUFFER_SIZE / half.len() * half.len());
}
