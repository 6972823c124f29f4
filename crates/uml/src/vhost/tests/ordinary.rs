//! The messages of the guest's own driver, and the replies.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bathy_devices::block::{Block, BlockConfig};
use bathy_devices::console::{CONTROL_RX_QUEUE, CONTROL_TX_QUEUE, Console, RX_QUEUE, TX_QUEUE};
use bathy_devices::entropy::Entropy;
use bathy_devices::net::Net;
use bathy_devices::testing::{Driver, TestClock, readable, writable};
use bathy_devices::{GuestRam, Outcome};
use vm_memory::{Bytes, GuestAddress};

use super::super::testing::{
    GET_CONFIG, GET_FEATURES, GET_VRING_BASE, SET_CONFIG, SET_FEATURES, SET_OWNER, SET_VRING_BASE,
    SET_VRING_CALL, SET_VRING_ENABLE, VERSION, longs, message, words,
};
use super::super::{BackendState, SocketError, VhostError};
use super::frontend::{Frontend, is_abandoned};

const QUEUE: u64 = 0x20000;
const HEADER: u64 = 0x40000;
const STATUS: u64 = 0x41000;
const DATA: u64 = 0x50000;

fn disk() -> Block {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&[b'A'; 512], 0).unwrap();
    file.write_all_at(&[b'B'; 512], 512).unwrap();
    Block::new(file, BlockConfig::default()).unwrap()
}

/// Asks the block device to read a sector.
fn push_read(ram: &GuestRam, driver: &mut Driver<'_>, sector: u64) {
    ram.memory().write_slice(&longs(&[0, sector]), GuestAddress(HEADER)).unwrap();
    driver.push(&[readable(HEADER, 16), writable(DATA, 512), writable(STATUS, 1)]);
}

fn data(ram: &GuestRam) -> [u8; 4] {
    ram.memory().read_obj(GuestAddress(DATA)).unwrap()
}

#[test]
fn drivers_conversation_leads_to_a_working_disk() {
    let mut frontend = Frontend::new(disk());
    let ram = Arc::clone(&frontend.ram);
    let mut driver = Driver::new(ram.memory(), QUEUE, 256);
    frontend.set_up(std::slice::from_ref(&driver));
    assert_eq!(frontend.interrupts(0), 0);

    push_read(&ram, &mut driver, 1);
    frontend.kick(0).unwrap();

    assert_eq!(data(&ram), *b"BBBB");
    assert_eq!(driver.take_used(), [(0, 513)]);
    assert_eq!(frontend.interrupts(0), 1);
}

#[test]
fn every_kick_is_noticed_though_none_is_ever_read() {
    let mut frontend = Frontend::new(disk());
    let ram = Arc::clone(&frontend.ram);
    let mut driver = Driver::new(ram.memory(), QUEUE, 256);
    frontend.set_up(std::slice::from_ref(&driver));
    for round in 1..=10 {
        // The driver wants an interrupt for each of its requests.
        driver.set_used_event(driver.used_index());
        push_read(&ram, &mut driver, 0);
        frontend.kick(0).unwrap();
        assert_eq!(driver.used_index(), round);
    }
    assert_eq!(frontend.interrupts(0), 10);
    assert_eq!(frontend.pending_events(), 0);
}

#[test]
fn request_that_was_there_before_the_queue_started_is_served() {
    let mut frontend = Frontend::new(disk());
    let ram = Arc::clone(&frontend.ram);
    let mut driver = Driver::new(ram.memory(), QUEUE, 256);
    push_read(&ram, &mut driver, 1);
    frontend.set_up(std::slice::from_ref(&driver));
    assert_eq!(driver.used_index(), 1);
}

#[test]
fn configuration_has_exactly_the_length_that_was_asked_for() {
    let mut frontend = Frontend::new(disk());
    frontend.negotiate();
    for length in [1_u32, 8, 60, 64, 256] {
        let filler = vec![0; usize::try_from(length).unwrap()];
        let answer = frontend.ask(GET_CONFIG, &[words(&[0, length, 0]), filler.clone()].concat());
        assert_eq!(answer[..12], words(&[0, length, 0]));
        assert_eq!(answer.len(), 12 + filler.len());
        assert_eq!(answer[12], 2, "the disk has two sectors");
    }
    frontend.request_acked(SET_CONFIG, &[words(&[32, 1, 0]), vec![1]].concat(), &[]);
}

#[test]
fn message_that_arrives_byte_by_byte_is_understood() {
    let mut frontend = Frontend::new(disk());
    frontend.request(SET_OWNER, &[], &[]).unwrap();
    let whole = message(GET_FEATURES, VERSION, &[]);
    for byte in &whole {
        assert!(frontend.receive().is_empty());
        frontend.send_raw(&[*byte], &[]);
        frontend.pump().unwrap();
    }
    assert_eq!(frontend.receive().len(), 20);
}

