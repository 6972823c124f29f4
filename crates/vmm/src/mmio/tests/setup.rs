//! A driver that sets its device up wrongly, too late, or not at all.

use std::time::Duration;

use bathy_devices::console::{BUFFER_BYTES, RX_QUEUE};
use bathy_devices::entropy::{BURST_BYTES, Entropy};
use bathy_devices::testing::TestClock;

use super::*;

fn fresh(ram: &Arc<GuestRam>) -> Guest<Block> {
    Guest::new(disk(BlockConfig::default()).0, ram)
}

/// Whether a queue with these numbers is taken for one.
fn accepted(ram: &Arc<GuestRam>, size: u32, rings: [u64; 3]) -> bool {
    let mut guest = fresh(ram);
    guest.negotiate();
    guest.describe(0, size, rings);
    guest.put_all(&[(QUEUE_READY, 1)]);
    guest.get(QUEUE_READY) == 1
}

const TABLE: u64 = 0x1000;
const AVAILABLE: u64 = 0x3000;
const USED: u64 = 0x5000;

#[test]
fn v6_status_bits_come_in_order_and_never_go() {
    let legal = [0, ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK];
    let ram = ram();
    for (reached, status) in legal.into_iter().enumerate() {
        for bits in 1..=0x1ff {
            let mut guest = Guest::new(Entropy::new(), &ram);
            let features = guest.offered();
            guest.put_all(&[(STATUS, ACKNOWLEDGE), (STATUS, DRIVER)][..reached.min(2)]);
            guest.accept(features);
            guest.put_all(&[(STATUS, FEATURES_OK), (STATUS, DRIVER_OK)][..reached.saturating_sub(2)]);
            assert_eq!(guest.get(STATUS), status);

            guest.put_all(&[(STATUS, bits)]);
            let next = legal.get(reached + 1).copied();
            let expected = if Some(bits) == next || bits == status | FAILED { bits } else { status };
            assert_eq!(guest.get(STATUS), expected, "{bits:#x} after {status:#x}");
        }
    }
}

#[test]
fn v6_features_that_were_not_offered_are_refused() {
    let ram = ram();
    let offered = fresh(&ram).offered();
    for (features, right) in [
        (offered, true),
        (VERSION_1, true),
        (0, false),
        (offered & !VERSION_1, false),
        (offered | 1 << 28, false), // indirect descriptors
        (offered | 1 << 34, false), // packed rings
        (offered | 1 << 63, false),
        (u64::MAX, false),
    ] {
        let mut guest = fresh(&ram);
        guest.negotiate_for(features);
        let expected = if right { FEATURES_OK } else { DRIVER };
        assert_eq!(guest.get(STATUS), expected, "{features:#x}");
        let accepted = guest.mmio.device().save().acked_features;
        assert_eq!(accepted, if right { features } else { 0 });
        // Starting all the same does not help.
        guest.put_all(&[(STATUS, DRIVER_OK)]);
        assert_eq!(guest.get(STATUS) == DRIVER_OK, right);
    }
}

#[test]
fn v6_features_are_written_only_while_they_are_negotiated() {
    let ram = ram();
    let mut guest = fresh(&ram);
    guest.accept(VERSION_1);
    assert_eq!(guest.mmio.save().driver_features, 0);
    guest.negotiate();
    let agreed = guest.mmio.save().driver_features;
    guest.accept(VERSION_1);
    assert_eq!(guest.mmio.save().driver_features, agreed);
    guest.put_all(&[(STATUS, DRIVER_OK)]);
    guest.accept(VERSION_1);
    assert_eq!(guest.mmio.save().driver_features, agreed);
    // Halves that do not exist are no other names for those that do.
    guest.put_all(&[(STATUS, 0), (STATUS, ACKNOWLEDGE), (STATUS, DRIVER)]);
    for half in [2, 3, 1 << 31, u32::MAX] {
        guest.put_all(&[(DRIVER_FEATURES_SEL, half), (DRIVER_FEATURES, u32::MAX)]);
        assert_eq!(guest.mmio.save().driver_features, 0);
    }
}

