//! A console that goes on in another process.

use super::*;
use crate::console::Hangup;

impl Bench<'_> {
    /// The console goes on as one that was made of its saved state, with its queues where they were.
    fn move_to_another_process(&mut self) {
        let json = serde_json::to_string(&self.console.save()).unwrap();
        self.console = Console::restore(serde_json::from_str(&json).unwrap()).unwrap();
        for (queue, driver) in self.queues.iter_mut().zip(&self.drivers) {
            *queue = driver.restored_queue(queue);
        }
    }

    /// What a transport does after a restore.
    fn serve_all(&mut self) {
        (0..4).for_each(|queue| self.run(queue).unwrap());
    }
}

/// Bytes that differ from their neighbours.
fn bytes(length: usize) -> Vec<u8> {
    (0..length).map(|i| u8::try_from(i % 251).unwrap()).collect()
}

#[test]
fn bytes_to_the_guest_arrive_once_and_in_order_with_a_move_after_each_buffer() {
    let ram = ram();
    let mut bench = Bench::opened(&ram);
    let sent = bytes(1000);
    assert_eq!(bench.console.send(&sent), sent.len());
    let mut received = Vec::new();
    while received.len() < sent.len() {
        bench.offer(64);
        bench.move_to_another_process();
        bench.serve_all();
        let chunk = bench.read();
        assert!(!chunk.is_empty(), "{} bytes arrived", received.len());
        received.extend(chunk);
    }
    assert_eq!(received, sent);
}

#[test]
fn bytes_from_the_guest_arrive_once_and_in_order_though_its_queue_was_held_back() {
    const CHUNK: usize = 30_000;
    let ram = ram();
    let mut bench = Bench::opened(&ram);
    let (mut sent, mut received) = (Vec::new(), Vec::new());
    // The last ones stay in the guest's queue: the console is full.
    for number in 0..12 {
        let chunk: Vec<u8> = bytes(CHUNK).iter().map(|byte| byte.wrapping_add(number)).collect();
        let address = DATA + u64::from(number) * CHUNK as u64;
        ram.memory().write_slice(&chunk, GuestAddress(address)).unwrap();
        bench.drivers[TX_QUEUE].push(&[readable(address, CHUNK.try_into().unwrap())]);
        sent.extend(chunk);
    }
    bench.run(TX_QUEUE).unwrap();
    assert!(bench.console.received() < sent.len());
    while received.len() < sent.len() {
        bench.move_to_another_process();
        bench.serve_all();
        let taken = bench.console.take(50_000);
        assert!(!taken.is_empty(), "{} bytes arrived", received.len());
        received.extend(taken);
    }
    assert!(received == sent);
    assert_eq!(bench.drivers[TX_QUEUE].used_index(), 12);
}

#[test]
fn control_messages_that_wait_for_a_buffer_arrive_once_after_a_move() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.send_control(DEVICE_READY, 1).unwrap();
    bench.move_to_another_process();
    bench.send_control(PORT_READY, 1).unwrap();
    bench.move_to_another_process();
    (0..8).for_each(|_| bench.offer_control_buffer());
    bench.serve_all();
    let events: Vec<_> =
        bench.received_control().into_iter().map(|(event, value, _)| (event, value)).collect();
    assert_eq!(events, [(PORT_ADD, 1), (PORT_NAME, 1), (PORT_OPEN, 1)]);
}

#[test]
fn a_session_stays_open_and_is_counted_on() {
    let ram = ram();
    let mut bench = Bench::opened(&ram);
    assert_eq!((bench.console.sessions(), bench.console.guest_open()), (1, true));
    bench.move_to_another_process();
    assert_eq!((bench.console.sessions(), bench.console.guest_open()), (1, true));
    bench.send_control(PORT_OPEN, 0).unwrap();
    bench.send_control(PORT_OPEN, 1).unwrap();
    assert_eq!(bench.console.sessions(), 2);
}

#[test]
fn a_hang_up_that_has_begun_is_completed_and_old_bytes_stay_thrown_away() {
    let ram = ram();
    let mut bench = Bench::opened(&ram);
    bench.write(b"of the old session").unwrap();
    bench.console.reconnect();
    bench.move_to_another_process();
    assert_eq!(bench.console.save().hangup, Hangup::AwaitClose);
    bench.write(b"of the old session too").unwrap();
    bench.send_control(PORT_OPEN, 0).unwrap();
    bench.move_to_another_process();
    bench.serve_all();
    bench.send_control(PORT_OPEN, 1).unwrap();
    bench.write(b"new").unwrap();
    assert_eq!(bench.console.take(100), b"new");
    assert_eq!(bench.console.sessions(), 2);
}
