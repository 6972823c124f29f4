//! A sandbox's resource usage and its limits.

use std::time::Duration;

use bathy_jail::{Cgroup, CgroupUsage};
use bathy_protocol::{Usage, unix_ns};
use bathy_runtime::processes::{HostProcesses, SandboxProcesses};
use bathy_spec::Chosen;
use serde::{Serialize, Serializer};

use crate::store::Record;

/// Resource usage of a sandbox at one moment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stats {
    /// CPU time of all its processes since it started, gateway included, in nanoseconds.
    pub cpu_ns: u64,
    /// Guest memory in use, in bytes.
    pub memory: u64,
    /// Guest memory in total, in bytes.
    pub memory_limit: u64,
    /// Host memory of all its processes, guest memory and gateway included, in bytes.
    pub host_memory: u64,
    /// Bytes that its disk occupies on the host.
    pub disk: u64,
    /// The size of its disk in bytes.
    pub disk_limit: u64,
    /// Bytes read from its disks since it started.
    pub disk_read: u64,
    /// Bytes written to its disk since it started.
    pub disk_written: u64,
    /// Host processes of the guest. Absent with the kvm engine, where guest processes are not host processes.
    pub processes: Option<u64>,
    /// The limit on these processes.
    pub processes_limit: u64,
    /// Running commands and jobs.
    pub commands: u32,
    pub clients: u32,
    /// How long it has been running; serialised in seconds.
    #[serde(serialize_with = "seconds")]
    pub uptime: Duration,
}

impl Stats {
    /// Reads the processes of a running sandbox and adds the keeper's statistics.
    pub(crate) fn gather(record: &Record, usage: &Usage) -> Self {
        // If they cannot be read, their figures are left out.
        let processes = record.keeper_pid.zip(HostProcesses::read().ok());
        let processes =
            processes.map(|(keeper, all)| all.sandbox(keeper, record.monitor_pid)).unwrap_or_default();
        let group = record.keeper_pid.and_then(|keeper| Cgroup::usage_of(&record.id, keeper).ok());
        Self::assemble(record, usage, &processes, group.unwrap_or_default(), unix_ns())
    }

    fn assemble(
        record: &Record,
        usage: &Usage,
        processes: &SandboxProcesses,
        group: CgroupUsage,
        now_ns: u64,
    ) -> Self {
        let spec = &record.spec;
        Self {
            // The cgroup also counts processes that were not waited for, and is more precise.
            cpu_ns: group.cpu_ns.unwrap_or(processes.cpu_ns),
            memory: usage.memory,
            memory_limit: spec.memory.0,
            host_memory: processes.memory,
            disk: usage.disk,
            disk_limit: spec.disk.0,
            disk_read: usage.disk_read,
            disk_written: usage.disk_written,
            processes: (record.engine != Some(Chosen::Kvm))
                .then(|| u64::try_from(processes.count).unwrap_or(u64::MAX)),
            processes_limit: spec.processes.into(),
            commands: usage.commands,
            clients: usage.clients,
            uptime: Duration::from_nanos(now_ns.saturating_sub(record.started_ns.unwrap_or(now_ns))),
        }
    }

    /// The share of one CPU used since `earlier`, in percent. Zero if no time has passed.
    pub fn cpu_percent(&self, earlier: &Self) -> f64 {
        let elapsed = self.uptime.saturating_sub(earlier.uptime).as_secs_f64();
        let used = Duration::from_nanos(self.cpu_ns.saturating_sub(earlier.cpu_ns)).as_secs_f64();
        if elapsed > 0.0 { 100.0 * used / elapsed } else { 0.0 }
    }
}

