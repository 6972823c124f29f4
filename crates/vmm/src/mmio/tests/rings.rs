//! A driver that sets its device up well, and then lies in its rings.

use bathy_devices::DeviceError;
use bathy_devices::block::BlockError;
use bathy_devices::console::{BUFFER_BYTES, ConsoleError, RX_QUEUE, TX_QUEUE};
use bathy_devices::entropy::{BURST_BYTES, Entropy, EntropyError};
use bathy_devices::net::{MAX_FRAME_BYTES, Net, NetError};
use bathy_devices::ring::RingError;
use bathy_devices::testing::TestClock;

use super::*;

const F_NEXT: u16 = 1;
const F_INDIRECT: u16 = 4;
const SIZE: u16 = 16;

/// The one error that a lie leads to; after it, nothing happens any more and no chain was given back.
fn provoke<D: VirtioDevice>(
    guest: &mut Guest<D>,
    driver: &mut Driver<'_>,
    queue: usize,
    lie: &impl Fn(&mut Driver<'_>),
) -> DeviceError {
    let used = driver.used_index();
    lie(driver);
    let error = guest.stops_once(u32::try_from(queue).unwrap());
    assert_eq!(driver.used_index(), used);
    let MmioError::Device(error) = error else { panic!("{error:?} is not the device's") };
    error
}

/// Writes the same false values to one console queue, while the device reads it.
fn provoke_console(queue: usize, lie: &impl Fn(&mut Driver<'_>)) -> DeviceError {
    let ram = ram();
    let mut drivers = drivers(&ram, 4, SIZE);
    let mut guest = if queue == CONTROL_RX_QUEUE {
        // A message waits for a buffer.
        let mut guest = Guest::started(Console::new(), &ram, &drivers);
        ram.memory().write_slice(&[0, 0, 0, 0, 0, 0, 1, 0], GuestAddress(ANSWER)).unwrap();
        drivers[CONTROL_TX_QUEUE].push(&[readable(ANSWER, 8)]);
        guest.kick(3).unwrap();
        guest
    } else {
        open_console(&ram, &mut drivers)
    };
    guest.mmio.device_mut().send(b"data");
    provoke(&mut guest, &mut drivers[queue], queue, lie)
}

/// Writes the same false values to one queue of a network link, while a frame waits for a buffer.
fn provoke_link(queue: usize, lie: &impl Fn(&mut Driver<'_>)) -> DeviceError {
    let ram = ram();
    let mut drivers = drivers(&ram, 2, SIZE);
    let mut guest = Guest::started(Net::new([2, 0, 0, 0, 0, 9]), &ram, &drivers);
    guest.mmio.device_mut().offer(&[7; 60]).unwrap();
    guest.mmio.service().unwrap();
    provoke(&mut guest, &mut drivers[queue], queue, lie)
}

/// Writes the same false values to every queue of every device.
fn in_every_queue(expected: impl Fn(&RingError) -> bool, lie: impl Fn(&mut Driver<'_>)) {
    let ram = ram();
    let (block, file) = disk(BlockConfig::default());
    let mut one = drivers(&ram, 1, SIZE);
    let mut errors = vec![provoke(&mut Guest::started(block, &ram, &one), &mut one[0], 0, &lie)];
    assert_eq!(bytes_of(&file), content());
    let mut one = drivers(&ram, 1, SIZE);
    errors.push(provoke(&mut Guest::started(Entropy::new(), &ram, &one), &mut one[0], 0, &lie));
    for queue in [RX_QUEUE, TX_QUEUE, CONTROL_RX_QUEUE, CONTROL_TX_QUEUE] {
        errors.push(provoke_console(queue, &lie));
    }
    // A network link's two queues have the same numbers as a console's first two.
    for queue in [RX_QUEUE, TX_QUEUE] {
        errors.push(provoke_link(queue, &lie));
    }
    for (place, error) in errors.iter().enumerate() {
        assert!(matches!(error, DeviceError::Ring(ring) if expected(ring)), "{place}: {error:?}");
    }
}

#[test]
fn v1_chains_that_do_not_end_are_bounded() {
    in_every_queue(
        |error| matches!(error, RingError::Endless),
        |driver| {
            driver.write_descriptor(0, readable(DATA, 16), F_NEXT, 1);
            driver.write_descriptor(1, readable(DATA, 16), F_NEXT, 0);
            driver.publish(0);
        },
    );
    in_every_queue(
        |error| matches!(error, RingError::Endless),
        |driver| {
            driver.write_descriptor(3, writable(DATA, 0), F_NEXT, 3);
            driver.publish(3);
        },
    );
}

#[test]
fn v1_descriptors_outside_the_table_are_refused() {
    in_every_queue(
        |error| matches!(error, RingError::NoSuchDescriptor(SIZE)),
        |driver| {
            driver.write_descriptor(0, readable(DATA, 16), F_NEXT, SIZE);
            driver.publish(0);
        },
    );
    in_every_queue(
        |error| matches!(error, RingError::NoSuchDescriptor(u16::MAX)),
        |driver| driver.publish(u16::MAX),
    );
}

#[test]
fn v2_available_index_that_is_too_far_ahead_or_behind_ends_the_device() {
    for index in [300, u16::MAX] {
        in_every_queue(|error| matches!(error, RingError::Queue(_)), |driver| driver.set_available(index));
    }
}

#[test]
fn v3_buffers_outside_memory_are_refused() {
    for (address, length) in [
        (RAM, 512),
        (RAM - 511, 512),
        (u64::MAX - 511, 512),
        (u64::MAX - 5, 512),
        (1 << 40, 512),
        (DATA, u32::MAX),
    ] {
        in_every_queue(
            |error| matches!(error, RingError::Unmapped { .. }),
            |driver| {
                driver.push(&[writable(address, length)]);
            },
        );
    }
}

#[test]
fn v3_buffers_in_the_hole_of_memory_are_refused() {
    let (hole, above) = (1 << 20, 64 << 20);
    let ram = Arc::new(GuestRam::create_around(2 << 20, hole..above).unwrap());
    for address in [hole, hole - 511, above - 1, above - 512, hole + 0x8_0000, above + (1 << 20)] {
        let mut drivers = drivers(&ram, 1, SIZE);
        let (block, _) = disk(BlockConfig::default());
        let mut guest = Guest::started(block, &ram, &drivers);
        let parts = block_request(guest.mem(), IN, 0, &[writable(address, 512)]);
        let error = provoke(&mut guest, &mut drivers[0], 0, &|driver| {
            driver.push(&parts);
        });
        assert!(matches!(error, DeviceError::Ring(RingError::Unmapped { .. })), "{address:#x}: {error:?}");
    }
}

#[test]
fn v4_indirect_descriptors_and_wrong_order_are_refused() {
    for length in [0, 16, 17, 4096] {
        in_every_queue(
            |error| matches!(error, RingError::Indirect),
            |driver| {
                driver.write_descriptor(0, readable(DATA, length), F_INDIRECT, 0);
                driver.publish(0);
            },
        );
    }
    in_every_queue(
        |error| matches!(error, RingError::Order),
        |driver| {
            driver.push(&[writable(DATA, 16), readable(DATA, 16)]);
        },
    );
}

#[test]
fn v4_buffers_of_the_wrong_direction_end_the_device() {
    let block = |parts: &[DriverBuffer]| {
        let ram = ram();
        let mut drivers = drivers(&ram, 1, SIZE);
        let mut guest = Guest::started(disk(BlockConfig::default()).0, &ram, &drivers);
        provoke(&mut guest, &mut drivers[0], 0, &|driver| {
            driver.push(parts);
        })
    };
    let error = block(&[readable(HEADER, 16), readable(ANSWER, 1)]);
    assert!(matches!(error, DeviceError::Block(BlockError::NoStatus)));
    let error = block(&[writable(HEADER, 16), writable(ANSWER, 1)]);
    assert!(matches!(error, DeviceError::Block(BlockError::NoHeader(0))));

    let ram = ram();
    let mut one = drivers(&ram, 1, SIZE);
    let mut guest = Guest::started(Entropy::new(), &ram, &one);
    let error = provoke(&mut guest, &mut one[0], 0, &|driver| {
        driver.push(&[readable(DATA, 16)]);
    });
    assert!(matches!(error, DeviceError::Entropy(EntropyError::NoBuffer)));

    for (queue, part) in [
        (RX_QUEUE, readable(DATA, 16)),
        (CONTROL_RX_QUEUE, readable(DATA, 16)),
        (CONTROL_TX_QUEUE, writable(DATA, 16)),
    ] {
        let error = provoke_console(queue, &|driver| {
            driver.push(&[part]);
        });
        assert!(
            matches!(
                error,
                DeviceError::Console(ConsoleError::SmallBuffer(0) | ConsoleError::ShortControl(0))
            ),
            "{queue}: {error:?}"
        );
    }
}

#[test]
fn v4_frames_of_the_wrong_direction_end_the_device() {
    let error = provoke_link(TX_QUEUE, &|driver| {
        driver.push(&[readable(DATA, 12), writable(DATA, 60)]);
    });
    assert!(matches!(error, DeviceError::Net(NetError::WritableFrame(60))), "{error:?}");
    let error = provoke_link(RX_QUEUE, &|driver| {
        driver.push(&[readable(DATA, 1), writable(DATA, 1526)]);
    });
    assert!(matches!(error, DeviceError::Net(NetError::ReadableBuffer(1))), "{error:?}");
}

#[test]
fn v5_data_that_lands_on_the_queue_itself_hurts_only_the_guest() {
    let ram = ram();
    for place in 0..3 {
        let mut drivers = drivers(&ram, 1, SIZE);
        let (block, file) = disk(BlockConfig::default());
        let mut guest = Guest::started(block, &ram, &drivers);
        let target = rings_of(&drivers[0])[place];
        for sector in 0..5 {
            drivers[0].push(&block_request(guest.mem(), IN, sector, &[writable(target, 512)]));
        }
        // The device overwrites what it has yet to read: any outcome but a crash will do, and one error at most.
        let failed = guest.kick(0).is_err();
        assert_eq!(guest.mmio.is_ended(), failed);
        assert_eq!(bytes_of(&file), content());
    }
}

#[test]
fn v5_same_buffer_in_two_chains_is_served_twice() {
    let ram = ram();
    let mut drivers = drivers(&ram, 1, SIZE);
    let mut guest = Guest::started(disk(BlockConfig::default()).0, &ram, &drivers);
    let head = drivers[0].push(&block_request(guest.mem(), IN, 1, &[writable(DATA, 512)]));
    drivers[0].publish(head);
    guest.kick(0).unwrap();
    assert_eq!(drivers[0].take_used(), [(0, 513), (0, 513)]);
}

#[test]
fn v8_read_only_disk_stays_as_it_is_whatever_the_driver_accepted() {
    let ram = ram();
    let mut drivers = drivers(&ram, 1, SIZE);
    let (block, file) = disk(BlockConfig { read_only: true, ..BlockConfig::default() });
    let mut guest = Guest::new(block, &ram);
    // A driver need not accept that the disk is read-only.
    guest.negotiate_for(VERSION_1);
    guest.set_up(0, &drivers[0]);
    guest.put_all(&[(STATUS, DRIVER_OK)]);
    for kind in [OUT, 11, 13] {
        drivers[0].push(&block_request(guest.mem(), kind, 0, &[readable(DATA, 512)]));
        guest.kick(0).unwrap();
        let answer: u8 = ram.memory().read_obj(GuestAddress(ANSWER)).unwrap();
        assert_eq!(answer, 1, "request {kind}");
    }
    assert_eq!(bytes_of(&file), content());
}

#[test]
fn v11_request_for_a_gibibyte_of_randomness_gets_no_more_than_the_rate() {
    let ram = Arc::new(GuestRam::create(2 << 30).unwrap());
    let mut drivers = drivers(&ram, 1, SIZE);
    let clock = TestClock::default();
    let mut guest = Guest::started(Entropy::with_clock(clock.for_device()), &ram, &drivers);
    for _ in 0..2 {
        drivers[0].push(&[writable(1 << 30, 1 << 30)]);
    }
    let outcome = guest.kick(0).unwrap();
    let burst = u32::try_from(BURST_BYTES).unwrap();
    assert_eq!(drivers[0].take_used(), [(0, burst)]);
    assert!(outcome.retry_after.is_some());
    // Asking more often does not help.
    for _ in 0..100 {
        assert!(guest.kick(0).unwrap().retry_after.is_some());
    }
    assert_eq!(drivers[0].take_used(), []);
    let mut beyond = [0xee];
    ram.memory().read_slice(&mut beyond, GuestAddress((1 << 30) + BURST_BYTES)).unwrap();
    assert_eq!(beyond, [0]);
}

#[test]
fn v11_console_flood_stays_in_the_guests_own_memory() {
    let ram = ram();
    let mut drivers = drivers(&ram, 4, 256);
    let mut guest = open_console(&ram, &mut drivers);
    let chains = 200;
    for _ in 0..chains {
        drivers[TX_QUEUE].push(&[readable(DATA, 32 << 10)]);
    }
    for _ in 0..1000 {
        guest.kick(1).unwrap();
    }
    assert_eq!(guest.mmio.device().received(), BUFFER_BYTES);
    assert_eq!(drivers[TX_QUEUE].take_used().len(), BUFFER_BYTES / (32 << 10));
    // What did not fit is there when the host has taken something out, and not before.
    assert_eq!(guest.mmio.service().unwrap(), Outcome::default());
    guest.mmio.device_mut().take(BUFFER_BYTES);
    guest.mmio.service().unwrap();
    assert_eq!(drivers[TX_QUEUE].take_used().len(), BUFFER_BYTES / (32 << 10));
}

#[test]
fn v9_flood_of_frames_stays_in_the_guests_own_memory() {
    let ram = ram();
    let mut drivers = drivers(&ram, 2, 256);
    let mut guest = Guest::started(Net::new([2, 0, 0, 0, 0, 9]), &ram, &drivers);
    for _ in 0..200 {
        drivers[TX_QUEUE].push(&[readable(DATA, u32::try_from(MAX_FRAME_BYTES + 12).unwrap())]);
    }
    for _ in 0..1000 {
        guest.kick(1).unwrap();
    }
    let held = drivers[TX_QUEUE].take_used().len();
    assert_eq!(held, bathy_devices::net::BUFFER_BYTES / MAX_FRAME_BYTES);
    // What did not fit is there when the host has taken something out, and not before.
    assert_eq!(guest.mmio.service().unwrap(), Outcome::default());
    guest.mmio.device_mut().drop_frame();
    guest.mmio.service().unwrap();
    assert_eq!(drivers[TX_QUEUE].take_used().len(), 1);
}
