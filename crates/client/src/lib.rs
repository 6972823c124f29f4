//! The client side of a keeper: connections, streams, windows, deadlines and interrupts.
//!
//! * [`connection`]: frames to and from a keeper.
//! * [`stream`]: one piece of work on a connection.
//! * [`command`]: requests for commands, and how commands end.
//! * [`attach`]: one command with local standard input, output and error.
//! * [`transfer`]: files into a sandbox and out of it.
//! * [`interpreter`]: code in the guest's interpreters.
//! * [`wait`]: polling descriptors with deadlines.

pub mod attach;
pub mod command;
pub mod connection;
pub mod interpreter;
pub mod stream;
pub mod transfer;
pub mod wait;

/// The CPU time of this thread, which does not depend on the load of the machine.
#[cfg(test)]
fn processor_time() -> std::time::Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    std::time::Duration::new(used.tv_sec.try_into().unwrap(), used.tv_nsec.try_into().unwrap())
}