#[test]
fn v6_queue_sizes_that_are_none_are_refused() {
    let ram = ram();
    for size in [1, 2, 16, 128, 256] {
        assert!(accepted(&ram, size, [TABLE, AVAILABLE, USED]), "{size}");
    }
    for size in [0, 3, 255, 257, 512, 32768, 65535, 65536, 65536 + 256, u32::MAX] {
        assert!(!accepted(&ram, size, [TABLE, AVAILABLE, USED]), "{size}");
    }
}

#[test]
fn v6_queue_without_addresses_is_refused() {
    let ram = ram();
    for rings in [[0, 0, 0], [0, AVAILABLE, USED], [TABLE, 0, USED], [TABLE, AVAILABLE, 0]] {
        assert!(!accepted(&ram, 16, rings), "{rings:?}");
    }
}

#[test]
fn v3_rings_outside_memory_or_not_aligned_are_refused() {
    let ram = ram();
    for (table, available, used) in [
        (RAM, AVAILABLE, USED),
        (RAM - 4096 + 16, AVAILABLE, USED),
        (u64::MAX - 15, AVAILABLE, USED),
        (TABLE | 1 << 63, AVAILABLE, USED),
        (TABLE + 8, AVAILABLE, USED),
        (TABLE, RAM - 516, USED),
        (TABLE, u64::MAX - 1, USED),
        (TABLE, AVAILABLE + 1, USED),
        (TABLE, AVAILABLE, RAM - 2052),
        (TABLE, AVAILABLE, u64::MAX - 3),
        (TABLE, AVAILABLE, USED + 2),
        (TABLE, AVAILABLE, 1 << 40),
    ] {
        assert!(!accepted(&ram, 256, [table, available, used]), "{table:#x} {available:#x} {used:#x}");
    }
    // Just inside.
    assert!(accepted(&ram, 256, [RAM - 4096, AVAILABLE, USED]));
    assert!(accepted(&ram, 256, [TABLE, RAM - 518, USED]));
    assert!(accepted(&ram, 256, [TABLE, AVAILABLE, RAM - 2056]));
}

#[test]
fn v3_rings_in_a_hole_of_memory_are_refused() {
    let (hole, above) = (1 << 20, 64 << 20);
    let ram = Arc::new(GuestRam::create_around(2 << 20, hole..above).unwrap());
    assert!(accepted(&ram, 256, [hole - 4096, AVAILABLE, USED]));
    assert!(accepted(&ram, 256, [above, AVAILABLE, USED]));
    for table in
        [hole, hole - 4096 + 16, above - 16, above - 4096, hole + (1 << 20) - 4096, above + (1 << 20)]
    {
        assert!(!accepted(&ram, 256, [table, AVAILABLE, USED]), "{table:#x}");
    }
}

#[test]
fn v5_rings_that_overlap_are_refused() {
    let ram = ram();
    // With 16 entries the table has 256 bytes, the available ring 38 and the used ring 134.
    assert!(accepted(&ram, 16, [0x1000, 0x1100, 0x1128]));
    assert!(accepted(&ram, 16, [0x1100, 0x1088, 0x1000]));
    for rings in [
        [0x1000, 0x1000, 0x2000],
        [0x1000, 0x10fe, 0x2000],
        [0x1000, 0x0fdc, 0x2000],
        [0x1000, 0x2000, 0x1000],
        [0x1000, 0x2000, 0x10fc],
        [0x1000, 0x2000, 0x0f7c],
        [0x1000, 0x2000, 0x2000],
        [0x1000, 0x2000, 0x2024],
        [0x1000, 0x2084, 0x2000],
    ] {
        assert!(!accepted(&ram, 16, rings), "{rings:x?}");
    }
}

