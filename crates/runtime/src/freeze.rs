//! Pausing and resuming a guest.
//!
//! A control group is the best mechanism. Without one, signals are used: to the guest kernel first, so that
//! it starts nothing new, then to all its processes. This does not work with ptrace: a kernel that traces its
//! processes sees every signal to them, takes it for one of its own and panics. A kvm guest is not a process:
//! its keeper stops the virtual processors itself.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::thread;
use std::time::{Duration, Instant};

pub use bathy_jail::cgroup::Priority;
use bathy_jail::cgroup::{Cgroup, CgroupError, CgroupFreezer};
use bathy_protocol::launch::UmlMode;
use bathy_spec::Chosen;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use thiserror::Error;

use crate::processes::{HostProcess, HostProcesses};

/// How long the processes have to stop.
const DEADLINE: Duration = Duration::from_secs(5);
/// How long one attempt takes.
const ATTEMPT: Duration = Duration::from_millis(500);
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// How many consecutive passes have to find everything stopped: a process that is forked during one is seen
/// by the next.
const QUIET_PASSES: u32 = 2;

/// A guest could not be paused or resumed.
#[derive(Debug, Error)]
pub enum FreezeError {
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// Neither mechanism is available.
    #[error(
        "This sandbox cannot be paused: it needs a control group ({0}), because a guest in ptrace mode does not survive being stopped by signals. Run bathy as root, or use the seccomp mode"
    )]
    Impossible(String),
    #[error("Cannot list the sandbox's processes")]
    List(#[source] io::Error),
    /// There is no guest.
    #[error("The sandbox's guest has ended")]
    NoGuest,
    /// A process cannot be signalled.
    #[error("Cannot stop or continue process {0} of the sandbox")]
    Signal(u32, #[source] io::Error),
    /// A process did not stop.
    #[error("{0} of the sandbox's processes did not stop within {DEADLINE:?}")]
    Slow(usize),
}

/// The mechanism for pausing a guest.
#[derive(Debug)]
pub enum Freezer {
    /// By its control group.
    Cgroup {
        freezer: CgroupFreezer,
        /// The name for `describe`.
        mechanism: String,
    },
    /// By signals to all its processes.
    Signals {
        keeper: u32,
        /// Why a control group is not used.
        why: String,
    },
    /// By the keeper, which stops the virtual processors.
    Keeper,
    Impossible {
        /// Why a control group is not used.
        why: String,
    },
}

impl Freezer {
    /// The best mechanism for the guest of this keeper. The keeper has left the group's freezer.
    pub fn new(group: &Cgroup, keeper: u32, engine: Chosen, mode: UmlMode) -> Self {
        if engine == Chosen::Kvm {
            return Self::Keeper;
        }
        let mechanism = group.enforced().freezer.clone();
        let why = || mechanism.trim_start_matches("none: ").to_owned();
        match (group.freezer(), mode) {
            (Some(freezer), _) => Self::Cgroup { freezer: freezer.clone(), mechanism },
            (None, UmlMode::Seccomp) => Self::Signals { keeper, why: why() },
            (None, UmlMode::Ptrace) => Self::Impossible { why: why() },
        }
    }

    /// The mechanism: `cgroup v1`, `cgroup v2`, `signals: reason`, `keeper: how` or `none: reason`.
    pub fn describe(&self) -> String {
        match self {
            Self::Cgroup { mechanism, .. } => mechanism.clone(),
            Self::Signals { why, .. } => format!("signals: {why}"),
            Self::Keeper => "keeper: it stops the virtual processors".to_owned(),
            Self::Impossible { why } => format!("none: {why}"),
        }
    }

    /// Pauses the guest. If that fails, the guest keeps running.
    pub fn freeze(&self) -> Result<(), FreezeError> {
        match self {
            Self::Cgroup { freezer, .. } => Ok(freezer.freeze()?),
            Self::Keeper => Ok(()),
            Self::Impossible { why } => Err(FreezeError::Impossible(why.clone())),
            Self::Signals { keeper, .. } => stop(*keeper).inspect_err(|_| {
                // A partly stopped guest is resumed.
                let _ = resume(*keeper);
            }),
        }
    }

    pub fn thaw(&self) -> Result<(), FreezeError> {
        match self {
            Self::Cgroup { freezer, .. } => Ok(freezer.thaw()?),
            Self::Keeper => Ok(()),
            Self::Impossible { why } => Err(FreezeError::Impossible(why.clone())),
            Self::Signals { keeper, .. } => resume(*keeper),
        }
    }
}

fn guest_processes(keeper: u32) -> Result<Vec<HostProcess>, FreezeError> {
    let below = HostProcesses::read().map_err(FreezeError::List)?.below(keeper);
    if below.is_empty() { Err(FreezeError::NoGuest) } else { Ok(below) }
}

/// A pid namespace. A process never leaves its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Namespace {
    device: u64,
    inode: u64,
}

