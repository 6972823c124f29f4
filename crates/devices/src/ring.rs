//! Taking descriptor chains out of a queue that a hostile guest writes to, and giving them back.
//!
//! The guest can change any byte of its queue at any time. So each descriptor is copied once and only the copy is
//! checked and used; a chain is followed for at most as many steps as the queue has entries; and whatever is not a
//! well-formed chain inside guest memory is an error, never a shorter chain.

#[cfg(test)]
mod tests;

use std::sync::atomic::{Ordering, fence};

use thiserror::Error;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use crate::device::{DeviceError, MAX_QUEUE_SIZE, Outcome};
use crate::memory::GuestMemory;

/// What a guest did wrong with a queue.
#[derive(Debug, Error)]
pub enum RingError {
    /// The available ring's index, or the rings' place in memory, makes no sense.
    #[error("The guest's rings make no sense")]
    Queue(#[source] virtio_queue::Error),
    /// A chain starts or continues at a descriptor that does not exist.
    #[error("The guest named descriptor {0}, which its queue does not have")]
    NoSuchDescriptor(u16),
    /// A chain has more descriptors than the queue: it must contain a loop.
    #[error("The guest's descriptor chain does not end")]
    Endless,
    /// An indirect table, which was never offered.
    #[error("The guest used an indirect descriptor, which was not offered")]
    Indirect,
    /// A buffer that the device may only read follows one that it may write.
    #[error("The guest put a readable buffer after a writable one")]
    Order,
    /// A buffer that is not wholly inside guest memory.
    #[error("The guest's buffer of {length} bytes at {address:#x} is outside its memory")]
    Unmapped {
        /// Where the buffer starts.
        address: u64,
        /// Its length in bytes.
        length: u32,
    },
    /// The buffers of one chain are together longer than virtio allows.
    #[error("The guest's descriptor chain is longer than 4 GiB")]
    TooLong,
    /// A checked access to guest memory failed all the same.
    #[error("Guest memory cannot be accessed")]
    Memory(#[source] vm_memory::GuestMemoryError),
}

/// One buffer of a chain, known to lie inside guest memory and to be longer than zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Where it starts in guest-physical memory.
    pub address: GuestAddress,
    /// Its length in bytes.
    pub length: u32,
}

/// A copy of one descriptor chain. Devices keep one and refill it, so that no request allocates.
#[derive(Debug, Default)]
pub struct Chain {
    head: u16,
    readable: Vec<Buffer>,
    writable: Vec<Buffer>,
    readable_bytes: u32,
    writable_bytes: u32,
}

impl Chain {
    /// Makes an empty chain with room for the longest one.
    pub fn new() -> Self {
        let most = usize::from(MAX_QUEUE_SIZE);
        Self {
            head: 0,
            readable: Vec::with_capacity(most),
            writable: Vec::with_capacity(most),
            readable_bytes: 0,
            writable_bytes: 0,
        }
    }

    /// The buffers that the device reads.
    pub fn readable(&self) -> &[Buffer] {
        &self.readable
    }

    /// The buffers that the device writes.
    pub fn writable(&self) -> &[Buffer] {
        &self.writable
    }

    /// How many bytes there are to read.
    pub fn readable_bytes(&self) -> u32 {
        self.readable_bytes
    }

    /// How many bytes may be written.
    pub fn writable_bytes(&self) -> u32 {
        self.writable_bytes
    }

    /// This chain with `written` bytes in its writable buffers, to be handed back together with others.
    pub fn done(&self, written: u32) -> Done {
        Done { head: self.head, written }
    }

    /// Copies from the readable buffers, `offset` bytes into them; returns how many bytes there were.
    ///
    /// # Errors
    /// When guest memory cannot be accessed.
    pub fn read(&self, mem: &GuestMemory, offset: u32, out: &mut [u8]) -> Result<usize, RingError> {
        let mut done = 0;
        for piece in pieces(&self.readable, offset, length(out)) {
            let (start, end) = (done, done + piece.length as usize);
            let Some(target) = out.get_mut(start..end) else { break };
            mem.read_slice(target, piece.address).map_err(RingError::Memory)?;
            done = end;
        }
        Ok(done)
    }

    /// Copies into the writable buffers, `offset` bytes into them; returns how many bytes fitted.
    ///
    /// # Errors
    /// When guest memory cannot be accessed.
    pub fn write(&self, mem: &GuestMemory, offset: u32, data: &[u8]) -> Result<usize, RingError> {
        let mut done = 0;
        for piece in pieces(&self.writable, offset, length(data)) {
            let (start, end) = (done, done + piece.length as usize);
            let Some(source) = data.get(start..end) else { break };
            mem.write_slice(source, piece.address).map_err(RingError::Memory)?;
            done = end;
        }
        Ok(done)
    }

