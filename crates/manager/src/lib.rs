//! What every face of the product does with sandboxes: those that outlive their first client, and those that do not.
//!
//! * [`store`]: what is known about them.
//! * [`Manager`]: the verbs: making them, entering them, finding and removing them.
//! * [`monitor`]: the process that watches each.
//! * [`stats`]: what they use.
//! * [`pool`]: managers and connections that are used again.
//! * [`ephemeral`]: sandboxes around one piece of work.
//! * [`reserve`]: how these count beside the others.

pub mod ephemeral;
mod manager;
pub mod monitor;
pub mod pool;
mod reserve;
pub mod stats;
pub mod store;

pub use manager::{
    Adopted, Begun, BegunCell, ChangedPolicy, CopyOptions, ExecRequest, Manager, ManagerError, NewRepl,
    NewSandbox, Repl, ReplOutcome, ReplStatus, Sandboxed, Status, collect_ended,
};
pub use reserve::{ReserveError, reserve};

/// What this thread has used, which does not depend on what else the machine does.
#[cfg(test)]
fn processor_time() -> std::time::Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    std::time::Duration::new(used.tv_sec.try_into().unwrap(), used.tv_nsec.try_into().unwrap())
}
