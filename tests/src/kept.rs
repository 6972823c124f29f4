//! Persistent sandboxes: each test has a state folder of its own, and ways to inspect its sandboxes and their processes.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::{Engine, Ran, bathy, engine, finish, pace, patience};

/// A state folder for one test. Dropping it removes its sandboxes, also after a failed test.
#[derive(Debug)]
pub struct Home {
    /// Declared before the folder, so that it is unmounted first.
    small_disk: Option<SmallDisk>,
    folder: tempfile::TempDir,
}

impl Default for Home {
    fn default() -> Self {
        Self::new()
    }
}

impl Home {
    pub fn new() -> Self {
        Self {
            small_disk: None,
            folder: tempfile::tempdir().expect("a folder for the test's sandboxes can be made"),
        }
    }

    /// An empty folder on a disk of its own of this size. Needs root.
    pub fn small(mebibytes: u32) -> Self {
        let mut home = Self::new();
        home.small_disk = Some(SmallDisk::mount(home.path(), mebibytes));
        home
    }

    /// The value of `XDG_STATE_HOME`. Tests may put other files beside the state.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The file with which a test fills this home's disk.
    pub fn filler(&self) -> PathBuf {
        self.path().join("filler")
    }

    /// Fills this home's disk to its last byte, and returns the number of bytes written.
    #[track_caller]
    pub fn fill(&self) -> u64 {
        let mut options = fs::File::options();
        let mut file = options.create(true).append(true).open(self.filler()).expect("our own folder");
        for size in [1 << 20, 4096, 1] {
            while file.write(&vec![1; size]).is_ok_and(|count| count == size) {}
        }
        file.metadata().expect("our own file").len()
    }

    /// The product's folder in it.
    pub fn state(&self) -> PathBuf {
        self.path().join("bathysphere")
    }

