//! What a driver that breaks the rules gets.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::*;
use crate::ring::RingError;

const F_NEXT: u16 = 1;
const F_INDIRECT: u16 = 4;

/// Publishes a chain that was written by hand and returns what the device says about it.
fn ring_error(bench: &mut Bench<'_>) -> RingError {
    bench.driver.publish(0);
    let error = bench.stops_once();
    assert_eq!(bench.driver.used_index(), 0);
    let DeviceError::Ring(error) = error else { panic!("{error:?} is not about the ring") };
    error
}

#[test]
fn v1_descriptor_loop_is_bounded() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.driver.write_descriptor(0, readable(HEADER, 16), F_NEXT, 1);
    bench.driver.write_descriptor(1, readable(DATA, 16), F_NEXT, 0);
    assert!(matches!(ring_error(&mut bench), RingError::Endless));
}

#[test]
fn v1_descriptor_that_is_its_own_next_is_bounded() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.driver.write_descriptor(0, readable(HEADER, 0), F_NEXT, 0);
    assert!(matches!(ring_error(&mut bench), RingError::Endless));
}

#[test]
fn v1_next_and_head_outside_the_table_are_refused() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.driver.write_descriptor(0, readable(HEADER, 16), F_NEXT, 256);
    assert!(matches!(ring_error(&mut bench), RingError::NoSuchDescriptor(256)));

    let mut bench = Bench::new(&ram);
    bench.driver.publish(u16::MAX);
    let error = bench.stops_once();
    assert!(matches!(error, DeviceError::Ring(RingError::NoSuchDescriptor(u16::MAX))));
}

#[test]
fn v2_available_index_too_far_ahead_stops_the_queue_once() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.driver.set_available(257);
    assert!(matches!(bench.stops_once(), DeviceError::Ring(RingError::Queue(_))));

    let mut bench = Bench::new(&ram);
    bench.push(FLUSH, 0, &[]);
    bench.process().unwrap();
    // Moving the index back is the same as moving it almost all the way round.
    bench.driver.set_available(0);
    assert!(matches!(bench.stops_once(), DeviceError::Ring(RingError::Queue(_))));
}

#[test]
fn v2_full_queue_and_wrapping_index_are_served() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    virtio_queue::QueueT::set_next_avail(&mut bench.queue, u16::MAX - 1);
    bench.driver.set_available(u16::MAX - 1);
    for _ in 0..4 {
        bench.push(FLUSH, 0, &[]);
    }
    bench.process().unwrap();
    assert_eq!(bench.driver.used_index(), 4);
}

#[test]
fn v3_buffers_outside_memory_are_refused() {
    let ram = ram();
    for (address, length) in [
        (RAM, 512),            // just behind the end
        (RAM - 511, 512),      // across the end
        (u64::MAX - 511, 512), // ends at the very end of the address space
        (u64::MAX - 5, 512),   // wraps around
        (1 << 40, 512),        // far away
        (DATA, u32::MAX),      // longer than memory
    ] {
        let mut bench = Bench::new(&ram);
        bench.push(IN, 0, &[writable(address, length)]);
        let error = bench.stops_once();
        assert!(matches!(error, DeviceError::Ring(RingError::Unmapped { .. })), "{address:#x}: {error:?}");
    }
}

#[test]
fn v3_chain_of_more_than_4_gib_is_refused() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    // The same four megabytes over and over, more often than fits into 32 bits; too many for a queue of 256.
    let ram = GuestRam::create(32 << 20).unwrap();
    bench.mem = ram.memory();
    bench.driver = Driver::new(ram.memory(), QUEUE, 256);
    bench.queue = bench.driver.device_queue();
    bench.push(IN, 0, &vec![writable(1 << 20, 31 << 20); 140]);
    assert!(matches!(bench.stops_once(), DeviceError::Ring(RingError::TooLong)));
}

#[test]
fn v3_empty_buffers_are_skipped_wherever_they_point() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    let answer = bench.request(IN, 0, &[writable(u64::MAX, 0), writable(DATA, 512), writable(0, 0)]);
    assert_eq!(answer, (OK, 513));
}

