//! Ending a sandbox whose monitor does not: it is stopped, stuck, or kept from answering.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::processes::Process;
use crate::store;

/// How long a monitor may take to record the end after its keeper was killed, and the kernel to end a killed process.
const PATIENCE: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(10);

/// Kills the processes that keep the sandbox in `folder` running. Whether it has ended. The keeper is first: a monitor that is
/// only slow then records how it ended.
pub(super) fn kill_processes(folder: &Path) -> io::Result<bool> {
    let Some(run) = store::life::running(folder)? else { return Ok(!store::alive(folder)?) };
    let life = File::options().read(true).open(folder.join(store::life::FILE_NAME))?.metadata()?;
    let Some(monitor) = open(run.monitor_pid)?.filter(|_| holds(run.monitor_pid, &life)) else {
        // Without its monitor the keeper ends by itself.
        return wait_for_end(folder);
    };
    let is_child = |pid| Process::read(pid).is_some_and(|process| process.parent == run.monitor_pid);
    if let Some(keeper) = open(run.keeper_pid)?.filter(|_| is_child(run.keeper_pid)) {
        kill(&keeper)?;
        if wait_for_end(folder)? {
            return Ok(true);
        }
    }
    kill(&monitor)?;
    wait_for_end(folder)
}

fn wait_for_end(folder: &Path) -> io::Result<bool> {
    let deadline = Instant::now() + PATIENCE;
    while store::alive(folder)? {
        if Instant::now() > deadline {
            return Ok(false);
        }
        sleep(PAUSE);
    }
    Ok(true)
}

/// A process by its number. What is then found out about the number holds for the process that this is, or it has ended.
fn open(pid: u32) -> io::Result<Option<OwnedFd>> {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Err(Errno::SRCH) => Ok(None),
        opened => Ok(Some(opened?)),
    }
}

fn holds(pid: u32, file: &fs::Metadata) -> bool {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    open.filter_map(|fd| fs::metadata(fd.path()).ok())
        .any(|held| (held.dev(), held.ino()) == (file.dev(), file.ino()))
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
    fn only_the_process_that_holds_the_lock_is_killed() {
        let folder = tempfile::tempdir().unwrap();
        let life = take_life(folder.path()).unwrap().unwrap();
        let writer = life.try_clone().unwrap();
        forget_ending(&writer).unwrap();
        let mut other = sleeper(Stdio::null());
        let mut monitor = sleeper(Stdio::from(life));
        // Numbers that belong to other processes by now.
        let stale = Run { started_ns: 1, monitor_pid: other.0.id(), keeper_pid: other.0.id() };
        write_running(&writer, stale).unwrap();
        drop(writer);
        assert!(!kill_processes(folder.path()).unwrap());
        assert!(other.0.try_wait().unwrap().is_none(), "a stranger was killed");
        let writer = File::options().write(true).open(folder.path().join("life")).unwrap();
        // The keeper's number is a stranger's still.
        write_running(&writer, Run { monitor_pid: monitor.0.id(), ..stale }).unwrap();
        drop(writer);
        std::thread::scope(|scope| {
            scope.spawn(|| monitor.0.wait().unwrap());
            assert!(kill_processes(folder.path()).unwrap());
        });
        assert!(other.0.try_wait().unwrap().is_none(), "a stranger was killed");
        assert!(kill_processes(folder.path()).unwrap(), "there is nothing to do");
    }
}
