//! Valid messages at the wrong moment.

use super::*;

#[test]
fn v14_nothing_comes_before_the_owner() {
    assert!(matches!(fails(&mut fresh(), GET_FEATURES, &[], &[]), VhostError::Order(_)));
}

#[test]
fn v14_owner_comes_once() {
    assert!(matches!(fails(&mut owned(), SET_OWNER, &[], &[]), VhostError::Order(_)));
}

#[test]
fn v14_features_that_were_not_offered_are_refused() {
    let version_1 = 1 << 32;
    for accepted in [version_1 | 1 << 28, version_1 | 1 << 63, 0, 1 << 29] {
        let error = fails(&mut negotiated(), SET_FEATURES, &longs(&[accepted]), &[]);
        assert!(matches!(error, VhostError::Features { .. }), "{accepted:#x}: {error:?}");
    }
    for accepted in [ACCEPTED_PROTOCOL | 1 << 14, 1, 1 << 63] {
        let error = fails(&mut owned(), SET_PROTOCOL_FEATURES, &longs(&[accepted]), &[]);
        assert!(matches!(error, VhostError::Features { .. }), "{accepted:#x}: {error:?}");
    }
}

#[test]
fn v14_what_was_not_negotiated_is_refused() {
    let mut disk = owned();
    disk.send_raw(&message(SET_FEATURES, VERSION | NEED_REPLY, &longs(&[1 << 32])), &[]);
    assert!(matches!(disk.pump(), Err(VhostError::Order(_))));

    let config = [words(&[0, 4, 0]), vec![0; 4]].concat();
    assert!(matches!(fails(&mut owned(), GET_CONFIG, &config, &[]), VhostError::Order(_)));
    let (_ours, theirs) = sockets(SocketType::STREAM);
    let error = fails(&mut owned(), SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
    assert!(matches!(error, VhostError::Order(_)));
}

#[test]
fn v14_queue_is_not_started_before_it_is_complete() {
    let start = words(&[0, 1]);
    assert!(matches!(fails(&mut negotiated(), SET_VRING_ENABLE, &start, &[]), VhostError::Order(_)));
    let error = fails(&mut with_memory(), SET_VRING_ENABLE, &start, &[]);
    assert!(matches!(vring_error(error), VringError::Incomplete));

    let mut disk = with_memory();
    let ram = Arc::clone(&disk.ram);
    disk.describe_queue(0, &Driver::new(ram.memory(), QUEUE, 256));
    assert!(matches!(vring_error(fails(&mut disk, SET_VRING_ENABLE, &start, &[])), VringError::Incomplete));
}

#[test]
fn v14_addresses_from_an_old_memory_table_do_not_count() {
    let mut disk = with_memory();
    let ram = Arc::clone(&disk.ram);
    disk.describe_queue(0, &Driver::new(ram.memory(), QUEUE, 256));
    disk.share_memory();
    let kick = eventfd(0, EventfdFlags::empty()).unwrap();
    disk.request_acked(SET_VRING_KICK, &longs(&[0]), &[kick.as_fd()]);
    let error = fails(&mut disk, SET_VRING_ENABLE, &words(&[0, 1]), &[]);
    assert!(matches!(vring_error(error), VringError::Incomplete));
}

#[test]
fn v14_address_before_the_memory_table_is_refused() {
    let ram = GuestRam::create(RAM).unwrap();
    let payload = ring_addresses(0, &Driver::new(ram.memory(), QUEUE, 256));
    assert!(matches!(fails(&mut negotiated(), SET_VRING_ADDR, &payload, &[]), VhostError::Order(_)));
}

#[test]
fn v14_running_queue_is_frozen() {
    let kick = eventfd(0, EventfdFlags::empty()).unwrap();
    let mut disk = running();
    let ram = Arc::clone(&disk.ram);
    let address = ring_addresses(0, &Driver::new(ram.memory(), QUEUE + 0x8000, 256));
    let error = fails(&mut disk, SET_VRING_ADDR, &address, &[]);
    assert!(matches!(vring_error(error), VringError::Running));
    for (request, payload) in [
        (SET_VRING_NUM, words(&[0, 128])),
        (SET_VRING_BASE, words(&[0, 5])),
        (SET_VRING_ENABLE, words(&[0, 1])),
    ] {
        let error = fails(&mut running(), request, &payload, &[]);
        assert!(matches!(vring_error(error), VringError::Running), "{request}");
    }
    let error = fails(&mut running(), SET_VRING_KICK, &longs(&[0]), &[kick.as_fd()]);
    assert!(matches!(vring_error(error), VringError::Running));
}

#[test]
fn v14_features_and_memory_are_frozen_while_a_queue_runs() {
    let error = fails(&mut running(), SET_FEATURES, &longs(&[1 << 32]), &[]);
    assert!(matches!(error, VhostError::Order(_)));
    let mut disk = running();
    let ram = Arc::clone(&disk.ram);
    let table = region(RESERVED, RAM - RESERVED, RESERVED, RESERVED);
    assert!(matches!(fails(&mut disk, SET_MEM_TABLE, &table, &[ram.fd()]), VhostError::Order(_)));
}
