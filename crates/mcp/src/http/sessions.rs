//! Sessions of older clients, of which the least recently used is evicted when there are too many.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use rmcp::transport::streamable_http_server::session::SessionId;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;

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
    /// Keeps at most `most` of a manager's sessions.
    pub fn new(manager: Arc<LocalSessionManager>, most: usize) -> Self {
        Self { most, manager, used: Mutex::default() }
    }

    /// Marks a session as just used, if it exists.
    pub fn touch(&self, id: &str) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let now = used.tick();
        if let Some(last) = used.last.get_mut(id) {
            *last = now;
        }
    }

    /// Evicts the sessions that are too many.
    pub async fn trim(&self) {
        self.refresh().await;
        let mut sessions = self.manager.sessions.write().await;
        while sessions.len() > self.most {
            let oldest = {
                let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
                // A session without an entry was made just now.
                sessions.keys().min_by_key(|id| used.last.get(*id).copied().unwrap_or(u64::MAX)).cloned()
            };
            let Some(handle) = oldest.and_then(|id| sessions.remove(&id)) else { return };
            // It may be busy, so it is closed in the background.
            tokio::spawn(async move { drop(handle.close().await) });
        }
    }

    /// Adds new sessions, whether or not their client received the id, and forgets those that are closed.
    async fn refresh(&self) {
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
    async fn the_least_recently_used_session_is_evicted() {
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
