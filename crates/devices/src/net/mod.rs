//! The network device: whole Ethernet frames between the guest and the owner of its link.
//!
//! Frames are opaque here; who may talk to whom is decided elsewhere. Both directions have a bounded buffer. When the
//! one from the guest is full, frames stay in the guest's own queue until some were taken out, so a guest that floods
//! its link only fills its own memory. Frames for the guest wait until its driver has posted buffers for them.
//!
//! A frame that the driver asks to be segmented is passed on as the one large frame that it is, and a checksum that it
//! leaves to the device is not filled in: nothing is sent on a wire from here. So the lengths and offsets in a frame's
//! header decide nothing, and who takes the frame must not trust its checksum.

mod counters;
mod device;
mod frames;
mod header;
mod state;
#[cfg(test)]
mod tests;

use thiserror::Error;

pub use counters::{Counters, Dropped, FrameCount};
pub use device::Net;
pub use state::NetState;

/// The queue with the guest's buffers for frames from the host.
pub const RX_QUEUE: usize = 0;
/// The queue with frames from the guest.
pub const TX_QUEUE: usize = 1;

/// The most that a frame carries behind its Ethernet header, unless it is to be segmented.
pub const MTU: u16 = 65520;

/// The shortest frame: an Ethernet header.
pub const MIN_FRAME_BYTES: usize = 14;

/// The longest frame to the guest, and the longest one from it that is not to be segmented.
pub const MAX_FRAME_BYTES: usize = MIN_FRAME_BYTES + 65520;

/// The longest frame from the guest that is to be segmented: the length field of IP has no more.
pub const MAX_LARGE_FRAME_BYTES: usize = MIN_FRAME_BYTES + 65535;

/// How many bytes each direction buffers.
pub const BUFFER_BYTES: usize = 512 << 10;

/// How many frames each direction buffers.
pub const BUFFER_FRAMES: usize = 1024;

/// How a guest misuses the network device's queues.
#[derive(Debug, Error)]
pub enum NetError {
    /// A chain in the transmit queue that does not hold a whole header.
    #[error("The guest sent a frame of {0} bytes, less than its header has")]
    ShortHeader(u32),
    /// A chain in the transmit queue with a buffer that the device may write.
    #[error("The guest put a writable buffer of {0} bytes behind a frame that it sends")]
    WritableFrame(u32),
    /// A chain in the receive queue with a buffer that the device may only read.
    #[error("The guest put a readable buffer of {0} bytes where frames are received")]
    ReadableBuffer(u32),
    /// A chain in the receive queue that is too small for a header.
    #[error("The guest offered a buffer of {0} bytes, too small to receive anything")]
    SmallBuffer(u32),
    /// A saved state with more in its buffers than they hold.
    #[error("The saved state of the network device does not fit its buffers")]
    State,
}

/// Why a frame for the guest was not taken.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Refused {
    /// The buffer is full: try again after the guest has received some frames.
    #[error("The buffer of frames for the guest is full")]
    Full,
    /// No frame has this length.
    #[error("A frame of {0} bytes is shorter than {MIN_FRAME_BYTES} or longer than {MAX_FRAME_BYTES}")]
    Length(usize),
}
