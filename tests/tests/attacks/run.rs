//! Running the product so that nothing of it outlives the test.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Read, Seek};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, OnceLock};
use std::thread::sleep;
use std::time::{Duration, Instant};

use bathy_tests::{Ran, bathy, patience};
use tempfile::TempPath;

use crate::process::{Process, descendants};

const TICK: Duration = Duration::from_millis(10);
const LOOK: Duration = Duration::from_millis(100);
const SET_UP: Duration = Duration::from_secs(20 * 60);

/// A program cannot be executed while a process, even one just being made, has it open for writing.
static FORK_OR_WRITE: Mutex<()> = Mutex::new(());

/// The attacker's program.
pub fn probe() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_jail-probe"))
}

/// A copy of the attacker's program that plays a role as guest kernel.
pub fn probe_as(role: &str) -> TempPath {
    let mut program = fs::read(probe()).expect("the probe is built");
    let marker = b"jail-probe's role is: ....";
    let places: Vec<_> =
        program.windows(marker.len()).enumerate().filter(|(_, window)| window == marker).collect();
    assert_eq!(places.len(), 1, "the probe has one place for its role");
    let start = places[0].0 + marker.len() - 4;
    program[start..start + role.len()].copy_from_slice(role.as_bytes());
    let _lock = FORK_OR_WRITE.lock();
    let path = tempfile::NamedTempFile::new().expect("there is room in /tmp").into_temp_path();
    fs::write(&path, program).expect("there is room in /tmp");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("our own file");
    path
}

/// `bathy run` with these arguments.
pub fn run_command(arguments: &[&str]) -> Command {
    let mut command = Command::new(bathy());
    command.arg("run").args(arguments);
    command
}

/// Lets the first run, which may have to build a kernel and an image, happen before anything is timed.
pub fn set_up() {
    static DONE: OnceLock<()> = OnceLock::new();
    DONE.get_or_init(|| {
        let ran = Run::of(Command::new(bathy()).args(["run", "--", "true"])).finish(SET_UP);
        assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    });
}

/// A `bathy` that runs, and what it has started. Dropping it ends all of it.
pub struct Run {
    child: Child,
    started: Instant,
    stdout: File,
    stderr: File,
    seen: BTreeSet<Process>,
}

impl Run {
    /// Starts `bathy run` with these arguments.
    pub fn start(arguments: &[&str]) -> Self {
        set_up();
        Self::of(&mut run_command(arguments))
    }

    /// Starts a prepared command.
    pub fn of(command: &mut Command) -> Self {
        Self::spawn(command, Stdio::null())
    }

    /// Starts a prepared command whose input has no end before [`Self::end_input`].
    pub fn with_input(command: &mut Command) -> Self {
        Self::spawn(command, Stdio::piped())
    }

    /// Ends the input.
    pub fn end_input(&mut self) {
        self.child.stdin = None;
    }

