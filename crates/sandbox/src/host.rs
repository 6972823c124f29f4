//! What this machine has.

use std::fs;

/// All memory of the machine, in bytes.
pub fn total_memory() -> u64 {
    memory_line("MemTotal:")
}

/// Memory that could be used without swapping, in bytes.
pub fn available_memory() -> u64 {
    memory_line("MemAvailable:")
}

fn memory_line(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().unwrap_or(0);
    kib.saturating_mul(1024)
}
