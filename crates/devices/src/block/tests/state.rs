//! A disk that goes on in another process.

use std::time::{Duration, Instant};

use super::*;
use crate::block::BlockLimits;
use crate::testing::TestClock;

const REQUEST: u32 = 4 << 20;
const SMALL: usize = 5;

impl Bench<'_> {
    /// Puts a read of the sector `number` into the queue, with a header, a status and a buffer of its own.
    fn push_own_read(&mut self, number: usize) {
        let number = u64::try_from(number).unwrap();
        let (header, status) = (HEADER + 16 * number, STATUS + number);
        self.mem.write_obj(IN.to_le(), GuestAddress(header)).unwrap();
        self.mem.write_obj(number.to_le(), GuestAddress(header + 8)).unwrap();
        self.mem.write_obj(UNANSWERED, GuestAddress(status)).unwrap();
        let data = DATA + 512 * number;
        self.driver.push(&[readable(header, 16), writable(data, 512), writable(status, 1)]);
    }

    /// The disk goes on as one that was made of its saved state, with its queue where it was.
    fn move_to_another_process(&mut self) {
        let json = serde_json::to_string(&self.block.save()).unwrap();
        let file = self.file.try_clone().unwrap();
        self.block = Block::restore(file, serde_json::from_str(&json).unwrap()).unwrap();
        self.queue = self.driver.restored_queue(&self.queue);
    }
}

#[test]
fn requests_that_wait_for_a_limit_are_answered_once_each_after_a_move() {
    let ram = GuestRam::create(32 << 20).unwrap();
    let mut bench = Bench::new(&ram);
    bench.file.set_len(64 << 20).unwrap();
    // The burst is four large requests; the clock of the first process does not move.
    let limits = BlockLimits { read_bandwidth: Some(4 << 20), ..BlockLimits::default() };
    let config = BlockConfig { limits, ..BlockConfig::default() };
    let clock = TestClock::default();
    bench.block = Block::new(bench.file.try_clone().unwrap(), config).unwrap().with_clock(clock.for_device());
    for _ in 0..4 {
        bench.request(IN, 0, &[writable(16 << 20, REQUEST)]);
    }
    (0..SMALL).for_each(|number| bench.push_own_read(number));
    assert!(bench.process().unwrap().retry_after.is_some());
    assert_eq!(bench.driver.take_used(), []);

    bench.move_to_another_process();
    assert!(bench.process().unwrap().retry_after.is_some(), "a move brings no tokens");
    let begin = Instant::now();
    let mut used = Vec::new();
    while used.len() < SMALL && begin.elapsed() < Duration::from_secs(60) {
        let outcome = bench.process().unwrap();
        used.extend(bench.driver.take_used());
        std::thread::sleep(outcome.retry_after.unwrap_or_default());
    }

    assert_eq!(used.len(), SMALL);
    let expected = &pattern()[..512 * SMALL];
    assert_eq!(bench.guest_bytes(DATA, 512 * SMALL), expected);
    assert_eq!(bench.guest_bytes(STATUS, SMALL), [OK; SMALL]);
    assert_eq!(bench.process().unwrap().retry_after, None, "nothing is left");
    assert_eq!(bench.block.traffic().read, u64::from(4 * REQUEST) + 512 * SMALL as u64);
}

#[test]
fn a_move_between_any_two_requests_loses_and_repeats_none() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    for number in 0..SMALL {
        bench.push_own_read(number);
        if number % 2 == 0 {
            bench.move_to_another_process();
        }
        bench.process().unwrap();
        bench.move_to_another_process();
    }
    let used: Vec<_> = bench.driver.take_used().into_iter().map(|(_, length)| length).collect();
    assert_eq!(used, [513; SMALL]);
    assert_eq!(bench.guest_bytes(STATUS, SMALL), [OK; SMALL]);
    assert_eq!(bench.block.traffic().read, 512 * SMALL as u64);
}
