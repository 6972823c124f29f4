//! A guest whose one processor changes the rings while another has the device look at them.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bathy_devices::console::{BUFFER_BYTES, TX_QUEUE};
use bathy_devices::net::{MAX_FRAME_BYTES, MAX_LARGE_FRAME_BYTES, Net};

use super::*;

const SIZE: u16 = 16;
/// How often the guest's rules have to be broken before a race counts as one.
const REFUSALS: u32 = 50;
const TOO_LONG: Duration = Duration::from_secs(120);
/// What takes longer hangs, however busy the host is.
const KICK: Duration = Duration::from_secs(30);

/// Places in memory, and what they may be changed to.
type Flips = Vec<(u64, Vec<u64>)>;

/// A thread that changes places in memory, all the time but when it is held.
struct Flipper {
    done: Arc<AtomicBool>,
    hold: Arc<Mutex<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Flipper {
    fn start(ram: &Arc<GuestRam>, flips: Flips) -> Self {
        let (done, hold) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(())));
        let thread = {
            let (done, hold, ram) = (Arc::clone(&done), Arc::clone(&hold), Arc::clone(ram));
            thread::spawn(move || {
                let mut seed = 0x9e37_79b9_7f4a_7c15;
                while !done.load(Ordering::Relaxed) {
                    let held = hold.lock().unwrap();
                    flip(ram.memory(), &flips, &mut seed);
                    drop(held);
                    thread::yield_now();
                }
            })
        };
        Self { done, hold, thread: Some(thread) }
    }
}

/// Changes a thousand things.
fn flip(mem: &GuestMemory, flips: &Flips, seed: &mut u64) {
    for _ in 0..1000 {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        let mut random = usize::try_from(*seed >> 32).unwrap();
        let (place, values) = &flips[random % flips.len()];
        random /= flips.len();
        mem.store(values[random % values.len()], GuestAddress(*place), Ordering::Relaxed).unwrap();
    }
}

impl Drop for Flipper {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || thread::panicking());
        }
    }
}

/// The second half of a descriptor: length, flags and next.
fn tail(length: u32, flags: u16, next: u16) -> u64 {
    u64::from(length) | u64::from(flags) << 32 | u64::from(next) << 48
}

/// Counts the outcome of a kick. An error has to be one of the device's own.
#[derive(Debug, Default)]
struct Tally {
    fine: u32,
    refused: u32,
}

impl Tally {
    fn is_enough(&self, fine: u32) -> bool {
        self.fine >= fine && self.refused >= REFUSALS
    }

    /// Counts how a kick went; false once the device has ended. Any other error is one too many.
    fn goes_on(&mut self, outcome: &Result<Outcome, MmioError>) -> bool {
        match outcome {
            Ok(_) => self.fine += 1,
            Err(MmioError::Device(_)) => self.refused += 1,
            Err(error) => panic!("{error:?}"),
        }
        outcome.is_ok()
    }
}

#[test]
fn v7_disk_keeps_to_what_it_has_checked() {
    let ram = ram();
    let (_, file) = disk(BlockConfig::default());
    file.set_len(1024).unwrap();
    let table = drivers(&ram, 1, SIZE)[0].descriptor_table();
    // A write of one sector or two to a disk of two; its data may be outside of memory, or the chain may have a loop.
    let lengths = [512, 1024].map(|length| vec![tail(length, 1, 2); 31]).concat();
    let lengths: Vec<u64> =
        lengths.into_iter().chain([tail(513, 1, 2), tail(u32::MAX - 511, 1, 2)]).collect();
    let flips = vec![
        (table + 8, vec![tail(16, 1, 1); 62].into_iter().chain([tail(16, 1, 0), tail(15, 1, 1)]).collect()),
        (table + 16, vec![DATA; 62].into_iter().chain([RAM - 512, RAM]).collect()),
        (table + 24, lengths.clone()),
        (table + 24, lengths),
        (HEADER, vec![u64::from(OUT), u64::from(OUT), u64::from(IN), 11]),
        (HEADER + 8, vec![0, 0, 0, 1, 2, u64::MAX]),
    ];
    let flipper = Flipper::start(&ram, flips);
    let begun = Instant::now();
    let mut tally = Tally::default();
    while !tally.is_enough(20_000) && begun.elapsed() < TOO_LONG {
        let held = flipper.hold.lock().unwrap();
        let mut drivers = drivers(&ram, 1, SIZE);
        let block = Block::new(file.try_clone().unwrap(), BlockConfig::default()).unwrap();
        let mut guest = Guest::started(block, &ram, &drivers);
        let head = drivers[0].push(&block_request(ram.memory(), OUT, 0, &[readable(DATA, 512)]));
        drop(held);
        for _ in 0..1000 {
            let kicked = Instant::now();
            let outcome = guest.kick(0);
            assert!(kicked.elapsed() < KICK, "a kick took {:?}", kicked.elapsed());
            if !tally.goes_on(&outcome) {
                break;
            }
            drivers[0].publish(head);
        }
        assert_eq!(file.metadata().unwrap().len(), 1024);
        assert_eq!(guest.mmio.device_mut().take_host_error(), None);
    }
    drop(flipper);
    assert!(tally.is_enough(20_000), "the race did not happen: {tally:?}");
}

