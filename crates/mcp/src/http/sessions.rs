//! Sessions of older clients: no more than there is room for, and the one that was not used for longest goes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use rmcp::transport::streamable_http_server::session::SessionId;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;

/// The sessions, and when each was used last.
#[derive(Debug)]
pub struct Sessions {
    most: usize,
    manager: Arc<LocalSessionManager>,
    used: Mutex<Used>,
}

#[derive(Debug, Default)]
struct Used {
    clock: u64,
    last: HashMap<SessionId, u64>,
}

impl Used {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }
}

impl Sessions {
    /// At most `most` of a manager's sessions.
    pub fn new(manager: Arc<LocalSessionManager>, most: usize) -> Self {
        Self { most, manager, used: Mutex::default() }
    }

    /// A session is used, if there is one of this name.
    pub fn touch(&self, id: &str) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let now = used.tick();
        if let Some(last) = used.last.get_mut(id) {
            *last = now;
        }
    }

    /// Ends the sessions that are too many.
    pub async fn trim(&self) {
        self.learn().await;
        let mut sessions = self.manager.sessions.write().await;
        while sessions.len() > self.most {
            let oldest = {
                let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
                // What is not known yet was made this moment.
                sessions.keys().min_by_key(|id| used.last.get(*id).copied().unwrap_or(u64::MAX)).cloned()
            };
            let Some(handle) = oldest.and_then(|id| sessions.remove(&id)) else { return };
            // It may be busy; nobody waits for that.
            tokio::spawn(async move { drop(handle.close().await) });
        }
    }

    /// Notes sessions that are new, whether or not their client heard of them, and forgets those that are gone.
    async fn learn(&self) {
        let sessions = self.manager.sessions.read().await;
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        used.last.retain(|id, _| sessions.contains_key(id));
        for id in sessions.keys() {
            if !used.last.contains_key(id) {
                let now = used.tick();
                used.last.insert(Arc::clone(id), now);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rmcp::transport::streamable_http_server::session::SessionManager;

    use super::*;

    #[tokio::test]
    async fn the_session_that_was_not_used_for_longest_goes() {
        let manager = Arc::new(LocalSessionManager::default());
        let sessions = Sessions::new(Arc::clone(&manager), 2);
        let mut made = Vec::new();
        for _ in 0..2 {
            made.push(manager.create_session().await.unwrap());
            sessions.trim().await;
        }
        sessions.touch(&made[0].0);
        sessions.touch("no such session");
        made.push(manager.create_session().await.unwrap());
        sessions.trim().await;
        let mut left = Vec::new();
        for (id, _) in &made {
            left.push(manager.has_session(id).await.unwrap());
        }
        assert_eq!(left, [true, false, true]);
    }
}
