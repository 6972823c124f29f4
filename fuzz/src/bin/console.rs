//! The console: whatever either side does, its buffers stay bounded and its state can be saved.
#![no_main]

use bathy_devices::VirtioDevice;
use bathy_devices::console::{BUFFER_BYTES, Console};
use bathy_devices::testing::{Driver, readable, writable};
use bathy_fuzz::{Input, MAX_STEPS, drive, ram};
use libfuzzer_sys::fuzz_target;
use vm_memory::{Bytes, GuestAddress};

fuzz_target!(|data: &[u8]| {
    let mut input = Input::new(data);
    let ram = ram();
    let mem = ram.memory();
    let mut drivers = [0x1000, 0x2000, 0x3000, 0x4000].map(|base| Driver::new(mem, base, 16));
    let mut queues = [0, 1, 2, 3].map(|i: usize| drivers[i].device_queue());
    let mut console = Console::new();
    console.set_features(console.features());

    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        let kick = usize::from(input.u8() % 4);
        match input.u8() % 10 {
            0 | 1 => drive(&mut input, &ram, &mut drivers[kick]),
            2 | 3 => {
                // A control message that makes sense.
                let event = input.choose(&[0_u8, 3, 6, 6]);
                let message = [0, 0, 0, 0, event, 0, input.u8() & 1, 0];
                mem.write_slice(&message, GuestAddress(0x100)).expect("inside memory");
                drivers[3].push(&[readable(0x100, 8)]);
            }
            4 => {
                drivers[2].push(&[writable(0x8000, 64)]);
            }
            5 => {
                drivers[0].push(&[writable(0x8000, input.length() % 0x4000)]);
            }
            6 => {
                // Enough, at times, to fill the port's buffer in one step.
                let length = u32::from(input.u16());
                for _ in 0..1 + input.u8() % 8 {
                    drivers[1].push(&[readable(0, length)]);
                }
            }
            7 => {
                let size = usize::from(input.u16()) * 8;
                let sent = console.send(&vec![7; size]);
                assert!(sent <= size);
            }
            8 => drop(console.take(usize::from(input.u16()) * 8)),
            _ => console.reconnect(),
        }
        if process(&mut console, &mut queues, kick, mem).is_err() {
            break;
        }
        assert!(console.received() <= BUFFER_BYTES);
        assert!(console.room() <= BUFFER_BYTES);
    }
    let state = console.save();
    assert!(state.control.len() <= 16, "{} messages wait", state.control.len());
    assert!(Console::restore(state.clone()).expect("its own state").save() == state);
});

fn process(
    console: &mut Console,
    queues: &mut [bathy_devices::Queue; 4],
    first: usize,
    mem: &bathy_devices::GuestMemory,
) -> Result<(), bathy_devices::DeviceError> {
    console.process(first, &mut queues[first], mem)?;
    for _ in 0..64 {
        let Some(next) = console.follow_up() else { return Ok(()) };
        console.process(next, &mut queues[next], mem)?;
    }
    panic!("the console always wants more");
}