#[test]
fn v4_status_that_cannot_be_written_stops_the_device() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    let header = bench.header(FLUSH, 0);
    bench.driver.push(&[header, readable(STATUS, 1)]);
    assert!(matches!(bench.stops_once(), DeviceError::Block(BlockError::NoStatus)));
    assert_eq!(bench.guest_bytes(STATUS, 1), [UNANSWERED]);
}

#[test]
fn v4_header_that_is_writable_stops_the_device() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.header(FLUSH, 0);
    bench.driver.push(&[writable(HEADER, 16), writable(STATUS, 1)]);
    assert!(matches!(bench.stops_once(), DeviceError::Block(BlockError::NoHeader(0))));
}

#[test]
fn v4_short_header_stops_the_device() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.header(FLUSH, 0);
    bench.driver.push(&[readable(HEADER, 15), writable(STATUS, 1)]);
    assert!(matches!(bench.stops_once(), DeviceError::Block(BlockError::NoHeader(15))));
}

#[test]
fn v4_readable_buffer_after_a_writable_one_is_refused() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.push(IN, 0, &[writable(DATA, 512), readable(DATA, 512)]);
    assert!(matches!(bench.stops_once(), DeviceError::Ring(RingError::Order)));
}

#[test]
fn v4_indirect_descriptors_are_refused_in_any_shape() {
    let ram = ram();
    for length in [0, 16, 17, 4096] {
        let mut bench = Bench::new(&ram);
        bench.driver.write_descriptor(0, readable(DATA, length), F_INDIRECT, 0);
        assert!(matches!(ring_error(&mut bench), RingError::Indirect));
    }
}

#[test]
fn v5_used_ring_over_the_descriptor_table_hurts_only_the_guest() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    let table = GuestAddress(bench.driver.descriptor_table());
    bench.queue.try_set_used_ring_address(table).unwrap();
    for _ in 0..8 {
        bench.push(IN, 0, &[writable(DATA, 512)]);
    }
    // The device's own answers overwrite descriptors that it has yet to read; any outcome but a crash will do.
    let _ = bench.process();
    assert_eq!(bench.file_bytes(), pattern());
}

#[test]
fn v5_same_buffer_in_two_chains_is_served_twice() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.push(IN, 1, &[writable(DATA, 512)]);
    bench.driver.publish(0);
    bench.process().unwrap();
    assert_eq!(bench.driver.take_used(), [(0, 513), (0, 513)]);
}

#[test]
fn v7_length_changed_between_check_and_use_never_passes_the_disks_end() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.file.set_len(512).unwrap();
    bench.block = Block::new(bench.file.try_clone().unwrap(), BlockConfig::default()).unwrap();
    // One thread of the guest makes its buffer as long as the disk and twice as long, in turn.
    let done = Arc::new(AtomicBool::new(false));
    let flipper = {
        let (done, mem) = (Arc::clone(&done), ram.memory().clone());
        let length = GuestAddress(bench.driver.descriptor_table() + 16 + 8);
        std::thread::spawn(move || {
            while !done.load(Ordering::Relaxed) {
                mem.store(512_u32, length, Ordering::Relaxed).unwrap();
                mem.store(1024_u32, length, Ordering::Relaxed).unwrap();
            }
        })
    };
    let (mut accepted, mut refused) = (0, 0);
    let deadline = Instant::now() + Duration::from_secs(20);
    bench.push(OUT, 0, &[readable(DATA, 512)]);
    while accepted.min(refused) < 200 && Instant::now() < deadline {
        bench.process().unwrap();
        match bench.guest_bytes(STATUS, 1)[0] {
            OK => accepted += 1,
            IOERR => refused += 1,
            other => panic!("status {other}"),
        }
        bench.driver.publish(0);
    }
    done.store(true, Ordering::Relaxed);
    flipper.join().unwrap();

    assert!(accepted.min(refused) >= 200, "the race did not happen: {accepted} and {refused}");
    assert_eq!(bench.file.metadata().unwrap().len(), 512);
    assert_eq!(bench.block.take_host_error(), None);
}

