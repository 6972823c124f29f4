//! What a disk has to save to go on in another process. Its file is passed on by itself, and the place in its queue is
//! part of the transport's state.

use serde::{Deserialize, Serialize};

use super::backing::Backing;
use super::device::{Block, Traffic};
use super::throttle::Throttle;
use super::{BlockConfig, BlockError, BlockLimits};
use crate::device::VirtioDevice;

/// A block device's state between requests, apart from its file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockState {
    /// The disk's size in sectors of 512 bytes.
    pub sectors: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether flushing is a no-op.
    pub volatile: bool,
    /// The disk's name, which the guest finds under `/sys/block/*/serial`.
    pub id: String,
    /// The feature bits that the driver accepted.
    pub acked_features: u64,
    /// What is left of its limits.
    pub throttle: ThrottleState,
    /// How much was asked of the disk.
    pub traffic: Traffic,
    /// How many requests failed because of the host.
    pub host_errors: u64,
}

/// What is left of a disk's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThrottleState {
    /// The rates per second.
    pub limits: BlockLimits,
    /// Bytes that may be written without waiting.
    pub write_tokens: u64,
    /// Bytes that may be read without waiting.
    pub read_tokens: u64,
    /// Flushes that need not wait.
    pub flush_tokens: u64,
}

impl Block {
    /// Makes the disk that `state` describes again, on the same files or copies of them.
    ///
    /// # Errors
    /// When they have another size, or does not fit otherwise.
    pub fn restore(backing: impl Into<Backing>, state: BlockState) -> Result<Self, BlockError> {
        let BlockState { sectors, read_only, volatile, id, acked_features, throttle, traffic, host_errors } =
            state;
        let mut block = Self::new(backing, BlockConfig { read_only, volatile, id, limits: throttle.limits })?;
        if block.sectors != sectors {
            return Err(BlockError::OtherDisk { saved: sectors, actual: block.sectors });
        }
        block.acked_features = acked_features & block.features();
        block.throttle = Throttle::restore(throttle);
        (block.traffic, block.host_errors) = (traffic, host_errors);
        Ok(block)
    }

    /// The state between requests.
    pub fn save(&self) -> BlockState {
        // Every field is named, so that a new one is either saved or left out for a reason.
        let Self {
            data: _,
            config: BlockConfig { read_only, volatile, id, limits: _ },
            sectors,
            acked_features,
            // An error is reported by the process in which it happened.
            host_error: _,
            host_errors,
            traffic,
            throttle,
            // Empty between requests.
            chain: _,
        } = self;
        BlockState {
            sectors: *sectors,
            read_only: *read_only,
            volatile: *volatile,
            id: id.clone(),
            acked_features: *acked_features,
            throttle: throttle.save(),
            traffic: *traffic,
            host_errors: *host_errors,
        }
    }
}