impl Namespace {
    /// The namespace of a process. None if it has ended, or belongs to a user whose processes we may not
    /// inspect, which the guest's do not.
    fn of(pid: u32) -> Result<Option<Self>, FreezeError> {
        match fs::metadata(format!("/proc/{pid}/ns/pid")) {
            Ok(found) => Ok(Some(Self { device: found.dev(), inode: found.ino() })),
            Err(error) => match error.raw_os_error() {
                Some(libc::ENOENT | libc::ESRCH | libc::EACCES | libc::EPERM) => Ok(None),
                _ => Err(FreezeError::Signal(pid, error)),
            },
        }
    }
}

/// The pid namespaces of a sandbox: the keeper is the first process of one, and its child, the guest kernel,
/// of a nested one with all processes of the guest. No host process is in either.
struct Namespaces(Vec<Namespace>);

impl Namespaces {
    fn of_keeper(keeper: u32) -> Result<Self, FreezeError> {
        let mut found = vec![Namespace::of(keeper)?.ok_or(FreezeError::NoGuest)?];
        // The keeper's pid is not reused before it is reaped, so a process with that parent is its child.
        let began =
            |pid| HostProcess::read(pid).filter(|process| process.parent == keeper).map(|now| now.began);
        for child in HostProcesses::read().map_err(FreezeError::List)?.children_of(keeper) {
            let before = began(child);
            let namespace = Namespace::of(child)?;
            if before.is_some() && before == began(child) {
                found.extend(namespace);
            }
        }
        Ok(Self(found))
    }

    /// Whether a process is in one of these namespaces.
    fn have(&self, pid: u32) -> Result<bool, FreezeError> {
        Ok(Namespace::of(pid)?.is_some_and(|namespace| self.0.contains(&namespace)))
    }
}

fn stop(keeper: u32) -> Result<(), FreezeError> {
    let namespaces = Namespaces::of_keeper(keeper)?;
    let begin = Instant::now();
    let mut attempt = begin;
    let mut quiet = 0;
    loop {
        let running: Vec<_> =
            guest_processes(keeper)?.into_iter().filter(|process| !process.is_stopped()).collect();
        quiet = if running.is_empty() { quiet + 1 } else { 0 };
        if quiet == QUIET_PASSES {
            return Ok(());
        }
        if begin.elapsed() > DEADLINE {
            return Err(FreezeError::Slow(running.len()));
        }
        // A process in vfork cannot stop before the child releases it: both are resumed for a moment.
        if attempt.elapsed() > ATTEMPT {
            resume(keeper)?;
            thread::sleep(POLL_INTERVAL);
            attempt = Instant::now();
            continue;
        }
        // The guest kernel is the first in the list.
        for process in &running {
            signal(process, &namespaces, Signal::STOP)?;
        }
        if !running.is_empty() {
            thread::sleep(POLL_INTERVAL);
        }
    }
}

fn resume(keeper: u32) -> Result<(), FreezeError> {
    let namespaces = Namespaces::of_keeper(keeper)?;
    // The guest kernel is resumed last, so that its processes are ready for whatever it expects of them.
    let processes = guest_processes(keeper)?;
    // One process that cannot be signalled does not prevent resuming the others.
    let results: Vec<_> =
        processes.iter().rev().map(|process| signal(process, &namespaces, Signal::CONT)).collect();
    results.into_iter().collect()
}

