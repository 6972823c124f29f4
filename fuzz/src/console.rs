//! What either side of a console does to it.

use bathy_devices::GuestMemory;
use bathy_devices::console::{BUFFER_BYTES, Console};
use bathy_devices::testing::{Driver, readable, writable};
use vm_memory::{Bytes, GuestAddress};

use crate::Input;

/// The guest does one thing that makes sense.
pub fn guest_acts(input: &mut Input<'_>, mem: &GuestMemory, drivers: &mut [Driver<'_>; 4]) {
    match input.u8() % 5 {
        0 | 1 => {
            let event = input.choose(&[0_u8, 3, 6, 6]);
            let message = [0, 0, 0, 0, event, 0, input.u8() & 1, 0];
            mem.write_slice(&message, GuestAddress(0x100)).expect("inside memory");
            drivers[3].push(&[readable(0x100, 8)]);
        }
        2 => {
            drivers[2].push(&[writable(0x8000, 64)]);
        }
        3 => {
            drivers[0].push(&[writable(0x8000, input.length() % 0x4000)]);
        }
        _ => {
            // Enough, at times, to fill the port's buffer in one step.
            let length = u32::from(input.u16());
            for _ in 0..1 + input.u8() % 8 {
                drivers[1].push(&[readable(0, length)]);
            }
        }
    }
}

/// The host does one thing.
pub fn host_acts(input: &mut Input<'_>, console: &mut Console) {
    match input.u8() % 3 {
        0 => {
            let size = usize::from(input.u16()) * 8;
            let sent = console.send(&vec![7; size]);
            assert!(sent <= size);
        }
        1 => drop(console.take(usize::from(input.u16()) * 8)),
        _ => console.reconnect(),
    }
}

/// Whatever either side did, buffers are bounded.
pub fn check_buffers(console: &Console) {
    assert!(console.received() <= BUFFER_BYTES);
    assert!(console.room() <= BUFFER_BYTES);
}

/// Whatever either side did, the state can be saved and is small.
pub fn check_state(console: &Console) {
    let state = console.save();
    assert!(state.control.len() <= 16, "{} messages wait", state.control.len());
    assert!(Console::restore(state.clone()).expect("its own state").save() == state);
}
