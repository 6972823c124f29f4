//! Events as the owner receives them.

mod hold;

use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use bathy_protocol::network::{FromGateway, NetEvent, Peer, Transport, decode};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};

use super::{EventLog, MAX_KINDS, MAX_QUEUED, PERIOD};
use crate::frame::DropReason;

struct Reader(OwnedFd);

impl Reader {
    fn new(now: Instant) -> (EventLog, Self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (one, two) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        (EventLog::new(one, now), Self(two))
    }

    /// The events since the last call.
    fn events(&self) -> Vec<NetEvent> {
        let mut message = vec![0; 65536];
        let mut events = Vec::new();
        while let Ok((count, _)) = recv(&self.0, &mut message, RecvFlags::empty()) {
            let FromGateway::Event(event) = decode(&message[..count]).unwrap() else {
                unreachable!("only events are sent here")
            };
            events.push(event);
        }
        events
    }
}

fn peer(port: u16) -> Peer {
    Peer { transport: Transport::Tcp, inbound: false, address: Ipv4Addr::LOCALHOST.into(), port, name: None }
}

fn denied(port: u16, count: u32) -> NetEvent {
    NetEvent::Denied { peer: peer(port), rule: "deny any".to_owned(), hint: None, count }
}

fn limited(limit: &str, count: u64) -> NetEvent {
    NetEvent::Limited { limit: limit.to_owned(), count }
}

fn unresolved(name: &str, denied: bool) -> NetEvent {
    let (name, kind, reason) = (name.to_owned(), "A".to_owned(), String::new());
    NetEvent::Unresolved { name, kind, reason, denied }
}

#[test]
fn the_first_denial_of_a_kind_is_sent_at_once_and_the_others_are_counted() {
    let now = Instant::now();
    let (mut event_log, reader) = Reader::new(now);
    for port in [80, 80, 443, 80] {
        event_log.log_denial(&peer(port), "deny any", None);
    }
    assert_eq!(reader.events(), [denied(80, 1), denied(443, 1)]);
    assert_eq!(event_log.due(), Some(now + PERIOD));
    event_log.flush_counts_if_due(now + PERIOD / 2);
    assert_eq!(reader.events(), []);
    event_log.flush_counts_if_due(now + PERIOD);
    assert_eq!(reader.events(), [denied(80, 2)]);
    assert_eq!(event_log.due(), None, "nothing is left to be sent");

    event_log.log_denial(&peer(80), "deny any", None);
    assert_eq!(reader.events(), [denied(80, 1)], "a new period");
    event_log.flush_counts_if_due(now + PERIOD * 3 / 2);
    assert_eq!(event_log.due(), Some(now + PERIOD * 2), "not before it is over");
}

#[test]
fn r5_denials_of_too_many_kinds_are_only_counted() {
    let (mut event_log, reader) = Reader::new(Instant::now());
    let kinds = u16::try_from(MAX_KINDS).unwrap();
    let mut events = Vec::new();
    for port in 1..=kinds + 3 {
        event_log.log_denial(&peer(port), "deny any", None);
        events.extend(reader.events());
    }
    assert_eq!(events, (1..=kinds).map(|port| denied(port, 1)).collect::<Vec<_>>());
    event_log.flush_counts();
    assert_eq!(reader.events(), [limited("different denials", 3)]);
    event_log.flush_counts();
    assert_eq!(reader.events(), []);
}

#[test]
fn a_denied_name_is_sent_once_in_a_period_and_any_other_each_time() {
    let now = Instant::now();
    let (mut event_log, reader) = Reader::new(now);
    assert_eq!(event_log.due(), None);
    for (name, denied) in
        [("a.example", true), ("a.example", true), ("b.example", false), ("b.example", false)]
    {
        event_log.log_query(unresolved(name, denied));
    }
    let [denied, failed] = [unresolved("a.example", true), unresolved("b.example", false)];
    assert_eq!(reader.events(), [denied.clone(), failed.clone(), failed]);
    assert_eq!(event_log.due(), Some(now + PERIOD));
    event_log.flush_counts_if_due(now + PERIOD);
    assert_eq!(reader.events(), [limited("repeated queries for denied names", 1)]);
    assert_eq!(event_log.due(), None);
    event_log.log_query(denied.clone());
    assert_eq!(reader.events(), [denied]);
    assert_eq!(event_log.due(), Some(now + PERIOD * 2), "the name itself has to be forgotten again");
}

#[test]
fn r5_too_many_denied_names_are_only_counted() {
    let (mut event_log, reader) = Reader::new(Instant::now());
    let mut count = 0;
    for number in 0..MAX_KINDS + 2 {
        event_log.log_query(unresolved(&format!("n{number}.example"), true));
        count += reader.events().len();
    }
    assert_eq!(count, MAX_KINDS);
    event_log.flush_counts();
    assert_eq!(reader.events(), [limited("denied names", 2)]);
}

#[test]
fn dropped_frames_and_limits_are_sent_with_their_numbers() {
    let now = Instant::now();
    let (mut event_log, reader) = Reader::new(now);
    event_log.count_drop(DropReason::Multicast);
    assert_eq!(event_log.due(), None, "every guest sends such frames");
    event_log.count_drop(DropReason::Fragment);
    assert_eq!(event_log.due(), Some(now + PERIOD));
    event_log.count_drop(DropReason::Fragment);
    event_log.flush_counts_if_due(now + PERIOD);
    assert_eq!(reader.events(), [NetEvent::Dropped { reason: DropReason::Fragment.to_string(), count: 2 }]);
    event_log.count_limit("connections at once");
    event_log.count_limit("connections at once");
    assert_eq!(event_log.due(), Some(now + PERIOD * 2));
    event_log.flush_counts_if_due(now + PERIOD * 2);
    assert_eq!(reader.events(), [limited("connections at once", 2)]);
}

#[test]
fn a_full_event_queue_stops_decisions_and_loses_no_event() {
    let now = Instant::now();
    let (mut event_log, reader) = Reader::new(now);
    let mut sent = 0;
    while event_log.has_space() {
        event_log.log(limited("", sent));
        sent += 1;
        assert!(sent < 1_000_000, "it never stops");
    }
    assert_eq!(event_log.queued.len(), MAX_QUEUED);
    assert!(!event_log.is_sent());
    event_log.count_limit("one more");
    assert_eq!(event_log.due(), None, "the reader decides when it goes on");
    event_log.flush_counts_if_due(now + PERIOD);
    let mut read = Vec::new();
    while !event_log.is_sent() {
        read.extend(reader.events());
        event_log.flush();
    }
    read.extend(reader.events());
    assert_eq!(read, (0..sent).map(|number| limited("", number)).collect::<Vec<_>>());
    assert!(event_log.has_space());
    event_log.flush_counts_if_due(now + PERIOD);
    assert_eq!(reader.events(), [limited("one more", 1)]);
}

#[test]
fn f1_an_owner_that_does_not_read_does_not_stop_the_gateway() {
    // The gateway's sockets are blocking ones.
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (one, _owner) = pair.unwrap();
    let (done, is_done) = mpsc::channel();
    thread::spawn(move || {
        let mut event_log = EventLog::new(one, Instant::now());
        while event_log.is_sent() {
            event_log.log(denied(80, 1));
        }
        done.send(()).unwrap();
    });
    assert_eq!(is_done.recv_timeout(Duration::from_secs(20)), Ok(()), "it waits for the owner");
}
