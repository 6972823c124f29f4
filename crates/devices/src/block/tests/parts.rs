//! A disk made of several files, each at an offset, with zeros between them.

use super::*;
use crate::block::{DiskPart, MAX_PARTS};

const READ_ONLY: BlockConfig = BlockConfig {
    read_only: true,
    volatile: true,
    id: String::new(),
    limits: crate::block::BlockLimits { write_bandwidth: None, read_bandwidth: None, flushes: None },
};

/// A file of `length` bytes of `value`.
fn file_of(value: u8, length: usize) -> File {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&vec![value; length], 0).unwrap();
    file
}

fn part(offset: u64, file: &File) -> DiskPart {
    DiskPart { offset, file: file.try_clone().unwrap() }
}

fn bench_of(ram: &GuestRam, parts: Vec<DiskPart>) -> Bench<'_> {
    let mut bench = Bench::new(ram);
    bench.block = Block::new(parts, READ_ONLY).unwrap();
    bench
}

/// The values of a read's bytes, each with how often it follows itself.
fn read(bench: &mut Bench<'_>, sector: u64, length: u32) -> Vec<(u8, usize)> {
    bench.mem.write_slice(&vec![0xee; length as usize], GuestAddress(DATA)).unwrap();
    assert_eq!(bench.request(IN, sector, &[writable(DATA, length)]), (OK, length + 1));
    let bytes = bench.guest_bytes(DATA, length as usize);
    bytes.chunk_by(|one, other| one == other).map(|run| (run[0], run.len())).collect()
}

#[test]
fn a_request_crosses_the_borders_of_parts_and_gaps_are_zeros() {
    let ram = ram();
    let (one, two) = (file_of(1, 1000), file_of(2, 4096));
    let mut bench = bench_of(&ram, vec![part(0, &one), part(8192, &two)]);
    assert_eq!(bench.block.sectors, (8192 + 4096) / 512);
    assert_eq!(read(&mut bench, 0, 12288), [(1, 1000), (0, 7192), (2, 4096)]);
    assert_eq!(read(&mut bench, 1, 1024), [(1, 488), (0, 536)]);
    assert_eq!(read(&mut bench, 8, 512), [(0, 512)]);
    assert_eq!(read(&mut bench, 15, 1024), [(0, 512), (2, 512)]);
    assert_eq!(read(&mut bench, 23, 512), [(2, 512)]);
}

#[test]
fn the_disk_ends_with_zeros_behind_its_last_part_and_has_nothing_beyond() {
    let ram = ram();
    let file = file_of(7, 100);
    // The first part begins behind a gap, and an empty one is between them.
    let empty = file_of(0, 0);
    let mut bench = bench_of(&ram, vec![part(4096, &file), part(8192, &empty), part(8192, &file)]);
    assert_eq!(bench.block.sectors, 24);
    assert_eq!(read(&mut bench, 0, 12288), [(0, 4096), (7, 100), (0, 3996), (7, 100), (0, 3996)]);
    for (sector, length) in [(24, 512), (23, 1024), (u64::MAX, 512), (u64::MAX / 512, 512)] {
        assert_eq!(bench.request(IN, sector, &[writable(DATA, length)]).0, IOERR, "{sector}");
    }
    assert_eq!(bench_of(&ram, Vec::new()).block.sectors, 0);
}

#[test]
fn bytes_arrive_in_order_however_the_guest_spreads_its_buffers() {
    let ram = ram();
    let (one, two) = (file_of(1, 700), file_of(2, 512));
    let mut bench = bench_of(&ram, vec![part(0, &one), part(4096, &two)]);
    let buffers = [(DATA, 10), (DATA + 0x1000, 4000), (DATA + 0x3000, 598)];
    let data: Vec<DriverBuffer> = buffers.iter().map(|(at, length)| writable(*at, *length)).collect();
    assert_eq!(bench.request(IN, 0, &data), (OK, 4609));
    let found: Vec<u8> =
        buffers.iter().flat_map(|(at, length)| bench.guest_bytes(*at, *length as usize)).collect();
    assert_eq!(found, [vec![1; 700], vec![0; 3396], vec![2; 512]].concat());
}

