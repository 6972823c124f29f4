//! What crossed the boundary, in an append-only, hash-chained log that anybody can verify.
//!
//! * [`event`]: the one type that describes what happened and who asked for it.
//! * [`line`](mod@line): an event as one line of JSON that carries the hash of the line before and its own.
//! * [`log`]: appending, by many processes at once; rotation.
//! * [`verify`](mod@verify): whether every line is there, in order, as it was written.
//! * [`follow`]: reading, and waiting for more.
//!
//! # What the chain is worth
//!
//! The log is a folder: `audit.jsonl`, older parts as `audit-<first number>.jsonl`, and `head.json`, which has the number and
//! hash of the newest line. Changing, removing, inserting or reordering lines breaks the chain. Removing the newest lines
//! leaves a chain that is whole but ends before what the head says.
//!
//! Nothing here is keyed. Whoever can write to the folder can also write a log that never was, with a chain and a head that
//! fit, or remove the folder. Guests, keepers and guest kernels cannot: they have no access to it. To notice what the
//! folder's owner does to it, keep the number and hash that verification prints somewhere else, and give them to
//! [`verify::verify`] as an [`Anchor`] later: no log with another past has them.
//!
//! # What a loss of power costs
//!
//! Lines reach the kernel before `append` returns, and the disk is made to take them once in ten seconds while more are
//! written: what is killed loses nothing, a machine that loses power may lose its last lines. The head names the boot of the
//! machine in which it was written and the last line that was synced: after a restart, lines that are missing behind that one are
//! taken for lost with the power. Verification counts them and passes. Lines that were synced, or that are missing without a
//! restart, were removed. So who removes the lines behind the last sync and restarts the machine is not told from a loss of power;
//! an [`Anchor`] tells.
//!
//! # A writer that stands still
//!
//! Writers take turns by a lock. One that is stopped while it holds the lock is not waited for: the others fail, name it, and do
//! as they do on a full disk. What has happened meanwhile is recorded later by those who keep it.
//!
//! # A full disk
//!
//! The log holds space in reserve beyond its end. What is about to happen is refused when the reserve cannot be kept; what has
//! happened already, such as the end of a sandbox, is recorded in it ([`Log::append_last`]).
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
pub use follow::{Entry, Filter, FollowError, Follower};
pub use line::LineError;
pub use log::{Log, LogError};
pub use verify::{Anchor, Fault, Report, VerifyError};
