//! The network device: whatever either side does, frames are frames, its buffers stay bounded, and what a driver accepted
//! decides what it is given.
#![no_main]

use bathy_devices::net::Net;
use bathy_devices::testing::Driver;
use bathy_devices::{DeviceError, GuestMemory, Outcome, Queue, QueueT, VirtioDevice};
use bathy_fuzz::net::{check_frame, check_state, guest_acts, host_acts};
use bathy_fuzz::{Input, MAX_STEPS, drive, ram};
use libfuzzer_sys::fuzz_target;

const EVENT_IDX: u64 = 1 << 29;

fuzz_target!(|data: &[u8]| {
    let mut input = Input::new(data);
    let ram = ram();
    let mem = ram.memory();
    let mut drivers = [0x1000, 0x2000].map(|base| Driver::new(mem, base, 16));
    let mut net = Net::new([2, 0, 0, 0, 0, 1]);
    let features = net.features() & !input.choose(&[0, 1, 1 << 1, 1 << 11, 1 << 15, EVENT_IDX, u64::MAX]);
    net.set_features(features);
    let mut queues = [0, 1].map(|i: usize| {
        let mut queue = drivers[i].device_queue();
        queue.set_event_idx(features & EVENT_IDX != 0);
        queue
    });

    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        let kick = match input.u8() % 10 {
            0 | 1 => {
                let queue = usize::from(input.u8() % 2);
                drive(&mut input, &ram, &mut drivers[queue]);
                Some(queue)
            }
            2..7 => Some(guest_acts(&mut input, mem, &mut drivers)),
            _ => {
                host_acts(&mut input, &mut net);
                None
            }
        };
        if work(&mut net, &mut queues, kick, mem).is_err() {
            break;
        }
        check_frame(&net);
    }
    check_state(&net);
});

fn work(
    net: &mut Net,
    queues: &mut [Queue; 2],
    kick: Option<usize>,
    mem: &GuestMemory,
) -> Result<(), DeviceError> {
    if let Some(number) = kick {
        round(net, &mut queues[number], number, mem)?;
    }
    for _ in 0..8 {
        let Some(number) = net.follow_up() else { return Ok(()) };
        round(net, &mut queues[number], number, mem)?;
    }
    panic!("the device always wants more");
}

/// One round, which completes no more than the queue can hold, and in which all frames are counted once.
fn round(net: &mut Net, queue: &mut Queue, number: usize, mem: &GuestMemory) -> Result<(), DeviceError> {
    let (used, counters) = (queue.next_used(), net.counters());
    let outcome = net.process(number, queue, mem);
    let completed = queue.next_used().wrapping_sub(used);
    assert!(completed <= 16, "more chains than the queue has entries");
    let now = net.counters();
    let sent = now.from_guest.frames - counters.from_guest.frames;
    let received = now.to_guest.frames - counters.to_guest.frames;
    assert!(sent + received <= completed.into(), "frames from nowhere");
    assert!(now.dropped.no_room - counters.dropped.no_room <= 16, "a round that is too long");
    if outcome.is_err() {
        let again = net.process(number, queue, mem).expect("a stopped queue is silent");
        assert_eq!(again, Outcome::default());
    }
    outcome.map(|_| ())
}
