//! Reuse of managers and connections, for programs with many calls such as the MCP server.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bathy_client::connection::Connection;
use bathy_client::interpreter::{self, CellEvent, CellOptions, CellOutcome, CellRequest, InterpreterError};

use crate::manager::{Manager, ManagerError, Sandboxed};

/// How long a manager is used before the operator's configuration is read again.
const MANAGER_AGE: Duration = Duration::from_secs(10);
/// The most idle managers in the pool.
const IDLE_MANAGERS: usize = 4;
/// How long a connection is pooled for the next call. A sandbox with a connection is not idle, so not for
/// long.
pub const CONNECTION_AGE: Duration = Duration::from_secs(2);

/// A connection to a sandbox and its next unused stream.
struct Pooled {
    connection: Connection,
    next: u32,
}

impl Pooled {
    fn new(connection: Connection) -> Self {
        Self { connection, next: 1 }
    }

    /// A stream that was not used before.
    fn stream(&mut self) -> u32 {
        let stream = self.next;
        self.next += 1;
        stream
    }

    /// Whether it has unused streams.
    fn is_useful(&self) -> bool {
        self.next < u32::MAX / 2
    }
}

struct Idle<T> {
    since: Instant,
    what: T,
}

/// The run of a sandbox that a connection belongs to.
type Run = (String, Option<u64>);

/// Shared by all calls of a program.
pub struct Pool {
    open: fn() -> Result<Manager, ManagerError>,
    managers: Mutex<Vec<Idle<Manager>>>,
    connections: Mutex<BTreeMap<Run, Vec<Idle<Pooled>>>>,
}

impl Pool {
    /// An empty pool whose managers are opened with `open`.
    pub fn new(open: fn() -> Result<Manager, ManagerError>) -> Self {
        Self { open, managers: Mutex::default(), connections: Mutex::default() }
    }

    /// Calls `act` with a manager that no other call uses.
    ///
    /// # Errors
    /// The manager cannot be opened, or `act` fails.
    pub fn with<T, E: From<ManagerError>>(
        &self,
        act: impl FnOnce(&mut Manager) -> Result<T, E>,
    ) -> Result<T, E> {
        let idle = {
            let mut managers = lock(&self.managers);
            managers.retain(|manager| manager.since.elapsed() < MANAGER_AGE);
            managers.pop()
        };
        let mut manager = match idle {
            Some(manager) => manager,
            None => Idle { since: Instant::now(), what: (self.open)()? },
        };
        // Warnings of other calls do not concern this one.
        drop(manager.what.take_warnings());
        let result = act(&mut manager.what);
        let mut managers = lock(&self.managers);
        if managers.len() < IDLE_MANAGERS && manager.what.is_reusable() {
            managers.push(manager);
        }
        result
    }

    /// Runs a cell in a running sandbox, on a pooled connection if there is one, and passes its output on as
    /// it arrives.
    ///
    /// # Errors
    /// The cell could not be run. If the connection broke, the cell may have run; it is not retried.
    pub fn run_code(
        &self,
        sandbox: &Sandboxed,
        request: &CellRequest,
        options: &CellOptions<'_>,
        on_event: &mut dyn FnMut(CellEvent),
    ) -> Result<CellOutcome, ManagerError> {
        let (mut pooled, cell) = self.with(|manager| {
            // Connected first: what is recorded as started is sent.
            let connection = self.connection(manager, sandbox)?;
            Ok::<_, ManagerError>((connection, manager.begin_cell(sandbox, request)?))
        })?;
        let stream = pooled.stream();
        let connection = &mut pooled.connection;
        let outcome = interpreter::run_cell(connection, stream, cell, options, on_event);
        // After a refusal the connection is still usable.
        if matches!(outcome, Ok(_) | Err(InterpreterError::Refused(_))) && pooled.is_useful() {
            let idle = Idle { since: Instant::now(), what: pooled };
            lock(&self.connections).entry(run(sandbox)).or_default().push(idle);
        }
        Ok(outcome?)
    }

    /// A pooled connection that the keeper has not closed, or a new one.
    fn connection(&self, manager: &mut Manager, sandbox: &Sandboxed) -> Result<Pooled, ManagerError> {
        let pooled = {
            let mut connections = lock(&self.connections);
            close_old(&mut connections);
            let open = connections.get_mut(&run(sandbox)).map(std::mem::take);
            let is_quiet = |idle: &Idle<Pooled>| idle.what.connection.is_quiet();
            let mut open: Vec<_> = open.into_iter().flatten().filter(is_quiet).collect();
            let pooled = open.pop();
            if !open.is_empty() {
                connections.insert(run(sandbox), open);
            }
            pooled
        };
        match pooled {
            Some(idle) => Ok(idle.what),
            None => Ok(Pooled::new(manager.connect(sandbox)?)),
        }
    }

    /// Closes connections that have been idle for too long.
    pub fn close_idle(&self) {
        close_old(&mut lock(&self.connections));
    }

    /// Closes all connections to a sandbox.
    pub fn hang_up(&self, sandbox: &Sandboxed) {
        lock(&self.connections).retain(|(id, _), _| *id != sandbox.record.id);
    }

    pub fn close_all(&self) {
        lock(&self.connections).clear();
    }
}

fn run(sandbox: &Sandboxed) -> Run {
    (sandbox.record.id.clone(), sandbox.record.started_ns)
}

fn close_old(connections: &mut BTreeMap<Run, Vec<Idle<Pooled>>>) {
    connections.retain(|_, idle| {
        idle.retain(|idle| idle.since.elapsed() < CONNECTION_AGE);
        !idle.is_empty()
    });
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