    /// Follows the chain that starts at `head`, copying each descriptor once.
    fn fill(&mut self, queue: &Queue, mem: &GuestMemory, head: u16) -> Result<(), RingError> {
        self.head = head;
        self.readable.clear();
        self.writable.clear();
        (self.readable_bytes, self.writable_bytes) = (0, 0);

        let (size, table) = (queue.size(), queue.desc_table());
        let mut index = head;
        for _ in 0..size {
            if index >= size {
                return Err(RingError::NoSuchDescriptor(index));
            }
            let address =
                table.checked_add(u64::from(index) * 16).ok_or(RingError::NoSuchDescriptor(index))?;
            let descriptor: Descriptor = mem.read_obj(GuestAddress(address)).map_err(RingError::Memory)?;
            self.add(mem, &descriptor)?;
            if !descriptor.has_next() {
                return Ok(());
            }
            index = descriptor.next();
        }
        Err(RingError::Endless)
    }

    fn add(&mut self, mem: &GuestMemory, descriptor: &Descriptor) -> Result<(), RingError> {
        if descriptor.refers_to_indirect_table() {
            return Err(RingError::Indirect);
        }
        let buffer = Buffer { address: descriptor.addr(), length: descriptor.len() };
        if buffer.length == 0 {
            return Ok(());
        }
        if !mem.check_range(buffer.address, buffer.length as usize) {
            return Err(RingError::Unmapped { address: buffer.address.0, length: buffer.length });
        }
        // Virtio limits the whole chain, not each direction.
        let total =
            self.readable_bytes.checked_add(self.writable_bytes).and_then(|n| n.checked_add(buffer.length));
        if total.is_none() {
            return Err(RingError::TooLong);
        }
        if descriptor.is_write_only() {
            self.writable.push(buffer);
            self.writable_bytes += buffer.length;
        } else if self.writable.is_empty() {
            self.readable.push(buffer);
            self.readable_bytes += buffer.length;
        } else {
            return Err(RingError::Order);
        }
        Ok(())
    }
}

/// A chain that the device is done with, and how much it wrote to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    head: u16,
    written: u32,
}

fn length(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX)
}

/// The parts of `buffers` that hold the bytes from `offset` on, `length` of them or as many as there are.
pub fn pieces(buffers: &[Buffer], offset: u32, length: u32) -> impl Iterator<Item = Buffer> + '_ {
    let (mut skip, mut left) = (offset, length);
    buffers.iter().filter_map(move |buffer| {
        let skipped = skip.min(buffer.length);
        skip -= skipped;
        let taken = left.min(buffer.length - skipped);
        left -= taken;
        // The sum stays inside the buffer, which was checked to lie inside guest memory.
        (taken > 0)
            .then(|| Buffer { address: GuestAddress(buffer.address.0 + u64::from(skipped)), length: taken })
    })
}

/// One round of work on a queue, of at most as many chains as the queue has entries.
pub struct Ring<'a> {
    queue: &'a mut Queue,
    mem: &'a GuestMemory,
    budget: u16,
    /// The used ring's index when the round began.
    used_before: u16,
    completed: bool,
    cut_short: bool,
}

