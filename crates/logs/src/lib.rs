//! Bounded log files: ring buffers that a keeper writes through an inherited descriptor, and that any process
//! can read.
//!
//! A ring is a header and a data area of fixed size. The writer only uses `pread` and `pwrite`, so it works
//! under a minimal seccomp filter, and the file never grows. Old records are overwritten by new ones.
//! [`mod@format`] explains why a writer that is killed or just writing does not confuse a reader.
//!
//! This writer respects the bound. A compromised keeper can use its descriptor in any way: `RLIMIT_FSIZE`
//! limits the file in that case, and [`Reader`] is written for arbitrary content.
#![forbid(unsafe_code)]

mod create;
pub mod format;
mod reader;
mod ring;

pub use create::{CreateError, create};
pub use format::{HEADER, MAX_CAPACITY, MAX_CHUNK, MIN_CAPACITY};
pub use reader::{LogRecord, Reader, ReaderError};
pub use ring::{Ring, RingError};

/// Standard output of a job.
pub const STDOUT: u8 = 1;
/// Standard error of a job.
pub const STDERR: u8 = 2;
/// The guest kernel's console.
pub const CONSOLE: u8 = 3;

/// The metadata of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta {
    /// The time of arrival in nanoseconds since 1970.
    pub unix_ns: u64,
    /// The number of the job that wrote it.
    pub source: u32,
    /// The output: [`STDOUT`], [`STDERR`] or [`CONSOLE`].
    pub channel: u8,
}