#[test]
fn messages_that_arrive_together_are_all_answered() {
    let mut frontend = Frontend::new(disk());
    frontend.request(SET_OWNER, &[], &[]).unwrap();
    frontend.send_raw(&message(GET_FEATURES, VERSION, &[]).repeat(100), &[]);
    frontend.pump().unwrap();
    assert_eq!(frontend.receive().len(), 100 * 20);
}

#[test]
fn driver_can_be_unbound_and_bound_again() {
    let mut frontend = Frontend::new(disk());
    let ram = Arc::clone(&frontend.ram);
    let mut driver = Driver::new(ram.memory(), QUEUE, 256);
    frontend.set_up(std::slice::from_ref(&driver));
    push_read(&ram, &mut driver, 0);
    frontend.kick(0).unwrap();

    frontend.request_acked(SET_VRING_ENABLE, &words(&[0, 0]), &[]);
    let features = frontend.ask(GET_FEATURES, &[]);
    push_read(&ram, &mut driver, 1);
    frontend.kick(0).unwrap();
    assert_eq!(driver.used_index(), 1, "a stopped queue does nothing");

    frontend.queues.clear();
    let mut driver = Driver::new(ram.memory(), QUEUE + 0x8000, 256);
    frontend.request_acked(SET_FEATURES, &features, &[]);
    frontend.share_memory();
    frontend.describe_queue(0, &driver);
    frontend.start_queue(0);
    push_read(&ram, &mut driver, 1);
    frontend.kick(0).unwrap();
    assert_eq!(driver.take_used(), [(0, 513)]);
}

#[test]
fn queue_can_be_stopped_and_resumed_where_it_was() {
    let mut frontend = Frontend::new(disk());
    let ram = Arc::clone(&frontend.ram);
    let mut driver = Driver::new(ram.memory(), QUEUE, 256);
    frontend.set_up(std::slice::from_ref(&driver));
    for _ in 0..3 {
        push_read(&ram, &mut driver, 0);
        frontend.kick(0).unwrap();
    }

    assert_eq!(frontend.ask(GET_VRING_BASE, &words(&[0, 0])), words(&[0, 3]));
    push_read(&ram, &mut driver, 1);
    frontend.kick(0).unwrap();
    assert_eq!(driver.used_index(), 3);

    frontend.request_acked(SET_VRING_BASE, &words(&[0, 3]), &[]);
    frontend.start_queue(0);
    assert_eq!(driver.used_index(), 4);
    assert_eq!(data(&ram), *b"BBBB");
}

#[test]
fn state_tells_where_each_queue_is() {
    let mut frontend = Frontend::new(disk());
    let ram = Arc::clone(&frontend.ram);
    let mut driver = Driver::new(ram.memory(), QUEUE, 256);
    frontend.set_up(std::slice::from_ref(&driver));
    push_read(&ram, &mut driver, 0);
    frontend.kick(0).unwrap();

    let state = frontend.backend.save();
    assert_eq!(state.queues.len(), 1);
    assert_eq!((state.queues[0].next_available, state.queues[0].next_used), (1, 1));
    assert_eq!(state.queues[0].descriptors, QUEUE);
    assert!(state.queues[0].running);
    let json = serde_json::to_string(&state).unwrap();
    assert_eq!(serde_json::from_str::<BackendState>(&json).unwrap(), state);
}

#[test]
fn console_reaches_the_guest_through_service() {
    let mut frontend = Frontend::new(Console::new());
    let ram = Arc::clone(&frontend.ram);
    let mut drivers = [0, 1, 2, 3].map(|i| Driver::new(ram.memory(), QUEUE + 0x4000 * i, 256));
    frontend.set_up(&drivers);
    drivers[CONTROL_RX_QUEUE].push(&[writable(DATA, 64)]);
    for event in [0_u8, 3, 6] {
        ram.memory().write_slice(&[0, 0, 0, 0, event, 0, 1, 0], GuestAddress(HEADER)).unwrap();
        drivers[CONTROL_TX_QUEUE].push(&[readable(HEADER, 8)]);
        drivers[CONTROL_RX_QUEUE].push(&[writable(DATA, 64)]);
        frontend.kick(CONTROL_TX_QUEUE).unwrap();
    }
    assert!(frontend.backend.device().guest_open());
    assert_eq!(drivers[CONTROL_RX_QUEUE].used_index(), 3);

    drivers[RX_QUEUE].push(&[writable(DATA + 0x1000, 64)]);
    frontend.kick(RX_QUEUE).unwrap();
    assert_eq!(frontend.backend.device_mut().send(b"hello"), 5);
    frontend.backend.service().unwrap();
    assert_eq!(drivers[RX_QUEUE].take_used(), [(0, 5)]);
    assert_eq!(frontend.interrupts(RX_QUEUE), 1);

    ram.memory().write_slice(b"answer", GuestAddress(HEADER)).unwrap();
    drivers[TX_QUEUE].push(&[readable(HEADER, 6)]);
    frontend.kick(TX_QUEUE).unwrap();
    assert_eq!(frontend.backend.device_mut().take(100), b"answer");
}

