//! Bytes that are not messages, and messages with the wrong things attached.

use super::*;

#[test]
fn v14_unknown_requests_end_the_connection() {
    for request in [0, 4, 6, 7, 14, 17, 19, 20, 22, 23, 26, 27, 32, 44, u32::MAX] {
        let error = message_error(fails(&mut owned(), request, &[], &[]));
        assert_eq!(error, MessageError::Unknown(request));
    }
}

#[test]
fn v14_flags_other_than_a_requests_end_the_connection() {
    for flags in [0, 2, 3, VERSION | 4, VERSION | 16, u32::MAX] {
        let mut disk = owned();
        disk.send_raw(&message(GET_FEATURES, flags, &[]), &[]);
        assert_eq!(message_error(disk.pump().unwrap_err()), MessageError::Flags(flags));
    }
}

#[test]
fn v14_payload_of_the_wrong_size_ends_the_connection() {
    let wrong: &[(u32, usize)] = &[
        (GET_FEATURES, 8),
        (SET_FEATURES, 0),
        (SET_FEATURES, 7),
        (SET_FEATURES, 9),
        (SET_PROTOCOL_FEATURES, 4),
        (SET_MEM_TABLE, 8),
        (SET_MEM_TABLE, 72),
        (SET_VRING_NUM, 4),
        (SET_VRING_ADDR, 39),
        (SET_VRING_BASE, 12),
        (SET_VRING_KICK, 4),
        (SET_VRING_CALL, 16),
        (SET_VRING_ENABLE, 0),
        (GET_CONFIG, 13),
    ];
    for (request, bytes) in wrong {
        let error = message_error(fails(&mut owned(), *request, &vec![0; *bytes], &[]));
        let bytes = u32::try_from(*bytes).unwrap();
        assert_eq!(error, MessageError::Size { request: *request, bytes });
    }
}

#[test]
fn v14_announced_length_is_refused_before_it_is_waited_for() {
    for bytes in [269, 4096, u32::MAX] {
        let mut disk = owned();
        disk.send_raw(&words(&[GET_CONFIG, VERSION, bytes]), &[]);
        let error = message_error(disk.pump().unwrap_err());
        assert_eq!(error, MessageError::Size { request: GET_CONFIG, bytes });
    }
}

#[test]
fn v14_wrong_number_of_descriptors_ends_the_connection_and_closes_them() {
    let (reader, writer) = pipe().unwrap();
    let error = fails(&mut owned(), GET_FEATURES, &[], &[writer.as_fd()]);
    assert_eq!(message_error(error), MessageError::Descriptors { request: GET_FEATURES, count: 1 });
    drop(writer);
    assert!(is_abandoned(reader));

    let error = fails(&mut negotiated(), SET_VRING_KICK, &longs(&[0]), &[]);
    assert_eq!(message_error(error), MessageError::Descriptors { request: SET_VRING_KICK, count: 0 });
}

#[test]
fn v14_flood_of_descriptors_ends_the_connection_and_closes_them() {
    let (reader, writer) = pipe().unwrap();
    let mut disk = negotiated();
    let error = fails(&mut disk, SET_VRING_KICK, &longs(&[0]), &[writer.as_fd(); 8]);
    assert!(matches!(error, VhostError::Socket(SocketError::TooManyDescriptors)), "{error:?}");
    drop(writer);
    assert!(is_abandoned(reader));
}

#[test]
fn v14_descriptors_spread_over_the_bytes_of_one_message_end_the_connection() {
    let (reader, writer) = pipe().unwrap();
    let mut disk = negotiated();
    let whole = message(SET_VRING_KICK, VERSION, &longs(&[0]));
    disk.send_raw(&whole[..4], &[writer.as_fd()]);
    disk.pump().unwrap();
    disk.send_raw(&whole[4..8], &[writer.as_fd()]);
    let error = disk.pump().unwrap_err();
    assert!(matches!(error, VhostError::Socket(SocketError::TooManyDescriptors)), "{error:?}");
    drop((writer, disk));
    assert!(is_abandoned(reader));
}

#[test]
fn v14_descriptor_of_an_unfinished_message_is_closed_with_the_server() {
    let (reader, writer) = pipe().unwrap();
    let mut disk = negotiated();
    disk.send_raw(&message(SET_VRING_KICK, VERSION, &longs(&[0]))[..14], &[writer.as_fd()]);
    disk.pump().unwrap();
    drop(writer);
    assert!(!is_abandoned(&reader));
    drop(disk);
    assert!(is_abandoned(reader));
}

#[test]
fn v14_client_that_does_not_read_its_answers_is_cut_off() {
    let mut disk = owned();
    let mut result = Ok(());
    for _ in 0..100_000 {
        result = disk.request(GET_FEATURES, &[], &[]);
        if result.is_err() {
            break;
        }
    }
    assert!(matches!(result, Err(VhostError::Socket(SocketError::Unread))), "{result:?}");
}

#[test]
fn v14_connection_closed_within_a_message_ends_it() {
    let mut disk = owned();
    disk.send_raw(&[1, 0, 0], &[]);
    rustix::net::shutdown(&disk.peer, rustix::net::Shutdown::Write).unwrap();
    assert!(matches!(disk.pump(), Err(VhostError::Socket(SocketError::Closed))));
}

#[test]
fn v14_configuration_beyond_the_limit_is_refused() {
    let mut disk = negotiated();
    let bytes = u32::try_from(MAX_CONFIG_BYTES).unwrap() + 1;
    let error = fails(&mut disk, GET_CONFIG, &words(&[0, bytes, 0]), &[]);
    assert_eq!(message_error(error), MessageError::Payload(GET_CONFIG));
}
