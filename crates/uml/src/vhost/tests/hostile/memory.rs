//! Memory that is not the guest's.

use super::*;

fn refused(payload: &[u8], fd: BorrowedFd<'_>) {
    let error = fails(&mut negotiated(), SET_MEM_TABLE, payload, &[fd]);
    assert!(matches!(error, VhostError::Memory(_)), "{error:?}");
}

#[test]
fn v14_any_other_file_is_refused_as_memory() {
    let table = region(RESERVED, RAM - RESERVED, RESERVED, RESERVED);
    refused(&table, GuestRam::create(RAM).unwrap().fd());
    refused(&table, open("/dev/zero", OFlags::RDWR, Mode::empty()).unwrap().as_fd());
    refused(&table, tempfile::tempfile().unwrap().as_fd());
    let (reader, writer) = pipe().unwrap();
    refused(&table, writer.as_fd());
    drop(writer);
    assert!(is_abandoned(reader));
}

#[test]
fn v14_regions_that_are_not_the_files_own_are_refused() {
    for payload in [
        region(RESERVED, RAM, RESERVED, RESERVED),
        region(0, RAM + 1, 0, 0),
        region(RAM, 4096, RAM, RAM),
        region(u64::MAX - 4095, 4096, u64::MAX - 4095, u64::MAX - 4095),
        region(u64::MAX, u64::MAX, u64::MAX, u64::MAX),
        region(RESERVED, 0, RESERVED, RESERVED),
        region(RESERVED, 4096, 0, RESERVED),
        region(RESERVED, 4096, RESERVED, 0),
    ] {
        let mut disk = negotiated();
        let ram = Arc::clone(&disk.ram);
        let error = fails(&mut disk, SET_MEM_TABLE, &payload, &[ram.fd()]);
        assert!(matches!(error, VhostError::Memory(_)), "{error:?}");
    }
}

#[test]
fn v14_more_or_fewer_than_one_region_are_refused() {
    for count in [0, 2, u32::MAX] {
        let mut payload = region(RESERVED, 4096, RESERVED, RESERVED);
        payload[..4].copy_from_slice(&count.to_ne_bytes());
        let mut disk = negotiated();
        let ram = Arc::clone(&disk.ram);
        let error = fails(&mut disk, SET_MEM_TABLE, &payload, &[ram.fd()]);
        assert_eq!(message_error(error), MessageError::Payload(SET_MEM_TABLE));
    }
}
