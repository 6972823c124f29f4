//! The host's side of every call: managers and connections that are used again, and what this server has made.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bathy_sandbox::manager::ManagerError;
use bathy_sandbox::{Connection, Manager, Sandboxed, StoreError};
use rustix::process::{Pid, WaitId, WaitIdOptions, getpid, waitid};

use crate::error::ToolError;

/// Who asks, for the audit log.
pub const PROGRAM: &str = "bathy mcp";
/// How long a manager is used before the operator's settings are read anew.
const MANAGER_AGE: Duration = Duration::from_secs(10);
/// How many idle managers are kept.
const IDLE_MANAGERS: usize = 4;
/// How long a connection is kept for the next call. A sandbox with a connection is not idle, so not for long.
pub const CONNECTION_AGE: Duration = Duration::from_secs(2);
/// The program that monitors run, as the kernel names its processes.
const MONITOR: &str = "bathy";

/// A connection to a sandbox, and the next stream on it that is free.
pub struct Line {
    /// The connection.
    pub connection: Connection,
    next: u32,
}

impl Line {
    fn new(connection: Connection) -> Self {
        Self { connection, next: 1 }
    }

    /// A stream that was never used.
    pub fn stream(&mut self) -> u32 {
        let stream = self.next;
        self.next += 1;
        stream
    }

    /// Whether it has streams left.
    fn is_useful(&self) -> bool {
        self.next < u32::MAX / 2
    }
}

struct Idle<T> {
    since: Instant,
    what: T,
}

/// Which run of a sandbox a connection belongs to.
type Run = (String, Option<u64>);

/// Everything that calls share about this machine.
#[derive(Default)]
pub struct Host {
    managers: Mutex<Vec<Idle<Manager>>>,
    lines: Mutex<BTreeMap<Run, Vec<Idle<Line>>>>,
    made: Mutex<BTreeSet<String>>,
    /// Monitors that had ended when housekeeping last looked.
    ended: Mutex<BTreeSet<i32>>,
}

impl Host {
    /// Does something with a manager of one's own.
    pub fn with<T>(&self, act: impl FnOnce(&mut Manager) -> Result<T, ToolError>) -> Result<T, ToolError> {
        let kept = {
            let mut managers = lock(&self.managers);
            managers.retain(|manager| manager.since.elapsed() < MANAGER_AGE);
            managers.pop()
        };
        let mut manager = match kept {
            Some(manager) => manager,
            None => Idle { since: Instant::now(), what: open()? },
        };
        let result = act(&mut manager.what);
        let mut managers = lock(&self.managers);
        if managers.len() < IDLE_MANAGERS {
            managers.push(manager);
        }
        result
    }

    /// A connection to a sandbox: one that is open already, or a new one. The flag tells that it was.
    pub fn line(&self, manager: &mut Manager, sandbox: &Sandboxed) -> Result<(Line, bool), ManagerError> {
        let kept = {
            let mut lines = lock(&self.lines);
            forget_old(&mut lines);
            lines.get_mut(&run(sandbox)).and_then(Vec::pop)
        };
        match kept {
            Some(line) => Ok((line.what, true)),
            None => Ok((Line::new(manager.connect(sandbox)?), false)),
        }
    }

    /// Gives back a connection on which nothing is left over.
    pub fn keep(&self, sandbox: &Sandboxed, line: Line) {
        if line.is_useful() {
            let idle = Idle { since: Instant::now(), what: line };
            lock(&self.lines).entry(run(sandbox)).or_default().push(idle);
        }
    }

    /// Closes connections that nobody used for a while; whether any are left.
    pub fn forget_idle(&self) -> bool {
        let mut lines = lock(&self.lines);
        forget_old(&mut lines);
        !lines.is_empty()
    }

    /// Collects monitors that have ended, which otherwise waits until the next one is started. One that has only just
    /// ended is left for the next time: whoever has started it may be waiting for it.
    pub fn collect_monitors(&self) {
        let mut seen = lock(&self.ended);
        let ended = ended_monitors();
        for pid in ended.intersection(&seen).copied().filter_map(Pid::from_raw) {
            // If somebody was faster, it is collected as well.
            let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
        }
        *seen = ended;
    }