/// Sends a signal to exactly this process, if it is in one of these namespaces. A process that has exited is
/// skipped.
///
/// The process list is not a snapshot: a guest process can exit during the pass and its pid be reused by a
/// host process, whose children then look like the guest's (TOCTOU). So the process is verified again once a
/// pidfd is open, by its namespace and start time rather than by its parent.
fn signal(process: &HostProcess, namespaces: &Namespaces, signal: Signal) -> Result<(), FreezeError> {
    let Some(pid) = i32::try_from(process.pid).ok().and_then(Pid::from_raw) else { return Ok(()) };
    let failed = |error: rustix::io::Errno| FreezeError::Signal(process.pid, error.into());
    let has_exited = |error: &rustix::io::Errno| *error == rustix::io::Errno::SRCH;
    let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => pidfd,
        Err(error) if has_exited(&error) => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    // If the pid is reused from here on, the pidfd refers to the ended process, which takes no signal.
    if HostProcess::read(process.pid).is_none_or(|now| now.began != process.began)
        || !namespaces.have(process.pid)?
    {
        return Ok(());
    }
    match pidfd_send_signal(&pidfd, signal) {
        Err(error) if !has_exited(&error) => Err(failed(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    /// A stand-in for a keeper with a guest kernel and processes: each the first process of a pid namespace.
    struct Keeper {
        unshare: Child,
        pid: u32,
    }

    impl Keeper {
        fn new() -> Self {
            let guest = "while :; do :; done & sleep 100 & while :; do sleep 0.01; done";
            let mut unshare = Command::new("unshare");
            unshare.args(["--user", "--map-root-user", "--pid", "--fork", "--kill-child"]);
            // The outer process waits for its child, the first process of the nested namespace.
            unshare.args(["unshare", "--pid", "--fork", "--kill-child", "/bin/sh", "-c", guest]);
            let unshare = unshare.spawn().unwrap();
            let mut keeper = Self { unshare, pid: u32::MAX };
            let begin = Instant::now();
            while HostProcesses::read().unwrap().below(keeper.pid()).len() < 4 {
                assert!(begin.elapsed() < Duration::from_secs(60), "the processes do not start");
                let children = HostProcesses::read().unwrap().children_of(keeper.unshare.id());
                keeper.pid = children.first().copied().unwrap_or(u32::MAX);
                thread::sleep(POLL_INTERVAL);
            }
            keeper
        }

        fn pid(&self) -> u32 {
            self.pid
        }

        fn cpu_ns_within(&self, time: Duration) -> u64 {
            let used = || HostProcesses::read().unwrap().sandbox(self.pid(), None).cpu_ns;
            let before = used();
            thread::sleep(time);
            used() - before
        }
    }

    impl Drop for Keeper {
        fn drop(&mut self) {
            // Its child and that child's namespace are killed with it.
            let _ = self.unshare.kill();
            let _ = self.unshare.wait();
        }
    }

    #[test]
    fn signals_stop_and_resume_everything_below_the_keeper() {
        let keeper = Keeper::new();
        let freezer = Freezer::Signals { keeper: keeper.pid(), why: "a test".to_owned() };
        assert_eq!(freezer.describe(), "signals: a test");
        let moment = Duration::from_millis(300);
        for _ in 0..3 {
            freezer.freeze().unwrap();
            assert_eq!(keeper.cpu_ns_within(moment), 0);
            assert!(!HostProcess::read(keeper.pid()).unwrap().is_stopped(), "the keeper answers");
            freezer.thaw().unwrap();
            assert!(keeper.cpu_ns_within(moment) > 0);
        }
    }

    struct Stranger(Child);

    impl Stranger {
        fn is_stopped(&self) -> bool {
            HostProcess::read(self.0.id()).unwrap().is_stopped()
        }
    }

    impl Drop for Stranger {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn r10_a_process_of_the_host_that_only_looks_like_the_guests_is_not_stopped() {
        let keeper = Keeper::new();
        let stranger = Stranger(Command::new("sleep").arg("100").spawn().unwrap());
        // As listed in a pass during which our own pid was a guest process's pid at first, and ours when our
        // child was read.
        let us = std::process::id();
        let torn = HostProcesses::read().unwrap().with(|process| {
            if process.pid == us {
                process.parent = keeper.pid();
                process.began -= 1;
            }
        });
        let listed = torn.below(keeper.pid());
        assert!(listed.iter().any(|process| process.pid == stranger.0.id()), "the test shows nothing");
        let namespaces = Namespaces::of_keeper(keeper.pid()).unwrap();
        for process in &listed {
            signal(process, &namespaces, Signal::STOP).unwrap();
        }
        // The guest's process has stopped, so the signals have been sent.
        let begin = Instant::now();
        while guest_processes(keeper.pid()).unwrap().iter().all(|process| !process.is_stopped()) {
            assert!(begin.elapsed() < Duration::from_secs(60), "nothing stops");
            thread::sleep(POLL_INTERVAL);
        }
        assert!(!stranger.is_stopped(), "a process of the host was stopped");
        drop(keeper);
        assert!(!stranger.is_stopped());
    }

    #[test]
    fn a_traced_guest_is_not_stopped_by_signals() {
        let why = "this machine has no control groups".to_owned();
        let freezer = Freezer::Impossible { why };
        let error = freezer.freeze().unwrap_err().to_string();
        assert!(error.contains("ptrace mode") && error.contains("no control groups"), "{error}");
        assert_eq!(freezer.describe(), "none: this machine has no control groups");
    }

    #[test]
    fn the_mechanism_follows_from_what_the_machine_offers() {
        let id = format!("test-mechanism-{}", std::process::id());
        let group = Cgroup::create(&id, &bathy_jail::CgroupLimits::default()).unwrap();
        for mode in [UmlMode::Seccomp, UmlMode::Ptrace] {
            let freezer = Freezer::new(&group, 1, Chosen::Uml, mode);
            match (group.freezer(), mode) {
                (Some(_), _) => assert_eq!(freezer.describe(), group.enforced().freezer),
                (None, UmlMode::Seccomp) => assert!(matches!(freezer, Freezer::Signals { .. })),
                (None, UmlMode::Ptrace) => assert!(matches!(freezer, Freezer::Impossible { .. })),
            }
            let freezer = Freezer::new(&group, 1, Chosen::Kvm, mode);
            assert!(matches!(freezer, Freezer::Keeper) && freezer.freeze().is_ok() && freezer.thaw().is_ok());
            assert_eq!(freezer.describe(), "keeper: it stops the virtual processors");
        }
    }

    #[test]
    fn an_ended_guest_is_an_error() {
        let freezer = Freezer::Signals { keeper: u32::MAX, why: String::new() };
        assert!(matches!(freezer.freeze(), Err(FreezeError::NoGuest)));
        assert!(matches!(freezer.thaw(), Err(FreezeError::NoGuest)));
    }
}
