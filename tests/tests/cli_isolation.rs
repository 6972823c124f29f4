//! Inside a sandbox nothing of the host is to be seen.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::fs;

use bathy_tests::run;

fn inside(script: &str) -> String {
    let ran = run(&["run", "-u", "root", "--", "sh", "-c", script]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    ran.stdout
}

#[test]
fn no_file_of_the_host() {
    let marker = tempfile::NamedTempFile::new().unwrap();
    fs::write(&marker, "host").unwrap();
    let path = marker.path().display();
    assert_eq!(inside(&format!("cat {path} 2>/dev/null || echo unseen")), "unseen\n");
    let passwd = inside("cat /etc/passwd");
    assert!(passwd.contains("user:x:1000:"), "{passwd}");
    assert_ne!(passwd, fs::read_to_string("/etc/passwd").unwrap());
}

#[test]
fn no_process_of_the_host() {
    // Whatever runs in the guest descends from its own PID 1 or is a thread of its own kernel.
    let script = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done";
    let commands = inside(script);
    let foreign: Vec<_> = commands
        .lines()
        .map(str::trim)
        .filter(|line| {
            !line.is_empty()
                && !line.starts_with("/init")
                && !line.starts_with("sh -c")
                && !line.starts_with("tr ")
        })
        .collect();
    assert!(foreign.is_empty(), "{foreign:?}");
}

#[test]
fn no_network_interface_but_its_own() {
    assert_eq!(inside("ls /sys/class/net"), "eth0\nlo\n");
    assert_eq!(run(&["run", "--net", "none", "--", "ls", "/sys/class/net"]).stdout, "lo\n");
    assert_eq!(
        inside("python3 -c \"import socket; s=socket.socket(); s.bind(('127.0.0.1',0)); print('ok')\""),
        "ok\n"
    );
}

#[test]
fn not_the_hosts_kernel_name_or_mounts() {
    let host = rustix::system::uname();
    assert_ne!(inside("uname -r").trim(), host.release().to_str().unwrap());
    assert_eq!(inside("hostname"), "sandbox\n");
    let mounts = inside("cat /proc/mounts");
    for foreign in ["cgroup", "hostfs", "9p"] {
        assert!(!mounts.contains(foreign), "{mounts}");
    }
    assert!(mounts.starts_with("devtmpfs") || mounts.starts_with("overlay"), "{mounts}");
}

#[test]
fn u3_the_kernel_has_no_way_to_the_host_but_its_devices() {
    let devices = inside("ls /dev");
    for absent in ["mem", "kmem", "port", "ubda"] {
        assert!(devices.lines().all(|device| device != absent), "{absent:?} in {devices}");
    }
    let offered = inside("cat /proc/filesystems /proc/devices");
    for absent in ["ubd", "hostfs", "mconsole"] {
        assert!(!offered.contains(absent), "{absent:?} in {offered}");
    }
    assert_eq!(
        inside(
            "ls /proc/modules /proc/kcore /dev/mem 2>/dev/null; cat /proc/sys/kernel/kexec_load_disabled 2>/dev/null; echo end"
        ),
        "end\n"
    );
}

#[test]
fn the_image_stays_read_only_whatever_root_does() {
    // Enforced by the device: the guest's own read-only mount is not what is relied on.
    let script = "dd if=/dev/zero of=/dev/vda bs=4096 count=1 oflag=direct 2>/dev/null && echo written; blockdev --setrw /dev/vda 2>/dev/null; dd if=/dev/zero of=/dev/vda bs=4096 count=1 conv=fsync 2>/dev/null && echo written; echo end";
    assert_eq!(inside(script), "end\n");
}

#[test]
fn a_sandbox_leaves_no_trace_for_the_next() {
    inside("echo secret > /root/trace; sync");
    assert_eq!(inside("cat /root/trace 2>/dev/null || echo clean"), "clean\n");
}
