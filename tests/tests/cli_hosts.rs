//! Hosts that are not as one would wish: an ordinary user, no namespaces, a full disk, a damaged cache.
//!
//! These tests run as root, because they make users and mounts; everything they make is theirs alone.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bathy_tests::{Engine, Ran, bathy, engine, finish, patience, patient_seconds};

/// An ordinary user with a home, the product in it, and a cache that need not be built.
struct OrdinaryUser {
    name: String,
    uid: u32,
    home: PathBuf,
}

impl OrdinaryUser {
    fn create() -> Self {
        let name = format!("bathytest{}", std::process::id());
        let home = PathBuf::from(format!("/home/{name}"));
        let added = Command::new("useradd").args(["-m", "-d"]).arg(&home).arg(&name).status().unwrap();
        assert!(added.success(), "useradd failed");
        let uid = Command::new("id").args(["-u", &name]).output().unwrap();
        let user = Self { uid: String::from_utf8(uid.stdout).unwrap().trim().parse().unwrap(), name, home };
        let programs = user.home.join("programs");
        fs::create_dir(&programs).unwrap();
        for program in ["bathy", "bathy-keeper", "bathy-gateway", "bathy-agent", "bathy-unpack"] {
            fs::copy(bathy().with_file_name(program), programs.join(program)).unwrap();
        }
        copy_cache(&user.home.join(".cache/bathysphere"));
        let owned = Command::new("chown").args(["-R", &user.name]).arg(&user.home).status().unwrap();
        assert!(owned.success(), "chown failed");
        user
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        let mut command = Command::new(self.home.join("programs/bathy"));
        command
            .args(arguments)
            .env_clear()
            .env("HOME", &self.home)
            .env("BATHY_ENGINE", engine().name())
            .current_dir("/")
            .uid(self.uid)
            .gid(self.uid);
        finish(&mut command, b"")
    }
}

impl Drop for OrdinaryUser {
    fn drop(&mut self) {
        let _ = Command::new("userdel").args(["-r", &self.name]).stderr(Stdio::null()).status();
    }
}

fn root_cache() -> PathBuf {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map_or_else(|| Path::new(&std::env::var_os("HOME").unwrap()).join(".cache"), PathBuf::from);
    base.join("bathysphere")
}

/// Copies what sandboxes need, and nothing else, of root's cache.
fn copy_cache(target: &Path) {
    fs::create_dir_all(target).unwrap();
    for part in ["kernel-kvm", "kernel-uml", "image-default", "disk"] {
        if !root_cache().join(part).exists() {
            // Not every machine has both kernels.
            continue;
        }
        let copied = Command::new("cp").arg("-r").arg(root_cache().join(part)).arg(target).status().unwrap();
        assert!(copied.success(), "the cache cannot be copied");
    }
}

