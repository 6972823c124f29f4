//! The entropy device: random bytes from the host's kernel, at a bounded rate.
//!
//! Random bytes cost the host time, so a guest that asks for gigabytes gets them no faster than the bucket refills.

mod device;
mod state;
#[cfg(test)]
mod tests;

use std::io;

use thiserror::Error;

pub use device::Entropy;
pub use state::EntropyState;

/// The most random bytes that a guest can take at once.
pub const BURST_BYTES: u64 = 64 << 10;

/// How many random bytes a guest can take per second in the long run.
pub const BYTES_PER_SECOND: u64 = 1 << 20;

/// What stops the entropy device.
#[derive(Debug, Error)]
pub enum EntropyError {
    /// A request with no byte that the device may write.
    #[error("The guest asked for random bytes and gave no buffer for them")]
    NoBuffer,
    /// The host's source failed.
    #[error("The host has no random bytes")]
    Source(#[source] io::Error),
}