    /// Closes all connections to a sandbox.
    pub fn hang_up(&self, sandbox: &Sandboxed) {
        lock(&self.lines).retain(|(id, _), _| *id != sandbox.record.id);
    }

    /// Remembers a sandbox that this server has made.
    pub fn made(&self, sandbox: &Sandboxed) {
        lock(&self.made).insert(sandbox.record.id.clone());
    }

    /// Removes every sandbox that this server has made; what went wrong, in sentences.
    pub fn remove_made(&self) -> Vec<String> {
        let made = std::mem::take(&mut *lock(&self.made));
        lock(&self.lines).clear();
        let mut failures = Vec::new();
        for id in made {
            let removed = self.with(|manager| match manager.find(&id) {
                Ok(sandbox) => remove(manager, &sandbox),
                // It ended by itself.
                Err(_) => Ok(()),
            });
            if let Err(error) = removed {
                failures.push(format!("The sandbox {id} is not removed: {}", error.message()));
            }
        }
        failures
    }
}

/// Removes a sandbox, whatever runs in it. Its own monitor may be faster, which is as good.
pub fn remove(manager: &mut Manager, sandbox: &Sandboxed) -> Result<(), ToolError> {
    match manager.remove(sandbox, true) {
        Err(_)
            if matches!(manager.find(&sandbox.record.id), Err(ManagerError::Store(StoreError::Name(_)))) =>
        {
            Ok(())
        }
        result => Ok(result?),
    }
}

/// Children of this process that were monitors, have ended, and are not collected.
fn ended_monitors() -> BTreeSet<i32> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    // Mostly there is none, and this is much less work than to look for them.
    if !matches!(waitid(WaitId::All, options), Ok(Some(_))) {
        return BTreeSet::new();
    }
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| {
        fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| is_ended_monitor(&stat))
    })
    .collect()
}

/// Reads `pid (name) state parent ...`; the name may hold anything.
fn is_ended_monitor(stat: &str) -> bool {
    let Some((_, rest)) = stat.split_once('(') else { return false };
    let Some((name, rest)) = rest.rsplit_once(')') else { return false };
    let mut fields = rest.split_ascii_whitespace();
    let parent = getpid().as_raw_nonzero().get();
    name == MONITOR
        && fields.next() == Some("Z")
        && fields.next().and_then(|field| field.parse::<i32>().ok()) == Some(parent)
}

fn open() -> Result<Manager, ManagerError> {
    Manager::open_for_agents(PROGRAM)
}

fn run(sandbox: &Sandboxed) -> Run {
    (sandbox.record.id.clone(), sandbox.record.started_ns)
}

fn forget_old(lines: &mut BTreeMap<Run, Vec<Idle<Line>>>) {
    lines.retain(|_, idle| {
        idle.retain(|line| line.since.elapsed() < CONNECTION_AGE);
        !idle.is_empty()
    });
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::process::Command;
    use std::thread;

    use super::*;

    #[test]
    fn monitors_that_have_ended_are_collected_and_nothing_else_is() {
        let folder = tempfile::tempdir().unwrap();
        symlink("/bin/true", folder.path().join(MONITOR)).unwrap();
        let mut monitor = Command::new(folder.path().join(MONITOR)).spawn().unwrap();
        let mut other = Command::new("/bin/true").spawn().unwrap();
        let state = |pid: u32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            stat.rsplit_once(") ")?.1.chars().next()
        };
        let until = Instant::now() + Duration::from_secs(20);
        while (state(monitor.id()), state(other.id())) != (Some('Z'), Some('Z')) {
            assert!(Instant::now() < until);
            thread::sleep(Duration::from_millis(5));
        }
        let host = Host::default();
        host.collect_monitors();
        assert_eq!(state(monitor.id()), Some('Z'), "it has only just ended");
        host.collect_monitors();
        assert_eq!(state(monitor.id()), None);
        assert!(monitor.wait().is_err(), "nothing is left to wait for");
        assert!(other.wait().unwrap().success(), "somebody else waits for it");
    }
}
