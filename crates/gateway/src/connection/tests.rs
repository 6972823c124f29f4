//! Connections in each state, over real sockets and stacks.

mod pump;

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::dialing::DIAL_TIME;
use super::open::HALF_OPEN_TIME;
use super::reading::READING_TIME;
use super::resolving::QUERY_IDLE_TIME;
use super::{Connection, NewStacks, TurnOutcome};
use crate::link::Link;
use crate::stack::{Clock, FourTuple, Stack};

fn tuple() -> FourTuple {
    FourTuple { guest_port: 30000, remote: SocketAddr::from((Ipv4Addr::LOCALHOST, 443)) }
}

fn socket() -> OwnedFd {
    std::os::unix::net::UnixDatagram::unbound().unwrap().into()
}

fn link() -> Link {
    Link::new(socket())
}

fn stack() -> Stack {
    Stack::listen(tuple(), 4096, Clock::new(), &mut link()).unwrap()
}

/// A connection in each state, with its name.
fn all(now: Instant) -> [(&'static str, Connection); 5] {
    [
        ("dialing", Connection::dialing(tuple(), socket(), Vec::new(), now)),
        ("reading", Connection::reading(tuple(), stack(), now)),
        ("answering", Connection::answering(tuple(), stack(), Vec::new(), now)),
        ("queries", Connection::resolving(tuple(), stack(), now)),
        ("inbound", Connection::inbound(tuple(), tuple().remote, socket(), stack(), now)),
    ]
}

fn stages(is_so: impl Fn(&Connection) -> bool) -> Vec<&'static str> {
    let all = all(Instant::now());
    all.iter().filter(|(_, connection)| is_so(connection)).map(|(name, _)| *name).collect()
}

#[test]
fn each_state_says_what_was_decided_and_what_was_sent() {
    assert_eq!(stages(Connection::is_undecided), ["reading"]);
    assert_eq!(stages(Connection::is_dialing), ["dialing"]);
    assert_eq!(stages(Connection::is_inspected), ["reading"]);
    assert_eq!(stages(Connection::is_local), ["answering", "queries"]);
    assert_eq!(stages(|connection| connection.socket().is_some()), ["dialing", "inbound"]);
    assert_eq!(stages(|connection| connection.inbound), ["inbound"]);
    assert_eq!(stages(|connection| connection.parsed_target().is_some()).len(), 0);
}

#[test]
fn only_a_dialed_connection_that_was_never_logged_is_logged_at_its_end() {
    assert_eq!(stages(Connection::was_only_dialed), ["dialing"]);
    let [(_, mut dialing), ..] = all(Instant::now());
    dialing.is_logged = true;
    assert!(!dialing.was_only_dialed());
}

#[test]
fn each_state_has_its_timeout_and_reason() {
    let table = [
        (DIAL_TIME, "not connected: timed out"),
        (READING_TIME, "the client sent no ClientHello or request in time"),
        (READING_TIME, "idle timeout"),
        (QUERY_IDLE_TIME, "idle timeout"),
        (HALF_OPEN_TIME, "handshake not completed in time"),
    ];
    let start = Instant::now();
    for (early, expected) in [(true, false), (false, true)] {
        for ((time, reason), (name, mut connection)) in table.into_iter().zip(all(start)) {
            let now = if early { start + time - Duration::from_millis(1) } else { start + time };
            let outcome = connection.pump(
                now,
                NewStacks { clock: Clock::new(), buffer_size: 4096 },
                &mut link(),
                &mut 1000,
            );
            let is_over = matches!(&outcome, TurnOutcome::Ended(why) if why == reason);
            assert_eq!(is_over, expected, "{name}: {outcome:?}");
        }
    }
}
