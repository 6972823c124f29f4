//! Giving up from another thread.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tokio::sync::watch;

/// Cancels what it was given to. Copies cancel the same.
#[derive(Clone, Debug)]
pub struct Cancel(Arc<watch::Sender<bool>>);

impl Default for Cancel {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }
}

impl Cancel {
    pub fn cancel(&self) {
        self.0.send_replace(true);
    }

    pub fn is_cancelled(&self) -> bool {
        *self.0.borrow()
    }

    /// Lets time pass, on a thread that waits for what another process does. Returns whether to go on.
    pub(crate) fn pause(&self, time: Duration) -> bool {
        if !self.is_cancelled() {
            thread::sleep(time);
        }
        !self.is_cancelled()
    }

    pub(crate) async fn cancelled(&self) {
        // The sender lives as long as `self`, so waiting ends only with the value.
        let _ = self.0.subscribe().wait_for(|cancelled| *cancelled).await;
    }
}
