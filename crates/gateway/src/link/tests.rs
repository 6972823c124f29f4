//! A link, and a keeper that reads or does not.

use std::os::fd::OwnedFd;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use bathy_protocol::network::{FRAME_HEADER, GATEWAY_MAC, GUEST_MAC};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

use super::{EtherType, Link, MAX_QUEUED, Received};

fn link() -> (Link, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (one, two) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    (Link::new(one), two)
}

fn next(keeper: &OwnedFd) -> Option<Vec<u8>> {
    let mut frame = vec![0; 2000];
    let (count, _) = recv(keeper, &mut *frame, RecvFlags::empty()).ok()?;
    frame.truncate(count);
    Some(frame)
}

#[test]
fn a_frame_is_parsed_with_destination_and_payload() {
    let (mut link, keeper) = link();
    for (kind, number) in [(EtherType::V4, [8, 0]), (EtherType::V6, [0x86, 0xdd]), (EtherType::Arp, [8, 6])] {
        link.send(kind, 3, |packet| packet.copy_from_slice(b"abc"));
        assert_eq!(next(&keeper).unwrap(), [&GUEST_MAC[..], &GATEWAY_MAC, &number, b"abc"].concat());
    }
    assert_eq!((link.sent, link.dropped), ((3, 3 * (FRAME_HEADER as u64 + 3)), 0));
}

#[test]
fn nothing_of_one_packet_shows_in_the_headers_of_the_next() {
    for kind in [EtherType::V4, EtherType::V6] {
        let (mut link, keeper) = link();
        link.send(EtherType::V4, 100, |packet| packet.fill(0xff));
        link.send(kind, 70, |packet| assert_eq!(packet[..60], [0; 60]));
        link.send(kind, 20, |packet| assert_eq!(packet, [0; 20]));
        assert_eq!(std::iter::from_fn(|| next(&keeper)).count(), 3);
    }
}

#[test]
fn a_frame_that_is_longer_than_any_is_no_frame() {
    let (link, keeper) = link();
    let mut buffer = [0; 10];
    for (length, expected) in [(9, 9), (10, 10), (11, 0)] {
        send(&keeper, &vec![7; length], SendFlags::empty()).unwrap();
        let Received::Frame(frame) = link.receive(&mut buffer) else { unreachable!("{length}") };
        assert_eq!(frame.len(), expected, "{length}");
    }
    assert!(matches!(link.receive(&mut buffer), Received::WouldBlock));
    drop(keeper);
    assert!(matches!(link.receive(&mut buffer), Received::Closed));
}

#[test]
fn frames_wait_in_order_until_the_keeper_reads_and_only_so_many() {
    let (mut link, keeper) = link();
    let mut count = 0_u32;
    let mut send = |link: &mut Link| {
        link.send(EtherType::V4, 1000, |packet| packet[..4].copy_from_slice(&count.to_be_bytes()));
        count += 1;
        count
    };
    while link.has_space() {
        send(&mut link);
    }
    for _ in 1..MAX_QUEUED {
        send(&mut link);
    }
    assert_eq!(link.dropped, 0);
    let all = send(&mut link) - 1;
    assert_eq!(link.dropped, 1);
    for number in 0..all {
        let frame = next(&keeper).or_else(|| {
            link.flush();
            next(&keeper)
        });
        assert_eq!(frame.unwrap()[FRAME_HEADER..][..4], number.to_be_bytes());
    }
    link.flush();
    assert!(link.has_space() && next(&keeper).is_none());
}

#[test]
fn a_keeper_that_neither_reads_nor_sends_does_not_stop_the_gateway() {
    // The gateway's sockets are blocking ones.
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (one, _keeper) = pair.unwrap();
    let (done, is_done) = mpsc::channel();
    thread::spawn(move || {
        let mut link = Link::new(one);
        while link.has_space() {
            link.send(EtherType::V4, 1000, |_| {});
        }
        link.flush();
        done.send(matches!(link.receive(&mut [0; 10]), Received::WouldBlock)).unwrap();
    });
    assert_eq!(is_done.recv_timeout(Duration::from_secs(20)), Ok(true), "it waits for the keeper");
}
