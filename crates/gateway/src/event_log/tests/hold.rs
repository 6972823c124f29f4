//! Events while their owner cannot record them.

use std::net::{IpAddr, Ipv4Addr};

use bathy_protocol::network::{Transport, decode};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};

use super::super::*;

fn event_log() -> (EventLog, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, owner) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    // Buffer space for a few messages.
    rustix::net::sockopt::set_socket_send_buffer_size(&ours, 4096).unwrap();
    (EventLog::new(ours, Instant::now()), owner)
}

fn received(event_log: &mut EventLog, owner: &OwnedFd) -> Vec<FromGateway> {
    let mut all = Vec::new();
    let mut message = [0; 1024];
    while let Ok((count, _)) = recv(owner, &mut message, RecvFlags::empty()) {
        all.push(decode(&message[..count]).unwrap());
        event_log.flush();
    }
    all
}

fn dropped(count: u64) -> NetEvent {
    NetEvent::Dropped { reason: "r".to_owned(), count }
}

#[test]
fn replies_overtake_queued_events_and_both_keep_their_order() {
    let (mut event_log, owner) = event_log();
    for count in 0..100 {
        event_log.log(dropped(count));
    }
    assert!(!event_log.is_sent());
    event_log.reply(&FromGateway::Changed { closed: 1 });
    event_log.reply(&FromGateway::Changed { closed: 2 });
    let all = received(&mut event_log, &owner);
    let events: Vec<_> = all.iter().filter(|told| matches!(told, FromGateway::Event(_))).cloned().collect();
    assert_eq!(events, (0..100).map(|count| FromGateway::Event(dropped(count))).collect::<Vec<_>>());
    let at = |closed| all.iter().position(|told| *told == FromGateway::Changed { closed }).unwrap();
    assert!(at(1) < 50 && at(2) == at(1) + 1, "{} {}", at(1), at(2));
    assert!(event_log.is_sent());
}

#[test]
fn counts_are_not_flushed_while_events_cannot_be_recorded() {
    let (mut event_log, owner) = event_log();
    let address = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 5));
    let peer = Peer { transport: Transport::Tcp, inbound: false, address, port: 1, name: None };
    event_log.hold(true);
    assert!(event_log.has_space() && !event_log.may_begin());
    event_log.count_limit("connections at once");
    event_log.log_denial(&peer, "deny private", None);
    event_log.log_denial(&peer, "deny private", None);
    assert_eq!(received(&mut event_log, &owner).len(), 1, "the first denial");
    let later = event_log.next + PERIOD;
    event_log.flush_counts_if_due(later);
    assert_eq!((received(&mut event_log, &owner).len(), event_log.due()), (0, None));
    event_log.hold(false);
    event_log.flush_counts_if_due(later);
    assert_eq!(received(&mut event_log, &owner).len(), 2, "the second, and the limit");
}
