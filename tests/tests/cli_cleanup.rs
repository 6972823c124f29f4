//! Whatever happens to a run, nothing of it is left.

#![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bathy_tests::{Engine, at_once, bathy, engine, patience, promptly};
use rustix::process::{Pid, Signal, kill_process};

/// A home of its own for a test's sandboxes, so that its traces can be distinguished from those of other tests.
struct Home {
    folder: tempfile::TempDir,
}

impl Home {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn state(&self) -> PathBuf {
        self.folder.path().join("bathysphere")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(bathy());
        command.env("XDG_STATE_HOME", self.folder.path()).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Processes that hold a file of this home open: its keepers hold their disk and their slot.
    fn processes(&self) -> BTreeSet<u32> {
        let holds = |pid: &u32| {
            let fds = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
            fds.filter_map(|fd| fs::read_link(fd.path()).ok())
                .any(|target| target.starts_with(self.folder.path()))
        };
        all_processes().filter(holds).collect()
    }

    #[track_caller]
    fn assert_clean(&self, guests: &BTreeSet<u32>) {
        let deadline = Instant::now() + patience(Duration::from_secs(3));
        loop {
            let left: BTreeSet<_> = self
                .processes()
                .into_iter()
                .chain(guests.iter().copied().filter(|pid| is_alive(*pid)))
                .collect();
            if left.is_empty() {
                break;
            }
            assert!(Instant::now() < deadline, "processes are left: {left:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
        // What was found out about /dev/kvm stays, on purpose.
        let names: BTreeSet<_> = fs::read_dir(self.state())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .filter(|name| name != "kvm.json")
            .collect();
        assert_eq!(names, BTreeSet::from(["audit".into(), "ephemeral".into()]), "files are left");
        assert_eq!(fs::metadata(self.state().join("ephemeral")).unwrap().len(), 0);
    }
}

fn all_processes() -> impl Iterator<Item = u32> {
    fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with(['Z', 'X']))
}

fn children(parent: u32) -> Vec<u32> {
    all_processes()
        .filter(|pid| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            status
                .lines()
                .any(|line| line.strip_prefix("PPid:").is_some_and(|ppid| ppid.trim() == parent.to_string()))
        })
        .collect()
}

fn descendants(parent: u32) -> BTreeSet<u32> {
    let mut found = BTreeSet::new();
    let mut next = vec![parent];
    while let Some(pid) = next.pop() {
        for child in children(pid) {
            if found.insert(child) {
                next.push(child);
            }
        }
    }
    found
}

/// A running sandbox whose command has printed its first line.
struct Running {
    child: Child,
    keeper: u32,
    all: BTreeSet<u32>,
}

impl Running {
    fn start(home: &Home) -> Self {
        let mut child =
            home.command(&["run", "--", "sh", "-c", "echo up; sleep 600 & sleep 600"]).spawn().unwrap();
        let mut line = String::new();
        let stdout = child.stdout.as_mut().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line).unwrap();
        assert_eq!(line, "up\n");
        let keeper = children(child.id())[0];
        let all = descendants(child.id());
        match engine() {
            Engine::Uml => {
                assert!(all.len() >= 4, "keeper, gateway, guest kernel and a guest process: {all:?}")
            }
            Engine::Kvm => assert_eq!(all.len(), 2, "keeper and gateway: {all:?}"),
        }
        Self { child, keeper, all }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Only matters if the test failed before it ended the sandbox itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

#[test]
fn ctrl_c_and_termination_end_everything() {
    for (sent, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let home = Home::new();
        let mut running = Running::start(&home);
        let started = Instant::now();
        signal(running.child.id(), sent);
        assert_eq!(running.child.wait().unwrap().code(), Some(code));
        assert!(started.elapsed() < promptly(Duration::from_secs(1)), "{:?}", started.elapsed());
        home.assert_clean(&running.all);
    }
}

#[test]
fn j7_killing_bathy_leaves_nothing() {
    let home = Home::new();
    let mut running = Running::start(&home);
    signal(running.child.id(), Signal::KILL);
    assert_eq!(running.child.wait().unwrap().signal(), Some(9));
    home.assert_clean(&running.all);
}

#[test]
fn j7_killing_the_keeper_leaves_nothing_and_is_reported() {
    let home = Home::new();
    let mut running = Running::start(&home);
    signal(running.keeper, Signal::KILL);
    assert_eq!(running.child.wait().unwrap().code(), Some(125));
    home.assert_clean(&running.all);
}

#[test]
fn u2_killing_the_guest_kernel_ends_only_that_sandbox() {
    let (home, other_home) = (Home::new(), Home::new());
    let mut other = Running::start(&other_home);
    let mut running = Running::start(&home);
    let guest = children(running.keeper)[0];
    signal(guest, Signal::KILL);
    assert_eq!(running.child.wait().unwrap().code(), Some(125));
    home.assert_clean(&running.all);
    assert!(other.child.try_wait().unwrap().is_none(), "the neighbour ended too");
    signal(other.child.id(), Signal::TERM);
    other.child.wait().unwrap();
    other_home.assert_clean(&other.all);
}

#[test]
fn a_reader_that_goes_away_ends_the_run() {
    let home = Home::new();
    let mut child = home.command(&["run", "--", "yes"]).spawn().unwrap();
    let mut buffer = [0u8; 4096];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut buffer).unwrap();
    let all = descendants(child.id());
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(141));
    home.assert_clean(&all);
}

/// A mount namespace of its own: what other programs of the machine mount meanwhile is not seen in it.
struct Mounts {
    holder: Child,
}

impl Mounts {
    fn new() -> Self {
        let mut holder = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c", "echo ready; exec sleep 1000"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = [0; 6];
        let ready = std::io::Read::read_exact(holder.stdout.as_mut().unwrap(), &mut line);
        assert!(ready.is_ok(), "only root can make a mount namespace for its test");
        Self { holder }
    }

    /// The same command, in here.
    fn inside(&self, command: &Command) -> Command {
        let mut inside = Command::new("nsenter");
        inside.arg(format!("--mount=/proc/{}/ns/mnt", self.holder.id()));
        inside.arg(command.get_program()).args(command.get_args());
        inside.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        inside.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        inside
    }

    fn list(&self) -> String {
        fs::read_to_string(format!("/proc/{}/mountinfo", self.holder.id())).unwrap()
    }
}

impl Drop for Mounts {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

#[test]
fn ten_times_twenty_runs_at_once_leave_nothing() {
    let home = Home::new();
    let mounts = Mounts::new();
    let mounts_before = mounts.list();
    let sockets = || {
        fs::read_to_string("/proc/net/unix").unwrap().lines().filter(|line| line.contains("bathy")).count()
    };
    let sockets_before = sockets();
    for _ in 0..10 {
        let run = || mounts.inside(&home.command(&["run", "--", "echo", "done"])).spawn().unwrap();
        let batch: Vec<_> = (0..at_once(20)).map(|_| run()).collect();
        for child in batch {
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            assert_eq!(output.stdout, b"done\n");
        }
    }
    home.assert_clean(&BTreeSet::new());
    assert_eq!(mounts.list(), mounts_before, "mounts are left");
    assert_eq!(sockets(), sockets_before, "sockets are left");
}
