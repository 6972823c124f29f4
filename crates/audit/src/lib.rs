//! The audit log: an append-only, hash-chained record of what crossed the boundary, which anyone can verify.
//!
//! * [`event`]: the type that describes an event and its actor.
//! * [`line`](mod@line): an event as one line of JSON, with its hash and that of the line before.
//! * [`log`]: appending by many concurrent processes; rotation.
//! * [`verify`](mod@verify): checks that every line is present, in order and unchanged.
//! * [`follow`]: reading and waiting for more.
//!
//! # What the chain guarantees
//!
//! The log is a folder: `audit.jsonl`, older parts as `audit-<first number>.jsonl`, and `head.json` with the
//! number and hash of the newest line. Changing, removing, inserting or reordering lines breaks the chain.
//! Removing the newest lines leaves an intact chain that ends before the head.
//!
//! Nothing here is keyed. A process that can write to the folder can also forge a log with a matching chain
//! and head, or remove the folder. Guests, keepers and guest kernels have no access to it. To detect
//! manipulation by the folder's owner, store the number and hash that verification prints elsewhere, and pass
//! them to [`verify::verify`] as an [`Anchor`] later: no log with another past has them.
//!
//! # Power failures
//!
//! Lines reach the kernel before `append` returns, and are flushed to the disk every ten seconds while more
//! are written. So a killed process loses nothing, but a power failure may lose the last lines. The head
//! names the boot in which it was written and the last line that was flushed: after a restart, missing lines
//! after that one count as lost in a power failure. Verification counts them and passes. Missing lines that
//! were flushed, or that are missing without a restart, were removed. So removing lines after the last flush
//! and restarting the machine looks like a power failure, except with an [`Anchor`].
//!
//! # Stopped writers
//!
//! Writers take turns with a lock. The others do not wait for a writer that is stopped while it holds the
//! lock: they fail with an error that names it, and proceed as on a full disk. Events that have already
//! happened are queued by their owner and recorded later.
//!
//! # Full disks
//!
//! The log reserves space beyond its end. An operation is refused when the reserve cannot be maintained. What
//! has already happened, such as the end of a sandbox, is recorded in the reserve ([`Log::append_last`]).
#![forbid(unsafe_code)]

mod chain;
pub mod event;
mod files;
pub mod follow;
mod head;
mod holder;
pub mod line;
pub mod log;
#[cfg(test)]
mod testing;
pub mod verify;

pub use event::{Actor, Argv, Event, RecoveredFrom, What};
pub use follow::{FollowError, Follower, LogEntry, LogFilter};
pub use line::LineError;
pub use log::{Log, LogError};
pub use verify::{Anchor, Fault, Report, VerifyError};