    /// `bathy` with these arguments, in this home. Its working directory has no `bathysphere.toml`.
    pub fn command<A: AsRef<OsStr>>(&self, arguments: &[A]) -> Command {
        let mut command = Command::new(bathy());
        command.env("XDG_STATE_HOME", self.path()).env_remove("BATHYSPHERE_CONFIG").current_dir(self.path());
        command.args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs `bathy` with these arguments to its end; its standard input is empty.
    pub fn run(&self, arguments: &[&str]) -> Ran {
        finish(&mut self.command(arguments), b"")
    }

    /// Runs `bathy` with these arguments and this standard input to its end.
    pub fn run_with(&self, arguments: &[&str], input: &[u8]) -> Ran {
        finish(&mut self.command(arguments), input)
    }

    /// Runs `bathy` with these arguments, which has to succeed, and returns its output.
    #[track_caller]
    pub fn ok(&self, arguments: &[&str]) -> String {
        let ran = self.run(arguments);
        assert_eq!(ran.code, Some(0), "bathy {arguments:?}: {ran:?}");
        ran.stdout
    }

    /// Runs `bathy` with these arguments, which has to fail with this exit code, and returns its standard error.
    #[track_caller]
    pub fn fails(&self, arguments: &[&str], code: i32) -> String {
        let ran = self.run(arguments);
        assert_eq!(ran.code, Some(code), "bathy {arguments:?}: {ran:?}");
        ran.stderr
    }

    /// Runs `bathy` with these arguments, which has to succeed, and parses its output as JSON.
    #[track_caller]
    pub fn json(&self, arguments: &[&str]) -> Value {
        let text = self.ok(arguments);
        serde_json::from_str(&text).unwrap_or_else(|error| unreadable(arguments, &text, &error))
    }

    /// Creates a sandbox of this name and returns its id.
    #[track_caller]
    pub fn create(&self, name: &str, options: &[&str]) -> String {
        let arguments = [&["create", "--name", name], options].concat();
        self.ok(&arguments).trim().to_owned()
    }

    /// Creates a sandbox of this name, starts it and returns its id.
    #[track_caller]
    pub fn started(&self, name: &str, options: &[&str]) -> String {
        let id = self.create(name, options);
        self.ok(&["start", name]);
        id
    }

    /// Runs a command in a sandbox to its end.
    pub fn exec(&self, name: &str, command: &[&str]) -> Ran {
        self.run(&[&["exec", name, "--"], command].concat())
    }

    /// Runs a shell script in a sandbox as its ordinary user, which has to succeed, and returns its output.
    #[track_caller]
    pub fn sh(&self, name: &str, script: &str) -> String {
        self.ok(&["exec", name, "--", "sh", "-c", script])
    }

    /// Runs a shell script in a sandbox as root, which has to succeed, and returns its output.
    #[track_caller]
    pub fn root_sh(&self, name: &str, script: &str) -> String {
        self.ok(&["exec", "-u", "root", name, "--", "sh", "-c", script])
    }

    /// Starts a shell script as a job and returns the job's number, as it is printed.
    #[track_caller]
    pub fn job(&self, name: &str, script: &str) -> String {
        self.ok(&["exec", "-d", name, "--", "sh", "-c", script]).trim().to_owned()
    }

    /// The record of a sandbox, by `bathy inspect`.
    #[track_caller]
    pub fn inspect(&self, name: &str) -> Value {
        self.json(&["inspect", name])[0].take()
    }

    /// `created`, `running`, `paused`, `stopped` or `dead`.
    #[track_caller]
    pub fn status(&self, name: &str) -> String {
        self.inspect(name)["status"].as_str().unwrap_or_default().to_owned()
    }

    /// The recorded events of this sandbox, oldest first.
    #[track_caller]
    pub fn events(&self, name: &str) -> Vec<Value> {
        match self.json(&["events", "--json", "--sandbox", name]) {
            Value::Array(events) => events,
            _ => Vec::new(),
        }
    }

    /// The process id of a running sandbox's monitor.
    #[track_caller]
    pub fn monitor(&self, name: &str) -> u32 {
        pid_in(&self.inspect(name), "monitor_pid").expect("it runs, so it has a monitor")
    }

    /// The process id of a running sandbox's keeper.
    #[track_caller]
    pub fn keeper(&self, name: &str) -> u32 {
        pid_in(&self.inspect(name), "keeper_pid").expect("it runs, so it has a keeper")
    }

    /// The process id of a running sandbox's gateway, if it has one at present.
    pub fn gateway(&self, name: &str) -> Option<u32> {
        let is_gateway = |pid: &u32| {
            let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            command.starts_with(b"bathy-gateway")
        };
        children(self.monitor(name)).into_iter().filter(is_gateway).find(|pid| is_alive(*pid))
    }

    /// The process that runs the guest: the guest kernel's own, or the keeper, whose threads are the processors of a virtual
    /// machine.
    #[track_caller]
    pub fn guest(&self, name: &str) -> u32 {
        let keeper = self.keeper(name);
        let kernels = children(keeper);
        match engine() {
            Engine::Uml => *kernels.first().expect("a keeper's child is the guest kernel"),
            Engine::Kvm => {
                assert!(kernels.is_empty(), "a virtual machine is no process of its own: {kernels:?}");
                keeper
            }
        }
    }

    /// All processes of a running sandbox: monitor, keeper, and the guest's, if it has any.
    #[track_caller]
    pub fn processes_of(&self, name: &str) -> BTreeSet<u32> {
        let guest = self.guest(name);
        let keeper = self.keeper(name);
        [self.monitor(name), keeper, guest].into_iter().chain(descendants(keeper)).collect()
    }

    /// Other processes with an open file in this home: monitors, keepers and clients of its sandboxes.
    pub fn processes(&self) -> BTreeSet<u32> {
        let holds = |pid: &u32| {
            let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
            open.filter_map(|fd| fs::read_link(fd.path()).ok()).any(|target| target.starts_with(self.path()))
        };
        all_processes().filter(|pid| *pid != std::process::id()).filter(holds).collect()
    }

    /// All host processes of this home's sandboxes: those of [`Self::processes`] and their descendants.
    pub fn all_processes(&self) -> BTreeSet<u32> {
        let holders = self.processes();
        let started = holders.iter().flat_map(|pid| descendants(*pid)).collect();
        &holders | &started
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        // What a test fills a small disk with is in its way.
        let _ = fs::remove_file(self.filler());
        let everything = self.all_processes();
        let listed = self.run(&["ls", "-q"]);
        let ids: Vec<&str> = listed.stdout.split_whitespace().collect();
        if !ids.is_empty() {
            self.run(&[&["rm", "-f"], ids.as_slice()].concat());
        }
        // What a broken product leaves must not disturb the tests that come after.
        let left = |pid: &u32| is_alive(*pid);
        if !everything.iter().any(left) {
            return;
        }
        sleep(pace(Duration::from_millis(300)));
        let holders = self.processes();
        for pid in everything.into_iter().filter(left).filter(|pid| holders.contains(pid)) {
            signal(pid, Signal::KILL);
        }
    }
}

/// A file system of a fixed size. Dropping it unmounts it.
#[derive(Debug)]
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(place: &Path, mebibytes: u32) -> Self {
        let options = format!("size={mebibytes}M,mode=700");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(place).status();
        assert!(mounted.is_ok_and(|status| status.success()), "only root can mount a disk for its test");
        Self(place.to_owned())
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // At once for everybody else, and for what still holds a file of it when that ends.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn unreadable(arguments: &[&str], text: &str, error: &serde_json::Error) -> Value {
    unreachable!("bathy {arguments:?} printed no JSON ({error}): {text}")
}

fn pid_in(record: &Value, key: &str) -> Option<u32> {
    u32::try_from(record[key].as_u64()?).ok()
}

/// The ids of all visible processes.
pub fn all_processes() -> impl Iterator<Item = u32> {
    let listed = fs::read_dir("/proc").into_iter().flatten().flatten();
    listed.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Whether a process exists and is not a zombie. It is alive while one of its threads is still exiting, because that thread
/// holds its files and their locks.
pub fn is_alive(pid: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads
        .filter_map(|thread| fs::read_to_string(thread.path().join("stat")).ok())
        .any(|stat| stat.rsplit(')').next().is_some_and(|rest| !rest.trim_start().starts_with(['Z', 'X'])))
}

/// The children of a process, in the order of their ids.
pub fn children(parent: u32) -> Vec<u32> {
    let wanted = parent.to_string();
    let mut found: Vec<u32> = all_processes()
        .filter(|pid| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            status.lines().any(|line| line.strip_prefix("PPid:").is_some_and(|ppid| ppid.trim() == wanted))
        })
        .collect();
    found.sort_unstable();
    found
}

/// The descendants of a process.
pub fn descendants(parent: u32) -> BTreeSet<u32> {
    let mut found = BTreeSet::new();
    let mut next = vec![parent];
    while let Some(pid) = next.pop() {
        next.extend(children(pid).into_iter().filter(|child| found.insert(*child)));
    }
    found
}

/// Sends a signal. A process that has exited is ignored.
pub fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
        let _ = kill_process(pid, signal);
    }
}

/// The processor time of a process, in clock ticks of a hundredth of a second.
pub fn cpu_ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    // User and system time are the 14th and 15th field of all, the process's state is the 3rd.
    [11, 12].iter().filter_map(|index| fields.get(*index)?.parse::<u64>().ok()).sum()
}

/// Waits until a condition holds, and fails if it does not within `seconds`, scaled to the speed of this machine.
#[track_caller]
pub fn until(what: &str, seconds: u64, mut holds: impl FnMut() -> bool) {
    let limit = patience(Duration::from_secs(seconds));
    let deadline = Instant::now() + limit;
    // Looking takes a processor as well.
    let pause = crate::limit(Duration::from_millis(30));
    while !holds() {
        assert!(Instant::now() < deadline, "not within {limit:?}: {what}");
        sleep(pause);
    }
}
