//! Sockets that both sides have closed but whose peer has not acknowledged everything. The kernel would keep them
//! for minutes, with their memory and ports and outside any limit (attack R14). So they count as connections until
//! they are closed, and are reset after a timeout.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::host;

/// How long the peer may take to acknowledge.
const ACK_TIMEOUT: Duration = Duration::from_secs(30);
/// How often sockets are checked: epoll reports nothing.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long the kernel goes on after the sandbox has ended.
const LINGER_TIME: Duration = Duration::from_secs(10);

/// The sockets and their deadlines, oldest first.
#[derive(Debug, Default)]
pub struct ClosingSockets {
    sockets: VecDeque<(OwnedFd, Instant)>,
    next: Option<Instant>,
}

impl ClosingSockets {
    pub fn count(&self) -> usize {
        self.sockets.len()
    }

    pub fn add(&mut self, socket: OwnedFd, now: Instant) {
        self.sockets.push_back((socket, now + ACK_TIMEOUT));
        self.next.get_or_insert(now + POLL_INTERVAL);
    }

    /// When to check the sockets next, if there are any.
    pub fn due(&self) -> Option<Instant> {
        self.next
    }

    /// Drops the sockets that are closed, and resets those past their deadline.
    pub fn poll(&mut self, now: Instant) {
        if self.next.is_none_or(|next| now < next) {
            return;
        }
        self.sockets.retain(|(socket, until)| {
            if now >= *until {
                host::reset_on_close(socket);
                return false;
            }
            !host::is_closed(socket)
        });
        self.next = (!self.sockets.is_empty()).then(|| now + POLL_INTERVAL);
    }

    /// The sandbox has ended: what was sent may still be delivered.
    pub fn release(&mut self) {
        self.sockets.drain(..).for_each(|(socket, _)| host::linger(socket, LINGER_TIME));
    }
}
