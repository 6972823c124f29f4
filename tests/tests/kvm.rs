//! What only a guest of the kvm engine has or can do. These tests run in the nested test bed, where there is a KVM that
//! behaves as hardware does; the suites that both engines share run there too.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::fs;
use std::process::Command;
use std::time::Duration;

use bathy_tests::kept::Home;
use bathy_tests::{Ran, bathy, finish, patient_seconds, promptly, run};

fn kvm(arguments: &[&str]) -> Ran {
    run(&[&["run", "--engine", "kvm"], arguments].concat())
}

#[test]
fn hello_from_a_virtual_machine() {
    let ran = kvm(&["--json", "--", "python3", "-c", "print('hello')"]);
    let result: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(result["stdout"]["text"], "hello\n", "{ran:?}");
    assert_eq!((&result["engine"], &result["engine_reason"]), (&"kvm".into(), &"asked for".into()));
}

#[test]
fn the_engine_may_be_named_before_the_verb() {
    let ran = run(&["--engine", "kvm", "run", "--", "python3", "-c", "print('hello')"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "hello\n"), "{}", ran.stderr);
}

#[test]
fn the_process_limit_is_the_guest_kernels() {
    let script = "
import os, time
count = 0
try:
    while count < 400:
        if os.fork() == 0: time.sleep(100)
        count += 1
except BlockingIOError: pass
print(count)
";
    let ran = kvm(&["--processes", "64", "--", "python3", "-c", script]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let count: u32 = ran.stdout.trim().parse().unwrap();
    assert!((32..80).contains(&count), "{count} processes of 64");
}

#[test]
fn auto_takes_the_virtual_machine_and_says_why() {
    let ran =
        finish(Command::new(bathy()).args(["run", "--json", "--", "true"]).env_remove("BATHY_ENGINE"), b"");
    let result: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(result["engine"], "kvm", "{ran:?}");
    assert!(result["engine_reason"].as_str().unwrap().contains("hardware virtualization"), "{result}");
}

/// Two processes that count until they have used a given amount of processor time each: on one processor that takes twice
/// the time, on two it takes once.
#[test]
fn two_processors_are_kept_busy_by_two_processes() {
    let script = "
import os, time
began = time.monotonic()
for number in range(2):
    if os.fork() == 0:
        os.sched_setaffinity(0, {number % os.cpu_count()})
        while time.process_time() < 4: pass
        os._exit(0)
os.wait(); os.wait()
used = os.times()
print(os.cpu_count(), (used.children_user + used.children_system) / (time.monotonic() - began))
";
    let busy = |cpus: &str| {
        let ran = kvm(&["--cpus", cpus, "--", "python3", "-c", script]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        let (count, share) = ran.stdout.trim().split_once(' ').unwrap();
        assert_eq!(count, cpus, "{ran:?}");
        share.parse::<f64>().unwrap()
    };
    // Each process has its own, because the guest's scheduler may leave both on one processor for all that time.
    let (one, two) = (busy("1"), busy("2"));
    // One processor gives no more than its own time, however busy the host is; what is more than that, another one gave.
    assert!(one < 1.05, "one processor gave {one}");
    assert!(two > 1.15, "two processors gave {two}, one gave {one}");
}

#[test]
fn processors_are_cores_of_one_package() {
    let script = "cat /sys/devices/system/cpu/cpu[01]/topology/physical_package_id /sys/devices/system/cpu/cpu[01]/topology/core_id";
    let ran = kvm(&["--cpus", "2", "--", "sh", "-c", script]);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "0\n0\n0\n1\n"), "{}", ran.stderr);
}