fn seconds<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::thread;
    use std::time::Instant;

    use bathy_spec::SandboxSpec;

    use super::*;
    use crate::store::State;

    fn record(keeper_pid: Option<u32>, started_ns: u64) -> Record {
        Record {
            id: "test".to_owned(),
            name: None,
            spec: SandboxSpec::default(),
            engine: Some(Chosen::Uml),
            engine_reason: None,
            created_ns: 0,
            state: State::Running,
            started_ns: Some(started_ns),
            ended_ns: None,
            end_cause: None,
            exit_code: None,
            monitor_pid: None,
            keeper_pid,
            enforcement: None,
            idle_paused: false,
        }
    }

    const USAGE: Usage = Usage { memory: 1, disk: 2, disk_read: 3, disk_written: 4, commands: 5, clients: 6 };
    const PROCESSES: SandboxProcesses = SandboxProcesses { guest: Some(9), count: 7, cpu_ns: 8, memory: 9 };

    #[test]
    fn every_figure_comes_from_its_source() {
        let record = record(None, 1_000_000_000);
        let stats = Stats::assemble(&record, &USAGE, &PROCESSES, CgroupUsage::default(), 3_500_000_000);
        let json = serde_json::to_value(&stats).unwrap();
        let expected = serde_json::json!({
            "cpu_ns": 8, "memory": 1, "memory_limit": record.spec.memory.0, "host_memory": 9,
            "disk": 2, "disk_limit": record.spec.disk.0, "disk_read": 3, "disk_written": 4,
            "processes": 7, "processes_limit": record.spec.processes,
            "commands": 5, "clients": 6, "uptime": 2.5,
        });
        assert_eq!(json, expected);
    }

    #[test]
    fn a_virtual_machine_is_its_keeper() {
        let script = "while :; do :; done";
        let mut keeper = Command::new("/bin/sh").args(["-c", script]).spawn().unwrap();
        let record = Record { engine: Some(Chosen::Kvm), ..record(Some(keeper.id()), unix_ns()) };
        thread::sleep(Duration::from_millis(300));
        let stats = Stats::gather(&record, &USAGE);
        keeper.kill().unwrap();
        keeper.wait().unwrap();
        // There is no count of processes; time and memory are those of the keeper.
        assert_eq!((stats.processes, stats.memory), (None, USAGE.memory));
        assert!(stats.cpu_ns > 0 && stats.host_memory > 0, "{stats:?}");
    }

    #[test]
    fn a_group_counts_cpu_time_better_than_a_list_of_processes() {
        let group = CgroupUsage { cpu_ns: Some(77), memory: None, pids: None };
        assert_eq!(Stats::assemble(&record(None, 0), &USAGE, &PROCESSES, group, 0).cpu_ns, 77);
    }

    #[test]
    fn percent_is_of_one_cpu_and_of_the_time_between_two_looks() {
        let look = |cpu_ns, now_ns| {
            let processes = SandboxProcesses { cpu_ns, ..PROCESSES };
            Stats::assemble(&record(None, 0), &USAGE, &processes, CgroupUsage::default(), now_ns)
        };
        let (first, second) = (look(100_000_000, 1_000_000_000), look(600_000_000, 2_000_000_000));
        assert!((second.cpu_percent(&first) - 50.0).abs() < 1e-9);
        // A clock that was set back, or the same sample twice.
        assert!(first.cpu_percent(&second).abs() < 1e-9 && first.cpu_percent(&first).abs() < 1e-9);
    }

    #[test]
    fn a_look_at_real_processes_shows_their_work() {
        let script = "sh -c 'while :; do :; done'; true";
        let mut keeper = Command::new("/bin/sh").args(["-c", script]).spawn().unwrap();
        let record = record(Some(keeper.id()), unix_ns());
        let begun = Instant::now();
        let look = || Stats::gather(&record, &USAGE);
        // On a busy machine it takes a while until the processes exist and one has run.
        let until = |is_enough: &dyn Fn(&Stats) -> bool| loop {
            let stats = look();
            if is_enough(&stats) || begun.elapsed() > Duration::from_secs(60) {
                break stats;
            }
            thread::sleep(Duration::from_millis(20));
        };
        let first = until(&|stats| stats.processes == Some(1));
        let second = until(&|stats| stats.cpu_ns > first.cpu_ns + 50_000_000);
        let elapsed = begun.elapsed();
        for process in HostProcesses::read().unwrap().below(keeper.id()) {
            let pid = i32::try_from(process.pid).ok().and_then(rustix::process::Pid::from_raw).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        }
        keeper.kill().unwrap();
        keeper.wait().unwrap();
        assert_eq!(first.processes, Some(1));
        assert!(first.host_memory > 0);
        let used = Duration::from_nanos(second.cpu_ns - first.cpu_ns);
        // One busy process has at most the whole time, plus one clock tick.
        assert!(used >= Duration::from_millis(50) && used <= elapsed + Duration::from_millis(20), "{used:?}");
        assert!(second.cpu_percent(&first) > 0.0);
    }
}
