//! What the host decides about a disk, what its file can do, and what the host learns of it.

use std::os::fd::AsRawFd;

use super::*;
use crate::block::BlockLimits;
use crate::block::request::{Clear, Limits, Request, parse};
use crate::ring::{Chain, run_round};

// Feature bits, by their numbers in the virtio specification.
const SIZE_MAX: u64 = 1 << 1;
const SEG_MAX: u64 = 1 << 2;
const RO: u64 = 1 << 5;
const BLK_SIZE: u64 = 1 << 6;
const F_FLUSH: u64 = 1 << 9;
const F_DISCARD: u64 = 1 << 13;
const F_WRITE_ZEROES: u64 = 1 << 14;
const EVENT_IDX: u64 = 1 << 29;
const VERSION_1: u64 = 1 << 32;

const NO_LIMITS: BlockLimits = BlockLimits { write_bandwidth: None, read_bandwidth: None, flushes: None };
const READ_ONLY: BlockConfig =
    BlockConfig { read_only: true, volatile: false, id: String::new(), limits: NO_LIMITS };

/// A disk on a file that knows neither `fdatasync` nor `fallocate`, and has no sector.
fn without_storage(ram: &GuestRam, config: BlockConfig) -> Bench<'_> {
    let mut bench = Bench::new(ram);
    let file = File::options().read(true).write(true).open("/dev/zero").unwrap();
    bench.block = Block::new(file, config).unwrap();
    bench
}

#[test]
fn driver_finds_what_the_device_is() {
    let ram = ram();
    let common = SIZE_MAX | SEG_MAX | BLK_SIZE | F_FLUSH | EVENT_IDX | VERSION_1;
    let mut block = Bench::new(&ram).block;
    assert_eq!((block.device_type(), block.queue_count(), block.follow_up()), (2, 1, None));
    assert_eq!(block.features(), common | F_DISCARD | F_WRITE_ZEROES);
    assert_eq!(Bench::with(&ram, READ_ONLY).block.features(), common | RO);
}

#[test]
fn every_limit_is_where_the_driver_looks_for_it() {
    let ram = ram();
    let bench = Bench::new(&ram);
    let mut space = [0xff; 60];
    bench.block.read_config(0, &mut space);
    let field = |at: usize| u32::from_le_bytes(space[at..at + 4].try_into().unwrap());
    // Capacity, size_max and seg_max, geometry, blk_size, topology and queues.
    assert_eq!([0, 4, 8, 12, 16, 20].map(field), [64, 0, 128 << 10, 128, 0, 512]);
    assert_eq!([24, 28, 32].map(field), [0; 3]);
    // Discard: sectors, ranges and alignment; write zeroes: sectors, ranges, and that it may unmap.
    assert_eq!([36, 40, 44, 48, 52, 56].map(field), [1 << 22, 16, 8, 1 << 22, 16, 1]);
}

#[test]
fn reset_forgets_what_the_driver_accepted() {
    let ram = ram();
    let mut block = Bench::new(&ram).block;
    block.set_features(VERSION_1);
    assert_eq!(block.save().acked_features, VERSION_1);
    block.reset();
    assert_eq!(block.save().acked_features, 0);
}

#[test]
fn state_with_features_that_were_never_offered_is_restored_without_them() {
    let ram = ram();
    let block = Bench::with(&ram, READ_ONLY).block;
    let state = BlockState { acked_features: u64::MAX, ..block.save() };
    let restored = Block::restore(disk_file(), state).unwrap();
    assert_eq!(restored.save().acked_features, block.features());
}

#[test]
fn longest_name_reaches_the_guest_whole() {
    let ram = ram();
    let id = "a name of 20 letters";
    let mut bench = Bench::with(&ram, BlockConfig { id: id.into(), ..BlockConfig::default() });
    assert_eq!(bench.request(GET_ID, 0, &[writable(DATA, 20)]), (OK, 21));
    assert_eq!(bench.guest_bytes(DATA, ID_BYTES), id.as_bytes());
}

#[test]
fn read_only_disk_needs_no_file_that_can_be_written() {
    let ram = ram();
    let named = tempfile::NamedTempFile::new().unwrap();
    named.as_file().write_all_at(&pattern(), 0).unwrap();
    let mut bench = Bench::new(&ram);
    bench.block = Block::new(File::open(named.path()).unwrap(), READ_ONLY).unwrap();
    assert_eq!(bench.request(IN, 0, &[writable(DATA, 512)]), (OK, 513));
    // A file that can only be written is no disk either.
    let write_only = File::options().write(true).open(named.path()).unwrap();
    assert!(matches!(Block::new(write_only, BlockConfig::default()), Err(BlockError::NotWritable)));
}

#[test]
fn traffic_counts_the_data_of_each_direction() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.request(IN, 0, &[writable(DATA, 512)]);
    bench.request(IN, 0, &[writable(DATA, 1024)]);
    bench.request(OUT, 0, &[readable(DATA, 2048)]);
    bench.request(OUT, SECTORS, &[readable(DATA, 512)]);
    let traffic = bench.block.traffic();
    assert_eq!((traffic.read, traffic.written), (1536, 2048), "what was refused is not counted");
}

