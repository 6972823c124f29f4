//! Ends a sandbox whose monitor is stopped, stuck or does not answer.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};
use std::{fs, io};

use bathy_jail::cgroup::Cgroup;
use bathy_runtime::folder::Folder;
use bathy_runtime::processes::HostProcesses;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::store::{self, Record};

/// How long the monitor may take to record the end after its keeper was killed, and the kernel to end a
/// killed process.
const TIMEOUT: Duration = Duration::from_secs(3);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Kills the processes of a sandbox. Returns whether the sandbox has ended.
///
/// The monitor's children are killed first, so that a monitor that is only slow records how the sandbox
/// ended. A pid alone does not identify the monitor or the keeper: pids are reused, and a keeper under the
/// guest's control can write other pids into the `life` file. So the process must also hold a file of the
/// sandbox's folder open.
pub(super) fn kill_processes(record: &Record, folder: &Folder) -> io::Result<bool> {
    let run = store::life::running(folder.path())?;
    let numbers = |in_life: Option<u32>, in_store: Option<u32>| {
        in_store.into_iter().chain(in_life).filter_map(|pid| open_holder(pid, folder).transpose()).next()
    };
    if let Some(monitor) = numbers(run.map(|run| run.monitor_pid), record.monitor_pid).transpose()? {
        for child in children(monitor.pid)? {
            kill(&child)?;
        }
        if !has_ended(&monitor.process)? {
            kill(&monitor.process)?;
        }
    }
    if wait_for_end(folder.path())? {
        return Ok(true);
    }
    // A stopped keeper does not notice that its monitor has exited.
    if let Some(keeper) = numbers(run.map(|run| run.keeper_pid), record.keeper_pid).transpose()? {
        kill(&keeper.process)?;
    }
    let _ = Cgroup::remove_stale(&record.id);
    wait_for_end(folder.path())
}

/// A process and its pid, which may since have been reused.
struct Holder {
    pid: u32,
    process: OwnedFd,
}

/// Opens the process with this pid, if it has a file of the sandbox's folder open, even a deleted one.
fn open_holder(pid: u32, folder: &Folder) -> io::Result<Option<Holder>> {
    let Some(process) = open(pid)? else { return Ok(None) };
    // Without a folder the sandbox has been removed.
    let Ok(folder) = folder.path().canonicalize() else { return Ok(None) };
    let held = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let holds = held.filter_map(|fd| fs::read_link(fd.path()).ok()).any(|path| path.starts_with(&folder));
    Ok(holds.then_some(Holder { pid, process }))
}

/// The children of a process that are still running.
fn children(parent: u32) -> io::Result<Vec<OwnedFd>> {
    let mut found = Vec::new();
    for child in HostProcesses::read()?.children_of(parent) {
        let process = open(child)?;
        // Checked again: with the pidfd open, the pid can no longer be reused unnoticed.
        let is_still = || HostProcesses::read().is_ok_and(|all| all.children_of(parent).contains(&child));
        found.extend(process.filter(|_| is_still()));
    }
    Ok(found)
}

fn wait_for_end(folder: &Path) -> io::Result<bool> {
    let deadline = Instant::now() + TIMEOUT;
    while store::alive(folder)? {
        if Instant::now() > deadline {
            return Ok(false);
        }
        sleep(POLL_INTERVAL);
    }
    Ok(true)
}

/// Waits until a process has ended, at most for the timeout of a monitor.
fn has_ended(process: &OwnedFd) -> io::Result<bool> {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    let limit = Timespec::try_from(TIMEOUT).map_err(io::Error::other)?;
    loop {
        match poll(&mut fds, Some(&limit)) {
            Err(Errno::INTR) => {}
            ready => return Ok(ready? > 0),
        }
    }
}

/// Opens a pidfd. What is found out about the pid afterwards is about this process, or the process has ended.
fn open(pid: u32) -> io::Result<Option<OwnedFd>> {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
    match pidfd_open(pid, PidfdFlags::empty()) {
        // `ENOENT` and `EINVAL`: the pid now belongs to a thread.
        Err(Errno::SRCH | Errno::NOENT | Errno::INVAL) => Ok(None),
        opened => Ok(Some(opened?)),
    }
}

fn kill(process: &OwnedFd) -> io::Result<()> {
    match pidfd_send_signal(process, Signal::KILL) {
        Err(Errno::SRCH) => Ok(()),
        sent => Ok(sent?),
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use bathy_spec::paths::Paths;

    use super::*;
    use crate::store::life::{Run, forget_ending, take_life, write_running};

    struct Sleeper(Child);

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn sleeper(stdin: Stdio) -> Sleeper {
        Sleeper(Command::new("sleep").arg("1000").stdin(stdin).spawn().unwrap())
    }

    #[test]
    fn only_a_process_that_holds_the_lock_is_killed() {
        let home = tempfile::tempdir().unwrap();
        let paths = Paths { state: home.path().join("state"), cache: home.path().join("cache") };
        let folder = Folder::of(&paths, "abcdefghijkl");
        folder.create().unwrap();
        let life = take_life(folder.path()).unwrap().unwrap();
        let writer = life.try_clone().unwrap();
        forget_ending(&writer).unwrap();
        let mut other = sleeper(Stdio::null());
        let mut monitor = sleeper(Stdio::from(life));
        // Pids that have since been reused.
        let stale = Run { started_ns: 1, monitor_pid: other.0.id(), keeper_pid: other.0.id() };
        write_running(&writer, stale).unwrap();
        drop(writer);
        let unknown = record(None);
        assert!(!kill_processes(&unknown, &folder).unwrap());
        assert!(other.0.try_wait().unwrap().is_none(), "another process was killed");
        assert!(monitor.0.try_wait().unwrap().is_none(), "its pid was unknown");
        // The pid in the store is right, even if the one in the lock file is not.
        let known = record(Some(monitor.0.id()));
        std::thread::scope(|scope| {
            scope.spawn(|| monitor.0.wait().unwrap());
            assert!(kill_processes(&known, &folder).unwrap());
        });
        assert!(other.0.try_wait().unwrap().is_none(), "another process was killed");
        assert!(kill_processes(&known, &folder).unwrap(), "there is nothing to do");
    }

    fn record(monitor_pid: Option<u32>) -> Record {
        let spec = bathy_spec::SandboxSpec::default();
        Record {
            id: "abcdefghijkl".to_owned(),
            name: None,
            spec,
            engine: None,
            engine_reason: None,
            created_ns: 1,
            state: store::State::Running,
            started_ns: Some(1),
            ended_ns: None,
            end_cause: None,
            exit_code: None,
            monitor_pid,
            keeper_pid: None,
            enforcement: None,
            idle_paused: false,
        }
    }
}
