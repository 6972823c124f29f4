//! What a driver that breaks the rules of its rings gets.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::*;
use crate::ring::RingError;

const F_NEXT: u16 = 1;
const F_INDIRECT: u16 = 4;
/// The longest that a race may take to happen on a busy host.
const TOO_LONG: Duration = Duration::from_secs(120);

/// Writes the same false values to each queue, while the device reads it.
fn in_both_queues(expected: impl Fn(&RingError) -> bool, lie: impl Fn(&mut Driver<'_>)) {
    let ram = ram();
    for queue in [RX_QUEUE, TX_QUEUE] {
        let mut bench = Bench::new(&ram);
        bench.net.offer(&frame(60, 1)).unwrap();
        lie(if queue == RX_QUEUE { &mut bench.rx } else { &mut bench.tx });
        let error = bench.stops_once(queue);
        assert!(matches!(&error, DeviceError::Ring(ring) if expected(ring)), "{queue}: {error:?}");
        assert_eq!(bench.net.frame(), None);
        assert_eq!((bench.rx.used_index(), bench.tx.used_index()), (0, 0));
    }
}

#[test]
fn v1_chains_that_do_not_end_are_bounded() {
    in_both_queues(
        |error| matches!(error, RingError::Endless),
        |driver| {
            driver.write_descriptor(0, readable(FRAME, 16), F_NEXT, 1);
            driver.write_descriptor(1, readable(FRAME, 16), F_NEXT, 0);
            driver.publish(0);
        },
    );
    in_both_queues(
        |error| matches!(error, RingError::Endless),
        |driver| {
            driver.write_descriptor(3, writable(FRAME, 16), F_NEXT, 3);
            driver.publish(3);
        },
    );
}

#[test]
fn v2_available_index_too_far_ahead_stops_the_queue_once() {
    in_both_queues(|error| matches!(error, RingError::Queue(_)), |driver| driver.set_available(SIZE + 1));
}

#[test]
fn v3_buffers_outside_memory_are_refused() {
    for (address, length) in
        [(RAM, 100), (RAM - 99, 100), (u64::MAX - 99, 100), (u64::MAX - 5, 100), (FRAME, u32::MAX)]
    {
        in_both_queues(
            |error| matches!(error, RingError::Unmapped { .. }),
            |driver| {
                driver.push(&[writable(address, length)]);
            },
        );
    }
}

#[test]
fn v4_indirect_descriptors_and_wrong_order_are_refused() {
    in_both_queues(
        |error| matches!(error, RingError::Indirect),
        |driver| {
            driver.write_descriptor(0, readable(FRAME, 16), F_INDIRECT, 0);
            driver.publish(0);
        },
    );
    in_both_queues(
        |error| matches!(error, RingError::Order),
        |driver| {
            driver.push(&[writable(FRAME, 100), readable(FRAME, 100)]);
        },
    );
}

#[test]
fn v4_frame_that_could_be_written_stops_the_device() {
    let ram = ram();
    for parts in [
        vec![writable(FRAME, 100)],
        vec![readable(FRAME, 60), writable(FRAME, 1)],
        vec![readable(FRAME, 12), writable(FRAME, 60)],
    ] {
        let mut bench = Bench::new(&ram);
        bench.tx.push(&parts);
        let error = bench.stops_once(TX_QUEUE);
        assert!(matches!(error, DeviceError::Net(NetError::WritableFrame(_))), "{error:?}");
        assert_eq!((bench.net.frame(), bench.tx.used_index()), (None, 0));
    }
}

#[test]
fn v4_buffer_that_cannot_be_written_stops_the_device() {
    let ram = ram();
    for parts in [vec![readable(BUFFERS, 1526)], vec![readable(BUFFERS, 1), writable(BUFFERS, 1526)]] {
        let mut bench = Bench::new(&ram);
        bench.net.offer(&frame(60, 1)).unwrap();
        bench.rx.push(&parts);
        let error = bench.stops_once(RX_QUEUE);
        assert!(matches!(error, DeviceError::Net(NetError::ReadableBuffer(_))), "{error:?}");
        assert_eq!(bench.rx.used_index(), 0);
    }
}

#[test]
fn v9_chain_without_a_whole_header_stops_the_device() {
    let ram = ram();
    for length in [0, 1, 10, 11] {
        let mut bench = Bench::new(&ram);
        bench.tx.push(&[readable(HEADER, length)]);
        let error = bench.stops_once(TX_QUEUE);
        assert!(
            matches!(error, DeviceError::Net(NetError::ShortHeader(seen)) if seen == length),
            "{error:?}"
        );
    }
}

#[test]
fn v9_buffer_too_small_for_a_header_stops_the_device() {
    let ram = ram();
    for length in [0, 1, 11] {
        let mut bench = Bench::new(&ram);
        bench.net.offer(&frame(60, 1)).unwrap();
        bench.rx.push(&[writable(BUFFERS, length)]);
        let error = bench.stops_once(RX_QUEUE);
        assert!(
            matches!(error, DeviceError::Net(NetError::SmallBuffer(seen)) if seen == length),
            "{error:?}"
        );
    }
    // A later buffer may be of any length but none.
    let mut bench = Bench::new(&ram);
    bench.net.offer(&frame(60, 1)).unwrap();
    bench.post(&[12, 1, 0]);
    assert!(matches!(bench.stops_once(RX_QUEUE), DeviceError::Net(NetError::SmallBuffer(0))));
}

#[test]
fn v9_frame_that_no_buffers_can_hold_is_dropped_and_the_next_one_delivered() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    // Every entry of the queue, with one byte less than the frame needs.
    bench.post(&[&[16; 255][..], &[15]].concat());
    bench.offer(&frame(256 * 16 - 12, 1));
    assert_eq!(bench.rx.used_index(), 0);
    assert_eq!(bench.net.counters().dropped.no_room, 1);
    bench.offer(&frame(256 * 16 - 13, 2));
    assert_eq!(bench.rx.take_used().len(), 256);
}

