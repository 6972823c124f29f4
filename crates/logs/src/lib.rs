//! Bounded log files: rings that a keeper writes through an inherited descriptor, and anybody reads.
//!
//! A ring is a header and a data area of fixed size. The writer only ever calls `pread` and `pwrite`, so it works behind
//! a filter that has nothing else, and whatever it is given to write, the file stays as large as it was made. Old records
//! make room for new ones. See [`mod@format`] for why a writer that is killed, or one that is just writing, never confuses a
//! reader.
//!
//! The bound holds for this writer. A keeper that was taken over can use its descriptor as it likes: its limit of
//! file sizes (`RLIMIT_FSIZE`) is what bounds that, and [`Reader`] is written for whatever it leaves in the file.
#![forbid(unsafe_code)]

mod create;
pub mod format;
mod reader;
mod ring;

pub use create::{CreateError, create};
pub use format::{HEADER, MAX_CAPACITY, MAX_CHUNK, MIN_CAPACITY};
pub use reader::{Reader, ReaderError, Record};
pub use ring::{Ring, RingError};

/// Standard output of a job.
pub const STDOUT: u8 = 1;
/// Standard error of a job.
pub const STDERR: u8 = 2;
/// The guest kernel's console.
pub const CONSOLE: u8 = 3;

/// What a record says about its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta {
    /// When they came, in nanoseconds since 1970.
    pub unix_ns: u64,
    /// Whose they are: the number of a job.
    pub source: u32,
    /// Which of its outputs: [`STDOUT`], [`STDERR`] or [`CONSOLE`].
    pub channel: u8,
}
