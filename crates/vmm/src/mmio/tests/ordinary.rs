//! What the guest's own driver writes and gets.

use bathy_devices::console::{RX_QUEUE, TX_QUEUE};
use bathy_devices::entropy::{BURST_BYTES, Entropy};
use bathy_devices::net::Net;
use bathy_devices::testing::TestClock;

use super::super::{MmioState, QueueState};
use super::*;

#[test]
fn transport_can_be_handed_between_threads() {
    fn is_send<T: Send>() {}
    is_send::<Mmio<Block>>();
    is_send::<Mmio<Console>>();
    is_send::<Mmio<Entropy>>();
    is_send::<Mmio<Net>>();
}

#[test]
fn driver_finds_what_the_device_is() {
    let (block, _) = disk(BlockConfig::default());
    let features = block.features();
    let mut guest = Guest::new(block, &ram());
    assert_eq!(guest.get(MAGIC).to_le_bytes(), *b"virt");
    assert_eq!(guest.get(VERSION), 2);
    assert_eq!(guest.get(DEVICE_ID), 2);
    assert_eq!(guest.offered(), features);
    guest.put_all(&[(DEVICE_FEATURES_SEL, 2)]);
    assert_eq!(guest.get(DEVICE_FEATURES), 0);
    assert_eq!(guest.get(QUEUE_NUM_MAX), 256);
    guest.put_all(&[(QUEUE_SEL, 1)]);
    assert_eq!(guest.get(QUEUE_NUM_MAX), 0);
    assert_eq!(guest.get(CONFIG_GENERATION), 0);
    for register in [SHM_LEN, SHM_LEN + 4, SHM_LEN + 8, SHM_LEN + 12] {
        assert_eq!(guest.get(register), u32::MAX);
    }
}

#[test]
fn configuration_is_read_at_any_width_and_place() {
    let (block, _) = disk(BlockConfig::default());
    let guest = Guest::new(block, &ram());
    let mut sectors = [0; 8];
    guest.mmio.read(CONFIG, &mut sectors);
    assert_eq!(u64::from_le_bytes(sectors), SECTORS);
    let mut byte = [0xee];
    guest.mmio.read(CONFIG + 21, &mut byte);
    assert_eq!(byte, [2], "the second byte of the block size, which is 512");
    let mut two = [0xee; 2];
    guest.mmio.read(CONFIG + 19, &mut two);
    assert_eq!(two, [0, 0]);
    let mut last = [0xee; 8];
    guest.mmio.read(0xff8, &mut last);
    assert_eq!(last, [0; 8]);
}

#[test]
fn disk_is_read_and_the_driver_interrupted() {
    let ram = ram();
    let mut drivers = drivers(&ram, 1, 256);
    let (block, _) = disk(BlockConfig::default());
    let mut guest = Guest::started(block, &ram, &drivers);
    assert_eq!((guest.edges(), guest.get(INTERRUPT_STATUS)), (0, 0));

    drivers[0].push(&block_request(guest.mem(), IN, 3, &[writable(DATA, 512)]));
    assert_eq!(guest.put(QUEUE_NOTIFY, 0), Effect::Kick(0));
    assert_eq!(drivers[0].used_index(), 0, "a register does no work");
    assert!(guest.mmio.on_kick(0).unwrap().notify);

    assert_eq!(drivers[0].take_used(), [(0, 513)]);
    let mut read = [0; 512];
    guest.mem().read_slice(&mut read, GuestAddress(DATA)).unwrap();
    assert_eq!(read[..], content()[3 * 512..4 * 512]);
    assert_eq!((guest.edges(), guest.get(INTERRUPT_STATUS)), (1, 1));
    guest.put_all(&[(INTERRUPT_ACK, 2)]);
    assert_eq!(guest.get(INTERRUPT_STATUS), 1);
    guest.put_all(&[(INTERRUPT_ACK, 1)]);
    assert_eq!(guest.get(INTERRUPT_STATUS), 0);
}