#[test]
fn v9_frame_longer_than_a_buffer_is_dropped_if_buffers_are_not_mergeable() {
    let ram = ram();
    let mut bench = Bench::without(&ram, MRG_RXBUF);
    bench.post(&[1526; 2]);
    bench.offer(&frame(1515, 1));
    assert_eq!(bench.rx.used_index(), 0);
    assert_eq!(bench.net.counters().dropped.no_room, 1);
    assert_eq!(bench.read(BUFFERS, 1526), [0; 1526]);
    bench.offer(&frame(1514, 2));
    assert_eq!(bench.rx.take_used(), [(0, 1526)]);
}

#[test]
fn v9_frames_that_no_buffer_can_hold_cost_a_bounded_round() {
    let ram = ram();
    let mut bench = Bench::without(&ram, MRG_RXBUF);
    bench.post(&[100]);
    for _ in 0..600 {
        bench.net.offer(&frame(200, 1)).unwrap();
    }
    assert!(bench.process(RX_QUEUE).unwrap().more);
    assert_eq!(bench.net.counters().dropped.no_room, 256);
}

#[test]
fn v9_flood_from_the_guest_stays_in_its_own_queue() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    for _ in 0..100 {
        bench.push(PLAIN, &frame(MAX_FRAME_BYTES, 1));
    }
    for _ in 0..1000 {
        bench.process(TX_QUEUE).unwrap();
    }
    assert_eq!(bench.tx.used_index(), 8, "what fits into the buffer");
    assert_eq!(bench.net.counters().from_guest.bytes, 8 * 65534);
    // What did not fit is taken when there is room, and not before.
    assert_eq!(bench.net.follow_up(), None);
    bench.net.drop_frame();
    assert_eq!(bench.net.follow_up(), Some(TX_QUEUE));
    bench.process(TX_QUEUE).unwrap();
    assert_eq!(bench.tx.used_index(), 9);
}

