//! The host's side of all calls: the pool of managers and connections, and the sandboxes that this server has made.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bathy_manager::pool::Pool;
use bathy_manager::store::StoreError;
use bathy_manager::{Manager, ManagerError, Sandboxed};

use crate::error::ToolError;

/// The name of this program in the audit log.
pub const PROGRAM: &str = "bathy mcp";
/// The most names of deleted sandboxes that are remembered.
const MAX_DELETED: usize = 4096;

pub struct Host {
    pub pool: Pool,
    made: Mutex<BTreeSet<String>>,
    deleted: Mutex<VecDeque<String>>,
}

impl Default for Host {
    fn default() -> Self {
        let pool = Pool::new(|| Manager::open_for_agents(PROGRAM));
        Self { pool, made: Mutex::default(), deleted: Mutex::default() }
    }
}

impl Host {
    /// Remembers a sandbox that this server has made.
    pub fn made(&self, sandbox: &Sandboxed) {
        lock(&self.made).insert(sandbox.record.id.clone());
    }

    /// Remembers the names of a sandbox that a call has deleted.
    pub fn deleted(&self, sandbox: &Sandboxed) {
        let mut deleted = lock(&self.deleted);
        deleted.extend(sandbox.record.name.clone());
        deleted.push_back(sandbox.record.id.clone());
        while deleted.len() > MAX_DELETED {
            deleted.pop_front();
        }
    }

    /// Whether a call has deleted a sandbox of this name or id.
    pub fn has_deleted(&self, wanted: &str) -> bool {
        lock(&self.deleted).iter().any(|name| name == wanted)
    }

    /// Removes every sandbox that this server has made. Returns failures, in sentences.
    pub fn remove_made(&self) -> Vec<String> {
        let made = std::mem::take(&mut *lock(&self.made));
        self.pool.close_all();
        let mut failures = Vec::new();
        for id in made {
            let removed = self.pool.with(|manager| match manager.find(&id) {
                Ok(sandbox) => remove(manager, &sandbox),
                // It has ended and is removed already.
                Err(error) if error.is_unknown_name() => Ok(Vec::new()),
                Err(error) => Err(error.into()),
            });
            match removed {
                Ok(warnings) => failures.extend(warnings),
                Err(error) => failures.push(format!("The sandbox {id} is not removed: {}", error.message())),
            }
        }
        failures
    }
}

/// Removes a sandbox, whatever runs in it; its own monitor may be faster. Returns warnings, such as that the removal could
/// not be recorded.
pub fn remove(manager: &mut Manager, sandbox: &Sandboxed) -> Result<Vec<String>, ToolError> {
    match manager.remove(sandbox, true) {
        Err(_)
            if matches!(manager.find(&sandbox.record.id), Err(ManagerError::Store(StoreError::Name(_)))) => {}
        result => result?,
    }
    Ok(manager.take_warnings())
}

/// A sentence, followed by warnings.
pub fn with_warnings(mut sentence: String, warnings: &[String]) -> String {
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
