//! Sandboxes as every front end uses them, persistent and ephemeral.
//!
//! * [`store`]: the records of persistent sandboxes.
//! * [`Manager`]: creates, starts, enters, finds and removes them.
//! * [`monitor`]: the process that supervises each running sandbox.
//! * [`stats`]: resource usage.
//! * [`pool`]: reuse of managers and connections.
//! * [`ephemeral`]: sandboxes for one command or one cell.
//! * [`reserve`]: the operator's limit on the number of sandboxes.

pub mod ephemeral;
mod manager;
pub mod monitor;
pub mod pool;
mod reserve;
pub mod stats;
pub mod store;

pub use manager::{
    Adopted, ChangedPolicy, CopyOptions, ExecRequest, ImageError, InspectedImage, LayerDigests, ListedImage,
    Manager, ManagerError, NewRepl, NewSandbox, PreparedExec, Repl, ReplOutcome, ReplStatus, Sandboxed,
    Status, collect_ended,
};
pub use reserve::{ReserveError, reserve};

/// The CPU time of this thread, which does not depend on the load of the machine.
#[cfg(test)]
fn processor_time() -> std::time::Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    std::time::Duration::new(used.tv_sec.try_into().unwrap(), used.tv_nsec.try_into().unwrap())
}
