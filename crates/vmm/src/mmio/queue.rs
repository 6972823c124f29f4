//! One queue: what the driver has written about it, and the queue that this becomes once all of it is checked.

use std::ops::Range;
use std::sync::Arc;

use bathy_devices::{GuestMemory, MAX_QUEUE_SIZE, Queue, QueueT, ServedQueue};
use serde::{Deserialize, Serialize};
use vm_memory::{GuestAddress, GuestMemoryBackend};

use super::interrupt::Interrupt;
use super::transport::MmioError;

/// A queue's state, as plain numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueState {
    /// Entries, as the driver wrote them.
    pub size: u32,
    /// Guest-physical address of the descriptor table, as the driver wrote it.
    pub descriptors: u64,
    /// Guest-physical address of the available ring, as the driver wrote it.
    pub available: u64,
    /// Guest-physical address of the used ring, as the driver wrote it.
    pub used: u64,
    /// The driver has declared the queue ready, and what it wrote was found right.
    pub ready: bool,
    /// The next available entry to be looked at.
    pub next_available: u16,
    /// The next used entry to be written.
    pub next_used: u16,
}

/// The three parts of a queue in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RingPart {
    Descriptors,
    Available,
    Used,
}

/// Which half of a number a register holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Half {
    Low,
    High,
}

impl Half {
    /// The half that a driver selects by this number, if there is one.
    pub(super) fn selected_by(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::Low),
            1 => Some(Self::High),
            _ => None,
        }
    }

    fn shift(self) -> u32 {
        match self {
            Self::Low => 0,
            Self::High => 32,
        }
    }

    /// This half of `whole`.
    pub(super) fn get(self, whole: u64) -> u32 {
        u32::try_from(whole >> self.shift() & u64::from(u32::MAX)).unwrap_or(0)
    }

    /// Replaces this half of `whole`.
    pub(super) fn put(self, whole: &mut u64, value: u32) {
        let mask = u64::from(u32::MAX) << self.shift();
        *whole = *whole & !mask | u64::from(value) << self.shift();
    }
}

#[derive(Debug)]
pub(super) struct MmioQueue {
    size: u32,
    descriptors: u64,
    available: u64,
    used: u64,
    /// Holds the checked numbers while it is ready, and nothing that counts otherwise.
    queue: Queue,
    /// The driver has started the device.
    started: bool,
    unfinished: bool,
    interrupt: Arc<Interrupt>,
}

impl MmioQueue {
    pub(super) fn new(interrupt: Arc<Interrupt>) -> Result<Self, MmioError> {
        Ok(Self {
            size: 0,
            descriptors: 0,
            available: 0,
            used: 0,
            queue: Queue::new(MAX_QUEUE_SIZE).map_err(MmioError::Queue)?,
            started: false,
            unfinished: false,
            interrupt,
        })
    }

    pub(super) fn state(&self) -> QueueState {
        QueueState {
            size: self.size,
            descriptors: self.descriptors,
            available: self.available,
            used: self.used,
            ready: self.queue.ready(),
            next_available: self.queue.next_avail(),
            next_used: self.queue.next_used(),
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        self.queue.ready()
    }

    pub(super) fn set_size(&mut self, size: u32) {
        if !self.is_ready() {
            self.size = size;
        }
    }

    pub(super) fn set_address(&mut self, part: RingPart, half: Half, value: u32) {
        if self.is_ready() {
            return;
        }
        let address = match part {
            RingPart::Descriptors => &mut self.descriptors,
            RingPart::Available => &mut self.available,
            RingPart::Used => &mut self.used,
        };
        half.put(address, value);
    }

    /// Makes the queue ready, if all that was written about it is right; otherwise it stays as it was.
    pub(super) fn make_ready(&mut self, mem: &GuestMemory, event_idx: bool) {
        if self.is_ready() {
            return;
        }
        let Some(mut queue) = self.checked(mem) else { return };
        queue.set_event_idx(event_idx);
        queue.set_ready(true);
        self.queue = queue;
    }

    pub(super) fn make_unready(&mut self) {
        self.queue.reset();
    }

    /// The queue that was described, starting from its first entry.
    fn checked(&self, mem: &GuestMemory) -> Option<Queue> {
        let entries = u16::try_from(self.size).ok()?;
        let mut queue = Queue::new(MAX_QUEUE_SIZE).ok()?;
        queue.try_set_size(entries).ok()?;
        queue.try_set_desc_table_address(GuestAddress(self.descriptors)).ok()?;
        queue.try_set_avail_ring_address(GuestAddress(self.available)).ok()?;
        queue.try_set_used_ring_address(GuestAddress(self.used)).ok()?;
        let descriptors = part_of(mem, self.descriptors, 16 * u64::from(entries))?;
        let available = part_of(mem, self.available, 6 + 2 * u64::from(entries))?;
        let used = part_of(mem, self.used, 6 + 8 * u64::from(entries))?;
        let apart = !overlap(&descriptors, &available)
            && !overlap(&descriptors, &used)
            && !overlap(&available, &used);
        apart.then_some(queue)
    }

    /// The driver has started the device: whatever it put into the queue before is there to be worked on.
    pub(super) fn start(&mut self) {
        self.started = true;
        self.unfinished = true;
    }

    /// The driver has given the device up: nothing of the queue is touched any more.
    pub(super) fn stop(&mut self) {
        self.started = false;
        self.unfinished = false;
    }

    pub(super) fn reset(&mut self) {
        self.stop();
        self.queue.reset();
        (self.size, self.descriptors, self.available, self.used) = (0, 0, 0, 0);
    }

    pub(super) fn is_running(&self) -> bool {
        self.started && self.is_ready()
    }
}

/// The bytes from `start` on, if they are all in guest memory. The queue's code takes an address of zero for one that
/// was never set, so nothing may be there.
fn part_of(mem: &GuestMemory, start: u64, bytes: u64) -> Option<Range<u64>> {
    let end = start.checked_add(bytes)?;
    let inside = start != 0 && mem.check_range(GuestAddress(start), usize::try_from(bytes).ok()?);
    inside.then_some(start..end)
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl ServedQueue for MmioQueue {
    type Error = MmioError;

    fn running(&mut self) -> Option<&mut Queue> {
        self.is_running().then_some(&mut self.queue)
    }

    fn unfinished(&mut self) -> &mut bool {
        &mut self.unfinished
    }

    fn interrupt(&self, _number: usize) -> Result<(), MmioError> {
        self.interrupt.raise().map_err(MmioError::Interrupt)
    }
}
