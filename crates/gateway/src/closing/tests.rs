use std::io::{ErrorKind, Read};
use std::net::{Shutdown, TcpListener, TcpStream};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{SendFlags, send, shutdown};

use super::*;

/// A connection that both sides have closed, with more data than the peer's kernel buffers; and the peer.
fn ended() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = host::dial(listener.local_addr().unwrap(), None).unwrap();
    let server = listener.accept().unwrap().0;
    poll(&mut [PollFd::new(&socket, PollFlags::OUT)], None).unwrap();
    host::connect_result(&socket).unwrap();
    server.shutdown(Shutdown::Write).unwrap();
    while send(&socket, &[7; 65536], SendFlags::NOSIGNAL).is_ok() {}
    shutdown(&socket, rustix::net::Shutdown::Write).unwrap();
    poll(&mut [PollFd::new(&socket, PollFlags::RDHUP)], None).unwrap();
    (socket, server)
}

#[test]
fn r14_a_connection_counts_until_its_peer_has_acknowledged_its_end() {
    let (socket, mut server) = ended();
    let (mut closing, mut now) = (ClosingSockets::default(), Instant::now());
    assert_eq!(closing.due(), None);
    closing.add(socket, now);
    assert_eq!((closing.count(), closing.due()), (1, Some(now + POLL_INTERVAL)));
    closing.poll(now + POLL_INTERVAL);
    assert_eq!((closing.count(), closing.due()), (1, Some(now + 2 * POLL_INTERVAL)));
    let mut bytes = Vec::new();
    server.read_to_end(&mut bytes).unwrap();
    assert!(bytes.len() > 65536 && bytes.iter().all(|byte| *byte == 7), "all of it arrives");
    // The last acknowledgement is in flight.
    let until = now + ACK_TIMEOUT - POLL_INTERVAL;
    while closing.count() > 0 && now < until {
        now += POLL_INTERVAL;
        closing.poll(now);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!((closing.count(), closing.due()), (0, None));
}

#[test]
fn r14_a_connection_that_is_not_acknowledged_in_time_is_reset() {
    let ((socket, mut server), now) = (ended(), Instant::now());
    let mut closing = ClosingSockets::default();
    closing.add(socket, now);
    closing.poll(now + ACK_TIMEOUT);
    assert_eq!((closing.count(), closing.due()), (0, None));
    let mut bytes = Vec::new();
    assert_eq!(server.read_to_end(&mut bytes).unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[test]
fn what_was_sent_arrives_after_the_sandboxs_end() {
    let (socket, mut server) = ended();
    let mut closing = ClosingSockets::default();
    closing.add(socket, Instant::now());
    closing.release();
    assert_eq!(closing.count(), 0);
    let mut bytes = Vec::new();
    server.read_to_end(&mut bytes).unwrap();
    assert!(bytes.len() > 65536, "{}", bytes.len());
}
