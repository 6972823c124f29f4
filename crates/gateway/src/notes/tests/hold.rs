//! Events while their owner cannot record them.

use std::net::{IpAddr, Ipv4Addr};

use bathy_protocol::network::{Transport, decode};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};

use super::super::*;

fn notes() -> (Notes, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, owner) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    // Room for a few messages.
    rustix::net::sockopt::set_socket_send_buffer_size(&ours, 4096).unwrap();
    (Notes::new(ours, Instant::now()), owner)
}

fn received(notes: &mut Notes, owner: &OwnedFd) -> Vec<FromGateway> {
    let mut all = Vec::new();
    let mut message = [0; 1024];
    while let Ok((count, _)) = recv(owner, &mut message, RecvFlags::empty()) {
        all.push(decode(&message[..count]).unwrap());
        notes.flush();
    }
    all
}

fn dropped(count: u64) -> NetEvent {
    NetEvent::Dropped { reason: "r".to_owned(), count }
}

#[test]
fn answers_overtake_events_that_wait_and_neither_lose_their_order() {
    let (mut notes, owner) = notes();
    for count in 0..100 {
        notes.event(dropped(count));
    }
    assert!(!notes.is_sent());
    notes.answer(&FromGateway::Changed { closed: 1 });
    notes.answer(&FromGateway::Changed { closed: 2 });
    let all = received(&mut notes, &owner);
    let events: Vec<_> = all.iter().filter(|told| matches!(told, FromGateway::Event(_))).cloned().collect();
    assert_eq!(events, (0..100).map(|count| FromGateway::Event(dropped(count))).collect::<Vec<_>>());
    let at = |closed| all.iter().position(|told| *told == FromGateway::Changed { closed }).unwrap();
    assert!(at(1) < 50 && at(2) == at(1) + 1, "{} {}", at(1), at(2));
    assert!(notes.is_sent());
}

#[test]
fn what_is_only_counted_stays_so_while_events_cannot_be_recorded() {
    let (mut notes, owner) = notes();
    let address = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 5));
    let peer = Peer { transport: Transport::Tcp, inbound: false, address, port: 1, name: None };
    notes.hold(true);
    assert!(notes.has_room() && !notes.may_begin());
    notes.limited("connections at once");
    notes.denied(&peer, "deny private", None);
    notes.denied(&peer, "deny private", None);
    assert_eq!(received(&mut notes, &owner).len(), 1, "the first denial");
    let later = notes.next + PERIOD;
    notes.settle(later);
    assert_eq!((received(&mut notes, &owner).len(), notes.due()), (0, None));
    notes.hold(false);
    notes.settle(later);
    assert_eq!(received(&mut notes, &owner).len(), 2, "the second, and the limit");
}
