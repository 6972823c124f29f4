//! Descriptors that would block or do harm.

use super::*;

#[test]
fn v14_kick_that_cannot_be_watched_is_refused() {
    let file = tempfile::tempfile().unwrap();
    let device = open("/dev/zero", OFlags::RDWR, Mode::empty()).unwrap();
    let directory = open("/", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
    for fd in [file.as_fd(), device.as_fd(), directory.as_fd()] {
        let error = fails(&mut with_memory(), SET_VRING_KICK, &longs(&[0]), &[fd]);
        assert!(matches!(vring_error(error), VringError::Kick));
    }
}

#[test]
fn v14_kick_without_a_descriptor_is_refused() {
    let error = fails(&mut with_memory(), SET_VRING_KICK, &longs(&[1 << 8]), &[]);
    assert_eq!(message_error(error), MessageError::Payload(SET_VRING_KICK));
}

#[test]
fn v14_kick_is_never_read() {
    // A pipe without a writer's data would block a reader for ever; this one's content must stay where it is.
    let mut disk = with_memory();
    let ram = Arc::clone(&disk.ram);
    disk.describe_queue(0, &Driver::new(ram.memory(), QUEUE, 256));
    let (reader, writer) = pipe().unwrap();
    disk.request_acked(SET_VRING_KICK, &longs(&[0]), &[reader.as_fd()]);
    disk.request_acked(SET_VRING_ENABLE, &words(&[0, 1]), &[]);
    rustix::io::write(&writer, b"12345678").unwrap();
    disk.pump().unwrap();
    let mut left = [0; 16];
    assert_eq!(rustix::io::read(&reader, &mut left), Ok(8));
}

#[test]
fn v14_call_that_is_no_stream_socket_is_refused_and_closed() {
    let (reader, writer) = pipe().unwrap();
    let (datagrams, _other) = sockets(SocketType::DGRAM);
    let counter = eventfd(0, EventfdFlags::empty()).unwrap();
    for fd in [writer.as_fd(), datagrams.as_fd(), counter.as_fd()] {
        let error = fails(&mut with_memory(), SET_VRING_CALL, &longs(&[0]), &[fd]);
        assert!(matches!(vring_error(error), VringError::Call));
    }
    drop(writer);
    assert!(is_abandoned(reader));
}

#[test]
fn v14_request_descriptor_that_is_no_stream_socket_is_refused() {
    let (_reader, writer) = pipe().unwrap();
    let error = fails(&mut negotiated(), SET_BACKEND_REQ_FD, &[], &[writer.as_fd()]);
    assert!(matches!(error, VhostError::RequestDescriptor));
}

#[test]
fn v14_call_socket_that_is_full_or_closed_does_not_hold_the_server_up() {
    let mut disk = fresh();
    let ram = Arc::clone(&disk.ram);
    let mut driver = Driver::new(ram.memory(), QUEUE, 256);
    disk.set_up(std::slice::from_ref(&driver));
    let (ours, theirs) = sockets(SocketType::STREAM);
    while send(&theirs, &[0; 4096], SendFlags::DONTWAIT).is_ok() {}
    disk.request_acked(SET_VRING_CALL, &longs(&[0]), &[theirs.as_fd()]);
    ram.memory().write_slice(&longs(&[4, 0]), GuestAddress(DATA)).unwrap();

    driver.push(&[readable(DATA, 16), writable(DATA + 64, 1)]);
    disk.kick(0).unwrap();
    assert_eq!(driver.used_index(), 1);
    drop(ours);
    driver.set_used_event(1);
    driver.push(&[readable(DATA, 16), writable(DATA + 64, 1)]);
    disk.kick(0).unwrap();
    assert_eq!(driver.used_index(), 2);
}

#[test]
fn v14_replaced_descriptors_are_closed() {
    let mut disk = with_memory();
    let mut old: Vec<OwnedFd> = Vec::new();
    for _ in 0..300 {
        let (ours, theirs) = sockets(SocketType::STREAM);
        disk.request_acked(SET_VRING_CALL, &longs(&[0]), &[theirs.as_fd()]);
        old.push(ours);
        let (reader, writer) = pipe().unwrap();
        disk.request_acked(SET_VRING_KICK, &longs(&[0]), &[writer.as_fd()]);
        old.push(reader);
    }
    let open = old.iter().filter(|fd| !is_abandoned(fd)).count();
    assert_eq!(open, 2, "only the latest of each kind stays open");
    drop(disk);
    assert!(old.iter().all(is_abandoned));
}
