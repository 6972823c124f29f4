//! Flows over real sockets.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use bathy_policy::Protocol;

use super::{FlowSocket, Flows, IDLE_TIME, SWEEP};
use crate::policy_check::Endpoint;
use crate::stack::FourTuple;

fn bound() -> (UdpSocket, SocketAddr) {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

fn tuple(guest_port: u16) -> FourTuple {
    FourTuple { guest_port, remote: SocketAddr::from((Ipv4Addr::LOCALHOST, 53)) }
}

fn endpoint(remote: SocketAddr) -> Endpoint {
    Endpoint { protocol: Protocol::Udp, remote, is_host: false, names: Vec::new() }
}

#[test]
fn datagrams_go_out_and_come_back_and_are_counted() {
    let now = Instant::now();
    let (server, address) = bound();
    let mut flows = Flows::new(now);
    let socket = crate::host::udp_socket(address).unwrap();
    let number = flows.add(tuple(1), endpoint(address), FlowSocket::Outbound(socket), now);
    let flow = flows.get_mut(number).unwrap();
    flow.send(b"hello", &[], now);
    let mut buffer = [0; 100];
    let (count, from) = server.recv_from(&mut buffer).unwrap();
    assert_eq!(&buffer[..count], b"hello");
    assert_eq!(flow.receive(&mut buffer, now), None, "nothing has come");
    server.send_to(b"welcome", from).unwrap();
    assert_eq!(flow.receive(&mut buffer, now), Some(7));
    assert_eq!((&buffer[..7], flow.meter.bytes()), (&b"welcome"[..], (5, 7)));
}

#[test]
fn a_reply_leaves_by_the_published_port_that_was_contacted() {
    let now = Instant::now();
    let ((remote, address), (other, _), (port, published)) = (bound(), bound(), bound());
    let mut flows = Flows::new(now);
    let number = flows.add(tuple(1), endpoint(address), FlowSocket::Inbound(1, address), now);
    assert_eq!(flows.inbound_flow(1, address), Some(number));
    assert_eq!(flows.inbound_flow(0, address), None, "another port");
    assert_eq!(flows.inbound_flow(1, published), None, "another peer");
    let ports: [OwnedFd; 2] = [other.into(), port.into()];
    let flow = flows.get_mut(number).unwrap();
    flow.send(b"welcome", &ports, now);
    let mut buffer = [0; 100];
    assert_eq!(remote.recv_from(&mut buffer).unwrap(), (7, published));
    assert_eq!(flow.receive(&mut buffer, now), None, "its datagrams come by the port");
    flow.received(3, now);
    assert_eq!(flow.meter.bytes(), (7, 3));
}

#[test]
fn a_flow_is_found_by_its_four_tuple_until_it_is_removed() {
    let now = Instant::now();
    let mut flows = Flows::new(now);
    assert_eq!(flows.due(), None);
    let (_, address) = bound();
    let [one, two] =
        [1, 2].map(|port| flows.add(tuple(port), endpoint(address), FlowSocket::Inbound(0, address), now));
    assert_eq!((flows.count(), flows.find(tuple(1)), flows.find(tuple(2))), (2, Some(one), Some(two)));
    assert_eq!(flows.all().map(|(number, _)| number).collect::<Vec<_>>(), [one, two]);
    assert_eq!(flows.due(), Some(now + SWEEP));
    assert_eq!(flows.remove(one).map(|flow| flow.tuple), Some(tuple(1)));
    assert_eq!((flows.count(), flows.find(tuple(1)), flows.find(tuple(2))), (1, None, Some(two)));
}

#[test]
fn a_flow_is_idle_without_datagrams_either_way() {
    let start = Instant::now();
    let (_, address) = bound();
    let mut flows = Flows::new(start);
    let [silent, sends, receives] = [1, 2, 3]
        .map(|port| flows.add(tuple(port), endpoint(address), FlowSocket::Inbound(0, address), start));
    let (port, _) = bound();
    flows.get_mut(sends).unwrap().send(b"x", &[port.into()], start + SWEEP);
    flows.get_mut(receives).unwrap().received(1, start + SWEEP);

    assert_eq!(flows.idle(start + IDLE_TIME - Duration::from_millis(1)).len(), 0);
    assert_eq!(flows.idle(start + IDLE_TIME).len(), 0, "it looks only once in a while");
    assert_eq!(flows.idle(start + IDLE_TIME + SWEEP - Duration::from_millis(1)), [silent]);
    assert_eq!(flows.idle(start + IDLE_TIME + SWEEP * 2), [silent, sends, receives]);
}
