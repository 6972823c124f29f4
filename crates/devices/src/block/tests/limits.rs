//! R13: a disk that is used faster than it may be waits, and goes on when its time has come.

use std::time::Duration;

use super::*;
use crate::block::{BURST_SECONDS, BlockLimits, MAX_REQUEST_BYTES, ThrottleState};
use crate::testing::TestClock;

const MIB: u64 = 1 << 20;
const LARGE_RAM: u64 = 32 << 20;
const REQUEST: u32 = 4 << 20;

struct Limited<'mem> {
    bench: Bench<'mem>,
    now: TestClock,
}

impl<'mem> Limited<'mem> {
    fn new(ram: &'mem GuestRam, config: BlockConfig) -> Self {
        let mut bench = Bench::new(ram);
        bench.file.set_len(64 << 20).unwrap();
        let now = TestClock::default();
        now.set(Duration::from_secs(100));
        let block = Block::new(bench.file.try_clone().unwrap(), config).unwrap();
        bench.block = block.with_clock(now.for_device());
        Self { bench, now }
    }

    fn pass(&self, time: Duration) {
        self.now.set(self.now.get() + time);
    }

    /// Works for `time`, whenever the device asks to be worked on; returns how many requests were done.
    fn work_for(&mut self, time: Duration) -> usize {
        let end = self.now.get() + time;
        let mut done = 0;
        loop {
            let outcome = self.bench.process().unwrap();
            done += self.bench.driver.take_used().len();
            match outcome.retry_after {
                _ if outcome.more => {}
                Some(wait) if self.now.get() + wait <= end => self.pass(wait),
                _ => {
                    self.now.set(end);
                    return done;
                }
            }
        }
    }
}

impl Limited<'_> {
    fn full(&self) -> ThrottleState {
        let limits = self.bench.block.save().throttle.limits;
        Block::new(self.bench.file.try_clone().unwrap(), BlockConfig { limits, ..BlockConfig::default() })
            .unwrap()
            .save()
            .throttle
    }
}

impl Bench<'_> {
    /// A flush and a read behind it; returns what the read has to bring.
    fn push_flush_and_read(&mut self) -> Vec<u8> {
        self.push(FLUSH, 0, &[]);
        // Not at the place of the first, which has not been read yet.
        let header = HEADER + 64;
        self.mem.write_obj(IN.to_le(), GuestAddress(header)).unwrap();
        self.mem.write_obj(3_u64.to_le(), GuestAddress(header + 8)).unwrap();
        self.driver.push(&[readable(header, 16), writable(DATA, 512), writable(STATUS, 1)]);
        pattern()[3 * 512..4 * 512].to_vec()
    }
}

fn large_ram() -> GuestRam {
    GuestRam::create(LARGE_RAM).unwrap()
}

fn limits(write: Option<u64>, read: Option<u64>, flushes: Option<u64>) -> BlockConfig {
    let limits = BlockLimits { write_bandwidth: write, read_bandwidth: read, flushes };
    BlockConfig { limits, ..BlockConfig::default() }
}

#[test]
fn r13_a_flood_of_flushes_is_held_to_the_rate() {
    let ram = ram();
    let mut disk = Limited::new(&ram, limits(None, None, Some(8)));
    (0..128).for_each(|_| disk.bench.push(FLUSH, 0, &[]));

    let burst = usize::try_from(8 * BURST_SECONDS).unwrap();
    assert_eq!(disk.work_for(Duration::ZERO), burst, "what was saved up is there at once");
    assert_eq!(disk.work_for(Duration::from_secs(1)), 8);
    assert_eq!(disk.work_for(Duration::from_secs(5)), 40);
    disk.pass(Duration::from_secs(3600));
    assert_eq!(disk.work_for(Duration::ZERO), burst, "no more than a burst is saved");
}