    fn spawn(command: &mut Command, stdin: Stdio) -> Self {
        let stdout = tempfile::tempfile().expect("there is room in /tmp");
        let stderr = tempfile::tempfile().expect("there is room in /tmp");
        let copy = |file: &File| Stdio::from(file.try_clone().expect("a descriptor can be had"));
        command.stdin(stdin).stdout(copy(&stdout)).stderr(copy(&stderr));
        let _lock = FORK_OR_WRITE.lock();
        let child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}; ./test builds it"));
        Self { child, started: Instant::now(), stdout, stderr, seen: BTreeSet::new() }
    }

    /// A guest whose kernel is the attacker's program in a role.
    pub fn role(role: &str, ready_timeout: &str) -> (Self, TempPath) {
        let program = probe_as(role);
        let path = program.to_str().expect("temporary paths are text");
        (Self::start(&["--kernel", path, "--ready-timeout", ready_timeout, "--", "true"]), program)
    }

    /// The number of `bathy` itself.
    pub fn number(&self) -> u32 {
        self.child.id()
    }

    /// All its processes now, by what they are: keeper, guest kernel, and the guest's processes.
    pub fn look(&mut self) -> Family {
        let tree = descendants(self.child.id());
        self.seen.extend(tree.keys());
        let children_of =
            |parent| tree.iter().filter(move |(_, its)| **its == parent).map(|(process, _)| *process);
        let is_gateway = |process: &Process| {
            fs::read(format!("/proc/{}/cmdline", process.number))
                .is_ok_and(|line| line.starts_with(b"bathy-gateway"))
        };
        let gateway = children_of(self.child.id()).find(is_gateway);
        let keeper = children_of(self.child.id()).find(|process| Some(*process) != gateway);
        let guest = keeper.and_then(|keeper| children_of(keeper.number).next());
        let stubs = guest.map(|guest| children_of(guest.number).collect()).unwrap_or_default();
        Family { keeper, gateway, guest, stubs }
    }

    /// What it has printed so far.
    pub fn printed(&mut self) -> String {
        read(&mut self.stdout)
    }

    /// Waits until a guest program runs and prints `word`; returns the sandbox's processes.
    pub fn when_printed(&mut self, word: &str) -> Family {
        let deadline = Instant::now() + patience(Duration::from_secs(20));
        while !read(&mut self.stdout).contains(word) {
            let status = self.child.try_wait().expect("it can be waited for");
            let errors = read(&mut self.stderr);
            assert!(
                status.is_none() && Instant::now() < deadline,
                "the guest did not start: {status:?} {errors}"
            );
            sleep(TICK);
        }
        self.look()
    }

    /// Waits for its end, and that nothing is left of it.
    pub fn finish(mut self, within: Duration) -> Ran {
        let status = self.wait(within).unwrap_or_else(|| panic!("bathy had not ended after {within:?}"));
        let took = self.started.elapsed();
        self.assert_nothing_left();
        Ran { code: status.code(), stdout: read(&mut self.stdout), stderr: read(&mut self.stderr), took }
    }

    /// Fails if anything of it lives; processes that are being torn down get a moment.
    pub fn assert_nothing_left(&self) {
        let deadline = Instant::now() + patience(Duration::from_secs(2));
        loop {
            let left: Vec<_> = self.seen.iter().filter(|process| process.is_alive()).collect();
            if left.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "left behind: {left:?}");
            sleep(TICK);
        }
    }

    /// Ends `bathy` itself with no chance to clean up.
    pub fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it can be waited for");
    }

    fn wait(&mut self, within: Duration) -> Option<ExitStatus> {
        let mut looked = None::<Instant>;
        while self.started.elapsed() < within {
            // Seldom: to look through a thousand processes takes a while.
            if looked.is_none_or(|at| at.elapsed() > LOOK) {
                self.look();
                looked = Some(Instant::now());
            }
            if let Some(status) = self.child.try_wait().expect("it can be waited for") {
                return Some(status);
            }
            sleep(TICK);
        }
        None
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        for process in self.seen.iter().filter(|process| process.is_alive()) {
            send(*process, rustix::process::Signal::KILL);
        }
    }
}

/// The processes of a sandbox.
#[derive(Debug)]
pub struct Family {
    pub keeper: Option<Process>,
    pub gateway: Option<Process>,
    pub guest: Option<Process>,
    pub stubs: Vec<Process>,
}

impl Family {
    /// Kilobytes of memory that they have besides the guest's, which is a file that they share.
    pub fn private_memory(&self) -> u64 {
        self.kilobytes("RssAnon:")
    }

    /// Kilobytes of the host's page tables for them.
    pub fn page_tables(&self) -> u64 {
        self.kilobytes("VmPTE:")
    }

    fn kilobytes(&self, name: &str) -> u64 {
        let all =
            [self.keeper, self.gateway, self.guest].into_iter().flatten().chain(self.stubs.iter().copied());
        let of = |process: Process| {
            // One that has just ended has none.
            let status = fs::read_to_string(format!("/proc/{}/status", process.number)).unwrap_or_default();
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
            line.trim().trim_end_matches(" kB").parse().unwrap_or(0)
        };
        all.map(of).sum()
    }
}

/// Sends a signal to a process of a sandbox.
pub fn send(process: Process, signal: rustix::process::Signal) {
    let number = i32::try_from(process.number).ok().and_then(rustix::process::Pid::from_raw);
    // It may have ended by itself.
    let _ = rustix::process::kill_process(number.expect("process numbers are positive"), signal);
}

/// Everything that a program has written.
fn read(file: &mut File) -> String {
    let mut bytes = Vec::new();
    // The writer shares the position: a copy of the descriptor would not help, so it is opened anew.
    let path = PathBuf::from(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(file)));
    let mut file = File::open(path).expect("our own descriptor");
    file.rewind().expect("a file");
    file.read_to_end(&mut bytes).expect("our own file");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Runs the attacker's program on the host.
pub fn probe_on_host(arguments: &[&str]) -> Ran {
    let run = Run::of(Command::new(probe()).args(arguments));
    let ran = run.finish(patience(Duration::from_secs(60)));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    ran
}

/// The numbers in the probe's last line: how many attempts held, and how many did not.
pub fn held_and_failed(text: &str) -> (u32, u32) {
    let line = text.lines().rev().find_map(|line| line.trim_start_matches([' ', '|']).strip_prefix("HELD "));
    let parse = |line: &str| {
        let (held, failed) = line.split_once(" FAILED ")?;
        Some((held.parse().ok()?, failed.parse().ok()?))
    };
    line.and_then(parse).unwrap_or_else(|| panic!("no result in:\n{text}"))
}
