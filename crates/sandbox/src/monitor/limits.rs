//! What a sandbox's control group has to hold: the guest, and what it takes to run it.

use bathy_jail::cgroup::CgroupLimits;

use crate::engine::Chosen;
use crate::spec::{CpuQuota, SandboxSpec};

/// Memory of the host that a sandbox may have besides its guest's: for its processes as such, and for each of them.
const OVERHEAD: u64 = 96 << 20;
const OVERHEAD_PER_PROCESS: u64 = 128 << 10;
/// The host's tables of a virtual machine's memory: at most 8 bytes for each page, twice where pages of the guest's tables
/// are shadowed, and the same again for the keeper's own view of it.
const TABLES: u64 = 4096 / 32;
/// Host processes besides those of the guest: the keeper, and the guest kernel's helpers or the keeper's own threads.
const HELPERS: u64 = 16;

/// The limits. A virtual machine's memory and processors are its keeper's own; its processes are no concern of the host's.
pub fn of(spec: &SandboxSpec, engine: Chosen) -> CgroupLimits {
    let (memory, tasks) = match engine {
        Chosen::Kvm => (spec.memory.0 / TABLES, u64::from(spec.cpus)),
        Chosen::Uml => (u64::from(spec.processes) * OVERHEAD_PER_PROCESS, spec.processes.into()),
    };
    CgroupLimits {
        cpu_quota: spec.cpu_quota.map(CpuQuota::as_cpus),
        memory: Some(spec.memory.0 + OVERHEAD + memory),
        pids: Some(tasks + HELPERS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Size;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_virtual_machine_has_its_memory_and_a_thread_for_each_processor() {
        let spec = SandboxSpec { memory: Size(1024 * MIB), cpus: 4, ..SandboxSpec::default() };
        let limits = of(&spec, Chosen::Kvm);
        assert_eq!((limits.memory, limits.pids), (Some((1024 + 96 + 8) * MIB), Some(20)));
        let more = of(&SandboxSpec { processes: 30_000, ..spec }, Chosen::Kvm);
        assert_eq!((more.memory, more.pids), (limits.memory, limits.pids), "its processes are its own");
    }

    #[test]
    fn a_guest_of_processes_has_room_for_each_of_them() {
        let spec = SandboxSpec { memory: Size(512 * MIB), processes: 1024, ..SandboxSpec::default() };
        let limits = of(&spec, Chosen::Uml);
        assert_eq!((limits.memory, limits.pids), (Some((512 + 96 + 128) * MIB), Some(1040)));
    }

    #[test]
    fn a_quota_holds_for_both() {
        let quota = CpuQuota::from_thousandths(1500);
        let spec = SandboxSpec { cpu_quota: Some(quota), cpus: 2, ..SandboxSpec::default() };
        for engine in Chosen::ALL {
            assert_eq!(of(&spec, engine).cpu_quota, Some(1.5));
        }
    }
}
