//! Queues that are not queues.

use bathy_devices::DeviceError;
use bathy_devices::net::{Net, NetError, TX_QUEUE};

use super::*;

#[test]
fn v14_queue_numbers_beyond_the_device_are_refused() {
    let kick = eventfd(0, EventfdFlags::empty()).unwrap();
    for queue in [1, 255, 256, u32::MAX] {
        for request in [SET_VRING_NUM, SET_VRING_BASE, SET_VRING_ENABLE] {
            let error = fails(&mut with_memory(), request, &words(&[queue, 0]), &[]);
            assert!(matches!(vring_error(error), VringError::NoSuchQueue(_)));
        }
    }
    let error = fails(&mut with_memory(), SET_VRING_KICK, &longs(&[1]), &[kick.as_fd()]);
    assert!(matches!(vring_error(error), VringError::NoSuchQueue(1)));
    let error = fails(&mut with_memory(), SET_VRING_KICK, &longs(&[1 << 9]), &[kick.as_fd()]);
    assert_eq!(message_error(error), MessageError::Payload(SET_VRING_KICK));
}

#[test]
fn v14_sizes_that_are_no_queue_sizes_are_refused() {
    for entries in [0, 3, 255, 257, 512, 65536, 65536 + 256, u32::MAX] {
        let error = fails(&mut with_memory(), SET_VRING_NUM, &words(&[0, entries]), &[]);
        assert!(matches!(vring_error(error), VringError::Entries(_)), "{entries}");
    }
    let error = fails(&mut with_memory(), SET_VRING_BASE, &words(&[0, 65536]), &[]);
    assert!(matches!(vring_error(error), VringError::Base(65536)));
}

#[test]
fn v14_rings_outside_the_table_or_not_aligned_are_refused() {
    let (table, used, available) = (QUEUE, QUEUE + 0x2000, QUEUE + 0x1000);
    for (table, used, available) in [
        (RESERVED - 16, used, available),
        (RAM - 4080, used, available),
        (u64::MAX - 15, used, available),
        (table + 8, used, available),
        (table, RAM - 2048, available),
        (table, used + 2, available),
        (table, used, RESERVED - 2),
        (table, used, RAM - 512),
        (table, used, u64::MAX - 1),
        (table, used, available + 1),
        (0, 0, 0),
    ] {
        let mut disk = with_memory();
        let ram = Arc::clone(&disk.ram);
        disk.describe_queue(0, &Driver::new(ram.memory(), QUEUE, 256));
        let payload = [words(&[0, 0]), longs(&[table, used, available, 0])].concat();
        disk.request_acked(SET_VRING_ADDR, &payload, &[]);
        let kick = eventfd(0, EventfdFlags::empty()).unwrap();
        disk.request_acked(SET_VRING_KICK, &longs(&[0]), &[kick.as_fd()]);
        let error = fails(&mut disk, SET_VRING_ENABLE, &words(&[0, 1]), &[]);
        assert!(matches!(vring_error(error), VringError::Address), "{table:#x} {used:#x} {available:#x}");
    }
}

#[test]
fn v14_log_flag_is_refused() {
    let payload = [words(&[0, 1]), longs(&[0, 0, 0, 0])].concat();
    let error = fails(&mut with_memory(), SET_VRING_ADDR, &payload, &[]);
    assert_eq!(message_error(error), MessageError::Payload(SET_VRING_ADDR));
}

#[test]
fn v14_malformed_ring_ends_the_connection_once() {
    let mut disk = fresh();
    let ram = Arc::clone(&disk.ram);
    let mut driver = Driver::new(ram.memory(), QUEUE, 256);
    disk.set_up(std::slice::from_ref(&driver));
    driver.push(&[readable(RAM, 16), writable(DATA, 1)]);
    assert!(matches!(disk.kick(0), Err(VhostError::Device(_))));
    assert_eq!(disk.kick(0).unwrap(), Outcome::default());
    assert!(is_abandoned(&disk.peer));
}

#[test]
fn v9_frame_that_could_be_written_ends_the_connection_once() {
    let mut link = Frontend::new(Net::new([2, 0, 0, 0, 0, 9]));
    let ram = Arc::clone(&link.ram);
    let mut drivers = [0, 1].map(|i| Driver::new(ram.memory(), QUEUE + 0x4000 * i, 256));
    link.set_up(&drivers);
    drivers[TX_QUEUE].push(&[readable(DATA, 12), writable(DATA, 60)]);
    let error = link.kick(TX_QUEUE).unwrap_err();
    assert!(matches!(error, VhostError::Device(DeviceError::Net(NetError::WritableFrame(60)))), "{error:?}");
    assert_eq!(link.kick(TX_QUEUE).unwrap(), Outcome::default());
    assert!(is_abandoned(&link.peer));
}
