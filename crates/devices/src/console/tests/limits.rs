//! What a driver finds before it sends anything, how much fits, and what a saved state may hold.

use super::*;
use crate::console::{ConsoleState, Hangup};

const MULTIPORT: u64 = 1 << 1;
const EVENT_IDX: u64 = 1 << 29;
const VERSION_1: u64 = 1 << 32;
/// The most control messages that wait while the guest sends nothing but requests with one answer each.
const MOST_WAITING: usize = 13;

#[test]
fn driver_finds_what_the_device_is() {
    let console = Console::new();
    assert_eq!((console.device_type(), console.queue_count()), (3, 4));
    assert_eq!(console.features(), MULTIPORT | EVENT_IDX | VERSION_1);
    let mut space = [0xff; 16];
    console.read_config(0, &mut space);
    assert_eq!(space, [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn reset_forgets_everything_about_the_guest() {
    let ram = ram();
    let mut bench = Bench::opened(&ram);
    bench.console.set_features(VERSION_1);
    assert_eq!(bench.console.save().acked_features, VERSION_1);
    bench.write(b"from guest").unwrap();
    bench.console.send(b"to guest");

    bench.console.reset();

    assert_eq!(bench.console.save(), Console::new().save());
    assert_eq!(bench.console.follow_up(), None);
}

#[test]
fn longest_chains_fill_the_buffer_to_its_last_byte() {
    let ram = ram();
    let mut bench = Bench::opened(&ram);
    for byte in 0..4 {
        bench.write(&vec![byte; 64 << 10]).unwrap();
    }
    assert_eq!((bench.console.received(), BUFFER_BYTES), (256 << 10, 256 << 10));
    bench.write(b"x").unwrap();
    assert_eq!(bench.drivers[TX_QUEUE].take_used().len(), 4, "the byte that does not fit stays in the queue");
    // One byte less is room for it.
    assert_eq!(bench.console.take(1), [0]);
    assert_eq!(bench.console.follow_up(), Some(TX_QUEUE));
    bench.run(TX_QUEUE).unwrap();
    assert_eq!(bench.console.take(usize::MAX).last(), Some(&b'x'));
}

#[test]
fn data_for_the_guest_stays_in_order_where_the_buffer_wraps() {
    let ram = ram();
    let mut bench = Bench::opened(&ram);
    let bytes = |from: usize, count: usize| -> Vec<u8> {
        (from..from + count).map(|i| u8::try_from(i % 251).unwrap()).collect()
    };
    let (quarter, whole) = (64 << 10, 256 << 10);
    assert_eq!(bench.console.send(&bytes(0, whole)), whole);
    bench.offer(64 << 10);
    bench.run(RX_QUEUE).unwrap();
    assert_eq!(bench.read(), bytes(0, quarter));
    assert_eq!(bench.console.send(&bytes(whole, quarter)), quarter);
    // The buffers are so long that one of them gets both the end of the block and its start.
    let rest = [(quarter, 150 << 10), (quarter + (150 << 10), 106 << 10)];
    for (from, count) in rest {
        bench.offer(u32::try_from(count).unwrap());
        bench.run(RX_QUEUE).unwrap();
        assert!(bench.read() == bytes(from, count), "{count} bytes from {from}");
    }
}

#[test]
fn send_and_take_mark_the_queue_that_has_work() {
    let mut console = Console::new();
    console.send(b"x");
    assert_eq!((console.follow_up(), console.follow_up()), (Some(RX_QUEUE), None));
    console.take(1);
    assert_eq!((console.follow_up(), console.follow_up()), (Some(TX_QUEUE), None));
}

#[test]
fn answers_wait_up_to_the_limit_and_a_hang_up_still_has_its_place() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    // These leave two messages, and the next ones one each.
    bench.send_control(PORT_READY, 1).unwrap();
    bench.send_control(PORT_OPEN, 1).unwrap();
    for _ in 0..20 {
        bench.send_control(DEVICE_READY, 1).unwrap();
    }
    assert_eq!(bench.console.save().control.len(), MOST_WAITING);
    assert_eq!(bench.drivers[CONTROL_TX_QUEUE].take_used().len(), MOST_WAITING);
    bench.console.reconnect();
    let state = bench.console.save();
    assert_eq!(state.control.len(), MOST_WAITING + 1);
    assert_eq!(Console::restore(state.clone()).unwrap().save(), state);
}

#[test]
fn old_data_of_more_than_one_round_is_thrown_away_before_the_host_is_back() {
    let ram = ram();
    let mut bench = Bench::opened(&ram);
    bench.console.reconnect();
    for _ in 0..64 {
        bench.drivers[TX_QUEUE].push(&[readable(DATA, 1)]);
    }
    bench.push_control(0, PORT_OPEN, 0);
    bench.process(CONTROL_TX_QUEUE).unwrap();
    assert_eq!(bench.console.save().hangup, Hangup::Drain);

    assert!(bench.process(TX_QUEUE).unwrap().more);
    assert_eq!(bench.console.save().hangup, Hangup::Drain, "there may be more in the queue");
    assert!(!bench.process(TX_QUEUE).unwrap().more);

    assert_eq!(bench.console.save().hangup, Hangup::None);
    assert_eq!(bench.drivers[TX_QUEUE].take_used().len(), 64);
    assert_eq!(bench.console.received(), 0);
}

#[test]
fn port_that_the_driver_gave_up_is_not_open_and_not_hung_up() {
    let ram = ram();
    for event in [DEVICE_READY, PORT_READY] {
        let mut bench = Bench::opened(&ram);
        bench.send_control(event, 0).unwrap();
        assert!(!bench.console.guest_open());
        bench.console.reconnect();
        bench.run(TX_QUEUE).unwrap();
        assert_eq!(bench.received_control(), [], "there is no port to send a message about");
        assert_eq!(bench.console.save().hangup, Hangup::None);
    }
}

#[test]
fn host_is_not_back_at_a_port_that_was_given_up_during_a_hang_up() {
    let ram = ram();
    let mut bench = Bench::opened(&ram);
    bench.console.reconnect();
    bench.run(CONTROL_RX_QUEUE).unwrap();
    assert_eq!(bench.received_control(), [(PORT_OPEN, 0, vec![])]);
    bench.send_control(PORT_READY, 0).unwrap();
    bench.send_control(PORT_OPEN, 0).unwrap();
    assert_eq!(bench.console.save().hangup, Hangup::None);
    assert_eq!(bench.received_control(), []);
    // It is back as soon as there is a port again.
    bench.send_control(PORT_READY, 1).unwrap();
    assert_eq!(bench.received_control().last(), Some(&(PORT_OPEN, 1, vec![])));
}

#[test]
fn second_hang_up_while_one_is_under_way_sends_nothing_more() {
    let ram = ram();
    let mut bench = Bench::opened(&ram);
    bench.console.reconnect();
    bench.console.reconnect();
    bench.run(CONTROL_RX_QUEUE).unwrap();
    assert_eq!(bench.received_control(), [(PORT_OPEN, 0, vec![])]);
}

#[test]
fn guest_that_closes_by_itself_is_not_hung_up() {
    let ram = ram();
    let mut bench = Bench::opened(&ram);
    bench.push_control(0, PORT_OPEN, 0);
    bench.process(CONTROL_TX_QUEUE).unwrap();
    assert_eq!(bench.console.save().hangup, Hangup::None);
    assert!(!bench.console.guest_open());
}

#[test]
fn state_is_restored_up_to_what_a_console_can_hold_and_no_further() {
    let longest = 8 + "bathysphere".len();
    let with = |change: &dyn Fn(&mut ConsoleState)| {
        let mut state = Console::new().save();
        change(&mut state);
        Console::restore(state.clone()).map(|console| assert_eq!(console.save(), state))
    };
    let fits = |change: &dyn Fn(&mut ConsoleState)| with(change).unwrap();
    let refused = |change: &dyn Fn(&mut ConsoleState)| {
        assert!(matches!(with(change), Err(ConsoleError::State)));
    };
    fits(&|state| state.to_guest = vec![1; BUFFER_BYTES]);
    refused(&|state| state.to_guest = vec![1; BUFFER_BYTES + 1]);
    fits(&|state| state.from_guest = vec![1; BUFFER_BYTES]);
    refused(&|state| state.from_guest = vec![1; BUFFER_BYTES + 1]);
    fits(&|state| state.control = vec![vec![1; longest]; 16]);
    refused(&|state| state.control = vec![vec![1; longest]; 17]);
    refused(&|state| state.control = vec![vec![1; longest], vec![1; longest + 1]]);
}

#[test]
fn restored_console_has_work_in_every_queue_and_no_feature_that_was_not_offered() {
    let state = ConsoleState { acked_features: u64::MAX, ..Console::new().save() };
    let mut console = Console::restore(state).unwrap();
    assert_eq!(console.save().acked_features, console.features());
    let marked = [(); 5].map(|()| console.follow_up());
    assert_eq!(
        marked,
        [Some(TX_QUEUE), Some(CONTROL_TX_QUEUE), Some(CONTROL_RX_QUEUE), Some(RX_QUEUE), None]
    );
    // And each of them only if it was accepted.
    let state = ConsoleState { acked_features: VERSION_1, ..Console::new().save() };
    assert_eq!(Console::restore(state).unwrap().save().acked_features, VERSION_1);
}