#[test]
fn an_ordinary_user_runs_sandboxes_without_any_privilege() {
    let user = OrdinaryUser::create();
    let ran = user.run(&["run", "--", "sh", "-c", "id -u; uname -r; exit 7"]);
    assert_eq!(ran.code, Some(7), "{}", ran.stderr);
    assert!(ran.stdout.starts_with("1000\n") && ran.stdout.contains("bathysphere"), "{}", ran.stdout);
    let ran = user.run(&["run", "--", "sudo", "sh", "-c", "echo x > /usr/bin/x && cat /usr/bin/x"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "x\n"), "{}", ran.stderr);
    if engine() == Engine::Uml {
        let ran = user.run(&["run", "--uml-mode", "ptrace", "--", "echo", "traced"]);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "traced\n"), "{}", ran.stderr);
    }
    let ran = user.run(&["run", "--timeout", &patient_seconds(1), "--", "sleep", "600"]);
    assert_eq!(ran.code, Some(124), "{}", ran.stderr);
    let ran = user.run(&["doctor", "--json"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stdout);
    let left: BTreeSet<_> = fs::read_dir(user.home.join(".local/state/bathysphere"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .filter(|name| name != "kvm.json")
        .collect();
    assert_eq!(left, BTreeSet::from(["audit".into(), "ephemeral".into(), "slots".into()]));
}

/// The user numbers of all processes that are in this range.
fn users_within(range: &std::ops::Range<u32>) -> BTreeSet<u32> {
    let user = |entry: fs::DirEntry| -> Option<u32> {
        let status = fs::read_to_string(entry.path().join("status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
        line.split_whitespace().next()?.parse().ok()
    };
    let all = fs::read_dir("/proc").unwrap().flatten().filter_map(user);
    all.filter(|user| range.contains(user)).collect()
}

#[test]
fn u7_what_the_kernel_counts_for_each_user_is_counted_for_each_sandbox() {
    let user = OrdinaryUser::create();
    let subordinates = fs::read_to_string("/etc/subuid").unwrap();
    let line = subordinates.lines().find_map(|line| line.strip_prefix(&format!("{}:", user.name)));
    let (first, count) = line.and_then(|line| line.split_once(':')).expect("useradd gives every user some");
    let (first, count): (u32, u32) = (first.parse().unwrap(), count.parse().unwrap());
    for name in ["one", "two"] {
        let ran = user.run(&["create", "--name", name]);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        let ran = user.run(&["start", name]);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
        let ran = user.run(&["exec", name, "--", "id", "-u"]);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "1000\n"), "{}", ran.stderr);
    }
    let users = users_within(&(first..first + count));
    // With kvm the guest is a part of its keeper.
    let each = if engine() == Engine::Uml { 3 } else { 2 };
    assert_eq!(users.len(), 2 * each, "{users:?}: keepers, guests and gateways");
    // Where other programs that use the same range have theirs last.
    assert!(users.iter().all(|user| *user >= first + count / 2), "{users:?} of {first} and {count}");
    for name in ["one", "two"] {
        let ran = user.run(&["rm", "-f", name]);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    }
    assert_eq!(users_within(&(first..first + count)), BTreeSet::new());
}

#[test]
fn r10_signals_pause_a_sandbox_where_no_control_group_can_be_had() {
    let user = OrdinaryUser::create();
    let ok = |arguments: &[&str]| {
        let ran = user.run(arguments);
        assert_eq!(ran.code, Some(0), "{arguments:?}: {ran:?}");
        ran.stdout
    };
    ok(&["create", "--start", "--name", "p", "--memory", "128M", "--disk", "64M", "--net", "none"]);
    ok(&["exec", "-d", "p", "--", "sh", "-c", "while :; do :; done"]);
    for _ in 0..2 {
        ok(&["pause", "p"]);
        assert!(ok(&["ls"]).contains("paused"));
        ok(&["resume", "p"]);
        assert_eq!(ok(&["exec", "p", "--", "echo", "goes on"]), "goes on\n");
    }
    ok(&["rm", "--force", "p"]);
}

#[test]
fn a_user_who_may_not_use_kvm_is_told_the_group_that_may() {
    if !Path::new("/dev/kvm").exists() {
        // Nowhere to put one.
        return;
    }
    let user = OrdinaryUser::create();
    let folder = tempfile::tempdir().unwrap();
    let device = folder.path().join("kvm");
    let as_user = format!(
        "setpriv --reuid {0} --regid {0} --clear-groups env -u BATHY_ENGINE -u XDG_CACHE_HOME HOME={1} {1}/programs/bathy",
        user.uid,
        user.home.display()
    );
    let script = |then: &str| {
        let device = device.display();
        format!(
            "rm -f {device}; mknod {device} c 10 232; chgrp users {device}; chmod 660 {device}
            mount --bind {device} /dev/kvm; cd /; {as_user} {then}"
        )
    };
    let ran = in_private_mounts(&script("run --engine kvm -- true"));
    assert_eq!(ran.code, Some(125), "{}", ran.stderr);
    let (who, cure) = ("/dev/kvm may only be used by root and the group users", "usermod -aG users $USER");
    assert!(ran.stderr.contains(who) && ran.stderr.contains(cure), "{}", ran.stderr);
    let ran = in_private_mounts(&script("run --json -- true"));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let reported: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!((&reported["engine"], &reported["engine_reason"]), (&"uml".into(), &who.into()), "{reported}");
    let ran = in_private_mounts(&script("doctor"));
    assert!(ran.stdout.contains(who) && ran.stdout.contains(cure), "{}", ran.stdout);
}

#[test]
fn a_machine_without_kvm_is_told_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().display();
    let script = |then: &str| {
        format!(
            "mount -t tmpfs none {path}
            for name in null zero full random urandom tty; do : > {path}/$name; mount --bind /dev/$name {path}/$name; done
            mount --rbind {path} /dev; unset BATHY_ENGINE; \"$BATHY\" {then}"
        )
    };
    let ran = in_private_mounts(&script("run --engine kvm -- true"));
    assert_eq!(ran.code, Some(125), "{}", ran.stderr);
    assert!(ran.stderr.contains("The kvm engine cannot be used: there is no /dev/kvm."), "{}", ran.stderr);
    let ran = in_private_mounts(&script("doctor --json"));
    let reported: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    let (engine, verdict) = (&reported["engine"], &reported["kvm"]["verdict"]);
    assert_eq!((engine, verdict), (&"uml".into(), &"absent".into()), "{reported}");
}

/// A shell in a mount namespace of its own, so that its mounts end with it.
fn in_private_mounts(script: &str) -> Ran {
    finish(Command::new("unshare").args(["--mount", "sh", "-euc", script]).env("BATHY", bathy()), b"")
}

#[test]
fn a_full_disk_on_the_host_is_named_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().display();
    // Less than the empty file system of a disk takes.
    let ran = in_private_mounts(&format!(
        "mount -t tmpfs -o size=16k none {path}; XDG_STATE_HOME={path} $BATHY run -- true"
    ));
    assert_eq!(ran.code, Some(125), "{}", ran.stderr);
    assert!(ran.stderr.contains("disk is full"), "{}", ran.stderr);
}

