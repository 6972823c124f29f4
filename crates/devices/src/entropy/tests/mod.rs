//! The entropy device, its rate limit by an artificial clock.

mod state;

use std::time::Duration;

use vm_memory::{Bytes, GuestAddress};

use super::{BURST_BYTES, BYTES_PER_SECOND, Entropy, EntropyError, EntropyState};
use crate::ring::RingError;
use crate::testing::{Driver, TestClock, readable, writable};
use crate::{DeviceError, GuestRam, Outcome, Queue, VirtioDevice};

const DATA: u64 = 0x10000;
const BURST: u32 = 64 << 10;
const EVENT_IDX: u64 = 1 << 29;
const VERSION_1: u64 = 1 << 32;

struct Bench<'mem> {
    ram: &'mem GuestRam,
    driver: Driver<'mem>,
    queue: Queue,
    now: TestClock,
    entropy: Entropy,
}

impl<'mem> Bench<'mem> {
    fn new(ram: &'mem GuestRam) -> Self {
        let now = TestClock::default();
        now.set(Duration::from_secs(100));
        let entropy = Entropy::with_clock(now.for_device());
        let driver = Driver::new(ram.memory(), 0x1000, 16);
        let queue = driver.device_queue();
        Self { ram, driver, queue, now, entropy }
    }

    fn process(&mut self) -> Result<Outcome, DeviceError> {
        self.entropy.process(0, &mut self.queue, self.ram.memory())
    }

    fn bytes(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.ram.memory().read_slice(&mut bytes, GuestAddress(address)).unwrap();
        bytes
    }

    fn exhaust(&mut self) {
        self.driver.push(&[writable(DATA, BURST)]);
        assert_eq!(self.process().unwrap().retry_after, None);
        assert_eq!(self.driver.take_used().len(), 1);
    }
}

fn ram() -> GuestRam {
    GuestRam::create(1 << 20).unwrap()
}

#[test]
fn driver_finds_what_the_device_is() {
    let mut entropy = Entropy::new();
    assert_eq!((entropy.device_type(), entropy.queue_count(), entropy.follow_up()), (4, 1, None));
    assert_eq!(entropy.features(), EVENT_IDX | VERSION_1);
    let mut space = [0xff; 8];
    entropy.read_config(0, &mut space);
    assert_eq!(space, [0; 8], "it has no configuration");
}

#[test]
fn request_is_filled_with_random_bytes_and_nothing_beyond() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.driver.push(&[writable(DATA, 64), writable(DATA + 0x1000, 64)]);

    assert!(bench.process().unwrap().notify);

    assert_eq!(bench.driver.take_used(), [(0, 128)]);
    let (first, second) = (bench.bytes(DATA, 64), bench.bytes(DATA + 0x1000, 64));
    assert_ne!(first, [0; 64]);
    assert_ne!(first, second);
    assert_eq!(bench.bytes(DATA + 64, 64), [0; 64]);
}

#[test]
fn v11_request_for_more_than_the_burst_gets_the_burst() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.driver.push(&[writable(DATA, 512 << 10)]);
    bench.process().unwrap();
    assert_eq!(bench.driver.take_used(), [(0, BURST)]);
    assert_eq!(u64::from(BURST), BURST_BYTES);
}

#[test]
fn v11_request_gets_exactly_what_time_has_brought() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.exhaust();
    // More than one block of 4096 bytes, and not a whole number of them.
    let earned = Duration::from_nanos((5000 * 1_000_000_000_u64).div_ceil(BYTES_PER_SECOND));
    bench.now.set(bench.now.get() + earned);
    bench.driver.push(&[writable(2 * DATA, BURST)]);

    bench.process().unwrap();

    assert_eq!(bench.driver.take_used(), [(1, 5000)]);
    assert_eq!(bench.bytes(2 * DATA + 5000, 4096), [0; 4096], "no byte more was written");
    assert_eq!(bench.entropy.save().tokens, 0);
}

