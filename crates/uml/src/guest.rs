//! How a guest of this engine is started: its command line, its descriptors, its limits.
//!
//! The keeper writes all of the command line; nothing of it comes from a client or from an image (attack U3).

use std::ffi::CString;
use std::ops::Range;

use bathy_jail::filter::{GUEST_PTRACE, GUEST_SECCOMP, GuestFilter};
use bathy_jail::limits::Limit;
use bathy_protocol::launch::{Launch, UmlMode};
use rustix::process::Resource;

/// Where the guest kernel finds what it was given. 0 is an input that never ends, 1 and 2 are the console.
pub mod fd {
    pub const RAM: usize = 3;
    /// An empty file for the program that runs guest code.
    pub const STUB: usize = 4;
    pub const INITRAMFS: usize = 5;
    /// The first device's socket; the others follow in the order of [`super::DEVICES`].
    pub const DEVICES: usize = 6;
}

/// The virtio types of the guest's devices, in the order in which it finds them: image, disk, control, entropy, and a
/// network device if it has one.
pub const DEVICES: [u32; 5] = [2, 2, 3, 4, 1];

/// The kernel's delay-loop constant. Measuring it would cost 55 ms of every start; nothing here depends on it, because
/// virtual devices need no delays.
const LOOPS_PER_JIFFY: u32 = 5_000_000;

/// The host processes that a guest needs besides one for each of its own.
const HELPERS: u64 = 8;

/// Descriptors of the guest kernel while its drivers start. It then lowers the limit to what it has open, before any guest
/// code runs.
///
/// The kernel passes descriptors to the keeper meanwhile, and the host refuses that while the user has more of them in flight
/// than this limit. A neighbour of the same user can have at most its own limit and one message of 253 more in flight, so this
/// is far above that (attack U7).
const DESCRIPTORS: u64 = 1024;

/// The guest kernel's command line.
pub fn command_line(launch: &Launch, mode: UmlMode) -> Vec<CString> {
    let mut words = vec![
        "bathysphere-guest".to_owned(),
        format!("mem={}K", launch.memory / 1024),
        format!("memfd={}", fd::RAM),
        format!("stubfd={}", fd::STUB),
        format!("initrd=fd:{}", fd::INITRAMFS),
        match mode {
            UmlMode::Seccomp => "seccomp=on".to_owned(),
            UmlMode::Ptrace => "seccomp=off".to_owned(),
        },
        format!("lpj={LOOPS_PER_JIFFY}"),
        "quiet".to_owned(),
        "con=null".to_owned(),
        "con0=fd:0,fd:1".to_owned(),
        "rdinit=/init".to_owned(),
    ];
    let count = DEVICES.len() - usize::from(!launch.network);
    for (number, kind) in (fd::DEVICES..).zip(DEVICES).take(count) {
        words.push(format!("virtio_uml.device=fd:{number}:{kind}"));
    }
    let mut for_pid1 = launch.restriction_arguments().peekable();
    if for_pid1.peek().is_some() {
        // What follows the dashes is for PID 1.
        words.push("--".to_owned());
        words.extend(for_pid1.map(str::to_owned));
    }
    // No word contains a zero byte: they are made of literals and numbers.
    words.into_iter().filter_map(|word| CString::new(word).ok()).collect()
}

/// The filter that fits the mode.
pub fn filter(mode: UmlMode) -> &'static GuestFilter {
    match mode {
        UmlMode::Seccomp => &GUEST_SECCOMP,
        UmlMode::Ptrace => &GUEST_PTRACE,
    }
}

