//! The configuration of a keeper. The descriptors that come with it are in [`crate::descriptors`].

use serde::{Deserialize, Serialize};

/// How the guest processes of a uml guest are isolated from its kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UmlMode {
    /// Fast: guest processes are stopped by a seccomp trap. Users inside the guest are not isolated from each
    /// other.
    #[default]
    Seccomp,
    /// Slower: guest processes are traced, so that users inside the guest are isolated from each other.
    Ptrace,
}

/// The engine of a guest, with its settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Engine {
    /// A jailed User Mode Linux kernel.
    Uml {
        /// The host processor that it is pinned to.
        cpu: u32,
        /// How guest processes are isolated.
        mode: UmlMode,
    },
    /// A hardware virtual machine with KVM.
    Kvm {
        /// The number of virtual processors.
        cpus: u32,
    },
}

/// Rate limits on a sandbox's disks, per second. Requests beyond them are delayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskLimits {
    /// Bytes written per second.
    pub write_bandwidth: u64,
    /// Bytes read per second from each disk; unlimited if absent.
    pub read_bandwidth: Option<u64>,
    /// Flushes to stable storage per second.
    pub flushes: u32,
}

/// The configuration of a keeper, read at its start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// The engine of the guest.
    pub engine: Engine,
    /// Guest memory in bytes.
    pub memory: u64,
    /// The maximum number of guest processes.
    pub processes: u64,
    /// Milliseconds until the guest has to be ready.
    pub ready_timeout_ms: u64,
    /// Whether a uml guest has its own host user besides the keeper's: uid 1 of the keeper's namespace.
    pub guest_user: bool,
    /// Whether the sandbox is persistent: then its disk has to survive.
    pub persistent: bool,
    /// The capacity of each of the two log rings in bytes, with `persistent`.
    pub log_capacity: u64,
    /// Rate limits on the disks.
    pub disk_limits: DiskLimits,
    /// The restriction of every command in this sandbox.
    pub restricted: Option<crate::Restriction>,
    /// Whether it has a network interface.
    pub network: bool,
    /// Where on the root image's disk each of its files begins, in ascending order.
    pub image: Vec<u64>,
}

impl Launch {
    /// The kernel arguments by which the guest's PID 1 learns its restriction.
    pub fn restriction_arguments(&self) -> impl Iterator<Item = &'static str> {
        let arguments = self.restricted.map(|restriction| {
            ["restricted"].into_iter().chain(restriction.writable_root.then_some("writable-root"))
        });
        arguments.into_iter().flatten()
    }
}

/// Encodes a configuration as bytes.
pub fn encode(launch: &Launch) -> Result<Vec<u8>, crate::MessageError> {
    postcard::to_allocvec(launch).map_err(|_| crate::MessageError::Malformed)
}