#[test]
fn r13_writes_are_held_to_the_bandwidth_and_reads_beside_them_are_free() {
    let ram = large_ram();
    let mut disk = Limited::new(&ram, limits(Some(8 * MIB), None, None));
    (0..16).for_each(|_| disk.bench.push(OUT, 0, &[readable(MIB, REQUEST)]));

    assert_eq!(disk.work_for(Duration::ZERO), 8, "32 MiB at once");
    assert_eq!(disk.work_for(Duration::from_secs(2)), 4, "then 8 MiB in a second");
    assert_eq!(disk.bench.block.traffic().written, 48 * MIB, "what waits has not been done");
    assert_eq!(disk.work_for(Duration::from_secs(60)), 4);
    assert_eq!(disk.bench.request(OUT, 0, &[readable(MIB, 512)]).0, OK);
    (0..40).for_each(|_| disk.bench.push(IN, 0, &[writable(MIB, REQUEST)]));
    assert_eq!(disk.work_for(Duration::ZERO), 40);
}

#[test]
fn r13_reads_are_held_to_theirs() {
    let ram = large_ram();
    let mut disk = Limited::new(&ram, limits(None, Some(8 * MIB), None));
    (0..16).for_each(|_| disk.bench.push(IN, 0, &[writable(MIB, REQUEST)]));
    assert_eq!(disk.work_for(Duration::ZERO), 8);
    assert_eq!(disk.work_for(Duration::from_secs(1)), 2);
}

#[test]
fn r13_a_queue_that_waits_goes_on_where_it_was_and_in_order() {
    let ram = ram();
    let mut disk = Limited::new(&ram, limits(None, None, Some(1)));
    (0..4).for_each(|_| disk.bench.push(FLUSH, 0, &[]));
    disk.work_for(Duration::ZERO);
    let expected = disk.bench.push_flush_and_read();
    let outcome = disk.bench.process().unwrap();
    assert_eq!(outcome.retry_after, Some(Duration::from_secs(1)));
    assert!(!outcome.more && !outcome.notify);
    assert!(disk.bench.driver.take_used().is_empty(), "a read behind a flush waits with it");

    disk.pass(Duration::from_secs(1) - Duration::from_nanos(1));
    assert!(disk.bench.process().unwrap().retry_after.is_some());
    disk.pass(Duration::from_nanos(1));
    let outcome = disk.bench.process().unwrap();

    assert_eq!((outcome.retry_after, outcome.notify), (None, true));
    assert_eq!(disk.bench.driver.take_used().len(), 2);
    assert_eq!(disk.bench.guest_bytes(DATA, 512), expected);
}

#[test]
fn r13_the_largest_request_is_charged_in_full_however_small_the_limit() {
    let ram = large_ram();
    let mut disk = Limited::new(&ram, limits(Some(MIB), None, None));
    (0..3).for_each(|_| disk.bench.push(OUT, 0, &[readable(MIB, MAX_REQUEST_BYTES)]));
    assert_eq!(disk.work_for(Duration::ZERO), 1);
    let outcome = disk.bench.process().unwrap();
    assert_eq!(outcome.retry_after, Some(Duration::from_secs(16)));
    assert_eq!(disk.work_for(Duration::from_secs(16)), 1);
}

#[test]
fn r13_small_requests_are_done_together_and_not_with_a_wake_up_each() {
    let ram = ram();
    let mut disk = Limited::new(&ram, limits(Some(100 * MIB), None, None));
    disk.bench.block = {
        let mut state = disk.bench.block.save();
        state.throttle.write_tokens = 0;
        Block::restore(disk.bench.file.try_clone().unwrap(), state).unwrap()
    };
    (0..80).for_each(|_| disk.bench.push(OUT, 0, &[readable(DATA, 64 << 10)]));
    let wait = disk.bench.process().unwrap().retry_after.unwrap();
    assert!(wait >= Duration::from_millis(5), "{wait:?}");
}

