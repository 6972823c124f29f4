//! Connections by number and four-tuple, their timers and their turns.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use super::Table;
use crate::connection::Connection;
use crate::stack::FourTuple;

fn tuple(guest_port: u16) -> FourTuple {
    FourTuple { guest_port, remote: SocketAddr::from((Ipv4Addr::LOCALHOST, 80)) }
}

/// A connection that only has its deadline as a timer.
fn connection(guest_port: u16, now: Instant) -> Connection {
    let socket = std::os::unix::net::UnixDatagram::unbound().unwrap().into();
    Connection::dialing(tuple(guest_port), socket, Vec::new(), now)
}

fn numbers(table: &mut Table) -> Vec<u64> {
    std::iter::from_fn(|| table.next_queued()).collect()
}

#[test]
fn a_connection_is_found_by_its_four_tuple_until_it_is_removed() {
    let now = Instant::now();
    let mut table = Table::default();
    let (one, two) = (table.add(connection(1, now)), table.add(connection(2, now)));
    assert_eq!((table.count(), table.find(tuple(1)), table.find(tuple(2))), (2, Some(one), Some(two)));
    assert!(table.contains(tuple(1)) && !table.contains(tuple(3)));
    assert_eq!(table.all().map(|(number, _)| number).collect::<Vec<_>>(), [one, two]);
    assert_eq!(table.all_mut().map(|(number, _)| number).collect::<Vec<_>>(), [one, two]);
    assert_eq!(table.get_mut(two).unwrap().tuple, tuple(2));

    table.set_timer(one, now);
    assert!(table.due().is_some());
    assert_eq!(table.remove(one).unwrap().tuple, tuple(1));
    assert!(table.remove(one).is_none());
    assert_eq!(
        (table.count(), table.find(tuple(1)), table.contains(tuple(1)), table.due()),
        (1, None, false, None)
    );
    assert_eq!(numbers(&mut table), [two], "a removed connection has no turn");
}

#[test]
fn each_has_one_turn_in_the_order_in_which_they_asked() {
    let now = Instant::now();
    let mut table = Table::default();
    let [one, two, three] = [1, 2, 3].map(|port| table.add(connection(port, now)));
    table.queue(one);
    assert_eq!(table.queued(), 3, "asking twice is asking once");
    assert_eq!(table.next_queued(), Some(one));
    table.queue(one);
    assert_eq!(numbers(&mut table), [two, three, one]);
    assert_eq!((table.queued(), table.next_queued()), (0, None));
}

#[test]
fn a_turn_comes_when_its_time_has_come_and_once() {
    let now = Instant::now();
    let second = Duration::from_secs(1);
    let mut table = Table::default();
    let (early, late) = (table.add(connection(1, now)), table.add(connection(2, now + second)));
    numbers(&mut table);
    table.set_timer(early, now);
    let due = table.due().unwrap();
    table.set_timer(late, now);
    table.set_timer(late, now);
    assert_eq!(table.due(), Some(due), "the first counts");

    table.fire_timers(due - second / 2);
    assert_eq!(numbers(&mut table).len(), 0);
    table.fire_timers(due);
    assert_eq!(numbers(&mut table), [early]);
    assert_eq!(table.due(), Some(due + second));
    table.fire_timers(due + second);
    assert_eq!(numbers(&mut table), [late]);
    assert_eq!(table.due(), None);
    table.set_timer(early, now);
    assert_eq!(table.due(), Some(due), "it may be set again");
}

#[test]
fn the_more_connections_the_smaller_their_buffers() {
    let now = Instant::now();
    let mut table = Table::default();
    let mut sizes = Vec::new();
    for port in 0..300 {
        sizes.push((usize::from(port), table.buffer_size(0)));
        table.add(connection(port, now));
    }
    sizes.dedup_by_key(|(_, buffer_size)| *buffer_size);
    assert_eq!(sizes, [(0, 512 * 1024), (32, 64 * 1024), (256, 16 * 1024)]);
}

#[test]
fn r14_from_the_33rd_connection_on_send_buffers_are_small() {
    let table = Table::default();
    let buffers = [0, 31, 32, 255, 256].map(|besides| table.send_buffer(besides));
    assert_eq!(buffers, [None, None, Some(64 * 1024), Some(64 * 1024), Some(16 * 1024)]);
}
