//! Credit-based flow control for one direction of one channel. Plain data, so that it can be saved with a
//! sandbox.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::INITIAL_WINDOW;

/// A violation of flow control by the peer.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum WindowError {
    /// The peer sent more than was granted.
    #[error("The peer sent {sent} bytes into a window of {left}")]
    Overrun {
        /// How many bytes were sent.
        sent: u32,
        /// How many bytes the window still allowed.
        left: u32,
    },
    /// The grants add up to more than the maximum window.
    #[error("The peer granted {granted} bytes on top of {open}: more than a whole window")]
    Overgrant {
        /// How many bytes were granted.
        granted: u32,
        /// How many bytes the window still had.
        open: u32,
    },
}

/// The sender's side: how much may still be sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendWindow {
    open: u32,
}

impl Default for SendWindow {
    fn default() -> Self {
        Self { open: INITIAL_WINDOW }
    }
}

impl SendWindow {
    /// A window with `open` bytes left.
    pub fn with(open: u32) -> Self {
        Self { open: open.min(INITIAL_WINDOW) }
    }

    /// How many bytes may be sent now.
    pub fn open(&self) -> usize {
        self.open as usize
    }

    /// Subtracts bytes that were sent, at most [`Self::open`].
    pub fn sent(&mut self, bytes: usize) {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        debug_assert!(bytes <= self.open);
        self.open = self.open.saturating_sub(bytes);
    }

    /// Adds bytes that the receiver granted.
    pub fn grant(&mut self, bytes: u32) -> Result<(), WindowError> {
        match self.open.checked_add(bytes) {
            Some(open) if open <= INITIAL_WINDOW => {
                self.open = open;
                Ok(())
            }
            _ => Err(WindowError::Overgrant { granted: bytes, open: self.open }),
        }
    }
}

/// The receiver's side: how much the peer may still send, and how much was consumed since the last grant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceiveWindow {
    left: u32,
    used: u32,
}

impl Default for ReceiveWindow {
    fn default() -> Self {
        Self { left: INITIAL_WINDOW, used: 0 }
    }
}

impl ReceiveWindow {
    /// Subtracts bytes that arrived.
    pub fn received(&mut self, bytes: usize) -> Result<(), WindowError> {
        let sent = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.left = self.left.checked_sub(sent).ok_or(WindowError::Overrun { sent, left: self.left })?;
        Ok(())
    }

    /// Records that bytes were consumed. Returns the number to grant, once there are enough to be worth a
    /// message.
    pub fn consumed(&mut self, bytes: usize) -> Option<u32> {
        self.used = self.used.saturating_add(u32::try_from(bytes).unwrap_or(u32::MAX));
        (self.used >= INITIAL_WINDOW / 2).then(|| {
            let grant = std::mem::take(&mut self.used);
            self.left = self.left.saturating_add(grant);
            grant
        })
    }

    /// Treats everything that arrived as consumed, so that a new reader starts with a whole window. Returns
    /// the number to grant.
    pub fn reopen(&mut self) -> Option<u32> {
        let grant = INITIAL_WINDOW.saturating_sub(self.left);
        *self = Self::default();
        (grant > 0).then_some(grant)
    }

    /// Passes on a grant that a later receiver made.
    pub fn granted(&mut self, bytes: u32) -> Result<(), WindowError> {
        match self.left.checked_add(bytes) {
            Some(left) if left <= INITIAL_WINDOW => {
                self.left = left;
                Ok(())
            }
            _ => Err(WindowError::Overgrant { granted: bytes, open: self.left }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sender_that_ignores_its_window_is_caught() {
        let mut window = ReceiveWindow::default();
        window.received(INITIAL_WINDOW as usize).unwrap();
        assert_eq!(window.received(1), Err(WindowError::Overrun { sent: 1, left: 0 }));
    }

    #[test]
    fn grants_reopen_exactly_what_was_consumed() {
        let (mut sender, mut receiver) = (SendWindow::default(), ReceiveWindow::default());
        let half = INITIAL_WINDOW / 2;
        sender.sent(sender.open());
        receiver.received(INITIAL_WINDOW as usize).unwrap();
        assert_eq!(receiver.consumed(half as usize - 1), None);
        assert_eq!(receiver.consumed(1), Some(half));
        sender.grant(half).unwrap();
        assert_eq!(sender.open(), half as usize);
        receiver.received(half as usize).unwrap();
        assert!(receiver.received(1).is_err());
    }

    #[test]
    fn a_new_reader_begins_with_a_whole_window() {
        let mut window = ReceiveWindow::default();
        assert_eq!(window.reopen(), None);
        window.received(100).unwrap();
        assert_eq!(window.consumed(40), None);
        assert_eq!(window.reopen(), Some(100));
        window.received(INITIAL_WINDOW as usize).unwrap();
    }

    #[test]
    fn a_receiver_that_grants_too_much_is_caught() {
        let mut sender = SendWindow::default();
        assert!(sender.grant(1).is_err());
        assert!(ReceiveWindow::default().granted(u32::MAX).is_err());
    }
}
