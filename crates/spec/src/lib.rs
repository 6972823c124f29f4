//! The specification of a sandbox: files and flags are combined into it, and the operator's limits are
//! applied to it.
//!
//! Apart from reading files this crate has no effects: it starts, writes and changes nothing.
//!
//! * [`SandboxSpec`] and [`CommandSpec`]: the specifications and their validation; [`Size`], [`Seconds`] and
//!   [`CpuQuota`] parse quantities.
//! * [`config`]: layers of configuration.
//! * [`operator`]: the operator's floor and ceilings.
//! * [`image`]: what the name of an image means, and which images an operator allows.
//! * [`name`]: names and ids of sandboxes.
//! * [`paths`]: the folders for files.
//! * [`host`]: the machine's resources, against which a specification is validated.

pub mod config;
pub mod host;
pub mod image;
pub mod name;
pub mod operator;
pub mod paths;
mod sandbox;

pub use sandbox::{
    Choice, Chosen, CommandSpec, CpuQuota, DiskLimits, Engine, MAX_CONNECTIONS, MAX_DISK, MAX_ENVIRONMENT,
    MAX_LABELS, MAX_LOG, MAX_PORTS, MAX_PROCESSES, MIN_BANDWIDTH, MIN_DISK, MIN_FLUSHES, MIN_LOG, MIN_MEMORY,
    SandboxSpec, Seconds, Security, Size, SpecError, label, variable,
};