#[test]
fn as_many_parts_as_an_image_can_have() {
    let ram = ram();
    let file = file_of(9, 512);
    let parts = |count: u64| (0..count).map(|number| part(number * 4096, &file)).collect::<Vec<_>>();
    let most = u64::try_from(MAX_PARTS).unwrap();
    let mut bench = bench_of(&ram, parts(most));
    let all = read(&mut bench, 0, u32::try_from(MAX_PARTS * 4096).unwrap());
    assert_eq!(all, [(9, 512), (0, 3584)].repeat(MAX_PARTS));
    assert!(matches!(Block::new(parts(most + 1), READ_ONLY), Err(BlockError::Parts(_))));
}

#[test]
fn a_part_that_became_shorter_is_an_error_and_the_others_stay_readable() {
    let ram = ram();
    let (one, two) = (file_of(1, 8192), file_of(2, 4096));
    let mut bench = bench_of(&ram, vec![part(0, &one), part(8192, &two)]);
    one.set_len(4096).unwrap();
    assert_eq!(read(&mut bench, 0, 4096), [(1, 4096)]);
    assert_eq!(bench.request(IN, 7, &[writable(DATA, 1024)]).0, IOERR);
    assert_eq!(bench.request(IN, 8, &[writable(DATA, 8192)]).0, IOERR);
    assert_eq!(bench.block.take_host_error(), Some(io::ErrorKind::UnexpectedEof));
    assert_eq!(read(&mut bench, 16, 4096), [(2, 4096)]);
    // One that grew shows nothing of what is new.
    two.set_len(1 << 20).unwrap();
    assert_eq!(bench.request(IN, 24, &[writable(DATA, 512)]).0, IOERR);
}

#[test]
fn parts_are_never_written() {
    let ram = ram();
    let file = file_of(1, 4096);
    let mut bench = bench_of(&ram, vec![part(0, &file)]);
    let range = bench.ranges(&[(0, 8, 0)]);
    for (kind, data) in
        [(OUT, readable(DATA, 512)), (DISCARD, range), (WRITE_ZEROES, bench.ranges(&[(0, 8, 0)]))]
    {
        assert_ne!(bench.request(kind, 0, &[data]).0, OK, "{kind}");
    }
    assert_eq!(bench.request(FLUSH, 0, &[]).0, OK);
    assert_eq!(read(&mut bench, 0, 4096), [(1, 4096)]);
    let writable = BlockConfig { read_only: false, ..READ_ONLY };
    assert!(matches!(Block::new(vec![part(0, &file)], writable), Err(BlockError::NotWritable)));
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let file = file_of(1, 5000);
    for (parts, wrong) in [
        (vec![part(0, &file), part(4096, &file)], 4096),
        (vec![part(8192, &file), part(0, &file)], 0),
        (vec![part(512, &file)], 512),
        (vec![part(u64::MAX - 4095, &file)], u64::MAX - 4095),
    ] {
        let error = Block::new(parts, READ_ONLY).unwrap_err();
        assert!(matches!(error, BlockError::Part { offset } if offset == wrong), "{error}");
    }
}

#[test]
fn a_disk_of_parts_is_restored_on_the_same_parts() {
    let ram = ram();
    let file = file_of(3, 4096);
    let block = bench_of(&ram, vec![part(4096, &file)]).block;
    assert_eq!(block.occupied(), file.metadata().unwrap().blocks() * 512);
    let state = block.save();
    assert_eq!(Block::restore(vec![part(4096, &file)], state.clone()).unwrap().save(), state);
    let other = Block::restore(vec![part(8192, &file)], state);
    assert!(matches!(other, Err(BlockError::OtherDisk { .. })));
}
