//! An owner that cannot record events, because its disk is full.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use bathy_protocol::network::{NetEvent, ToGateway, encode};
use rustix::net::{SendFlags, send};
use smoltcp::wire::TcpControl;

use crate::scene::{Client, LOCAL, Scene, accepted, allow, policies};

impl Scene {
    /// The owner cannot record events from now on, or can again.
    fn hold(&mut self, is_held: bool) {
        send(&self.owner, &encode(&ToGateway::Hold(is_held)).unwrap(), SendFlags::empty()).unwrap();
        self.step();
    }

    /// As many iterations of the loop as something would have taken that does not happen.
    fn idle(&mut self) {
        for _ in 0..50 {
            self.step();
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn allowed(&self) -> usize {
        self.events.iter().filter(|event| matches!(event, NetEvent::Allowed { .. })).count()
    }
}

#[test]
fn f1_while_events_cannot_be_recorded_nothing_begins_and_what_is_open_goes_on() {
    let listener = TcpListener::bind((LOCAL, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let mut scene = Scene::new(&[&allow(address)]);
    let mut open = Client::open(&mut scene, 30000, address, 65000);
    let mut server = accepted(&listener);
    scene.until("its event", |scene| scene.allowed() == 1);
    scene.hold(true);
    listener.set_nonblocking(true).unwrap();
    let late = Client::open_unanswered(&scene, 30001, address);
    scene.idle();
    assert!(listener.accept().is_err(), "nothing was dialed");
    assert!(scene.next_segment().is_none(), "the guest gets no answer, so that it retransmits");
    // What was logged continues, both ways, and its end is logged.
    open.pour(&scene, b"up", 2);
    scene.until("it arrives", |_| server.read(&mut [0; 2]).is_ok_and(|count| count == 2));
    server.write_all(b"down").unwrap();
    scene.until("it arrives", |scene| {
        open.receive(scene);
        open.received_bytes == b"down"
    });
    open.send_segment(&scene, TcpControl::Rst, &[]);
    let is_end = |event: &NetEvent| matches!(event, NetEvent::Closed { sent: 2, received: 4, .. });
    scene.until("its end is logged", |scene| scene.events.iter().any(is_end));
    assert_eq!(scene.allowed(), 1);
    scene.hold(false);
    late.send_segment(&scene, TcpControl::Syn, &[]);
    scene.until("the other begins", |_| listener.accept().is_ok());
}

#[test]
fn f1_a_dialing_connection_waits_until_events_can_be_recorded() {
    let listener = TcpListener::bind((LOCAL, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let mut scene = Scene::new(&[&allow(address)]);
    let mut client = Client::open_unanswered(&scene, 30000, address);
    scene.step();
    scene.hold(true);
    let mut server = accepted(&listener);
    scene.idle();
    assert!(scene.next_segment().is_none(), "the guest is not connected");
    assert_eq!(scene.events, []);
    scene.hold(false);
    client.next += 1;
    scene.until("it goes on", |scene| {
        client.receive(scene);
        client.acknowledged.is_some()
    });
    client.pour(&scene, b"x", 1);
    scene.until("it is connected", |_| server.read(&mut [0]).is_ok_and(|count| count == 1));
    assert_eq!(scene.allowed(), 1);
}

#[test]
fn f1_inbound_peers_wait_until_events_can_be_recorded() {
    let port = TcpListener::bind((LOCAL, 0)).unwrap();
    port.set_nonblocking(true).unwrap();
    let published = port.local_addr().unwrap();
    let mut scene = Scene::with_ports(&[], vec![port], 8);
    scene.hold(true);
    let _peer = TcpStream::connect(published).unwrap();
    scene.idle();
    assert!(scene.next_segment().is_none(), "the guest gets no SYN");
    scene.hold(false);
    scene.until("the guest gets a SYN", |scene| {
        scene.next_segment().is_some_and(|(segment, _)| segment.syn())
    });
}

#[test]
fn f1_a_new_policy_holds_also_while_events_cannot_be_recorded() {
    let listener = TcpListener::bind((LOCAL, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let mut scene = Scene::new(&[&allow(address)]);
    let mut client = Client::open(&mut scene, 30000, address, 65000);
    scene.until("its event", |scene| scene.allowed() == 1);
    scene.hold(true);
    let change = ToGateway::Policies(policies(&["deny public"]));
    send(&scene.owner, &encode(&change).unwrap(), SendFlags::empty()).unwrap();
    scene.until("it is ended", |scene| {
        client.receive(scene);
        client.ended
    });
    let [NetEvent::Allowed { .. }, NetEvent::Closed { reason, .. }] = &scene.events[..] else {
        unreachable!("{:?}", scene.events)
    };
    assert_eq!(reason, "the policy was changed: preset allow-list");
}
