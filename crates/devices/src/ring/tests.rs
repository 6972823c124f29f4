//! Which bytes of a chain are where, and handing chains back: one by one, several at once, and with as few interrupts as the driver wants.

use super::*;
use crate::GuestRam;
use crate::testing::{Driver, writable};

const QUEUE: u64 = 0x1000;
const DATA: u64 = 0x8000;
const SIZE: u16 = 16;

fn ram() -> GuestRam {
    GuestRam::create(1 << 20).unwrap()
}

fn push(driver: &mut Driver<'_>, count: u16) {
    for _ in 0..count {
        driver.push(&[writable(DATA, 64)]);
    }
}

/// One round that takes chains in groups of `group` and hands each group back at once, for as long as there are whole
/// groups; what is left is put back.
fn round_by_groups(queue: &mut Queue, ram: &GuestRam, group: u16) -> Outcome {
    let mut chain = Chain::new();
    run_round(queue, ram.memory(), |ring| {
        loop {
            let mut done = Vec::new();
            while done.len() < group.into() {
                if !ring.pop(&mut chain)? {
                    ring.put_back_last(u16::try_from(done.len()).unwrap());
                    return Ok(());
                }
                done.push(chain.done(u32::try_from(done.len()).unwrap() + 1));
            }
            ring.complete_together(&done)?;
        }
    })
    .unwrap()
}

#[test]
fn pieces_are_the_parts_that_hold_the_bytes_and_no_empty_ones() {
    let buffer = |address, length| Buffer { address: GuestAddress(address), length };
    let buffers = [buffer(0x100, 10), buffer(0x200, 20), buffer(0x300, 30)];
    let found = |offset, length| pieces(&buffers, offset, length).collect::<Vec<_>>();
    assert_eq!(found(0, 60), buffers);
    assert_eq!(found(4, 3), [buffer(0x104, 3)]);
    assert_eq!(found(10, 20), [buffer(0x200, 20)]);
    assert_eq!(found(9, 22), [buffer(0x109, 1), buffer(0x200, 20), buffer(0x300, 1)]);
    assert_eq!(found(35, u32::MAX), [buffer(0x305, 25)]);
    assert_eq!(found(60, 1), []);
    assert_eq!(found(0, 0), []);
}

#[test]
fn chains_handed_back_together_are_all_in_the_used_ring() {
    let ram = ram();
    let mut driver = Driver::new(ram.memory(), QUEUE, SIZE);
    let mut queue = driver.device_queue();
    push(&mut driver, 7);
    assert!(round_by_groups(&mut queue, &ram, 3).notify);
    assert_eq!(driver.take_used(), [(0, 1), (1, 2), (2, 3), (3, 1), (4, 2), (5, 3)]);
    // The one that was left is the first of the next group.
    push(&mut driver, 2);
    round_by_groups(&mut queue, &ram, 3);
    assert_eq!(driver.take_used(), [(6, 1), (7, 2), (8, 3)]);
}

#[test]
fn groups_go_on_at_the_start_of_the_ring_and_over_the_end_of_its_index() {
    let ram = ram();
    let mut driver = Driver::new(ram.memory(), QUEUE, SIZE);
    let mut queue = driver.device_queue();
    let start = u16::MAX - 5;
    queue.set_next_avail(start);
    queue.set_next_used(start);
    driver.set_available(start);
    let mut total: u16 = 0;
    for _ in 0..10 {
        push(&mut driver, 4);
        round_by_groups(&mut queue, &ram, 4);
        total += 4;
        assert_eq!(driver.used_index(), start.wrapping_add(total));
        let slot = |back: u16| {
            let place = start.wrapping_add(total).wrapping_sub(back) % SIZE;
            let entry: [u32; 2] =
                ram.memory().read_obj(GuestAddress(driver.used_ring() + 4 + 8 * u64::from(place))).unwrap();
            entry[1]
        };
        assert_eq!([4, 3, 2, 1].map(slot), [1, 2, 3, 4]);
    }
}

#[test]
fn nothing_handed_back_is_nothing_to_be_interrupted_for() {
    let ram = ram();
    let mut driver = Driver::new(ram.memory(), QUEUE, SIZE);
    let mut queue = driver.device_queue();
    push(&mut driver, 2);
    assert!(!round_by_groups(&mut queue, &ram, 3).notify);
    let outcome = run_round(&mut queue, ram.memory(), |ring| Ok(ring.complete_together(&[])?)).unwrap();
    assert!(!outcome.notify);
    assert_eq!(driver.used_index(), 0);
}

#[test]
fn driver_is_interrupted_when_its_index_is_among_those_of_the_round() {
    let ram = ram();
    for (event, expected) in [
        (0, [true, false, false]),
        (2, [true, false, false]),
        (3, [false, true, false]),
        (5, [false, true, false]),
        (8, [false, false, true]),
        (9, [false, false, false]),
        (u16::MAX, [false, false, false]),
    ] {
        let mut driver = Driver::new(ram.memory(), QUEUE, SIZE);
        let mut queue = driver.device_queue();
        queue.set_event_idx(true);
        driver.set_used_event(event);
        let seen = [0, 1, 2].map(|_| {
            push(&mut driver, 3);
            round_by_groups(&mut queue, &ram, 3).notify
        });
        assert_eq!(seen, expected, "event {event}");
    }
}

#[test]
fn v5_used_ring_outside_memory_is_an_error_for_a_group_too() {
    let ram = ram();
    let mut driver = Driver::new(ram.memory(), QUEUE, SIZE);
    let mut queue = driver.device_queue();
    queue.try_set_used_ring_address(GuestAddress((1 << 20) - 8)).unwrap();
    push(&mut driver, 4);
    let mut chain = Chain::new();
    let outcome = run_round(&mut queue, ram.memory(), |ring| {
        let mut done = Vec::new();
        for _ in 0..4 {
            assert!(ring.pop(&mut chain)?);
            done.push(chain.done(1));
        }
        Ok(ring.complete_together(&done)?)
    });
    assert!(matches!(outcome, Err(DeviceError::Ring(RingError::Memory(_)))), "{outcome:?}");
    assert!(!queue.ready());
}