#[test]
fn v6_ready_queue_is_frozen_until_it_is_unready() {
    let ram = ram();
    let drivers = drivers(&ram, 1, 16);
    let mut guest = fresh(&ram);
    guest.negotiate();
    guest.set_up(0, &drivers[0]);
    let before = guest.mmio.save();
    guest.describe(0, 256, [RAM, RAM, RAM]);
    guest.put_all(&[(QUEUE_READY, 1), (QUEUE_READY, 2), (QUEUE_READY, u32::MAX)]);
    assert_eq!(guest.mmio.save(), before);
    guest.put_all(&[(QUEUE_READY, 0)]);
    assert_eq!(guest.get(QUEUE_READY), 0);
    guest.describe(0, 256, [RAM, RAM, RAM]);
    assert_eq!(guest.mmio.save().queues[0].descriptors, RAM);
    guest.put_all(&[(QUEUE_READY, 1)]);
    assert_eq!(guest.get(QUEUE_READY), 0);
}

#[test]
fn v6_queue_is_frozen_once_the_device_runs() {
    let ram = ram();
    let mut drivers = drivers(&ram, 1, 16);
    let mut guest = Guest::started(disk(BlockConfig::default()).0, &ram, &drivers);
    let before = guest.mmio.save();
    for ready in [0, 1] {
        guest.put_all(&[(QUEUE_READY, ready), (QUEUE_RESET, 1)]);
        guest.describe(0, 256, [DATA, DATA + 0x2000, DATA + 0x4000]);
        assert_eq!(guest.mmio.save(), before);
    }
    drivers[0].push(&block_request(ram.memory(), IN, 0, &[writable(DATA, 512)]));
    guest.kick(0).unwrap();
    assert_eq!(drivers[0].take_used(), [(0, 513)]);
}

#[test]
fn v6_queue_that_comes_too_late_never_runs() {
    let ram = ram();
    let mut drivers = drivers(&ram, 1, 16);
    let mut guest = fresh(&ram);
    guest.negotiate();
    guest.describe(0, 16, rings_of(&drivers[0]));
    guest.put_all(&[(STATUS, DRIVER_OK), (QUEUE_READY, 1)]);
    assert_eq!(guest.get(QUEUE_READY), 0);
    drivers[0].push(&block_request(ram.memory(), IN, 0, &[writable(DATA, 512)]));
    assert_eq!(guest.put(QUEUE_NOTIFY, 0), Effect::None);
    assert_eq!(guest.mmio.on_kick(0).unwrap(), Outcome::default());
    assert_eq!(drivers[0].used_index(), 0);
}

#[test]
fn v6_queues_are_set_up_only_after_the_features() {
    let ram = ram();
    let drivers = drivers(&ram, 1, 16);
    for steps in 0..3 {
        let mut guest = fresh(&ram);
        guest.put_all(&[(STATUS, ACKNOWLEDGE), (STATUS, DRIVER)][..steps]);
        let before = guest.mmio.save();
        guest.describe(0, 16, rings_of(&drivers[0]));
        guest.put_all(&[(QUEUE_READY, 1)]);
        assert_eq!(guest.mmio.save(), before);
    }
}

#[test]
fn v6_kick_before_the_start_or_after_giving_up_does_nothing() {
    let ram = ram();
    let mut drivers = drivers(&ram, 1, 16);
    let mut guest = fresh(&ram);
    guest.negotiate();
    guest.set_up(0, &drivers[0]);
    drivers[0].push(&block_request(ram.memory(), IN, 0, &[writable(DATA, 512)]));
    let quiet = |guest: &mut Guest<Block>, drivers: &[Driver<'_>], used: u16| {
        assert_eq!(guest.put(QUEUE_NOTIFY, 0), Effect::None);
        assert_eq!(guest.mmio.on_kick(0).unwrap(), Outcome::default());
        assert_eq!(guest.mmio.service().unwrap(), Outcome::default());
        assert_eq!(drivers[0].used_index(), used);
    };
    quiet(&mut guest, &drivers, 0);
    assert_eq!(guest.put(STATUS, DRIVER_OK), Effect::Work);
    guest.mmio.service().unwrap();
    assert_eq!(drivers[0].used_index(), 1);
    drivers[0].push(&block_request(ram.memory(), IN, 0, &[writable(DATA, 512)]));
    assert_eq!(guest.put(STATUS, DRIVER_OK | FAILED), Effect::Work);
    quiet(&mut guest, &drivers, 1);
}

