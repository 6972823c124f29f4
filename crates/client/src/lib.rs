//! The client side of a keeper: connections, streams, windows, deadlines and interrupts, for every caller in the same way.
//!
//! * [`connection`]: frames to and from a keeper.
//! * [`stream`]: one piece of work on it.
//! * [`command`]: requests for commands, and how commands end.
//! * [`attach`]: one command with the caller's own standard input, output and error.
//! * [`transfer`]: files into a sandbox and out of it.
//! * [`interpreter`]: code in the guest's interpreters.
//! * [`wait`]: waiting for descriptors.

pub mod attach;
pub mod command;
pub mod connection;
pub mod interpreter;
pub mod stream;
pub mod transfer;
pub mod wait;

/// What this thread has used, which does not depend on what else the machine does.
#[cfg(test)]
fn processor_time() -> std::time::Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    std::time::Duration::new(used.tv_sec.try_into().unwrap(), used.tv_nsec.try_into().unwrap())
}
