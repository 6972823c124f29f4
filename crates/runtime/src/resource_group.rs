//! A sandbox's control group: what it has to hold, which is the guest and what it takes to run it, and the processes in it.

use std::io;
use std::path::Path;

use bathy_jail::cgroup::{self, Cgroup, CgroupError, CgroupLimits, Entrance, Priority};
use bathy_spec::{Chosen, CpuQuota, SandboxSpec};

/// Host memory beyond the guest's: for the processes as such, and for each of them.
const OVERHEAD: u64 = 96 << 20;
const OVERHEAD_PER_PROCESS: u64 = 128 << 10;
/// Where no group limits memory: what the guest's processes may have of the host's memory beyond the guest's,
/// as such and for each that the guest may have. A share of the guest's memory is added, for tables of all of it.
const WATCHED: u64 = 64 << 20;
const WATCHED_PER_PROCESS: u64 = 256 << 10;
/// The same for the gateway: the program, names and the long buffers of the first connections; and for each
/// connection the short buffers of later ones, and what is buffered until the destination is known.
const GATEWAY: u64 = 96 << 20;
const GATEWAY_PER_CONNECTION: u64 = 64 << 10;
/// The host's page tables of a virtual machine: at most 8 bytes for each page, twice where the guest's tables
/// are shadowed, and the same again for the keeper's own mapping.
const TABLES: u64 = 4096 / 32;
/// Host processes besides those of the guest: the keeper, and the guest kernel's helpers or the keeper's own
/// threads.
const HELPERS: u64 = 16;
/// The name prefix of the groups of ephemeral sandboxes.
const EPHEMERAL: &str = "run-";
/// The magic number of tmpfs in statfs(2).
const TMPFS: i64 = 0x0102_1994;

/// Whether files in this folder are charged as memory to the process that writes them.
fn is_in_memory(folder: &Path) -> bool {
    rustix::fs::statfs(folder).is_ok_and(|found| found.f_type == TMPFS)
}

/// The limits of a sandbox's group. With kvm, memory and processors are the keeper's own, and guest processes
/// are not host processes.
///
/// A user who stores the sandbox's files in memory has accepted that cost: the disk, and the guest's memory
/// once more while it is paused. Otherwise a guest that fills its disk would be killed for that.
fn of(spec: &SandboxSpec, engine: Chosen, files_in_memory: bool) -> CgroupLimits {
    let (memory, tasks) = match engine {
        Chosen::Kvm => (spec.memory.0 / TABLES, u64::from(spec.cpus)),
        Chosen::Uml => (u64::from(spec.processes) * OVERHEAD_PER_PROCESS, spec.processes.into()),
    };
    let files = if files_in_memory { spec.disk.0 + spec.memory.0 } else { 0 };
    let (gateway, gateways) = if spec.network.has_network() {
        (GATEWAY + u64::from(spec.network_limits.connections) * GATEWAY_PER_CONNECTION, 1)
    } else {
        (0, 0)
    };
    CgroupLimits {
        cpu_quota: spec.cpu_quota.map(CpuQuota::as_cpus),
        cpu_weight: true,
        memory: Some(spec.memory.0 + OVERHEAD + memory + files + gateway),
        pids: Some(tasks + HELPERS + gateways),
    }
}

/// How much memory beyond the guest's its processes may have where no group limits it. A virtual machine has
/// none.
fn watched(spec: &SandboxSpec, engine: Chosen) -> Option<u64> {
    let processes = u64::from(spec.processes) * WATCHED_PER_PROCESS;
    (engine == Chosen::Uml).then(|| WATCHED.saturating_add(processes).saturating_add(spec.memory.0 / TABLES))
}

/// The control group, and the scheduling priority that replaces it where the host offers no group.
#[derive(Debug)]
pub struct ResourceGroup {
    cgroup: Cgroup,
    priority: Priority,
    /// The limit of memory beyond the guest's for a supervisor to hold.
    watched: Option<u64>,
}

impl ResourceGroup {
    /// The group of the persistent sandbox `id` with this folder. A group that a killed monitor left behind
    /// is removed first.
    ///
    /// # Errors
    /// Processes of the same sandbox are still running.
    pub fn persistent(
        id: &str,
        spec: &SandboxSpec,
        engine: Chosen,
        folder: &Path,
    ) -> Result<Self, CgroupError> {
        let _ = Cgroup::remove_stale(id);
        Self::create(id, spec, engine, folder)
    }

    /// The group of an ephemeral sandbox with a disk in the state folder `state`.
    ///
    /// # Errors
    /// The id is invalid.
    pub fn ephemeral(
        id: &str,
        spec: &SandboxSpec,
        engine: Chosen,
        state: &Path,
    ) -> Result<Self, CgroupError> {
        Self::create(&format!("{EPHEMERAL}{id}"), spec, engine, state)
    }

    fn create(id: &str, spec: &SandboxSpec, engine: Chosen, folder: &Path) -> Result<Self, CgroupError> {
        let cgroup = Cgroup::create(id, &of(spec, engine, is_in_memory(folder)))?;
        let priority = Priority::for_quota(&cgroup, spec.cpu_quota.map(CpuQuota::as_cpus));
        let watched = watched(spec, engine).filter(|_| !cgroup.limits_memory());
        Ok(Self { cgroup, priority, watched })
    }

    pub fn cgroup(&self) -> &Cgroup {
        &self.cgroup
    }

