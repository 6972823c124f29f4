//! What a driver that keeps the rules gets.

use super::*;

#[test]
fn read_scatters_the_file_over_the_buffers() {
    let ram = ram();
    let mut bench = Bench::new(&ram);

    let answer = bench.request(IN, 3, &[writable(DATA, 100), writable(DATA + 0x1000, 924)]);

    assert_eq!(answer, (OK, 1025));
    let expected = &pattern()[3 * 512..5 * 512];
    assert_eq!(bench.guest_bytes(DATA, 100), expected[..100]);
    assert_eq!(bench.guest_bytes(DATA + 0x1000, 924), expected[100..]);
    assert_eq!(bench.guest_bytes(DATA + 100, 16), [0; 16]);
}

#[test]
fn write_gathers_the_buffers_into_the_file() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.mem.write_slice(&[7; 512], GuestAddress(DATA)).unwrap();
    bench.mem.write_slice(&[9; 512], GuestAddress(DATA + 0x1000)).unwrap();

    let answer = bench.request(OUT, 62, &[readable(DATA, 512), readable(DATA + 0x1000, 512)]);

    assert_eq!(answer, (OK, 1));
    let file = bench.file_bytes();
    assert_eq!(file[62 * 512..63 * 512], [7; 512]);
    assert_eq!(file[63 * 512..], [9; 512]);
    assert_eq!(file[..62 * 512], pattern()[..62 * 512]);
}

#[test]
fn header_and_status_may_share_buffers_with_data() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.header(IN, 5);
    // The header comes in two pieces, and the status is the last byte behind the data.
    bench.driver.push(&[readable(HEADER, 5), readable(HEADER + 5, 11), writable(DATA, 513)]);

    bench.process().unwrap();

    assert_eq!(bench.driver.take_used(), [(0, 513)]);
    assert_eq!(bench.guest_bytes(DATA, 512), pattern()[5 * 512..6 * 512]);
    assert_eq!(bench.guest_bytes(DATA + 512, 1), [OK]);
}

#[test]
fn get_id_returns_the_name() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    assert_eq!(bench.request(GET_ID, 0, &[writable(DATA, 20)]), (OK, 21));
    assert_eq!(bench.guest_bytes(DATA, ID_BYTES), *b"disk\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
}

#[test]
fn flush_succeeds_on_every_kind_of_disk() {
    let ram = ram();
    for (read_only, volatile) in [(false, false), (false, true), (true, false)] {
        let mut bench = Bench::with(&ram, BlockConfig { read_only, volatile, ..BlockConfig::default() });
        assert_eq!(bench.request(FLUSH, 0, &[]), (OK, 1));
    }
}

#[test]
fn discard_gives_space_back_and_keeps_the_size() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    let before = bench.file.metadata().unwrap().blocks();
    let ranges = bench.ranges(&[(8, 8, 0), (16, 8, 0)]);

    assert_eq!(bench.request(DISCARD, 0, &[ranges]), (OK, 1));

    let after = bench.file.metadata().unwrap();
    assert!(after.blocks() < before);
    assert_eq!(after.len(), SECTORS * 512);
}

#[test]
fn write_zeroes_clears_exactly_the_range() {
    let ram = ram();
    for flags in [0, 1] {
        let mut bench = Bench::new(&ram);
        let ranges = bench.ranges(&[(10, 4, flags)]);

        assert_eq!(bench.request(WRITE_ZEROES, 0, &[ranges]), (OK, 1));

        let mut expected = pattern();
        expected[10 * 512..14 * 512].fill(0);
        assert_eq!(bench.file_bytes(), expected);
    }
}

#[test]
fn unknown_request_is_unsupported() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    assert_eq!(bench.request(99, 0, &[]), (UNSUPPORTED, 1));
}

#[test]
fn host_errors_reach_the_guest_as_a_failure_and_the_host_as_a_reason() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.file.set_len(512).unwrap();

    assert_eq!(bench.request(IN, 8, &[writable(DATA, 512)]), (IOERR, 1));

    assert_eq!(bench.block.take_host_error(), Some(io::ErrorKind::UnexpectedEof));
    assert_eq!(bench.block.take_host_error(), None);
    assert_eq!(bench.block.host_errors(), 1);
}

#[test]
fn configuration_space_tells_size_and_limits() {
    let ram = ram();
    let bench = Bench::new(&ram);
    let mut space = [0xff; 64];
    bench.block.read_config(0, &mut space);
    assert_eq!(space[..8], SECTORS.to_le_bytes());
    assert_eq!(space[12..16], MAX_SEGMENTS.to_le_bytes());
    assert_eq!(space[36..40], MAX_RANGE_SECTORS.to_le_bytes());
    assert_eq!(space[60..], [0; 4]);
    let mut beyond = [0xff; 4];
    bench.block.read_config(u32::MAX, &mut beyond);
    assert_eq!(beyond, [0; 4]);
}

#[test]
fn interrupts_are_suppressed_as_the_driver_asks() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    virtio_queue::QueueT::set_event_idx(&mut bench.queue, true);
    bench.driver.set_used_event(1);

    bench.push(FLUSH, 0, &[]);
    assert!(!bench.process().unwrap().notify);
    bench.push(FLUSH, 0, &[]);
    assert!(bench.process().unwrap().notify);
}

#[test]
fn state_survives_saving_and_only_fits_the_same_disk() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    let features = bench.block.features();
    bench.block.set_features(features);
    let state = bench.block.save();
    let json = serde_json::to_string(&state).unwrap();

    let restored = Block::restore(disk_file(), serde_json::from_str(&json).unwrap()).unwrap();
    assert_eq!(restored.save(), state);

    let smaller = disk_file();
    smaller.set_len(512).unwrap();
    let refused = Block::restore(smaller, state);
    assert!(matches!(refused, Err(BlockError::OtherDisk { saved: SECTORS, actual: 1 })));
}

#[test]
fn unfit_files_are_refused() {
    let odd = tempfile::tempfile().unwrap();
    odd.set_len(1000).unwrap();
    assert!(matches!(Block::new(odd, BlockConfig::default()), Err(BlockError::Size(1000))));

    let named = tempfile::NamedTempFile::new().unwrap();
    let read_only = File::open(named.path()).unwrap();
    assert!(matches!(Block::new(read_only, BlockConfig::default()), Err(BlockError::NotWritable)));

    let long = BlockConfig { id: "x".repeat(21), ..BlockConfig::default() };
    assert!(matches!(Block::new(disk_file(), long), Err(BlockError::LongId(_))));
}