#[test]
fn v6_kick_of_an_absent_queue_does_nothing() {
    let ram = ram();
    let drivers = drivers(&ram, 1, 16);
    let mut guest = Guest::started(disk(BlockConfig::default()).0, &ram, &drivers);
    for queue in [1, 2, 255, 256, 65536, 1 << 31, u32::MAX] {
        assert_eq!(guest.put(QUEUE_NOTIFY, queue), Effect::None);
        let queue = usize::try_from(queue).unwrap();
        assert_eq!(guest.mmio.on_kick(queue).unwrap(), Outcome::default());
    }
    // One that the device has, and that the driver never made ready.
    let mut guest = Guest::started(Console::new(), &ram, &drivers);
    assert_eq!(guest.put(QUEUE_NOTIFY, 3), Effect::None);
    assert_eq!(guest.mmio.on_kick(3).unwrap(), Outcome::default());
}

#[test]
fn v6_reset_in_the_middle_of_a_request_leaves_the_rings_alone() {
    let ram = ram();
    let mut drivers = drivers(&ram, 1, 16);
    let clock = TestClock::default();
    let mut guest = Guest::started(Entropy::with_clock(clock.for_device()), &ram, &drivers);
    let pristine = Guest::new(Entropy::new(), &ram).mmio.save();
    drivers[0].push(&[writable(DATA, u32::try_from(BURST_BYTES).unwrap())]);
    drivers[0].push(&[writable(DATA, 512)]);
    assert!(guest.kick(0).unwrap().retry_after.is_some());
    assert_eq!(guest.get(INTERRUPT_STATUS), 1);

    assert_eq!(guest.put(STATUS, 0), Effect::Work);
    assert_eq!(guest.mmio.save(), pristine);
    assert_eq!(guest.mmio.device().save().acked_features, 0);
    guest.edges();
    // The time comes at which the second request would have been answered, and a kick that was on its way.
    clock.set(Duration::from_secs(10));
    assert_eq!(guest.mmio.service().unwrap(), Outcome::default());
    assert_eq!(guest.mmio.on_kick(0).unwrap(), Outcome::default());
    assert_eq!(drivers[0].used_index(), 1);
    assert_eq!((guest.edges(), guest.get(INTERRUPT_STATUS)), (0, 0));
}

#[test]
fn v6_reset_of_a_console_closes_it() {
    let ram = ram();
    let mut drivers = drivers(&ram, 4, 16);
    let mut guest = open_console(&ram, &mut drivers);
    drivers[RX_QUEUE].push(&[writable(DATA, 512)]);
    guest.mmio.device_mut().send(b"for a process that has exited by then");
    assert_eq!(guest.put(STATUS, 0), Effect::Work);
    guest.mmio.service().unwrap();
    assert!(!guest.mmio.device().guest_open());
    assert_eq!(guest.mmio.device().room(), BUFFER_BYTES);
    assert_eq!(drivers[RX_QUEUE].used_index(), 0);
}

#[test]
fn v6_number_of_queues_is_the_devices() {
    let ram = ram();
    let mut guest = Guest::new(Console::new(), &ram);
    guest.negotiate();
    assert_eq!(guest.mmio.device().queue_count(), 4);
    let before = guest.mmio.save().queues;
    for queue in [4, 5, 1 << 16, u32::MAX] {
        guest.describe(queue, 16, [TABLE, AVAILABLE, USED]);
        guest.put_all(&[(QUEUE_READY, 1)]);
        assert_eq!((guest.get(QUEUE_READY), guest.get(QUEUE_NUM_MAX)), (0, 0));
        assert_eq!(guest.mmio.save().queues, before);
    }
}