#[test]
fn v8_sectors_beyond_the_disk_are_refused() {
    let ram = ram();
    for sector in [SECTORS - 1, SECTORS, u64::MAX / 512, u64::MAX / 512 + 1, u64::MAX - 1, u64::MAX] {
        let mut bench = Bench::new(&ram);
        assert_eq!(bench.request(OUT, sector, &[readable(DATA, 1024)]), (IOERR, 1), "{sector}");
        assert_eq!(bench.request(IN, sector, &[writable(DATA, 1024)]), (IOERR, 1), "{sector}");
        assert_eq!(bench.file_bytes(), pattern());
    }
}

#[test]
fn v8_lengths_that_are_not_whole_sectors_are_refused() {
    let ram = ram();
    for length in [1, 511, 513] {
        let mut bench = Bench::new(&ram);
        assert_eq!(bench.request(OUT, 0, &[readable(DATA, length)]), (IOERR, 1));
        assert_eq!(bench.request(IN, 0, &[writable(DATA, length)]), (IOERR, 1));
    }
    let mut bench = Bench::new(&ram);
    assert_eq!(bench.request(IN, 0, &[]), (IOERR, 1));
}

#[test]
fn v8_read_only_disk_refuses_every_change() {
    let ram = ram();
    let mut bench = Bench::with(&ram, BlockConfig { read_only: true, ..BlockConfig::default() });
    assert_eq!(bench.request(OUT, 0, &[readable(DATA, 512)]), (IOERR, 1));
    let ranges = bench.ranges(&[(0, 8, 0)]);
    assert_eq!(bench.request(DISCARD, 0, &[ranges]), (IOERR, 1));
    assert_eq!(bench.request(WRITE_ZEROES, 0, &[ranges]), (IOERR, 1));
    assert_eq!(bench.file_bytes(), pattern());
    assert_eq!(bench.request(IN, 0, &[writable(DATA, 512)]), (OK, 513));
}

#[test]
fn v8_request_of_too_many_buffers_is_refused() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    let most: Vec<DriverBuffer> = (0..128).map(|i| writable(DATA + i * 4, 4)).collect();
    assert_eq!(bench.request(IN, 0, &most), (OK, 513));
    // The same sector once more, in one buffer more.
    let mut bench = Bench::new(&ram);
    let mut too_many = most;
    too_many.pop();
    too_many.extend([writable(DATA, 2); 2]);
    assert_eq!(bench.request(IN, 0, &too_many), (IOERR, 1));
}

#[test]
fn v8_request_of_too_many_bytes_is_refused() {
    let ram = GuestRam::create(32 << 20).unwrap();
    let mut bench = Bench::new(&ram);
    bench.file.set_len(64 << 20).unwrap();
    bench.block = Block::new(bench.file.try_clone().unwrap(), BlockConfig::default()).unwrap();
    assert_eq!(bench.request(IN, 0, &[writable(1 << 20, 16 << 20)]), (OK, (16 << 20) + 1));
    assert_eq!(bench.request(IN, 0, &[writable(1 << 20, (16 << 20) + 512)]), (IOERR, 1));
}

#[test]
fn v8_discard_and_write_zeroes_that_lie_about_their_ranges_are_refused() {
    let ram = ram();
    let lies: &[&[(u64, u32, u32)]] = &[
        &[(SECTORS, 1, 0)],
        &[(0, 65, 0)],
        &[(u64::MAX, 1, 0)],
        &[(0, u32::MAX, 0)],
        &[(0, MAX_RANGE_SECTORS + 1, 0)],
        &[(0, 1, 0), (SECTORS - 1, 2, 0)],
        &[(0, 1, 0); 17],
    ];
    for lie in lies {
        for kind in [DISCARD, WRITE_ZEROES] {
            let mut bench = Bench::new(&ram);
            let ranges = bench.ranges(lie);
            assert_eq!(bench.request(kind, 0, &[ranges]), (IOERR, 1), "{lie:?}");
            assert_eq!(bench.file_bytes(), pattern());
        }
    }
}

