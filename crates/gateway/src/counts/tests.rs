use std::fs::File;
use std::os::unix::fs::FileExt;

use bathy_protocol::counts::{self, Count};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::*;

/// Slots for so many connections, and the owner's file.
pub(crate) fn memory(connections: u32) -> (Counts, File) {
    let fd = memfd_create("counts", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    let file = File::from(fd);
    file.set_len(counts::size(connections) as u64).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    (Counts::map(file.try_clone().unwrap().into()).unwrap(), file)
}

/// The counts that the owner reads.
pub(crate) fn found(file: &File) -> Vec<(u64, u64, u64)> {
    let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    counts::read(&bytes).map(|Count { number, sent, received }| (number, sent, received)).collect()
}

#[test]
fn n9_a_slot_has_all_that_was_counted_before_and_after_it_was_taken() {
    let (mut counts, file) = memory(3);
    let (mut one, mut two) = (Meter::default(), Meter::default());
    one.add_sent(5);
    one.add_received(6);
    assert_eq!(found(&file), [], "it has not begun");
    counts.begin(2, &mut one);
    counts.begin(5, &mut two);
    assert_eq!(found(&file), [(2, 5, 6), (5, 0, 0)]);
    one.add_sent(10);
    two.add_received(1 << 40);
    one.add_received(100);
    assert_eq!(found(&file), [(2, 15, 106), (5, 0, 1 << 40)]);
    assert_eq!((one.bytes(), two.bytes()), ((15, 106), (0, 1 << 40)));
}

#[test]
fn n9_a_freed_slot_keeps_its_counts_until_it_is_the_oldest_one() {
    let (mut counts, file) = memory(2);
    for number in [2, 4] {
        let mut meter = Meter::default();
        counts.begin(number, &mut meter);
        meter.add_sent(number * 10);
        counts.end(meter);
    }
    assert_eq!(found(&file), [(2, 20, 0), (4, 40, 0)]);
    let mut meter = Meter::default();
    counts.begin(6, &mut meter);
    assert_eq!(found(&file), [(6, 0, 0), (4, 40, 0)], "nothing of the one before");
    meter.add_received(1);
    assert_eq!(found(&file), [(6, 0, 1), (4, 40, 0)]);
}

#[test]
fn n9_without_a_free_slot_bytes_are_counted_all_the_same() {
    let (mut counts, file) = memory(1);
    let (mut first, mut second, mut third) = (Meter::default(), Meter::default(), Meter::default());
    counts.begin(2, &mut first);
    counts.begin(4, &mut second);
    second.add_sent(7);
    assert_eq!((found(&file), second.bytes()), (vec![(2, 0, 0)], (7, 0)));
    counts.end(second);
    counts.begin(6, &mut third);
    assert_eq!(found(&file), [(2, 0, 0)], "it had none to give back");
    counts.end(first);
    counts.begin(8, &mut third);
    assert_eq!(found(&file), [(8, 0, 0)]);
}

#[test]
fn without_memory_nothing_is_written() {
    let (mut counts, mut meter) = (Counts::default(), Meter::default());
    counts.begin(2, &mut meter);
    meter.add_sent(1);
    assert_eq!(meter.bytes(), (1, 0));
}