#[test]
fn r13_cleared_ranges_count_as_what_they_cost() {
    let ram = ram();
    // Sixteen ranges count for 4 MiB.
    let ranges: Vec<_> = (0..16).map(|range| (range * 16, 16, 0)).collect();
    for kind in [DISCARD, WRITE_ZEROES] {
        let mut disk = Limited::new(&ram, limits(Some(4 * MIB), None, None));
        for _ in 0..8 {
            let part = disk.bench.ranges(&ranges);
            disk.bench.push(kind, 0, &[part]);
        }
        assert_eq!(disk.work_for(Duration::ZERO), 4, "{kind}");
        assert_eq!(disk.work_for(Duration::from_secs(2)), 2, "{kind}");
    }
}

#[test]
fn r13_a_volatile_disk_flushes_as_it_likes_and_writes_as_it_may() {
    let ram = large_ram();
    let config = limits(Some(4 * MIB), None, Some(1));
    let mut disk = Limited::new(&ram, BlockConfig { volatile: true, ..config });
    (0..100).for_each(|_| disk.bench.push(FLUSH, 0, &[]));
    assert_eq!(disk.work_for(Duration::ZERO), 100);
    (0..8).for_each(|_| disk.bench.push(OUT, 0, &[readable(MIB, REQUEST)]));
    assert_eq!(disk.work_for(Duration::ZERO), 4);
}

#[test]
fn r13_refused_requests_and_names_cost_nothing() {
    let ram = ram();
    let mut disk = Limited::new(&ram, limits(Some(1), Some(1), Some(1)));
    for _ in 0..20 {
        assert_eq!(disk.bench.request(OUT, u64::MAX, &[readable(DATA, 512)]).0, IOERR);
        assert_eq!(disk.bench.request(GET_ID, 0, &[writable(DATA, 20)]).0, OK);
    }
    assert_eq!(disk.bench.block.save().throttle, disk.full());
}

#[test]
fn r13_neither_a_reset_nor_a_restored_state_brings_a_new_burst() {
    let ram = ram();
    let mut disk = Limited::new(&ram, limits(Some(MIB), Some(MIB), Some(1)));
    (0..8).for_each(|_| disk.bench.push(FLUSH, 0, &[]));
    assert_eq!(disk.work_for(Duration::ZERO), 4);
    disk.bench.block.reset();
    assert_eq!(disk.work_for(Duration::ZERO), 0);

    let state = disk.bench.block.save();
    assert_eq!(state.throttle.flush_tokens, 0);
    let json = serde_json::to_string(&state).unwrap();
    let file = disk.bench.file.try_clone().unwrap();
    let restored = Block::restore(file, serde_json::from_str(&json).unwrap()).unwrap();
    assert_eq!(restored.save(), state);
    disk.bench.block = restored;
    assert!(disk.bench.process().unwrap().retry_after.is_some());
    assert!(disk.bench.driver.take_used().is_empty());

    let greedy = ThrottleState { flush_tokens: u64::MAX, ..state.throttle };
    let file = disk.bench.file.try_clone().unwrap();
    let restored = Block::restore(file, BlockState { throttle: greedy, ..state }).unwrap();
    assert_eq!(restored.save().throttle.flush_tokens, BURST_SECONDS, "no more than a burst is restored");
}

#[test]
fn r13_without_limits_nothing_waits() {
    let ram = ram();
    let mut disk = Limited::new(&ram, limits(Some(1), None, Some(1)));
    (0..100).for_each(|_| disk.bench.push(FLUSH, 0, &[]));
    assert_eq!(disk.work_for(Duration::ZERO), 4);
    disk.bench.block.lift_limits();
    assert_eq!(disk.work_for(Duration::ZERO), 96);
    let mut free = Limited::new(&ram, BlockConfig::default());
    (0..100).for_each(|_| free.bench.push(FLUSH, 0, &[]));
    assert_eq!(free.work_for(Duration::ZERO), 100);
}