impl Ring<'_> {
    /// The guest's memory, in which the queue lies.
    pub fn mem(&self) -> &GuestMemory {
        self.mem
    }

    /// How many entries the queue has, which is the most chains that the driver can have made available.
    pub fn size(&self) -> u16 {
        self.queue.size()
    }

    /// Takes the next chain out of the queue; `false` when there is none, or when the round's budget is used up.
    ///
    /// # Errors
    /// When the available ring or the chain is malformed.
    pub fn pop(&mut self, chain: &mut Chain) -> Result<bool, RingError> {
        if self.budget == 0 {
            self.cut_short = true;
            return Ok(false);
        }
        let Some(head) = self.next_head()? else { return Ok(false) };
        self.budget -= 1;
        chain.fill(self.queue, self.mem, head)?;
        Ok(true)
    }

    /// Puts the chain that was just taken back, to be taken again in a later round.
    pub fn put_back(&mut self) {
        self.put_back_last(1);
    }

    /// Puts the `count` chains that were taken last back, none of which was completed, to be taken again in the same
    /// order.
    pub fn put_back_last(&mut self, count: u16) {
        self.queue.set_next_avail(self.queue.next_avail().wrapping_sub(count));
    }

    /// Whether the round ended with chains possibly left.
    pub fn was_cut_short(&self) -> bool {
        self.cut_short
    }

    /// Ends the round early, with chains possibly left to be worked on.
    pub fn cut_short(&mut self) {
        self.cut_short = true;
    }

    /// Hands the chain back to the guest with `written` bytes in its writable buffers.
    ///
    /// # Errors
    /// When the used ring cannot be written.
    pub fn complete(&mut self, chain: &Chain, written: u32) -> Result<(), RingError> {
        self.completed = true;
        self.queue.add_used(self.mem, chain.head, written).map_err(RingError::Queue)
    }

    /// Hands several chains back at once: the guest sees either none or all of them.
    ///
    /// # Errors
    /// When the used ring cannot be written.
    pub fn complete_together(&mut self, chains: &[Done]) -> Result<(), RingError> {
        let Some((last, others)) = chains.split_last() else { return Ok(()) };
        let mut place = self.queue.next_used();
        for chain in others {
            let offset = 4 + 8 * u64::from(place % self.queue.size());
            let address =
                self.queue.used_ring().checked_add(offset).ok_or(virtio_queue::Error::AddressOverflow);
            let entry = [u32::from(chain.head).to_le(), chain.written.to_le()];
            self.mem
                .write_obj(entry, GuestAddress(address.map_err(RingError::Queue)?))
                .map_err(RingError::Memory)?;
            place = place.wrapping_add(1);
        }
        // Adding the last one moves the index that the guest looks at, over all of them.
        self.queue.set_next_used(place);
        self.completed = true;
        self.queue.add_used(self.mem, last.head, last.written).map_err(RingError::Queue)
    }

    fn next_head(&mut self) -> Result<Option<u16>, RingError> {
        if let Some(head) = self.peek_head()? {
            return Ok(Some(head));
        }
        // Ask for a kick, then look once more: the guest may have added a chain before it could see that we asked.
        // Looking only once keeps a guest that moves its index back and forth from holding us here.
        if self.queue.enable_notification(self.mem).map_err(RingError::Queue)? {
            return self.peek_head();
        }
        Ok(None)
    }

    fn peek_head(&mut self) -> Result<Option<u16>, RingError> {
        let mut heads = self.queue.iter(self.mem).map_err(RingError::Queue)?;
        Ok(heads.next().map(|chain| chain.head_index()))
    }

    /// Whether the driver wants an interrupt for what this round completed. The queue itself could decide this only if every
    /// chain had been completed by itself.
    fn interrupt_wanted(&self) -> Result<bool, RingError> {
        if !self.queue.event_idx_enabled() {
            return Ok(true);
        }
        // The driver writes the index it waits for, then looks at the used ring; here it is the other way round.
        fence(Ordering::SeqCst);
        let offset = 4 + 2 * u64::from(self.queue.size());
        let address = self.queue.avail_ring().checked_add(offset).ok_or(virtio_queue::Error::AddressOverflow);
        let address = GuestAddress(address.map_err(RingError::Queue)?);
        let event: u16 = self.mem.load(address, Ordering::Relaxed).map_err(RingError::Memory)?;
        let now = self.queue.next_used();
        let since_event = now.wrapping_sub(u16::from_le(event)).wrapping_sub(1);
        Ok(since_event < now.wrapping_sub(self.used_before))
    }

    fn finish(self) -> Result<Outcome, RingError> {
        let notify = self.completed && self.interrupt_wanted()?;
        Ok(Outcome { notify, retry_after: None, more: self.cut_short })
    }
}

/// Runs one round of `work` on a queue, and stops the queue for good if that fails.
///
/// # Errors
/// Whatever `work` reports, or a malformed queue.
pub fn run_round(
    queue: &mut Queue,
    mem: &GuestMemory,
    work: impl FnOnce(&mut Ring<'_>) -> Result<(), DeviceError>,
) -> Result<Outcome, DeviceError> {
    if !queue.ready() {
        return Ok(Outcome::default());
    }
    let (budget, used_before) = (queue.size(), queue.next_used());
    let mut ring = Ring { queue: &mut *queue, mem, budget, used_before, completed: false, cut_short: false };
    let outcome = work(&mut ring).and_then(|()| Ok(ring.finish()?));
    if outcome.is_err() {
        queue.set_ready(false);
    }
    outcome
}
