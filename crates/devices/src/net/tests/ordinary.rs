//! What a driver that behaves like Linux finds and gets.

use super::*;

const LINK_UP: u8 = 1;
const DATA_VALID: u8 = 2;

#[test]
fn driver_finds_what_the_device_is() {
    let net = Net::new(ADDRESS);
    assert_eq!(net.device_type(), 1);
    assert_eq!(net.queue_count(), 2);
    let expected = CSUM | GUEST_CSUM | MTU | MAC | TSO4 | TSO6 | MRG_RXBUF | STATUS | EVENT_IDX | VERSION_1;
    assert_eq!(net.features(), expected);
    let mut space = [0xee; 16];
    net.read_config(0, &mut space);
    assert_eq!(space, [2, 0, 0, 0, 0, 9, LINK_UP, 0, 0, 0, 0xf0, 0xff, 0, 0, 0, 0]);
}

#[test]
fn frame_reaches_the_owner_without_its_header_and_is_counted() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    let sent = frame(60, 1);
    bench.push(PLAIN, &sent);

    assert!(bench.process(TX_QUEUE).unwrap().notify);

    assert_eq!(bench.net.frame(), Some(&sent[..]));
    assert_eq!(bench.tx.take_used(), [(0, 0)]);
    let counters = bench.net.counters();
    assert_eq!((counters.from_guest.frames, counters.from_guest.bytes), (1, 60));
    bench.net.drop_frame();
    assert_eq!(bench.net.frame(), None);
}

#[test]
fn owner_that_takes_a_frame_makes_no_work_for_a_queue_that_did_not_stall() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.send(PLAIN, &frame(60, 1));
    bench.net.drop_frame();
    assert_eq!(bench.net.follow_up(), None);
}

#[test]
fn frame_is_put_together_however_it_lies_in_memory() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    let whole = frame(200, 1);
    bench.write(FRAME, &[&PLAIN[..], &whole].concat());
    // The header in the same buffer, and the header itself in two.
    bench.tx.push(&[readable(FRAME, 212)]);
    bench.tx.push(&[readable(FRAME, 5), readable(FRAME + 5, 30), readable(0, 0), readable(FRAME + 35, 177)]);
    bench.process(TX_QUEUE).unwrap();
    for _ in 0..2 {
        assert_eq!(bench.net.frame(), Some(&whole[..]));
        bench.net.drop_frame();
    }
}

#[test]
fn frame_reaches_the_guest_behind_a_header_that_says_its_checksum_is_good() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.post(&[1526]);
    let given = frame(60, 7);

    assert!(bench.offer(&given).notify);

    assert_eq!(bench.rx.take_used(), [(0, 72)]);
    assert_eq!(bench.read(BUFFERS, 12), [DATA_VALID, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
    assert_eq!(bench.read(BUFFERS + 12, 61), [&given[..], &[0]].concat());
    let counters = bench.net.counters();
    assert_eq!((counters.to_guest.frames, counters.to_guest.bytes), (1, 60));
}

#[test]
fn driver_that_did_not_ask_about_checksums_is_not_told() {
    let ram = ram();
    let mut bench = Bench::without(&ram, GUEST_CSUM);
    bench.post(&[1526]);
    bench.offer(&frame(60, 7));
    assert_eq!(bench.read(BUFFERS, 12), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
}

#[test]
fn longest_frame_is_spread_over_the_buffers_that_linux_posts() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.post(&[1536; 256]);
    let given = frame(MAX_FRAME_BYTES, 3);

    bench.offer(&given);

    let used = bench.rx.take_used();
    let total: u32 = used.iter().map(|(_, written)| written).sum();
    assert_eq!(total, length(&given) + HEADER_BYTES);
    assert_eq!(used.len(), 43);
    assert!(used.iter().zip(0..).all(|((head, _), place)| *head == place));
    assert_eq!(bench.read(BUFFERS + 10, 2), [43, 0]);
    assert!(bench.read(BUFFERS + 12, given.len()) == given);
    // The next one goes on where this one ended.
    bench.offer(&frame(60, 1));
    assert_eq!(bench.rx.take_used(), [(43, 72)]);
}

#[test]
fn driver_without_mergeable_buffers_gets_a_frame_in_one_chain() {
    let ram = ram();
    let mut bench = Bench::without(&ram, MRG_RXBUF);
    let given = frame(MAX_FRAME_BYTES, 3);
    // As Linux does it: the header by itself, and then page by page.
    let mut parts = vec![writable(BUFFERS, 12)];
    parts.extend((0..17).map(|page| writable(BUFFERS + 0x1000 * (page + 1), 0x1000)));
    bench.rx.push(&parts);

    bench.offer(&given);

    assert_eq!(bench.rx.take_used(), [(0, length(&given) + HEADER_BYTES)]);
    assert_eq!(bench.read(BUFFERS + 10, 2), [1, 0]);
    assert!(bench.read(BUFFERS + 0x1000, given.len()) == given);
}

#[test]
fn many_frames_are_delivered_with_one_interrupt() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.post(&[128; 100]);
    for seed in 0..50 {
        bench.net.offer(&frame(100, seed)).unwrap();
    }
    let first = bench.net.follow_up();
    assert_eq!(first, Some(RX_QUEUE));
    assert!(bench.process(RX_QUEUE).unwrap().notify);
    assert_eq!(bench.rx.take_used().len(), 50);
    assert_eq!(bench.net.follow_up(), None);
}