#[test]
fn network_link_carries_both_ways() {
    let mut frontend = Frontend::new(Net::new([2, 0, 0, 0, 0, 9]));
    let ram = Arc::clone(&frontend.ram);
    let mut drivers = [0, 1].map(|i| Driver::new(ram.memory(), QUEUE + 0x4000 * i, 256));
    frontend.set_up(&drivers);
    let answer = frontend.ask(GET_CONFIG, &[words(&[0, 12, 0]), vec![0; 12]].concat());
    assert_eq!(answer[12..], [2, 0, 0, 0, 0, 9, 1, 0, 0, 0, 0xf0, 0xff], "address, link, no queues, MTU");

    frontend.backend.device_mut().offer(&[7; 60]).unwrap();
    frontend.backend.service().unwrap();
    assert_eq!(frontend.interrupts(RX_QUEUE), 0, "there is no buffer yet");
    drivers[RX_QUEUE].push(&[writable(DATA, 1526)]);
    frontend.kick(RX_QUEUE).unwrap();
    assert_eq!(drivers[RX_QUEUE].take_used(), [(0, 72)]);
    assert_eq!(frontend.interrupts(RX_QUEUE), 1);

    ram.memory().write_slice(&[0; 12], GuestAddress(HEADER)).unwrap();
    ram.memory().write_slice(&[5; 60], GuestAddress(DATA)).unwrap();
    drivers[TX_QUEUE].push(&[readable(HEADER, 12), readable(DATA, 60)]);
    frontend.kick(TX_QUEUE).unwrap();
    assert_eq!(frontend.backend.device().frame(), Some(&[5; 60][..]));
    frontend.backend.device_mut().drop_frame();
    frontend.backend.service().unwrap();
    assert_eq!(drivers[TX_QUEUE].take_used(), [(0, 0)]);
}

#[test]
fn queue_that_waits_for_time_is_worked_on_by_service() {
    let now = TestClock::default();
    let mut frontend = Frontend::new(Entropy::with_clock(now.for_device()));
    let ram = Arc::clone(&frontend.ram);
    let mut driver = Driver::new(ram.memory(), QUEUE, 256);
    frontend.set_up(std::slice::from_ref(&driver));
    driver.push(&[writable(DATA, 64 << 10)]);
    driver.push(&[writable(DATA, 64)]);

    let wait = frontend.kick(0).unwrap().retry_after.unwrap();
    assert_eq!(driver.used_index(), 1);
    now.set(wait);
    assert_eq!(frontend.backend.service().unwrap().retry_after, None);
    assert_eq!(driver.used_index(), 2);
}

#[test]
fn call_descriptor_can_be_taken_away() {
    let mut frontend = Frontend::new(disk());
    let ram = Arc::clone(&frontend.ram);
    let mut driver = Driver::new(ram.memory(), QUEUE, 256);
    frontend.set_up(std::slice::from_ref(&driver));
    frontend.request_acked(SET_VRING_CALL, &longs(&[1 << 8]), &[]);
    assert!(is_abandoned(&frontend.queues[0].call));
    push_read(&ram, &mut driver, 0);
    frontend.kick(0).unwrap();
    assert_eq!(driver.used_index(), 1);
}

#[test]
fn request_descriptor_stays_open_as_long_as_the_connection() {
    let mut frontend = Frontend::new(disk());
    frontend.negotiate();
    let request_end = frontend.request_end.take().unwrap();
    assert!(!is_abandoned(&request_end));
    drop(frontend);
    assert!(is_abandoned(&request_end));
}

#[test]
fn ended_connection_leaves_nothing_watched_and_nothing_open() {
    let mut frontend = Frontend::new(disk());
    let ram = Arc::clone(&frontend.ram);
    let driver = Driver::new(ram.memory(), QUEUE, 256);
    frontend.set_up(std::slice::from_ref(&driver));

    rustix::net::shutdown(&frontend.peer, rustix::net::Shutdown::Both).unwrap();
    let error = frontend.pump().unwrap_err();

    assert!(matches!(error, VhostError::Socket(SocketError::Closed)));
    assert!(frontend.backend.is_ended());
    assert!(is_abandoned(&frontend.queues[0].call));
    // The guest still holds the kick, which is not watched any more.
    rustix::io::write(&frontend.queues[0].kick, &1_u64.to_ne_bytes()).unwrap();
    assert_eq!(frontend.pending_events(), 0);
    assert_eq!(frontend.backend.service().unwrap(), Outcome::default());
}
