//! The block device: a file of fixed size as a disk, or several files that are read only.
//!
//! Data moves between the file and guest memory by one vectored system call per request, without passing through a
//! buffer of ours. The disk's size and whether it may be written are decided by the host when the device is made, and
//! checked here for every request: what the guest believes about them does not matter.

mod backing;
mod device;
mod request;
mod state;
#[cfg(test)]
mod tests;
mod throttle;

use std::io;

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use backing::{Backing, DiskPart};
pub use device::{Block, Traffic};
pub use state::{BlockState, ThrottleState};

/// Requests address the disk in units of this many bytes.
pub const SECTOR: u64 = 512;

/// The most files of a disk: an image has at most 128 layers, and an index.
pub const MAX_PARTS: usize = 129;

/// Where a part may begin on its disk, so that no two share a page of the guest's.
pub const PART_ALIGNMENT: u64 = 4096;

/// The most buffers of data in one request.
pub const MAX_SEGMENTS: u32 = 128;

/// The longest buffer that the driver is asked to use. With [`MAX_SEGMENTS`] it bounds the time that one request can
/// keep the device busy.
pub const MAX_SEGMENT_BYTES: u32 = 128 << 10;

/// The most data in one request.
pub const MAX_REQUEST_BYTES: u32 = MAX_SEGMENTS * MAX_SEGMENT_BYTES;

/// The most ranges in one discard or write-zeroes request.
pub const MAX_RANGES: u32 = 16;

/// The longest range to discard or zero: 2 GiB.
pub const MAX_RANGE_SECTORS: u32 = 1 << 22;

/// The length of the disk's name, as GET_ID returns it.
pub const ID_BYTES: usize = 20;

/// What is wrong with a block device or with a request to it that cannot be answered.
#[derive(Debug, Error)]
pub enum BlockError {
    /// The backing file cannot be examined.
    #[error("Cannot examine the disk's file")]
    File(#[source] io::Error),
    /// The file's size is not a whole number of sectors.
    #[error("The disk's file has {0} bytes, which is not a whole number of sectors")]
    Size(u64),
    /// There are too many files.
    #[error("The disk has {0} parts; the most is {MAX_PARTS}")]
    Parts(usize),
    /// A part is where it cannot be.
    #[error("The disk's part at {offset} overlaps another one, is not aligned, or ends too late")]
    Part {
        /// Where it begins.
        offset: u64,
    },
    /// A writable disk was asked for on a file that cannot be written.
    #[error("The disk's file is not open for writing")]
    NotWritable,
    /// The name is longer than virtio allows.
    #[error("The disk's name {0:?} is longer than {ID_BYTES} bytes")]
    LongId(String),
    /// The state does not describe this disk.
    #[error("The saved state is of a disk of {saved} sectors, this one has {actual}")]
    OtherDisk {
        /// Sectors in the saved state.
        saved: u64,
        /// Sectors of the file.
        actual: u64,
    },
    /// The chain is too short for a request's header.
    #[error("The guest's request has {0} bytes, less than a header")]
    NoHeader(u32),
    /// The chain has no byte to write the status to.
    #[error("The guest left no byte for the request's status")]
    NoStatus,
}

/// How many seconds' worth of each limit a disk that was idle may use at once.
pub const BURST_SECONDS: u64 = 4;

/// How fast a disk may be used, as rates per second; without one there is no limit. What is too much waits in the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockLimits {
    /// Bytes written. Ranges that are discarded or zeroed count as data, by what they cost the host.
    pub write_bandwidth: Option<u64>,
    /// Bytes that may be read per second.
    pub read_bandwidth: Option<u64>,
    /// Flushes that reach stable storage; those of a disk that does not outlive its sandbox cost nothing.
    pub flushes: Option<u64>,
}

/// What the host decides about a disk.
#[derive(Clone, Debug, Default)]
pub struct BlockConfig {
    /// Whether writes are refused.
    pub read_only: bool,
    /// The disk does not outlive the sandbox, so flushing it to stable storage would be wasted.
    pub volatile: bool,
    /// A name of at most [`ID_BYTES`] bytes, which the guest finds under `/sys/block/*/serial`.
    pub id: String,
    /// How fast it may be used.
    pub limits: BlockLimits,
}