#[test]
fn v7_console_keeps_to_what_it_has_checked() {
    let ram = ram();
    let table = drivers(&ram, 4, SIZE)[TX_QUEUE].descriptor_table();
    // Mostly data that the device takes, for as long as it has room; now and then too much, or from nowhere.
    let fine = [16, 4096, 60_000, 64 << 10].map(|length| vec![tail(length, 0, 0); 16]).concat();
    let wrong = [(64 << 10) + 1, 1 << 20].map(|length| tail(length, 0, 0));
    let flips = vec![
        (table, vec![DATA; 30].into_iter().chain([RAM - 16, RAM]).collect()),
        (table + 8, fine.into_iter().chain(wrong).collect()),
    ];
    let flipper = Flipper::start(&ram, flips);
    let begun = Instant::now();
    let mut tally = Tally::default();
    while !tally.is_enough(1000) && begun.elapsed() < TOO_LONG {
        let held = flipper.hold.lock().unwrap();
        let mut drivers = drivers(&ram, 4, SIZE);
        let mut guest = open_console(&ram, &mut drivers);
        drop(held);
        for round in 0..1000 {
            drivers[TX_QUEUE].publish(0);
            let kicked = Instant::now();
            let outcome = guest.kick(1);
            assert!(kicked.elapsed() < KICK, "a kick took {:?}", kicked.elapsed());
            if !tally.goes_on(&outcome) {
                break;
            }
            let received = guest.mmio.device().received();
            assert!(received <= BUFFER_BYTES, "{received} bytes wait");
            if round % 32 == 31 {
                guest.mmio.device_mut().take(BUFFER_BYTES);
                if guest.mmio.service().is_err() {
                    tally.refused += 1;
                    break;
                }
            }
        }
    }
    drop(flipper);
    assert!(tally.is_enough(1000), "the race did not happen: {tally:?}");
}

#[test]
fn v7_network_link_keeps_to_what_it_has_checked() {
    let ram = ram();
    let table = drivers(&ram, 2, SIZE)[TX_QUEUE].descriptor_table();
    // Frames of all lengths, right or not, whose header says one thing and then another; now and then from nowhere.
    let lengths = [26, 72, MAX_FRAME_BYTES + 12, MAX_LARGE_FRAME_BYTES + 12, 100_000];
    let lengths = lengths.map(|length| vec![tail(u32::try_from(length).unwrap(), 0, 0); 4]).concat();
    let flips = vec![
        (table, vec![DATA; 14].into_iter().chain([RAM - 16, RAM]).collect()),
        (table + 8, lengths.into_iter().chain([tail(11, 0, 0), tail(60, 2, 0)]).collect()),
        (DATA, vec![0, 0x0101, 0x0401, 0xff01, u64::MAX]),
    ];
    let flipper = Flipper::start(&ram, flips);
    let begun = Instant::now();
    let mut tally = Tally::default();
    let mut large = 0;
    while !(tally.is_enough(1000) && large > 0) && begun.elapsed() < TOO_LONG {
        let held = flipper.hold.lock().unwrap();
        let mut drivers = drivers(&ram, 2, SIZE);
        let mut guest = Guest::started(Net::new([2, 0, 0, 0, 0, 9]), &ram, &drivers);
        drop(held);
        for _ in 0..1000 {
            drivers[TX_QUEUE].publish(0);
            let kicked = Instant::now();
            let outcome = guest.kick(1);
            assert!(kicked.elapsed() < KICK, "a kick took {:?}", kicked.elapsed());
            if !tally.goes_on(&outcome) {
                break;
            }
            let length = guest.mmio.device().frame().map_or(60, <[u8]>::len);
            assert!(
                [14, 60, MAX_FRAME_BYTES, MAX_LARGE_FRAME_BYTES].contains(&length),
                "a frame of {length} bytes"
            );
            large += u32::from(length == MAX_LARGE_FRAME_BYTES);
            guest.mmio.device_mut().drop_frame();
        }
    }
    drop(flipper);
    assert!(tally.is_enough(1000) && large > 0, "the race did not happen: {tally:?}, {large}");
}