#[test]
fn interrupt_is_as_seldom_as_the_driver_wants_it() {
    let ram = ram();
    let mut drivers = drivers(&ram, 1, 16);
    let (block, _) = disk(BlockConfig::default());
    let mut guest = Guest::started(block, &ram, &drivers);
    drivers[0].set_used_event(1);
    for expected in [0, 1, 0] {
        drivers[0].push(&block_request(guest.mem(), IN, 0, &[writable(DATA, 512)]));
        guest.kick(0).unwrap();
        assert_eq!(guest.edges(), expected);
    }
}

#[test]
fn interrupt_line_that_nobody_reads_never_blocks() {
    let (block, _) = disk(BlockConfig::default());
    let guest = Guest::new(block, &ram());
    guest.interrupt.line().write(u64::MAX - 1).unwrap();
    guest.interrupt.raise().unwrap();
    guest.interrupt.raise_config().unwrap();
    assert_eq!(guest.get(INTERRUPT_STATUS), 3);
}

#[test]
fn request_that_was_there_before_the_start_is_served() {
    let ram = ram();
    let mut drivers = drivers(&ram, 1, 16);
    let (block, _) = disk(BlockConfig::default());
    let mut guest = Guest::new(block, &ram);
    guest.negotiate();
    guest.set_up(0, &drivers[0]);
    drivers[0].push(&block_request(ram.memory(), IN, 0, &[writable(DATA, 512)]));
    assert_eq!(guest.put(STATUS, DRIVER_OK), Effect::Work);
    guest.mmio.service().unwrap();
    assert_eq!(drivers[0].take_used(), [(0, 513)]);
}

#[test]
fn console_carries_both_ways() {
    let ram = ram();
    let mut drivers = drivers(&ram, 4, 64);
    let mut guest = open_console(&ram, &mut drivers);

    ram.memory().write_slice(b"from the guest", GuestAddress(DATA)).unwrap();
    drivers[TX_QUEUE].push(&[readable(DATA, 14)]);
    guest.kick(1).unwrap();
    assert_eq!(guest.mmio.device_mut().take(100), b"from the guest");

    drivers[RX_QUEUE].push(&[writable(DATA, 64)]);
    guest.mmio.device_mut().send(b"from the host");
    guest.edges();
    guest.mmio.service().unwrap();
    assert_eq!(drivers[RX_QUEUE].take_used(), [(0, 13)]);
    assert_eq!(guest.edges(), 1);
}

#[test]
fn network_link_carries_both_ways() {
    let ram = ram();
    let mut drivers = drivers(&ram, 2, 64);
    let net = Net::new([2, 0, 0, 0, 0, 9]);
    let features = net.features();
    let mut guest = Guest::new(net, &ram);
    assert_eq!(guest.get(DEVICE_ID), 1);
    assert_eq!(guest.offered(), features);
    let mut config = [0xee; 4];
    guest.mmio.read(CONFIG + 8, &mut config);
    assert_eq!(config, [0, 0, 0xf0, 0xff], "the MTU is 65520");
    guest.mmio.read(CONFIG + 4, &mut config);
    assert_eq!(config, [0, 9, 1, 0], "the link is up");
    // A frame that comes before the driver waits for its buffers.
    guest.mmio.device_mut().offer(&[7; 60]).unwrap();
    guest.mmio.service().unwrap();
    drivers[RX_QUEUE].push(&[writable(DATA, 1526)]);
    guest.start(&drivers);
    assert_eq!(drivers[RX_QUEUE].take_used(), [(0, 72)]);
    assert_eq!(guest.edges(), 1);

    ram.memory().write_slice(&[0; 12], GuestAddress(HEADER)).unwrap();
    ram.memory().write_slice(&[5; 60], GuestAddress(DATA)).unwrap();
    drivers[TX_QUEUE].push(&[readable(HEADER, 12), readable(DATA, 60)]);
    guest.kick(1).unwrap();
    assert_eq!(guest.mmio.device().frame(), Some(&[5; 60][..]));
    assert_eq!(drivers[TX_QUEUE].take_used(), [(0, 0)]);
}