#[test]
fn v11_waiting_request_is_answered_from_the_byte_on_that_makes_it_worthwhile() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.driver.push(&[writable(DATA, BURST - 1023)]);
    bench.process().unwrap();
    bench.driver.push(&[writable(DATA, BURST)]);
    assert_eq!(bench.entropy.save().tokens, 1023);
    assert!(bench.process().unwrap().retry_after.is_some());
    assert_eq!(bench.driver.take_used().len(), 1);

    // One more comes in less than a microsecond.
    bench.now.set(bench.now.get() + Duration::from_micros(1));
    bench.process().unwrap();
    assert_eq!(bench.driver.take_used(), [(1, 1024)]);
}

#[test]
fn v11_requests_beyond_the_burst_wait_for_time_to_pass() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.exhaust();
    bench.driver.push(&[writable(DATA, 512)]);

    let wait = bench.process().unwrap().retry_after.unwrap();

    assert_eq!(bench.driver.take_used(), []);
    let expected = Duration::from_nanos(512 * 1_000_000_000 / BYTES_PER_SECOND);
    assert!(wait >= expected && wait < expected * 2, "{wait:?}");
    bench.now.set(bench.now.get() + wait);
    assert_eq!(bench.process().unwrap(), Outcome { notify: true, ..Outcome::default() });
    assert_eq!(bench.driver.take_used(), [(1, 512)]);
}

#[test]
fn v11_rate_holds_over_a_long_time() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    let (mut total, mut waiting): (u64, bool) = (0, false);
    // Ten seconds of a guest that always wants more and asks every 100 microseconds.
    for _ in 0..100_000 {
        if !waiting {
            bench.driver.push(&[writable(DATA, 64 << 10)]);
        }
        waiting = bench.process().unwrap().retry_after.is_some();
        total += bench.driver.take_used().iter().map(|(_, length)| u64::from(*length)).sum::<u64>();
        bench.now.set(bench.now.get() + Duration::from_micros(100));
    }
    let fair = BURST_BYTES + 10 * BYTES_PER_SECOND;
    assert!(total <= fair, "{total} of {fair}");
    assert!(total >= fair * 999 / 1000, "{total} of {fair}");
}

#[test]
fn v11_request_without_room_stops_the_device_once() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.driver.push(&[readable(DATA, 64)]);
    assert!(matches!(bench.process(), Err(DeviceError::Entropy(EntropyError::NoBuffer))));
    assert_eq!(bench.process().unwrap(), Outcome::default());
}

#[test]
fn v11_request_of_gibibytes_outside_memory_is_refused() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.driver.push(&[writable(DATA, u32::MAX)]);
    assert!(matches!(bench.process(), Err(DeviceError::Ring(RingError::Unmapped { .. }))));
}

#[test]
fn clock_that_goes_back_gives_nothing_for_free() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.exhaust();
    bench.now.set(Duration::ZERO);
    bench.driver.push(&[writable(DATA, 64)]);
    assert!(bench.process().unwrap().retry_after.is_some());
}

#[test]
fn state_keeps_an_empty_bucket_empty() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    bench.exhaust();
    let state = bench.entropy.save();
    assert_eq!(state.tokens, 0);
    let json = serde_json::to_string(&state).unwrap();
    assert_eq!(Entropy::restore(serde_json::from_str(&json).unwrap()).save().tokens, 0);
}

#[test]
fn state_keeps_what_the_driver_accepted_and_a_reset_forgets_it() {
    let mut entropy = Entropy::new();
    entropy.set_features(VERSION_1);
    let mut restored = Entropy::restore(entropy.save());
    assert_eq!(restored.save().acked_features, VERSION_1);
    restored.reset();
    assert_eq!(restored.save().acked_features, 0);
    let state = EntropyState { tokens: u64::MAX, acked_features: u64::MAX };
    let offered = EntropyState { tokens: BURST_BYTES, acked_features: entropy.features() };
    assert_eq!(Entropy::restore(state).save(), offered, "no more than the device has and offers");
}

#[test]
fn there_is_no_second_queue() {
    let ram = ram();
    let mut bench = Bench::new(&ram);
    let outcome = bench.entropy.process(1, &mut bench.queue, ram.memory());
    assert!(matches!(outcome, Err(DeviceError::NoSuchQueue(1))));
}
