//! The host's side of every call: the pool of managers and connections, and what this server has made.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bathy_manager::pool::Pool;
use bathy_manager::store::StoreError;
use bathy_manager::{Manager, ManagerError, Sandboxed};

use crate::error::ToolError;

/// Who asks, for the audit log.
pub const PROGRAM: &str = "bathy mcp";
/// Everything that calls share about this machine.
pub struct Host {
    /// Managers and connections.
    pub pool: Pool,
    made: Mutex<BTreeSet<String>>,
}

impl Default for Host {
    fn default() -> Self {
        Self { pool: Pool::new(|| Manager::open_for_agents(PROGRAM)), made: Mutex::default() }
    }
}

impl Host {
    /// Remembers a sandbox that this server has made.
    pub fn made(&self, sandbox: &Sandboxed) {
        lock(&self.made).insert(sandbox.record.id.clone());
    }

    /// Removes every sandbox that this server has made; what went wrong, in sentences.
    pub fn remove_made(&self) -> Vec<String> {
        let made = std::mem::take(&mut *lock(&self.made));
        self.pool.close_all();
        let mut failures = Vec::new();
        for id in made {
            let removed = self.pool.with(|manager| match manager.find(&id) {
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