#[test]
fn occupied_is_what_the_host_stores_and_not_the_size() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    let file = File::from(rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.set_len(1 << 20).unwrap();
    bench.block = Block::new(file.try_clone().unwrap(), BlockConfig::default()).unwrap();
    assert_eq!(bench.block.occupied(), 0);
    bench.request(OUT, 0, &[readable(DATA, 4096)]);
    assert!(bench.block.occupied() >= 4096);
    assert_eq!(bench.block.occupied(), file.metadata().unwrap().blocks() * 512);
}

#[test]
fn flush_reaches_the_file_only_where_what_was_written_is_relied_on() {
    let ram = ram();
    let volatile = BlockConfig { volatile: true, ..BlockConfig::default() };
    assert_eq!(without_storage(&ram, BlockConfig::default()).request(FLUSH, 0, &[]), (IOERR, 1));
    assert_eq!(without_storage(&ram, volatile).request(FLUSH, 0, &[]), (OK, 1));
    assert_eq!(without_storage(&ram, READ_ONLY).request(FLUSH, 0, &[]), (OK, 1));
}

#[test]
fn empty_range_is_nothing_to_do() {
    let ram = ram();
    for kind in [DISCARD, WRITE_ZEROES] {
        let mut bench = Bench::new(&ram);
        let ranges = bench.ranges(&[(3, 0, 0), (8, 8, 0)]);
        assert_eq!(bench.request(kind, 0, &[ranges]), (OK, 1));
        assert_eq!(bench.block.host_errors(), 0);
        assert_eq!(bench.file_bytes()[8 * 512..16 * 512], [0; 8 * 512], "the range behind it is cleared");
    }
}

#[test]
fn only_the_range_whose_space_may_be_given_back_is_parsed_as_such() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    let ranges = bench.ranges(&[(8, 8, 0), (16, 4, 1), (24, 8, 0)]);
    bench.push(WRITE_ZEROES, 0, &[ranges]);
    let (mut chain, mut parsed) = (Chain::new(), None);
    run_round(&mut bench.queue, bench.mem, |ring| {
        assert!(ring.pop(&mut chain)?);
        parsed = parse(&chain, ring.mem(), Limits { sectors: SECTORS, read_only: false }).ok();
        Ok(())
    })
    .unwrap();

    let Some(Request::WriteZeroes(list)) = parsed else { panic!("{parsed:?} clears nothing") };

    let clear =
        |sector: u64, sectors: u64, unmap| Clear { offset: sector * 512, bytes: sectors * 512, unmap };
    let expected = [clear(8, 8, false), clear(16, 4, true), clear(24, 8, false)];
    assert_eq!(list.iter().copied().collect::<Vec<_>>(), expected);
}

#[test]
fn zeros_are_a_hole_where_the_file_system_knows_no_zero_range() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    // A file in memory can have holes, and that is all.
    bench.file = File::from(rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    bench.file.write_all_at(&pattern(), 0).unwrap();
    bench.block = Block::new(bench.file.try_clone().unwrap(), BlockConfig::default()).unwrap();
    let ranges = bench.ranges(&[(8, 16, 0)]);

    assert_eq!(bench.request(WRITE_ZEROES, 0, &[ranges]), (OK, 1));

    let mut expected = pattern();
    expected[8 * 512..24 * 512].fill(0);
    assert_eq!(bench.file_bytes(), expected);
}

#[test]
fn file_that_cannot_be_cleared_is_no_failure_and_leaves_zeros_to_the_driver() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    let file = disk_file();
    let number = file.as_raw_fd();
    bench.block = Block::new(file, BlockConfig::default()).unwrap();
    // A file that any process has, that can be written, and that knows no `fallocate`.
    let other = File::options().read(true).write(true).open("/proc/self/comm").unwrap();
    // SAFETY: both descriptors are open, and the disk, which owns the second, can do with any file in its place.
    assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), number) }, number);

    let ranges = bench.ranges(&[(8, 8, 0)]);
    assert_eq!(bench.request(DISCARD, 0, &[ranges]), (OK, 1));
    assert_eq!(bench.request(WRITE_ZEROES, 0, &[ranges]), (UNSUPPORTED, 1));
    let ranges = bench.ranges(&[(8, 8, 1)]);
    assert_eq!(bench.request(WRITE_ZEROES, 0, &[ranges]), (UNSUPPORTED, 1));
    assert_eq!((bench.block.take_host_error(), bench.block.host_errors()), (None, 0));
}

#[test]
fn error_of_the_host_while_clearing_reaches_the_guest_and_the_host() {
    let ram = ram();
    for kind in [DISCARD, WRITE_ZEROES] {
        let mut bench = Bench::new(&ram);
        let fd = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        let file = File::from(fd);
        file.set_len(SECTORS * 512).unwrap();
        bench.block = Block::new(file.try_clone().unwrap(), BlockConfig::default()).unwrap();
        rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::WRITE).unwrap();
        let ranges = bench.ranges(&[(8, 8, 0)]);
        assert_eq!(bench.request(kind, 0, &[ranges]), (IOERR, 1));
        assert_eq!(bench.block.take_host_error(), Some(io::ErrorKind::PermissionDenied));
        assert_eq!(bench.request(kind, 0, &[ranges]), (IOERR, 1));
        assert_eq!(bench.block.host_errors(), 2);
    }
}