#[test]
fn what_the_host_says_early_survives_the_drivers_first_reset() {
    let ram = ram();
    let mut console = Console::new();
    console.send(b"early");
    let mut guest = Guest::new(console, &ram);
    guest.put_all(&[(STATUS, 0), (STATUS, ACKNOWLEDGE), (STATUS, 0)]);
    guest.mmio.service().unwrap();
    assert_eq!(guest.mmio.device().save().to_guest, b"early");
    guest.negotiate();
    guest.put_all(&[(STATUS, 0)]);
    assert_eq!(guest.mmio.device().save().to_guest, b"");
}

#[test]
fn queue_that_waits_for_time_is_worked_on_by_service() {
    let ram = ram();
    let mut drivers = drivers(&ram, 1, 16);
    let clock = TestClock::default();
    let mut guest = Guest::started(Entropy::with_clock(clock.for_device()), &ram, &drivers);
    let most = u32::try_from(BURST_BYTES).unwrap();
    drivers[0].push(&[writable(DATA, most)]);
    drivers[0].push(&[writable(DATA, 16)]);
    let wait = guest.kick(0).unwrap().retry_after.unwrap();
    assert_eq!(drivers[0].take_used(), [(0, most)]);

    assert!(guest.mmio.service().unwrap().retry_after.is_some());
    drivers[0].set_used_event(1);
    clock.set(wait);
    assert_eq!(guest.mmio.service().unwrap(), Outcome { notify: true, ..Outcome::default() });
    assert_eq!(drivers[0].take_used(), [(1, 16)]);
}

#[test]
fn driver_can_be_unbound_and_bound_again() {
    let ram = ram();
    let (block, _) = disk(BlockConfig::default());
    let first = drivers(&ram, 1, 16);
    let mut guest = Guest::started(block, &ram, &first);
    assert_eq!(guest.put(STATUS, 0), Effect::Work);
    let mut second = drivers(&ram, 1, 128);
    guest.start(&second);
    second[0].push(&block_request(guest.mem(), IN, 0, &[writable(DATA, 512)]));
    guest.kick(0).unwrap();
    assert_eq!(second[0].take_used(), [(0, 513)]);
}

#[test]
fn rings_and_buffers_lie_on_both_sides_of_a_hole() {
    let above = 64 << 20;
    let ram = Arc::new(GuestRam::create_around(2 << 20, 1 << 20..above).unwrap());
    let (block, _) = disk(BlockConfig::default());
    let mut driver = Driver::new(ram.memory(), above + 0x1000, 16);
    let mut guest = Guest::started(block, &ram, std::slice::from_ref(&driver));
    driver.push(&block_request(guest.mem(), IN, 0, &[writable(above, 512)]));
    guest.kick(0).unwrap();
    assert_eq!(driver.take_used(), [(0, 513)]);
}

#[test]
fn state_tells_where_everything_is() {
    let ram = ram();
    let mut drivers = drivers(&ram, 1, 16);
    let (block, _) = disk(BlockConfig::default());
    let features = block.features();
    let mut guest = Guest::started(block, &ram, &drivers);
    drivers[0].push(&block_request(guest.mem(), IN, 0, &[writable(DATA, 512)]));
    guest.kick(0).unwrap();

    let [descriptors, available, used] = rings_of(&drivers[0]);
    let queue =
        QueueState { size: 16, descriptors, available, used, ready: true, next_available: 1, next_used: 1 };
    let expected = MmioState {
        status: DRIVER_OK,
        driver_features: features,
        device_features_select: 0,
        driver_features_select: 0,
        queue_select: 0,
        interrupt_status: 1,
        queues: vec![queue],
    };
    assert_eq!(guest.mmio.save(), expected);
}
