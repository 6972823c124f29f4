//! Confinement of the host processes of a sandbox: namespaces, an empty root, no privileges, limits, a system call filter.
//!
//! Each process kind closes its jail before the guest's first instruction. Resources arrive as open descriptors, so
//! that nothing has to be looked up afterwards.
#![deny(missing_docs)]

#[cfg(all(feature = "log-filter", not(debug_assertions)))]
compile_error!(
    "log-filter is for developers' builds: with it the filters of a release would let everything pass"
);

pub mod cgroup;
pub mod filter;
pub mod limits;
mod newborn;
pub mod privileges;
pub mod root;
pub mod spawn;
mod sys;
#[cfg(test)]
mod tests;

pub use cgroup::{Cgroup, CgroupError, CgroupLimits, CgroupUsage, Enforcement};
pub use filter::{Filter, FilterError};
pub use limits::{Limit, LimitsError};
pub use privileges::PrivilegesError;
pub use root::RootError;
pub use spawn::{Identity, SpawnError, Spawned};