#[test]
fn interrupt_comes_when_the_driver_wants_it_even_in_the_middle_of_a_frame() {
    let ram = ram();
    let features = Net::new(ADDRESS).features();
    let mut bench = Bench::with(&ram, Net::new(ADDRESS), features);
    bench.post(&[64; 64]);
    // Frames of four buffers each. The driver wants to be told of the second buffer of the second frame, and of no other.
    bench.rx.set_used_event(5);
    let interrupts = [1, 2, 3, 4].map(|seed| bench.offer(&frame(200, seed)).notify);
    assert_eq!(interrupts, [false, true, false, false]);
    assert_eq!(bench.rx.used_index(), 16);
}

#[test]
fn link_that_is_down_loses_everything_and_gives_the_guest_its_buffers_back() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.send(PLAIN, &frame(60, 1));
    assert_eq!(bench.tx.take_used().len(), 1);
    bench.net.offer(&frame(60, 2)).unwrap();
    bench.net.set_link(false);
    let mut status = [0xee; 2];
    bench.net.read_config(6, &mut status);
    assert_eq!(status, [0, 0]);
    assert!(!bench.net.link_up());
    assert_eq!(bench.net.frame(), None);

    bench.post(&[1526]);
    bench.offer(&frame(60, 3));
    assert!(!bench.passes(PLAIN, &frame(60, 4)));

    assert_eq!(bench.rx.used_index(), 0);
    assert_eq!(bench.net.counters().dropped.link_down, 4);
    bench.net.set_link(true);
    assert!(bench.net.link_up());
    bench.offer(&frame(60, 5));
    assert_eq!(bench.rx.take_used(), [(0, 72)]);
}

#[test]
fn link_that_goes_down_lets_a_stalled_queue_go_on() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    for _ in 0..10 {
        bench.push(PLAIN, &frame(MAX_FRAME_BYTES, 1));
    }
    bench.process(TX_QUEUE).unwrap();
    assert_eq!(bench.tx.used_index(), 8);
    bench.net.set_link(false);
    assert!(bench.service().notify);
    assert_eq!(bench.tx.used_index(), 10);
}

#[test]
fn reset_forgets_frames_and_features_and_keeps_what_the_host_set() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.send(PLAIN, &frame(60, 1));
    bench.net.offer(&frame(60, 2)).unwrap();
    let counters = bench.net.counters();
    bench.net.reset();
    assert_eq!(bench.net.frame(), None);
    assert_eq!(bench.net.follow_up(), None);
    let state = bench.net.save();
    assert_eq!((state.acked_features, state.mac, state.link_up), (0, ADDRESS, true));
    assert!(state.to_guest.is_empty());
    assert_eq!(bench.net.counters(), counters);
}

#[test]
fn state_survives_with_its_frames_in_order() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    for seed in 0..3 {
        bench.send(PLAIN, &frame(60, seed));
        bench.net.offer(&frame(MAX_FRAME_BYTES, seed)).unwrap();
    }
    bench.net.set_link(true);
    let state = bench.net.save();
    let json = serde_json::to_string(&state).unwrap();
    let state: NetState = serde_json::from_str(&json).unwrap();
    let mut restored = Net::restore(&state).unwrap();
    assert_eq!(restored.save(), state);
    assert_eq!(restored.frame(), Some(&frame(60, 0)[..]));
    assert_eq!(restored.follow_up(), Some(TX_QUEUE));
    assert_eq!(restored.follow_up(), Some(RX_QUEUE));
}
