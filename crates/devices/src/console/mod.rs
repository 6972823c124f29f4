//! The console device: one byte stream between the host and the guest's agent.
//!
//! It offers a single generic port and no terminal. The guest finds it as `/dev/vportNp0`, where N is the number of the
//! device among all its virtio devices, or by its name. Both directions have a bounded
//! buffer here. When the one to the host is full, the guest's data stays in its own queue until the host has taken some
//! out, so a guest that floods the port only fills its own memory.

mod device;
mod request;
mod session;
mod state;
#[cfg(test)]
mod tests;

use thiserror::Error;

pub use device::Console;
pub use session::Hangup;
pub use state::ConsoleState;

/// The queue with the guest's buffers for data from the host.
pub const RX_QUEUE: usize = 0;
/// The queue with data from the guest.
pub const TX_QUEUE: usize = 1;
/// The queue with the guest's buffers for control messages from the host.
pub const CONTROL_RX_QUEUE: usize = 2;
/// The queue with control messages from the guest.
pub const CONTROL_TX_QUEUE: usize = 3;

/// How much each direction buffers.
pub const BUFFER_BYTES: usize = 256 << 10;

/// The most data in one of the guest's chains. Linux sends at most 32 KiB at once.
pub const MAX_CHAIN_BYTES: u32 = 64 << 10;

/// The name that the guest finds under `/sys/class/virtio-ports/*/name`.
pub const PORT_NAME: &str = "bathysphere";

/// How a guest breaks the console's protocol.
#[derive(Debug, Error)]
pub enum ConsoleError {
    /// A chain of data that is longer than the device takes.
    #[error("The guest sent {0} bytes in one chain, more than {MAX_CHAIN_BYTES}")]
    LongChain(u32),
    /// A chain that is too small for data or messages from the host.
    #[error("The guest offered a buffer of {0} bytes, too small to be used")]
    SmallBuffer(u32),
    /// A control message that is cut short.
    #[error("The guest sent a control message of {0} bytes")]
    ShortControl(u32),
    /// A control message about a port that was never offered.
    #[error("The guest named port {0}, which does not exist")]
    NoSuchPort(u32),
    /// A control message that only the host may send, or that virtio does not define.
    #[error("The guest sent control event {0}, which no driver sends")]
    UnknownControl(u16),
    /// A saved state with more in its buffers than they hold.
    #[error("The saved console state does not fit its buffers")]
    State,
}