#[test]
fn a_disk_that_fills_up_under_a_guest_fails_its_writes_and_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().display();
    let command =
        "dd if=/dev/zero of=/tmp/big bs=1M count=64 conv=fsync 2>/dev/null && echo stored; echo alive";
    let ran = in_private_mounts(&format!(
        "mount -t tmpfs -o size=16m none {path}; XDG_STATE_HOME={path} $BATHY run -- sh -c '{command}'"
    ));
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "alive\n"), "{}", ran.stderr);
    assert!(ran.stderr.contains("the host failed a request of the sandbox's disk"), "{}", ran.stderr);
}

#[test]
fn a_machine_without_user_namespaces_is_told_what_to_do() {
    // In a user namespace of its own the limit is set for this test alone.
    let script = "echo 0 > /proc/sys/user/max_user_namespaces; \"$BATHY\" run -- true";
    let ran = finish(
        Command::new("unshare")
            .args(["--user", "--map-root-user", "sh", "-euc", script])
            .env("BATHY", bathy()),
        b"",
    );
    assert_eq!(ran.code, Some(125), "{}", ran.stderr);
    assert!(ran.stderr.contains("max_user_namespaces"), "{}", ran.stderr);
    let script = "echo 0 > /proc/sys/user/max_user_namespaces; \"$BATHY\" doctor";
    let ran = finish(
        Command::new("unshare")
            .args(["--user", "--map-root-user", "sh", "-euc", script])
            .env("BATHY", bathy()),
        b"",
    );
    assert_eq!(ran.code, Some(1), "{}", ran.stdout);
    assert!(ran.stdout.contains("FAIL  user namespaces"), "{}", ran.stdout);
}

#[test]
fn a_damaged_kernel_is_noticed_before_it_runs() {
    let cache = tempfile::tempdir().unwrap();
    let ours = cache.path().join("bathysphere");
    copy_cache(&ours);
    // Every kernel in the cache, whichever recipe it is of.
    for entry in fs::read_dir(ours.join(format!("kernel-{}", engine().name()))).unwrap().flatten() {
        let kernel = entry.path().join("linux");
        let Ok(mut bytes) = fs::read(&kernel) else { continue };
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::set_permissions(&kernel, fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(&kernel, bytes).unwrap();
    }

    // Building it again takes minutes and is tested elsewhere: this run is ended as soon as it begins to.
    let mut child = Command::new(bathy())
        .args(["run", "--", "true"])
        .env("XDG_CACHE_HOME", cache.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .unwrap();
    let stderr = std::io::BufReader::new(child.stderr.take().unwrap());
    let mut lines = std::io::BufRead::lines(stderr);
    let started = Instant::now();
    let mut message = Vec::new();
    let noticed = lines
        .by_ref()
        .map_while(Result::ok)
        .take_while(|_| started.elapsed() < patience(Duration::from_secs(20)))
        .inspect(|line| message.push(line.clone()))
        .any(|line| line.contains("kernel is damaged: building it again"));
    let group = rustix::process::Pid::from_child(&child);
    let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    child.wait().unwrap();
    assert!(noticed, "the damage was not noticed: {message:?}");
}
