//! The resources of this machine.

use std::fs;
use std::io;

/// The memory of the machine in bytes.
pub fn total_memory() -> u64 {
    memory_line("MemTotal:")
}

/// The memory that could be used without swapping, in bytes.
pub fn available_memory() -> u64 {
    memory_line("MemAvailable:")
}

/// The id of the present boot.
pub fn boot_id() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

/// The processors that this process may use.
pub fn usable_cpus() -> io::Result<Vec<u32>> {
    let set = rustix::thread::sched_getaffinity(None)?;
    let cpus = (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu));
    Ok(cpus.filter_map(|cpu| u32::try_from(cpu).ok()).collect())
}

fn memory_line(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().unwrap_or(0);
    kib.saturating_mul(1024)
}
