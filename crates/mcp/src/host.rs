//! The host's side of every call: managers and connections that are used again, and what this server has made.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bathy_client::connection::Connection;
use bathy_manager::store::StoreError;
use bathy_manager::{Manager, ManagerError, Sandboxed};

use crate::error::ToolError;

/// Who asks, for the audit log.
pub const PROGRAM: &str = "bathy mcp";
/// How long a manager is used before the operator's settings are read anew.
const MANAGER_AGE: Duration = Duration::from_secs(10);
/// How many idle managers are kept.
const IDLE_MANAGERS: usize = 4;
/// How long a connection is kept for the next call. A sandbox with a connection is not idle, so not for long.
pub const CONNECTION_AGE: Duration = Duration::from_secs(2);

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
        // What others did with it is not this caller's to hear.
        drop(manager.what.take_warnings());
        let result = act(&mut manager.what);
        let mut managers = lock(&self.managers);
        if managers.len() < IDLE_MANAGERS && manager.what.may_be_kept() {
            managers.push(manager);
        }
        result
    }

    /// A connection to a sandbox: one that is open already and was not closed by the other side since, or a new one.
    pub fn line(&self, manager: &mut Manager, sandbox: &Sandboxed) -> Result<Line, ManagerError> {
        let kept = {
            let mut lines = lock(&self.lines);
            forget_old(&mut lines);
            let open = lines.get_mut(&run(sandbox)).map(std::mem::take);
            let mut open: Vec<_> =
                open.into_iter().flatten().filter(|line| line.what.connection.is_quiet()).collect();
            let kept = open.pop();
            if !open.is_empty() {
                lines.insert(run(sandbox), open);
            }
            kept
        };
        match kept {
            Some(line) => Ok(line.what),
            None => Ok(Line::new(manager.connect(sandbox)?)),
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
                Err(_) => Ok(Vec::new()),
            });
            match removed {
                Ok(warnings) => failures.extend(warnings),
                Err(error) => failures.push(format!("The sandbox {id} is not removed: {}", error.message())),
            }
        }
        failures
    }
}

/// Removes a sandbox, whatever runs in it. Its own monitor may be faster, which is as good. What there is to say about it, such
/// as that it could not be recorded.
pub fn remove(manager: &mut Manager, sandbox: &Sandboxed) -> Result<Vec<String>, ToolError> {
    match manager.remove(sandbox, true) {
        Err(_)
            if matches!(manager.find(&sandbox.record.id), Err(ManagerError::Store(StoreError::Name(_)))) => {}
        result => result?,
    }
    Ok(manager.take_warnings())
}

/// A sentence, with warnings behind it.
pub fn told(mut sentence: String, warnings: &[String]) -> String {
    for warning in warnings {
        sentence.push_str("\n[");
        sentence.push_str(&crate::text::clean(warning));
        sentence.push(']');
    }
    sentence
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