#[test]
fn v9_flood_of_tiny_frames_is_bounded_by_their_number() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    for _ in 0..12 {
        for _ in 0..100 {
            bench.push(PLAIN, &frame(14, 1));
        }
        bench.process(TX_QUEUE).unwrap();
    }
    assert_eq!(bench.net.save().from_guest.len(), BUFFER_FRAMES);
    assert_eq!(usize::from(bench.tx.used_index()), BUFFER_FRAMES);
}

#[test]
fn v5_same_buffers_in_two_chains_are_served_twice() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.push(PLAIN, &frame(60, 1));
    bench.tx.publish(0);
    bench.rx.push(&[writable(BUFFERS, 1526)]);
    bench.rx.publish(0);
    bench.process(TX_QUEUE).unwrap();
    assert_eq!(bench.tx.take_used(), [(0, 0), (0, 0)]);
    assert_eq!(bench.net.save().from_guest.len(), 2);
    bench.offer(&frame(60, 1));
    bench.offer(&frame(70, 2));
    assert_eq!(bench.rx.take_used(), [(0, 72), (0, 82)]);
}

#[test]
fn v5_frames_written_over_the_rings_harm_only_the_guest() {
    let ram = ram();
    for place in 0..3 {
        let mut bench = Bench::new(&ram);
        let target = [bench.rx.descriptor_table(), bench.rx.available_ring(), bench.rx.used_ring()][place];
        for _ in 0..100 {
            bench.rx.push(&[writable(target, 1526)]);
        }
        for seed in 0..100 {
            let _ = bench.net.offer(&frame(1500, seed));
        }
        // The device overwrites what it has yet to read: any outcome but a crash will do, and one error at most.
        if bench.process(RX_QUEUE).is_err() {
            assert_eq!(bench.process(RX_QUEUE).unwrap(), Outcome::default());
        }
        assert!(bench.net.counters().to_guest.frames <= 100);
    }
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn v7_header_and_lengths_that_change_all_the_time_never_let_a_wrong_frame_through() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    let (stop, mem, table) = (AtomicBool::new(false), bench.mem, bench.tx.descriptor_table());
    let lengths = [60, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1, MAX_LARGE_FRAME_BYTES, 100_000];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for bytes in lengths.into_iter().cycle() {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                // The header says, or does not say, what makes this length right.
                let large = [u8::from(bytes > MAX_FRAME_BYTES); 2];
                mem.write_slice(&large, GuestAddress(HEADER)).unwrap();
                let bytes = u32::try_from(bytes).unwrap();
                mem.write_obj(bytes.to_le(), GuestAddress(table + 16 + 8)).unwrap();
            }
        });
        // However this ends, the other thread ends too.
        let _stop = StopOnDrop(&stop);
        bench.push(PLAIN, &frame(60, 1));
        let begun = Instant::now();
        let happened = |bench: &Bench<'_>| {
            let counters = bench.net.counters();
            counters.from_guest.frames > 1000 && counters.dropped.long > 100
        };
        while !happened(&bench) {
            assert!(begun.elapsed() < TOO_LONG, "the race did not happen: {:?}", bench.net.counters());
            bench.process(TX_QUEUE).unwrap();
            // The copied bytes are the checked ones, to the last byte.
            let seen = bench.net.frame().map(<[u8]>::len);
            assert!(seen.is_none_or(|seen| lengths[..4].contains(&seen)), "{seen:?} bytes");
            bench.net.drop_frame();
            bench.tx.publish(0);
        }
    });
}

#[test]
fn there_is_no_third_queue() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    let outcome = bench.net.process(2, &mut bench.queues[0], ram.memory());
    assert!(matches!(outcome, Err(DeviceError::NoSuchQueue(2))));
}