/// Limits of the guest's processes. Guest memory is one sealed file that cannot grow; what these processes can have
/// besides is private memory and new processes.
pub fn limits(launch: &Launch) -> Vec<Limit> {
    const MIB: u64 = 1024 * 1024;
    vec![
        Limit { resource: Resource::Nproc, value: launch.processes + HELPERS },
        Limit { resource: Resource::Nofile, value: DESCRIPTORS },
        // What it writes, and does not map, is its stub program and one page of its own code in guest memory.
        Limit { resource: Resource::Fsize, value: 16 * MIB },
        Limit { resource: Resource::Data, value: 16 * MIB },
        // The kernel maps guest memory once whole and again in pieces, a program of the guest no more than that. Without a
        // limit a program could have the host make tables of pages for its whole address space.
        Limit { resource: Resource::As, value: launch.memory.saturating_mul(2).saturating_add(256 * MIB) },
        Limit { resource: Resource::Stack, value: 8 * MIB },
        Limit { resource: Resource::Sigpending, value: 4096 },
    ]
}

/// What a guest kernel describes one page of memory with, as a share of that page.
const DESCRIPTION_SHARE: u64 = 4096 / 64;
/// What its allocators take beside that before anything else runs.
const BOOT_TABLES: u64 = 2 << 20;
/// No more than this: a large guest's tables are not worth the time before its start.
const MOST_PREPARED: u64 = 32 << 20;
/// What the host can map at once.
const LARGE_PAGE: u64 = 2 << 20;

/// The part of `memory` bytes that every guest kernel writes to while it boots: it describes its pages at the end.
pub fn used_at_boot(memory: u64) -> Range<u64> {
    let start = memory.saturating_sub((memory / DESCRIPTION_SHARE + BOOT_TABLES).min(MOST_PREPARED));
    start / LARGE_PAGE * LARGE_PAGE..memory
}

#[cfg(test)]
mod tests {
    use bathy_protocol::launch::{DiskLimits, Engine};

    use super::*;

    fn launch() -> Launch {
        Launch {
            engine: Engine::Uml { cpu: 0, mode: UmlMode::Seccomp },
            memory: 128 << 20,
            processes: 10,
            ready_timeout_ms: 1,
            guest_user: false,
            persistent: false,
            log_capacity: 0,
            restricted: None,
            network: false,
            image: vec![0],
            disk_limits: DiskLimits { write_bandwidth: 1, read_bandwidth: None, flushes: 1 },
        }
    }

    #[test]
    fn u3_the_command_line_holds_only_words_of_ours() {
        let words = command_line(&launch(), UmlMode::Seccomp);
        let words: Vec<_> = words.iter().map(|word| word.to_str().unwrap()).collect();
        assert!(words.contains(&"mem=131072K") && words.contains(&"seccomp=on"));
        let forbidden = ["ubd", "hostfs", "mconsole", "uml_dir", "umid", "vec", "tap", "root="];
        for word in words {
            assert!(!forbidden.iter().any(|bad| word.starts_with(bad)), "{word}");
        }
    }

    #[test]
    fn a_restricted_guest_is_told_so() {
        let restricted = Some(bathy_protocol::Restriction { writable_root: false });
        let words = command_line(&Launch { restricted, ..launch() }, UmlMode::Ptrace);
        let last: Vec<_> = words.iter().rev().take(2).map(|word| word.to_str().unwrap()).collect();
        assert_eq!(last, ["restricted", "--"]);
    }

    #[test]
    fn ptrace_mode_brings_its_own_filter() {
        let words = command_line(&launch(), UmlMode::Ptrace);
        assert!(words.iter().any(|word| word.to_str() == Ok("seccomp=off")));
        assert!(matches!(filter(UmlMode::Ptrace), GuestFilter::Everywhere(_)));
        assert!(matches!(filter(UmlMode::Seccomp), GuestFilter::ByAddress(_)));
    }

    #[test]
    fn the_end_of_memory_is_used_at_boot() {
        const MIB: u64 = 1 << 20;
        for (memory, start) in [(64, 60), (128, 124), (512, 502), (1024, 1006), (65_536, 65_504)] {
            assert_eq!(used_at_boot(memory * MIB), start * MIB..memory * MIB);
        }
        assert_eq!(used_at_boot(MIB), 0..MIB);
    }
}
