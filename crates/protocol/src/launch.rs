//! The configuration of a keeper. The resources that come with it are in [`crate::descriptors`].

use serde::{Deserialize, Serialize};

/// How a guest of the uml engine is kept apart from its own kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UmlMode {
    /// Fast: guest processes are stopped by a seccomp trap. Users inside the guest are no boundary against each other.
    #[default]
    Seccomp,
    /// Slower: guest processes are traced, so that users inside the guest are kept apart.
    Ptrace,
}

/// What kind of guest the keeper runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Engine {
    /// A jailed User Mode Linux kernel.
    Uml {
        /// The host processor that it is pinned to.
        cpu: u32,
        /// How guest processes are contained.
        mode: UmlMode,
    },
    /// A hardware virtual machine.
    Kvm {
        /// How many processors it has.
        cpus: u32,
    },
}

/// How fast a sandbox may use its disks, as rates per second. What is too much waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskLimits {
    /// Bytes written.
    pub write_bandwidth: u64,
    /// Bytes read, of each disk; as fast as it goes if absent.
    pub read_bandwidth: Option<u64>,
    /// Flushes to stable storage.
    pub flushes: u32,
}

/// The keeper's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// What the guest is.
    pub engine: Engine,
    /// Guest memory in bytes.
    pub memory: u64,
    /// How many processes the guest may consist of.
    pub processes: u64,
    /// Milliseconds that the guest has to get ready.
    pub ready_timeout_ms: u64,
    /// Whether a guest that is a process has a host user of its own, besides the keeper's: uid 1 of the keeper's namespace.
    pub guest_user: bool,
    /// The sandbox outlives its first client: its disk is worth keeping.
    pub persistent: bool,
    /// With `persistent`: the capacity of each of the two log rings, in bytes.
    pub log_capacity: u64,
    /// How fast the disks may be used.
    pub disk_limits: DiskLimits,
    /// Every command of this sandbox is restricted.
    pub restricted: Option<crate::Restriction>,
    /// It has a network card.
    pub network: bool,
}

impl Launch {
    /// The words by which the guest's PID 1 learns that it is restricted.
    pub fn words_of_restriction(&self) -> impl Iterator<Item = &'static str> {
        let words = self.restricted.map(|restriction| {
            ["restricted"].into_iter().chain(restriction.writable_root.then_some("writable-root"))
        });
        words.into_iter().flatten()
    }
}

/// Encodes a configuration.
pub fn encode(launch: &Launch) -> Result<Vec<u8>, crate::MessageError> {
    postcard::to_allocvec(launch).map_err(|_| crate::MessageError::Malformed)
}