    /// Kills the guest's processes at once, which is quicker than one after the other behind their keeper.
    pub fn kill_guest(&self) {
        self.cgroup.kill_guest();
    }

    /// How much host memory beyond the guest's its processes may have, if only its supervisor can hold them to
    /// that: with a memory cgroup and with kvm there is nothing to watch.
    pub(crate) fn watched_memory(&self) -> Option<u64> {
        self.watched
    }

    /// The mechanism that enforces the CPU quota.
    pub fn describe_cpu(&self) -> String {
        self.priority.describe(&self.cgroup)
    }

    /// The mechanism that gives all processes of a guest together the scheduler weight of one.
    pub fn describe_weight(&self) -> String {
        cgroup::describe_weight(&self.cgroup)
    }

    /// Where the keeper starts: under the limits, with the guest.
    ///
    /// # Errors
    /// The group was removed.
    pub(crate) fn keeper_entrance(&self) -> Result<Entrance, CgroupError> {
        self.cgroup.guest_entrance()
    }

    /// Where the gateway starts: under the limits, but not frozen with the guest, so that new policies take
    /// effect during a pause.
    ///
    /// # Errors
    /// The group was removed.
    pub(crate) fn gateway_entrance(&self) -> io::Result<Entrance> {
        self.cgroup.host_side_entrance().map_err(io::Error::other)
    }

    /// Sets the scheduling priority that replaces a group.
    pub(crate) fn set_priority(&self, pid: u32) -> io::Result<()> {
        self.priority.apply(pid)
    }

    /// Moves the keeper out of the guest's freezer and weight, once the guest has inherited its place.
    ///
    /// With kvm they stay together, because virtual processors are threads of the keeper.
    pub(crate) fn part_keeper(&self, pid: u32) {
        // If the keeper cannot be moved, it serves its guest all the same.
        let _ = self.cgroup.leave_guest(pid);
    }
}

impl Drop for ResourceGroup {
    /// Removes the group once its processes have ended, and those of ephemeral sandboxes whose command was
    /// killed.
    fn drop(&mut self) {
        // A group that stays is empty and is removed by a later sandbox.
        let _ = self.cgroup.remove();
        Cgroup::remove_abandoned(EPHEMERAL);
    }
}

#[cfg(test)]
mod tests {
    use bathy_policy::{NetworkPolicy, Preset};
    use bathy_spec::Size;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_virtual_machine_has_its_memory_and_a_thread_for_each_processor() {
        let spec = SandboxSpec { memory: Size(1024 * MIB), cpus: 4, ..SandboxSpec::default() };
        let limits = of(&spec, Chosen::Kvm, false);
        assert_eq!((limits.memory, limits.pids), (Some((1024 + 96 + 8 + 160) * MIB), Some(21)));
        let more = of(&SandboxSpec { processes: 30_000, ..spec }, Chosen::Kvm, false);
        assert_eq!((more.memory, more.pids), (limits.memory, limits.pids), "its processes are its own");
    }

    #[test]
    fn a_guest_of_processes_has_memory_for_each_of_them() {
        let spec = SandboxSpec { memory: Size(512 * MIB), processes: 1024, ..SandboxSpec::default() };
        let limits = of(&spec, Chosen::Uml, false);
        assert_eq!((limits.memory, limits.pids), (Some((512 + 96 + 128 + 160) * MIB), Some(1041)));
    }

    #[test]
    fn a_gateway_has_memory_for_each_connection_where_there_is_one() {
        let of = |spec: &SandboxSpec| {
            let limits = of(spec, Chosen::Uml, false);
            (limits.memory.unwrap_or_default(), limits.pids.unwrap_or_default())
        };
        let none = NetworkPolicy { preset: Preset::None, rules: Vec::new() };
        let without = of(&SandboxSpec { network: none, ..SandboxSpec::default() });
        let mut spec = SandboxSpec::default();
        spec.network_limits.connections = 16;
        assert_eq!(of(&spec), (without.0 + 97 * MIB, without.1 + 1));
        spec.network_limits.connections = 16_384;
        assert_eq!(of(&spec), (without.0 + (96 + 1024) * MIB, without.1 + 1));
    }

    #[test]
    fn files_that_are_memory_are_counted() {
        assert!(is_in_memory(Path::new("/dev/shm")));
        assert!(!is_in_memory(Path::new("/proc")));
        let spec = SandboxSpec { memory: Size(512 * MIB), disk: Size(2048 * MIB), ..SandboxSpec::default() };
        for engine in Chosen::ALL {
            let [on_disk, in_memory] =
                [false, true].map(|files| of(&spec, engine, files).memory.unwrap_or_default());
            assert_eq!(in_memory - on_disk, (2048 + 512) * MIB);
        }
    }

    #[test]
    fn memory_that_no_group_limits_is_watched() {
        let spec = SandboxSpec { memory: Size(512 * MIB), processes: 1024, ..SandboxSpec::default() };
        assert_eq!(watched(&spec, Chosen::Uml), Some((64 + 256 + 4) * MIB));
        assert_eq!(watched(&spec, Chosen::Kvm), None);
    }

    #[test]
    fn a_quota_holds_for_both() {
        let quota = CpuQuota::from_thousandths(1500);
        let spec = SandboxSpec { cpu_quota: Some(quota), cpus: 2, ..SandboxSpec::default() };
        for engine in Chosen::ALL {
            let limits = of(&spec, engine, false);
            assert_eq!(limits.cpu_quota, Some(1.5));
        }
    }
}
