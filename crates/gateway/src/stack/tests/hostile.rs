//! Packets that a guest's kernel would never send, against the stack's own assertions.

use std::time::Duration;

use smoltcp::socket::tcp::State;
use smoltcp::wire::TcpControl;

use super::*;

const PART: usize = 60_000;
/// Longer than the first retransmission timeout of a SYN.
const RETRY: Duration = Duration::from_millis(1100);

/// Sends more than twice what the stack's buffer holds, before it acknowledges anything: first far ahead, so that a
/// gap is left, and then from the beginning.
fn overflow(pair: &mut Pair) {
    let first = pair.guest.next;
    for start in [BUFFER_SIZE + PART, BUFFER_SIZE, BUFFER_SIZE - PART, 0] {
        pair.guest.next = first + start;
        while pair.guest.next - first < 2 * BUFFER_SIZE + PART {
            let part = pair.guest.packet(TcpControl::None, &vec![7; PART]);
            pair.stack.on_packet(&part, pair.now, &mut pair.link);
        }
    }
    pair.guest.next = first;
    let taken = pair.stack.tcp().recv_queue();
    assert!(taken > 0 && taken <= BUFFER_SIZE, "{taken}");
}

/// Fills the link, so that nothing can be sent before the guest has read it.
fn fill(guest: &mut Guest, link: &mut Link) {
    let packet = guest.ack();
    while link.has_space() {
        link.send(EtherType::V4, packet.len(), |place| place.copy_from_slice(&packet));
    }
}

#[test]
fn v15_a_challenge_ack_before_the_connection_is_established_opens_no_window() {
    for tuple in [V4, V6] {
        let mut pair = Pair::waiting(tuple);
        let syn = pair.guest.syn();
        pair.on_packet(&syn);
        pair.guest.segments();
        // Outside of the window, which is answered with an ACK although the connection is not established.
        pair.guest.next = pair.guest.next - 1;
        let probe = pair.guest.ack();
        pair.guest.next += 1;
        pair.on_packet(&probe);
        let challenge = pair.guest.segments();
        assert!(challenge.len() == 1 && challenge[0].ack() && !challenge[0].syn());
        pair.now += RETRY;
        pair.stack.transmit(pair.now, &mut pair.link);
        let again = pair.guest.segments();
        assert!(again.len() == 1 && again[0].syn() && again[0].ack(), "its window is not scaled");
        let ack = pair.guest.ack();
        pair.on_packet(&ack);
        assert_eq!(pair.state(), ESTABLISHED);
        overflow(&mut pair);
    }
}

#[test]
fn v15_no_more_is_taken_than_there_is_buffer_space_for_whatever_window_was_sent() {
    for retries in 0..3 {
        let mut pair = Pair::waiting(V4);
        let syn = pair.guest.syn();
        pair.on_packet(&syn);
        for _ in 0..retries {
            pair.now += RETRY * 4;
            pair.stack.transmit(pair.now, &mut pair.link);
        }
        pair.guest.segments();
        let ack = pair.guest.ack();
        // Before the stack has sent anything with a scaled window.
        pair.stack.on_packet(&ack, pair.now, &mut pair.link);
        overflow(&mut pair);
        // Reading frees buffer space, which is advertised and can be used.
        let taken = pair.stack.tcp().recv(|bytes| (bytes.len(), bytes.len())).unwrap();
        pair.stack.transmit(pair.now, &mut pair.link);
        pair.guest.next += taken;
        let more = pair.guest.packet(TcpControl::None, &[7; 1000]);
        pair.on_packet(&more);
        assert!(pair.stack.tcp().recv_queue() >= 1000, "{retries} {}", pair.stack.tcp().recv_queue());
    }
}

#[test]
fn v15_a_connection_that_was_reset_while_it_opened_does_not_open_again() {
    for distance in [0, 100_000, 1 << 30, i32::MAX] {
        let mut pair = Pair::waiting(V4);
        let syn = pair.guest.syn();
        pair.on_packet(&syn);
        pair.guest.segments();
        let reset = pair.guest.packet(TcpControl::Rst, &[]);
        pair.stack.on_packet(&reset, pair.now, &mut pair.link);
        assert_eq!(pair.state(), RESET);
        // With sequence numbers of another connection, before the first one was removed.
        pair.guest.next.0 = pair.guest.next.0.wrapping_add(distance);
        let acknowledged = pair.guest.acknowledged.take();
        let syn = pair.guest.syn();
        pair.guest.acknowledged = acknowledged;
        pair.stack.on_packet(&syn, pair.now, &mut pair.link);
        let data = pair.guest.packet(TcpControl::None, &[7; 1000]);
        pair.on_packet(&data);
        assert_eq!(pair.state(), RESET, "{distance}");
        assert_eq!(pair.stack.tcp().recv_queue(), 0);
    }
}