#[test]
fn memory_beyond_the_hole_is_there() {
    // More than what fits below the devices' addresses; only what is touched is taken from the host.
    let ran = kvm(&["--memory", "5G", "--", "sh", "-c", "grep MemTotal /proc/meminfo; grep RAM /proc/iomem"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let total: u64 = ran.stdout.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(total > 4_800_000, "{ran:?}");
}

#[test]
fn a_panic_is_told_from_a_power_off_and_shows_the_kernels_last_lines() {
    let script = "echo 2 > /proc/sys/vm/panic_on_oom; tail /dev/zero";
    let ran = kvm(&["--user", "root", "--memory", "128M", "--", "sh", "-c", script]);
    assert_eq!(ran.code, Some(125), "{ran:?}");
    assert!(ran.stderr.contains("the guest kernel panicked"), "{}", ran.stderr);
    assert!(ran.stderr.contains("Out of memory") || ran.stderr.contains("out of memory"), "{}", ran.stderr);
}

#[test]
fn a_guest_that_resets_halts_or_turns_itself_off_has_ended() {
    for how in ["0x1234567", "0xcdef0123", "0x4321fedc"] {
        let script = format!("import ctypes; ctypes.CDLL(None).reboot({how})");
        let ran = kvm(&["--user", "root", "--", "python3", "-c", &script]);
        assert_eq!(ran.code, Some(125), "{how}: {ran:?}");
        assert!(ran.stderr.contains("the guest ended before its command did (status 0)"), "{}", ran.stderr);
    }
}

#[test]
fn a_kernel_that_is_none_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |name: &str, content: &[u8], words: &str| {
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        let ran = kvm(&["--kernel", path.to_str().unwrap(), "--", "true"]);
        assert_eq!(ran.code, Some(125), "{name}: {ran:?}");
        assert!(ran.stderr.contains(words), "{name}: {}", ran.stderr);
    };
    refused("script", b"#!/bin/sh\n", "not an ELF kernel image");
    refused("empty", b"", "not an ELF kernel image");
    let program = fs::read("/bin/true").unwrap();
    refused("program", &program, "guest kernel");
    let kernel = fs::read(kernel()).unwrap();
    refused("half", &kernel[..kernel.len() / 2], "not an ELF kernel image");
}

/// The microVM kernel in the cache.
fn kernel() -> std::path::PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(std::path::PathBuf::from);
    let cache =
        cache.unwrap_or_else(|| std::path::PathBuf::from(std::env::var_os("HOME").unwrap()).join(".cache"));
    let entries = fs::read_dir(cache.join("bathysphere/kernel-kvm")).unwrap().flatten();
    entries.map(|entry| entry.path().join("linux")).find(|path| path.exists()).unwrap()
}

#[test]
fn a_damaged_kernel_ends_the_sandbox_and_nothing_else() {
    let home = Home::new();
    home.started("neighbour", &[]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("damaged");
    let mut image = fs::read(kernel()).unwrap();
    // All code from its second megabyte on.
    let length = image.len();
    image[1 << 20..length / 2].fill(0xcc);
    fs::write(&path, image).unwrap();
    let ran =
        kvm(&["--kernel", path.to_str().unwrap(), "--ready-timeout", &patient_seconds(2), "--", "true"]);
    assert_eq!(ran.code, Some(125), "{ran:?}");
    // It fails in the guest, and not in the keeper.
    let of_guest = ["the guest was not ready", "before its command", "the guest kernel panicked"];
    assert!(of_guest.iter().any(|words| ran.stderr.contains(words)), "{}", ran.stderr);
    assert_eq!(home.exec("neighbour", &["true"]).code, Some(0));
}

#[test]
fn what_the_machine_does_not_have_is_refused() {
    let many = kvm(&["--cpus", "63", "--", "true"]);
    assert_eq!(many.code, Some(125), "{many:?}");
    assert!(many.stderr.contains("CPUs"), "{}", many.stderr);
    let mode = kvm(&["--uml-mode", "ptrace", "--", "true"]);
    assert_eq!(mode.code, Some(125), "{mode:?}");
    assert!(mode.stderr.contains("uml engine"), "{}", mode.stderr);
}

#[test]
fn a_paused_machine_stands_still_and_goes_on() {
    let home = Home::new();
    home.started("still", &["--cpus", "2"]);
    let job = home.job("still", "i=0; while :; do i=$((i+1)); echo $i > /tmp/count; done");
    assert!(!job.is_empty());
    home.sh("still", "until [ -s /tmp/count ]; do sleep 0.1; done");
    let keeper = home.keeper("still");
    home.ok(&["pause", "still"]);
    let ticks = || {
        let stat = fs::read_to_string(format!("/proc/{keeper}/stat")).unwrap();
        let fields: Vec<u64> = stat
            .rsplit_once(')')
            .unwrap()
            .1
            .split_whitespace()
            .filter_map(|field| field.parse().ok())
            .collect();
        // User and system time, counted without the state's letter.
        fields[10] + fields[11]
    };
    let before = ticks();
    std::thread::sleep(Duration::from_secs(3));
    assert!(ticks() - before <= 1, "a paused guest used {} ticks", ticks() - before);
    home.ok(&["resume", "still"]);
    let count = || home.sh("still", "cat /tmp/count").trim().parse::<u64>().unwrap_or(0);
    let resumed = count();
    let begin = std::time::Instant::now();
    while count() <= resumed {
        assert!(begin.elapsed() < promptly(Duration::from_secs(6)), "the job does not go on");
    }
}
