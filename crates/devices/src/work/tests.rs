//! Which queues are worked on, in which order and how often, with a device that only counts.

use std::cell::Cell;
use std::collections::VecDeque;
use std::time::Duration;

use super::*;
use crate::GuestRam;

const NOTIFY: Outcome = Outcome { notify: true, retry_after: None, more: false };
const MORE: Outcome = Outcome { notify: false, retry_after: None, more: true };
const IDLE: Outcome = Outcome { notify: false, retry_after: None, more: false };

/// Answers each round with the next of its outcomes, or with none, and asks for the queues of a list in turn.
#[derive(Default)]
struct Scripted {
    rounds: Vec<usize>,
    outcomes: VecDeque<Outcome>,
    follow_ups: VecDeque<usize>,
    /// Fails in a round on this queue.
    broken: Option<usize>,
}

impl VirtioDevice for Scripted {
    fn device_type(&self) -> u32 {
        0
    }

    fn features(&self) -> u64 {
        0
    }

    fn set_features(&mut self, _: u64) {}

    fn queue_count(&self) -> usize {
        3
    }

    fn read_config(&self, _: u32, _: &mut [u8]) {}

    fn process(&mut self, index: usize, _: &mut Queue, _: &GuestMemory) -> Result<Outcome, DeviceError> {
        self.rounds.push(index);
        if self.broken == Some(index) {
            return Err(DeviceError::NoSuchQueue(index));
        }
        Ok(self.outcomes.pop_front().unwrap_or_default())
    }

    fn follow_up(&mut self) -> Option<usize> {
        self.follow_ups.pop_front()
    }

    fn reset(&mut self) {}
}

struct Served {
    queue: Option<Queue>,
    unfinished: bool,
    /// The numbers that interrupts were sent with.
    interrupts: Cell<Vec<usize>>,
}

impl ServedQueue for Served {
    type Error = DeviceError;

    fn running(&mut self) -> Option<&mut Queue> {
        self.queue.as_mut()
    }

    fn unfinished(&mut self) -> &mut bool {
        &mut self.unfinished
    }

    fn interrupt(&self, number: usize) -> Result<(), DeviceError> {
        let mut numbers = self.interrupts.take();
        numbers.push(number);
        self.interrupts.set(numbers);
        Ok(())
    }
}

fn queues(unfinished: [bool; 3]) -> [Served; 3] {
    use virtio_queue::QueueT;
    unfinished.map(|unfinished| Served {
        queue: Some(Queue::new(16).unwrap()),
        unfinished,
        interrupts: Cell::default(),
    })
}

fn run(
    device: &mut Scripted,
    queues: &mut [Served; 3],
    first: Option<usize>,
) -> Result<Outcome, DeviceError> {
    let ram = GuestRam::create(4096).unwrap();
    work(device, queues, ram.memory(), first)
}

#[test]
fn kicked_queue_is_worked_on_and_no_other() {
    let mut device = Scripted::default();
    let outcome = run(&mut device, &mut queues([true, false, true]), Some(1)).unwrap();
    assert_eq!((device.rounds, outcome), (vec![1], IDLE));
}

#[test]
fn without_a_kick_the_unfinished_queues_are_worked_on() {
    let mut device = Scripted::default();
    run(&mut device, &mut queues([true, false, true]), None).unwrap();
    assert_eq!(device.rounds, [0, 2]);
}

#[test]
fn queue_that_the_driver_has_not_started_is_left_alone() {
    let mut device = Scripted { outcomes: [NOTIFY].into(), ..Scripted::default() };
    let mut queues = queues([true, false, false]);
    queues[0].queue = None;
    assert_eq!(run(&mut device, &mut queues, None).unwrap(), IDLE);
    assert!(device.rounds.is_empty());
    assert!(queues[0].unfinished, "it is still to be worked on once it is started");
}

#[test]
fn queue_is_unfinished_after_a_round_that_left_something_and_finished_after_one_that_did_not() {
    let waits = Outcome { retry_after: Some(Duration::from_millis(5)), ..IDLE };
    for (outcome, left) in [(MORE, true), (waits, true), (NOTIFY, false), (IDLE, false)] {
        for before in [false, true] {
            let mut device = Scripted { outcomes: [outcome].into(), ..Scripted::default() };
            let mut queues = queues([false, before, false]);
            assert_eq!(run(&mut device, &mut queues, Some(1)).unwrap(), outcome);
            assert_eq!(queues.map(|queue| queue.unfinished), [false, left, false], "{outcome:?}");
        }
    }
}

#[test]
fn driver_is_interrupted_for_the_queue_whose_round_completed_something() {
    let mut device =
        Scripted { outcomes: [IDLE, NOTIFY].into(), follow_ups: [2].into(), ..Scripted::default() };
    let mut queues = queues([false; 3]);
    assert_eq!(run(&mut device, &mut queues, Some(0)).unwrap(), NOTIFY);
    assert_eq!(queues.map(|queue| queue.interrupts.take()), [vec![], vec![], vec![2]]);
}

#[test]
fn queues_that_the_device_asks_for_follow_in_its_order() {
    // There is no queue 9: asking for it costs a turn and nothing else.
    let mut device = Scripted {
        outcomes: [IDLE, MORE, NOTIFY].into(),
        follow_ups: [2, 9, 0].into(),
        ..Scripted::default()
    };
    let outcome = run(&mut device, &mut queues([false; 3]), Some(1)).unwrap();
    assert_eq!(device.rounds, [1, 2, 0]);
    assert_eq!(outcome, Outcome { more: true, ..NOTIFY });
}

#[test]
fn device_that_always_asks_for_another_queue_has_to_let_others_work() {
    let mut device = Scripted { follow_ups: vec![0; 100].into(), ..Scripted::default() };
    let outcome = run(&mut device, &mut queues([false; 3]), Some(1)).unwrap();
    assert_eq!(device.rounds.len(), 1 + 3 * FOLLOW_UPS_PER_QUEUE);
    assert_eq!(outcome, MORE);
}

#[test]
fn device_that_stops_ends_the_round_at_once() {
    let mut device = Scripted { broken: Some(0), follow_ups: [2].into(), ..Scripted::default() };
    let outcome = run(&mut device, &mut queues([true; 3]), None);
    assert!(matches!(outcome, Err(DeviceError::NoSuchQueue(0))));
    assert_eq!(device.rounds, [0]);
}