#[test]
fn v15_a_guest_cannot_open_a_connection_that_the_stack_has_not_begun_yet() {
    for with_window_scale in [true, false] {
        let (mut guest, mut link) = Guest::new(V4);
        fill(&mut guest, &mut link);
        let stack = Stack::connect(V4, BUFFER_SIZE, Clock::new(), &mut link).unwrap();
        let mut pair = Pair { stack, guest, link, now: Instant::now() };
        pair.stack.transmit(pair.now, &mut pair.link);
        let mut syn = pair.guest.syn();
        if !with_window_scale {
            // Behind the header and the MSS option.
            syn[IPV4_HEADER + TCP_HEADER + 4..].fill(1);
        }
        pair.on_packet(&syn);
        let _ = pair.stack.due(pair.now);
        while !pair.link.has_space() {
            pair.guest.segments();
            pair.link.flush();
        }
        pair.stack.transmit(pair.now, &mut pair.link);
        assert_eq!(pair.state(), OPENING);
        pair.guest.next = TcpSeqNumber(1000);
        pair.guest.segments();
        let answer = pair.guest.syn();
        pair.on_packet(&answer);
        assert_eq!(pair.state(), ESTABLISHED);
        overflow(&mut pair);
    }
}

#[test]
fn v15_both_sides_may_begin_at_once() {
    let (guest, mut link) = Guest::new(V4);
    let stack = Stack::connect(V4, BUFFER_SIZE, Clock::new(), &mut link).unwrap();
    let mut pair = Pair { stack, guest, link, now: Instant::now() };
    pair.stack.transmit(pair.now, &mut pair.link);
    let syn = pair.guest.syn();
    pair.on_packet(&syn);
    assert_eq!(pair.stack.tcp().state(), State::SynReceived);
    pair.guest.segments();
    let ack = pair.guest.ack();
    pair.on_packet(&ack);
    assert_eq!(pair.state(), ESTABLISHED);
    overflow(&mut pair);
}

/// A deterministic pseudo-random generator.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 20).unwrap() % limit
    }

    fn choose<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

/// One random action of the guest, the peer, or the clock.
fn happen(pair: &mut Pair, numbers: &mut Numbers) {
    match numbers.below(16) {
        0 => pair.now += Duration::from_millis(numbers.choose(&[1, 50, 1100, 3000, 31_000])),
        1 => drop(pair.stack.tcp().send_slice(&vec![1; numbers.choose(&[1, 1000, BUFFER_SIZE])])),
        2 => drop(pair.stack.tcp().recv(|bytes| (bytes.len(), ()))),
        3 => drop(pair.stack.tcp().recv(|bytes| (bytes.len() / 2, ()))),
        4 if numbers.below(8) == 0 => pair.stack.tcp().close(),
        5..8 => drop(pair.guest.segments()),
        _ => send_any(pair, numbers),
    }
    pair.link.flush();
    if numbers.below(2) == 0 {
        pair.stack.transmit(pair.now, &mut pair.link);
    }
    let _ = pair.stack.due(pair.now);
}

fn send_any(pair: &mut Pair, numbers: &mut Numbers) {
    use TcpControl::{Fin, None as Plain, Psh, Rst, Syn};
    let (next, acknowledged) = (pair.guest.next, pair.guest.acknowledged);
    let control = numbers.choose(&[Plain, Plain, Plain, Plain, Psh, Fin, Syn, Syn, Rst]);
    if control == Rst && numbers.below(4) > 0 {
        return;
    }
    let distance = numbers.choose(&[0, 0, 0, 1, -1, 1000, -1000, 65_536, i32::MAX, i32::MIN]);
    pair.guest.next.0 = next.0.wrapping_add(distance);
    if control == Syn && numbers.below(2) == 0 {
        pair.guest.acknowledged = None;
    } else if numbers.below(16) == 0 {
        pair.guest.acknowledged = acknowledged.map(|number| number + 1);
    }
    let length = numbers.choose(&[0, 0, 1, 1000, PART]);
    for _ in 0..numbers.choose(&[1, 1, 1, 6]) {
        let packet = pair.guest.packet(control, &vec![7; length]);
        pair.stack.on_packet(&packet, pair.now, &mut pair.link);
    }
    pair.guest.acknowledged = acknowledged;
    if control != Syn && numbers.below(4) > 0 {
        pair.guest.next = next;
    }
}

#[test]
fn v15_no_order_of_segments_and_times_fails_an_assertion() {
    for seed in 1..80 {
        let mut numbers = Numbers(u64::wrapping_mul(seed, 0x9e37_79b9_7f4a_7c15));
        let tuple = numbers.choose(&[V4, V6]);
        let (guest, mut link) = Guest::new(tuple);
        let buffer_size = numbers.choose(&[4096, 70_000, BUFFER_SIZE]);
        let make = numbers.choose(&[Stack::listen, Stack::connect]);
        let stack = make(tuple, buffer_size, Clock::new(), &mut link).unwrap();
        let mut pair = Pair { stack, guest, link, now: Instant::now() };
        for _ in 0..60 {
            happen(&mut pair, &mut numbers);
            let taken = pair.stack.tcp().recv_queue();
            assert!(taken <= buffer_size, "{seed}: {taken} of {buffer_size}");
        }
    }
}
