//! The driver's side of a queue, for tests: well-behaved by default, and as hostile as a test wants it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

use crate::bucket::Clock;
use crate::memory::GuestMemory;

const F_NEXT: u16 = 1;
const F_WRITE: u16 = 2;

/// A clock that moves only when a test moves it.
#[derive(Clone, Debug, Default)]
pub struct TestClock(Arc<Mutex<Duration>>);

impl TestClock {
    /// How far the clock has come.
    pub fn get(&self) -> Duration {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves the clock to `time`.
    pub fn set(&self, time: Duration) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = time;
    }

    /// The same clock, for a device.
    pub fn for_device(&self) -> Clock {
        let clock = self.clone();
        Box::new(move || clock.get())
    }
}

/// One buffer of a request.
#[derive(Clone, Copy, Debug)]
pub struct DriverBuffer {
    /// The guest-physical address at which it starts.
    pub address: u64,
    /// How long it claims to be.
    pub length: u32,
    /// The device may write it.
    pub writable: bool,
}

/// A buffer that the device reads.
pub fn readable(address: u64, length: u32) -> DriverBuffer {
    DriverBuffer { address, length, writable: false }
}

/// A buffer that the device writes.
pub fn writable(address: u64, length: u32) -> DriverBuffer {
    DriverBuffer { address, length, writable: true }
}

/// A queue as its driver sees it: descriptor table, available ring and used ring in guest memory, one after the other.
#[derive(Debug)]
pub struct Driver<'mem> {
    mem: &'mem GuestMemory,
    base: u64,
    size: u16,
    next_descriptor: u16,
    available: u16,
    seen: u16,
}

impl<'mem> Driver<'mem> {
    /// Lays an empty queue of `size` entries out from `base` on.
    pub fn new(mem: &'mem GuestMemory, base: u64, size: u16) -> Self {
        let driver = Self { mem, base, size, next_descriptor: 0, available: 0, seen: 0 };
        let bytes =
            usize::try_from(driver.used_ring() - base).expect("a small queue") + 6 + 8 * usize::from(size);
        mem.write_slice(&vec![0; bytes], GuestAddress(base)).expect("the queue is inside guest memory");
        driver
    }

    /// The queue as the device of another process finds it, at the place where `queue` is: what a transport restores.
    pub fn restored_queue(&self, queue: &Queue) -> Queue {
        let mut restored = self.device_queue();
        restored.set_next_avail(queue.next_avail());
        restored.set_next_used(queue.next_used());
        restored.set_event_idx(queue.event_idx_enabled());
        restored
    }

    /// The same queue as a device sees it, ready to be used.
    pub fn device_queue(&self) -> Queue {
        let mut queue = Queue::new(self.size).expect("a power of two");
        queue.try_set_desc_table_address(GuestAddress(self.base)).expect("aligned");
        queue.try_set_avail_ring_address(GuestAddress(self.available_ring())).expect("aligned");
        queue.try_set_used_ring_address(GuestAddress(self.used_ring())).expect("aligned");
        queue.set_ready(true);
        queue
    }

    /// Where the descriptor table is.
    pub fn descriptor_table(&self) -> u64 {
        self.base
    }

    /// Where the available ring is.
    pub fn available_ring(&self) -> u64 {
        self.base + 16 * u64::from(self.size)
    }

    /// Where the used ring is.
    pub fn used_ring(&self) -> u64 {
        (self.available_ring() + 6 + 2 * u64::from(self.size)).next_multiple_of(4)
    }

    /// Writes one descriptor, valid or not.
    pub fn write_descriptor(&self, index: u16, part: DriverBuffer, flags: u16, next: u16) {
        let flags = flags | if part.writable { F_WRITE } else { 0 };
        let descriptor = Descriptor::new(part.address, part.length, flags, next);
        let address = GuestAddress(self.base + 16 * u64::from(index));
        self.mem.write_obj(descriptor, address).expect("inside the table");
    }

    /// Makes a chain of `parts` available; returns its head.
    pub fn push(&mut self, parts: &[DriverBuffer]) -> u16 {
        let head = self.next_descriptor;
        for (position, part) in parts.iter().enumerate() {
            let index = self.next_descriptor;
            self.next_descriptor = (index + 1) % self.size;
            let flags = if position + 1 == parts.len() { 0 } else { F_NEXT };
            self.write_descriptor(index, *part, flags, self.next_descriptor);
        }
        self.publish(head);
        head
    }

    /// Puts a head into the available ring and moves its index.
    pub fn publish(&mut self, head: u16) {
        let slot = self.available_ring() + 4 + 2 * u64::from(self.available % self.size);
        self.mem.write_obj(head.to_le(), GuestAddress(slot)).expect("inside the ring");
        self.available = self.available.wrapping_add(1);
        self.set_available(self.available);
    }

    /// Sets the available ring's index, whatever is in the ring.
    pub fn set_available(&mut self, index: u16) {
        self.available = index;
        self.mem.write_obj(index.to_le(), GuestAddress(self.available_ring() + 2)).expect("inside the ring");
    }

    /// Sets the index after which the driver wants an interrupt.
    pub fn set_used_event(&self, index: u16) {
        let address = self.available_ring() + 4 + 2 * u64::from(self.size);
        self.mem.write_obj(index.to_le(), GuestAddress(address)).expect("inside the ring");
    }

    /// How many chains were made available in all.
    pub fn available_index(&self) -> u16 {
        self.available
    }

    /// How many chains the device has given back in all.
    pub fn used_index(&self) -> u16 {
        let index: u16 = self.mem.read_obj(GuestAddress(self.used_ring() + 2)).expect("inside the ring");
        u16::from_le(index)
    }

    /// The chains that the device gave back since the last call: their heads and how much was written to them.
    pub fn take_used(&mut self) -> Vec<(u32, u32)> {
        let mut found = Vec::new();
        while self.seen != self.used_index() {
            let slot = self.used_ring() + 4 + 8 * u64::from(self.seen % self.size);
            let [id, length]: [u32; 2] = self.mem.read_obj(GuestAddress(slot)).expect("inside the ring");
            found.push((u32::from_le(id), u32::from_le(length)));
            self.seen = self.seen.wrapping_add(1);
        }
        found
    }
}
