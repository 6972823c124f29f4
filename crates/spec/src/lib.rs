//! What is asked for: the one description of a sandbox, the files and flags that become it, and what the operator allows.
//!
//! Pure but for reading files: nothing here starts, writes or changes anything.
//!
//! * [`SandboxSpec`] and [`CommandSpec`]: the descriptions, with every check of them; [`Size`], [`Seconds`] and [`CpuQuota`]
//!   parse amounts as people write them.
//! * [`config`]: layers of configuration that become a description.
//! * [`operator`]: the operator's floor and ceilings.
//! * [`name`]: names and ids of sandboxes.
//! * [`paths`]: where things are kept.
//! * [`host`]: what the machine has, as far as a description is checked against it.

pub mod config;
pub mod host;
pub mod name;
pub mod operator;
pub mod paths;
mod sandbox;

pub use sandbox::{
    Choice, Chosen, CommandSpec, CpuQuota, DiskLimits, Engine, MAX_CONNECTIONS, MAX_DISK, MAX_ENVIRONMENT,
    MAX_LABELS, MAX_LOG, MAX_PORTS, MAX_PROCESSES, MIN_BANDWIDTH, MIN_DISK, MIN_FLUSHES, MIN_LOG, MIN_MEMORY,
    SandboxSpec, Seconds, Security, Size, SpecError, label, variable,
};
