//! The byte counts of open connections and flows, in memory that the owner can still read if this process dies: see
//! [`bathy_protocol::counts`].

#[cfg(test)]
pub(crate) mod tests;

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use bathy_protocol::counts::WORDS;
use bathy_protocol::network::NEVER_BEGAN;

use crate::sys;

#[derive(Debug, Default)]
pub struct Counts {
    /// Free slots, oldest first: the owner may not have received the final event of the others yet.
    free: VecDeque<Slot>,
}

/// The counts of one connection or flow.
#[derive(Debug)]
struct Slot(&'static [AtomicU64; WORDS]);

impl Counts {
    /// Maps the owner's memory.
    ///
    /// # Errors
    /// When it cannot be mapped, or is not sealed.
    pub fn map(file: OwnedFd) -> io::Result<Self> {
        let (slots, _) = sys::map_words(file)?.as_chunks::<WORDS>();
        Ok(Self { free: slots.iter().map(Slot).collect() })
    }

    /// Publishes a meter under the number that it has in events. Without a free slot its counts are only in events.
    pub fn begin(&mut self, number: u64, meter: &mut Meter) {
        if meter.slot.is_none() {
            meter.slot = self.free.pop_front();
        }
        if let Some(Slot([its_number, sent, received])) = &meter.slot {
            // This order holds whenever the process is killed: counts are never read under the wrong number.
            its_number.store(NEVER_BEGAN, Ordering::SeqCst);
            sent.store(meter.bytes.0, Ordering::SeqCst);
            received.store(meter.bytes.1, Ordering::SeqCst);
            its_number.store(number, Ordering::SeqCst);
        }
    }

    /// Frees the slot. Its contents stay until it is used again.
    pub fn end(&mut self, meter: Meter) {
        self.free.extend(meter.slot);
    }
}

/// Counts the bytes of a connection or flow. The store into shared memory costs nothing beside the system call that
/// moved the bytes.
#[derive(Debug, Default)]
pub struct Meter {
    bytes: (u64, u64),
    slot: Option<Slot>,
}

impl Meter {
    /// Bytes from the guest, and to it.
    pub fn bytes(&self) -> (u64, u64) {
        self.bytes
    }

    pub fn add_sent(&mut self, bytes: u64) {
        self.bytes.0 += bytes;
        if let Some(Slot([_, sent, _])) = &self.slot {
            sent.store(self.bytes.0, Ordering::Relaxed);
        }
    }

    pub fn add_received(&mut self, bytes: u64) {
        self.bytes.1 += bytes;
        if let Some(Slot([_, _, received])) = &self.slot {
            received.store(self.bytes.1, Ordering::Relaxed);
        }
    }
}
