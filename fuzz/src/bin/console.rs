//! The console: whatever either side does, its buffers stay bounded and its state can be saved.
#![no_main]

use bathy_devices::VirtioDevice;
use bathy_devices::console::Console;
use bathy_devices::testing::Driver;
use bathy_fuzz::console::{check_buffers, check_state, guest_acts, host_acts};
use bathy_fuzz::{Input, MAX_STEPS, drive, ram};
use libfuzzer_sys::fuzz_target;

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
            2..7 => guest_acts(&mut input, mem, &mut drivers),
            _ => host_acts(&mut input, &mut console),
        }
        if process(&mut console, &mut queues, kick, mem).is_err() {
            break;
        }
        check_buffers(&console);
    }
    check_state(&console);
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
