//! The byte counts of what is open, where the owner finds them should this process die: see [`bathy_protocol::counts`].

#[cfg(test)]
pub(crate) mod tests;

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use bathy_protocol::counts::WORDS;
use bathy_protocol::network::NEVER_BEGAN;

use crate::sys;

/// The slots that no connection or flow has now.
#[derive(Debug, Default)]
pub struct Counts {
    /// The one that was freed first is taken first: the others keep for longer what the owner may not have been sent yet.
    free: VecDeque<Slot>,
}

/// Where the counts of one connection or flow are.
#[derive(Debug)]
struct Slot(&'static [AtomicU64; WORDS]);

impl Counts {
    /// In this memory of the owner's.
    ///
    /// # Errors
    /// When it cannot be mapped, or not for good.
    pub fn map(file: OwnedFd) -> io::Result<Self> {
        let (slots, _) = sys::map_words(file)?.as_chunks::<WORDS>();
        Ok(Self { free: slots.iter().map(Slot).collect() })
    }

    /// Writes these counts from now on, as those of this number in events. If no slot is free they stay unknown.
    pub fn begin(&mut self, number: u64, meter: &mut Meter) {
        if meter.slot.is_none() {
            meter.slot = self.free.pop_front();
        }
        if let Some(Slot([its_number, sent, received])) = &meter.slot {
            // In this order, whenever the process is killed: the counts of one are never taken for those of another.
            its_number.store(NEVER_BEGAN, Ordering::SeqCst);
            sent.store(meter.bytes.0, Ordering::SeqCst);
            received.store(meter.bytes.1, Ordering::SeqCst);
            its_number.store(number, Ordering::SeqCst);
        }
    }

    /// What was counted has ended. Its slot keeps what is in it until it is needed.
    pub fn end(&mut self, meter: Meter) {
        self.free.extend(meter.slot);
    }
}

/// Counts the bytes of a connection or flow. A write to the owner's memory costs nothing beside the system call that moved them.
#[derive(Debug, Default)]
pub struct Meter {
    bytes: (u64, u64),
    slot: Option<Slot>,
}

impl Meter {
    /// Bytes from the guest and to it.
    pub fn bytes(&self) -> (u64, u64) {
        self.bytes
    }

    /// So many more came from the guest.
    pub fn add_sent(&mut self, bytes: u64) {
        self.bytes.0 += bytes;
        if let Some(Slot([_, sent, _])) = &self.slot {
            sent.store(self.bytes.0, Ordering::Relaxed);
        }
    }

    /// So many more went to the guest.
    pub fn add_received(&mut self, bytes: u64) {
        self.bytes.1 += bytes;
        if let Some(Slot([_, _, received])) = &self.slot {
            received.store(self.bytes.1, Ordering::Relaxed);
        }
    }
}