#[test]
fn v8_range_that_would_take_long_is_refused() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    // Sparse, and large enough for the range to be inside the disk.
    bench.file.set_len(8 << 30).unwrap();
    bench.block = Block::new(bench.file.try_clone().unwrap(), BlockConfig::default()).unwrap();
    for kind in [DISCARD, WRITE_ZEROES] {
        let ranges = bench.ranges(&[(0, MAX_RANGE_SECTORS, 0)]);
        assert_eq!(bench.request(kind, 0, &[ranges]), (OK, 1));
        let ranges = bench.ranges(&[(0, MAX_RANGE_SECTORS + 1, 0)]);
        assert_eq!(bench.request(kind, 0, &[ranges]), (IOERR, 1));
    }
}

#[test]
fn v8_ranges_of_odd_length_or_with_unknown_flags_are_refused() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    for length in [0, 1, 15, 17] {
        assert_eq!(bench.request(DISCARD, 0, &[readable(DATA, length)]), (IOERR, 1));
    }
    let ranges = bench.ranges(&[(0, 1, 2)]);
    assert_eq!(bench.request(WRITE_ZEROES, 0, &[ranges]), (UNSUPPORTED, 1));
    let ranges = bench.ranges(&[(0, 1, 1)]);
    assert_eq!(bench.request(DISCARD, 0, &[ranges]), (UNSUPPORTED, 1));
}

#[test]
fn v8_short_buffer_for_the_id_is_refused() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    assert_eq!(bench.request(GET_ID, 0, &[writable(DATA, 19)]), (IOERR, 1));
    assert_eq!(bench.guest_bytes(DATA, 19), [0; 19]);
}

#[test]
fn one_round_moves_a_bounded_amount_of_data() {
    let ram = GuestRam::create(32 << 20).unwrap();
    let mut bench = Bench::new(&ram);
    bench.file.set_len(64 << 20).unwrap();
    bench.block = Block::new(bench.file.try_clone().unwrap(), BlockConfig::default()).unwrap();
    for _ in 0..4 {
        bench.push(IN, 0, &[writable(1 << 20, 12 << 20)]);
    }

    let outcome = bench.process().unwrap();

    assert!(outcome.more);
    assert_eq!(bench.driver.take_used().len(), 2);
    bench.process().unwrap();
    bench.process().unwrap();
    assert_eq!(bench.driver.take_used().len(), 2);
}

#[test]
fn v8_one_round_makes_the_host_do_a_bounded_amount_of_work() {
    let ram = GuestRam::create(32 << 20).unwrap();
    let mut bench = Bench::new(&ram);
    bench.file.set_len(64 << 20).unwrap();
    let disk = |volatile| BlockConfig { volatile, ..BlockConfig::default() };
    let mut round = |requests: &dyn Fn(&mut Bench<'_>), volatile| {
        bench.block = Block::new(bench.file.try_clone().unwrap(), disk(volatile)).unwrap();
        (0..16).for_each(|_| requests(&mut bench));
        let first = bench.process().unwrap().more;
        let done = bench.driver.take_used().len();
        while bench.process().unwrap().more {}
        assert_eq!(done + bench.driver.take_used().len(), 16, "the others have their turn as well");
        (first, done)
    };
    let flush = |bench: &mut Bench<'_>| bench.push(FLUSH, 0, &[]);
    assert_eq!(round(&flush, false), (true, 4));
    assert_eq!(round(&flush, true), (false, 16), "they are nothing to a disk that is not durable");
    // Sixteen ranges of sixteen sectors each.
    let ranges: Vec<_> = (0..16).map(|range| (range * 16, 16, 0)).collect();
    for kind in [DISCARD, WRITE_ZEROES] {
        let clear = |bench: &mut Bench<'_>| {
            let part = bench.ranges(&ranges);
            bench.push(kind, 0, &[part]);
        };
        assert_eq!(round(&clear, false), (true, 4), "{kind}");
    }
}

#[test]
fn write_error_of_the_host_is_reported() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    let fd = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    let file = File::from(fd);
    file.set_len(SECTORS * 512).unwrap();
    bench.block = Block::new(file.try_clone().unwrap(), BlockConfig::default()).unwrap();
    rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::WRITE).unwrap();

    assert_eq!(bench.request(OUT, 0, &[readable(DATA, 512)]), (IOERR, 1));
    assert_eq!(bench.block.take_host_error(), Some(io::ErrorKind::PermissionDenied));
}
