//! A sandbox from the host's side: what is asked for, what it is made of, how it is started and spoken to.
//!
//! * [`spec`]: the one description of a sandbox, for every face of the product.
//! * [`config`] and [`policy`]: files and flags that become it, and what the operator allows.
//! * [`store`]: what is known about sandboxes that outlive their first client.
//! * [`manager`] and [`monitor`]: those sandboxes: making them, entering them, and the process that watches each.
//! * [`ephemeral`]: those that do not outlive their command, as far as they are counted.
//! * [`launch`]: from a description to a running keeper.
//! * [`connection`]: speaking to it.
//! * [`interpreter`]: code in the guest's interpreters.
//! * [`attach`]: one command with the caller's own standard input, output and error.
//! * [`doctor`]: what this machine offers, and what to do about what it does not.

pub mod addresses;
pub mod assets;
pub mod attach;
pub mod command;
pub mod config;
pub mod connection;
mod counts;
pub mod description;
pub mod disk;
pub mod doctor;
pub mod ending;
pub mod engine;
pub mod ephemeral;
pub mod folder;
pub mod freeze;
pub mod gateway;
pub mod host;
mod identity;
pub mod interpreter;
pub mod kvm_probe;
pub mod launch;
pub mod ledger;
pub mod manager;
pub mod monitor;
pub mod name;
pub mod net_events;
pub mod paths;
pub mod policy;
pub mod processes;
pub mod recorder;
mod resource_group;
pub mod restarts;
pub mod room;
pub mod slot;
pub mod spec;
pub mod spool;
pub mod stats;
pub mod store;
mod sys;
pub mod transfer;

pub use assets::Assets;
pub use attach::{Attach, AttachError, Outcome};
pub use config::{ConfigError, Layers};
pub use connection::{Connection, ConnectionError};
pub use launch::{LaunchError, Sandbox};
pub use manager::{Manager, ManagerError, NewSandbox, Sandboxed, Status};
pub use name::NameError;
pub use paths::Paths;
pub use policy::{Policy, PolicyError};
pub use spec::{CommandSpec, CpuQuota, Engine, SandboxSpec, Seconds, Security, Size, SpecError};
pub use store::{Store, StoreError};

use std::error::Error;
use std::path::PathBuf;

/// An error with its sources, in one line.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// Where the audit log is.
pub fn audit_folder(paths: &Paths) -> PathBuf {
    paths.state.join("audit")
}

/// The user's audit log, rotated as the operator says.
pub fn audit_log(paths: &Paths, policy: &Policy) -> Result<bathy_audit::Log, bathy_audit::LogError> {
    let log =
        bathy_audit::Log::open(&audit_folder(paths))?.keep(policy.audit.keep.map(|files| files as usize));
    Ok(match policy.audit.rotate_size {
        Some(size) => log.rotate_at(size.0),
        None => log,
    })
}

/// What this thread has used, which does not depend on what else the machine does.
#[cfg(test)]
fn processor_time() -> std::time::Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    std::time::Duration::new(used.tv_sec.try_into().unwrap(), used.tv_nsec.try_into().unwrap())
}
