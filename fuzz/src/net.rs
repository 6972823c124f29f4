//! What either side of a network link does to it.

use bathy_devices::GuestMemory;
use bathy_devices::net::{
    BUFFER_BYTES, BUFFER_FRAMES, MAX_FRAME_BYTES, MAX_LARGE_FRAME_BYTES, MIN_FRAME_BYTES, Net, RX_QUEUE,
    Refused, TX_QUEUE,
};
use bathy_devices::testing::{Driver, readable, writable};
use vm_memory::{Bytes, GuestAddress};

use crate::Input;

/// Below the rings, so that a frame seldom destroys them by accident.
const HEADER: u64 = 0x100;

/// The guest does one thing that makes sense; returns the queue that it did it to.
pub fn guest_acts(input: &mut Input<'_>, mem: &GuestMemory, drivers: &mut [Driver<'_>]) -> usize {
    if input.u8() & 1 == 0 {
        for _ in 0..1 + input.u8() % 8 {
            let length = input.choose(&[0, 1, 11, 12, 13, 64, 128, 1526, 4096]);
            drivers[RX_QUEUE].push(&[writable(0x8000, length)]);
        }
        return RX_QUEUE;
    }
    let (flags, gso_type) =
        (input.choose(&[0, 0, 1, 1, 2, 0xff]), input.choose(&[0, 0, 1, 4, 3, 5, 0x80, 0x81]));
    let mut header = [flags, gso_type, input.u8(), 0, input.u8(), 0, input.u8(), 0, input.u8(), 0, 0, 0];
    if input.u8() % 8 == 0 {
        // Anything but what makes sense, somewhere.
        header[usize::from(input.u8() % 12)] = input.u8();
    }
    mem.write_slice(&header, GuestAddress(HEADER)).expect("inside memory");
    let length = match input.u8() % 4 {
        0 => u32::from(input.u8() % 20),
        1 => u32::from(input.u8()),
        2 => u32::from(input.u16()),
        _ => 65500 + u32::from(input.u8() % 60),
    };
    // Longer frames than there is memory, from several buffers that lie in the same place.
    let parts = [readable(HEADER, 12), readable(0, length / 2), readable(0, length - length / 2)];
    drivers[TX_QUEUE].push(&parts);
    TX_QUEUE
}

/// The owner of the link does one thing.
pub fn host_acts(input: &mut Input<'_>, net: &mut Net) {
    match input.u8() % 8 {
        0..3 => {
            let length = input.choose(&[13, 14, 60, 1514, 9000, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1]);
            let good = (MIN_FRAME_BYTES..=MAX_FRAME_BYTES).contains(&length);
            let wanted = net.wants_frames();
            match net.offer(&vec![7; length]) {
                Ok(()) => assert!(good && wanted),
                Err(Refused::Length(_)) => assert!(!good),
                Err(Refused::Full) => assert!(!wanted),
            }
        }
        3 => {
            let room = net.space().map(|space| {
                space[..32].fill(9);
                space.len()
            });
            let length = input.u16().into();
            let taken = net.commit(length).is_ok();
            assert!(!taken || room == Some(MAX_FRAME_BYTES));
        }
        4..7 => {
            for _ in 0..input.u8() % 32 {
                net.drop_frame();
            }
        }
        _ => net.set_link(input.u8() % 4 != 0),
    }
}

/// Whatever either side did, no frame is longer or shorter than a frame can be.
pub fn check_frame(net: &Net) {
    if let Some(frame) = net.frame() {
        assert!((MIN_FRAME_BYTES..=MAX_LARGE_FRAME_BYTES).contains(&frame.len()), "{} bytes", frame.len());
    }
}

/// Whatever either side did, both buffers are bounded and the state can be saved.
pub fn check_state(net: &Net) {
    let state = net.save();
    for frames in [&state.to_guest, &state.from_guest] {
        assert!(frames.len() <= BUFFER_FRAMES);
        assert!(frames.iter().map(Vec::len).sum::<usize>() <= BUFFER_BYTES);
    }
    assert!(state.link_up || state.to_guest.is_empty() && state.from_guest.is_empty());
    assert!(Net::restore(&state).expect("its own state").save() == state);
}
