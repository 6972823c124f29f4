//! What every device model offers to the transport that carries it.

use std::time::Duration;

use thiserror::Error;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::Queue;

use crate::block::BlockError;
use crate::console::ConsoleError;
use crate::entropy::EntropyError;
use crate::memory::GuestMemory;
use crate::net::NetError;
use crate::ring::RingError;

/// The largest queue any device accepts, which is also what the guest's driver asks for.
pub const MAX_QUEUE_SIZE: u16 = 256;

/// Features that every device offers. Indirect descriptors are left out on purpose: a chain then never holds more
/// descriptors than its queue, and there is one table less for a guest to lie about.
pub const TRANSPORT_FEATURES: u64 = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX;

/// The guest broke the rules of a device so badly that its queue was stopped.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// The queue itself, or a descriptor chain in it, is malformed.
    #[error("The guest's queue is malformed")]
    Ring(#[from] RingError),
    /// The block device was given a request it cannot even answer.
    #[error("The guest's block request cannot be answered")]
    Block(#[from] BlockError),
    /// The console's protocol was broken.
    #[error("The guest broke the console's protocol")]
    Console(#[from] ConsoleError),
    /// The entropy device cannot go on.
    #[error("The entropy device failed")]
    Entropy(#[from] EntropyError),
    /// The network device was given buffers it cannot use.
    #[error("The guest's buffers for the network cannot be used")]
    Net(#[from] NetError),
    /// The transport named a queue that the device does not have.
    #[error("There is no queue {0}")]
    NoSuchQueue(usize),
}

/// What one round of work on a queue leaves to be done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The guest wants an interrupt for what was completed.
    pub notify: bool,
    /// The queue waits for time to pass: work on it again after this long.
    pub retry_after: Option<Duration>,
    /// The round's budget ended before the queue was empty: work on it again soon.
    pub more: bool,
}

impl Outcome {
    /// Combines the outcomes of two rounds: whatever either of them asks for.
    #[must_use]
    pub fn merge(self, other: Self) -> Self {
        let retry_after = match (self.retry_after, other.retry_after) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        Self { notify: self.notify || other.notify, retry_after, more: self.more || other.more }
    }
}

/// A virtio device model, driven by a transport.
pub trait VirtioDevice {
    /// The device's number in the virtio specification.
    fn device_type(&self) -> u32;

    /// The feature bits offered to the driver, [`TRANSPORT_FEATURES`] included.
    fn features(&self) -> u64;

    /// Stores the features that the driver accepted. The transport has checked that it is a subset of what was offered.
    fn set_features(&mut self, acked: u64);

    /// How many queues the device has, each of at most [`MAX_QUEUE_SIZE`] entries.
    fn queue_count(&self) -> usize;

    /// Copies from the configuration space; bytes beyond its end read as zero.
    fn read_config(&self, offset: u32, out: &mut [u8]);

    /// Handles a write to the configuration space. No device here has a writable field.
    fn write_config(&mut self, _offset: u32, _data: &[u8]) {}

    /// Works on one queue, after a kick or after the host side made progress possible.
    ///
    /// At most one queue's worth of chains is handled per call. A queue that is not ready is left alone. An error
    /// stops the queue: it is no longer ready, so a second call reports nothing.
    ///
    /// # Errors
    /// When the queue or a request in it is malformed beyond what can be answered within the device's protocol.
    fn process(&mut self, index: usize, queue: &mut Queue, mem: &GuestMemory)
    -> Result<Outcome, DeviceError>;

    /// A queue other than the one just processed that now has work to do, if any. Asking takes the mark away.
    fn follow_up(&mut self) -> Option<usize> {
        None
    }

    /// Returns to the state before the driver found the device; what the host configured stays.
    fn reset(&mut self);
}

/// Copies `space` from `offset` on into `out`, and zeros where `space` has ended.
pub(crate) fn read_space(space: &[u8], offset: u32, out: &mut [u8]) {
    out.fill(0);
    let tail = usize::try_from(offset).ok().and_then(|start| space.get(start..)).unwrap_or_default();
    for (to, from) in out.iter_mut().zip(tail) {
        *to = *from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_outcome_asks_for_what_either_asks_for() {
        let idle = Outcome::default();
        let notify = Outcome { notify: true, ..idle };
        let more = Outcome { more: true, ..idle };
        assert_eq!(idle.merge(idle), idle);
        for asks in [notify, more] {
            assert_eq!(asks.merge(idle), asks);
            assert_eq!(idle.merge(asks), asks);
            assert_eq!(asks.merge(asks), asks);
        }
        assert_eq!(notify.merge(more), Outcome { notify: true, more: true, retry_after: None });
    }

    #[test]
    fn merged_outcome_waits_no_longer_than_either_may() {
        let after = |milliseconds| Outcome {
            retry_after: Some(Duration::from_millis(milliseconds)),
            ..Outcome::default()
        };
        assert_eq!(after(5).merge(after(7)), after(5));
        assert_eq!(after(7).merge(after(5)), after(5));
        assert_eq!(after(7).merge(Outcome::default()), after(7));
        assert_eq!(Outcome::default().merge(after(7)), after(7));
    }

    #[test]
    fn configuration_space_is_read_from_any_offset_and_is_zero_beyond() {
        let read = |offset| {
            let mut out = [0xff; 3];
            read_space(&[1, 2, 3, 4], offset, &mut out);
            out
        };
        assert_eq!(read(0), [1, 2, 3]);
        assert_eq!(read(1), [2, 3, 4]);
        assert_eq!(read(3), [4, 0, 0]);
        assert_eq!(read(4), [0, 0, 0]);
        assert_eq!(read(u32::MAX), [0, 0, 0]);
    }
}
