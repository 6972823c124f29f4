//! Connections that both sides have ended while the other side has not acknowledged all that was sent. Their sockets would
//! stay in the host's kernel for minutes, with their memory and ports and within no limit (attack R14): so they count as
//! connections until they are closed, and not for long.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::host;

/// How long the other side may take.
const ACK_TIMEOUT: Duration = Duration::from_secs(30);
/// How often it is looked at: nothing tells.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long the host goes on when the sandbox has ended.
const LINGER_TIME: Duration = Duration::from_secs(10);

/// The sockets, those that ended first at the front.
#[derive(Debug, Default)]
pub struct ClosingSockets {
    sockets: VecDeque<(OwnedFd, Instant)>,
    next: Option<Instant>,
}

impl ClosingSockets {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.sockets.len()
    }

    /// One more.
    pub fn add(&mut self, socket: OwnedFd, now: Instant) {
        self.sockets.push_back((socket, now + ACK_TIMEOUT));
        self.next.get_or_insert(now + POLL_INTERVAL);
    }

    /// When to look at them again, if there are any.
    pub fn due(&self) -> Option<Instant> {
        self.next
    }

    /// Drops those that are closed, and breaks those off that take too long.
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

    /// The sandbox has ended: what was sent may still arrive.
    pub fn release(&mut self) {
        self.sockets.drain(..).for_each(|(socket, _)| host::linger(socket, LINGER_TIME));
    }
}
