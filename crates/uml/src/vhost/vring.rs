//! One queue of a device, as the driver sets it up step by step and then starts it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use bathy_devices::{GuestMemory, MAX_QUEUE_SIZE, Queue, QueueT};
use rustix::fs::{FileType, fstat};
use rustix::io::Errno;
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SendFlags, SocketType, send};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use vm_memory::GuestAddress;

use super::message::{Region, VringAddress};

/// What is wrong with how a queue is set up.
#[derive(Debug, Error)]
pub enum VringError {
    /// A queue that the device does not have.
    #[error("The device has no queue {0}")]
    NoSuchQueue(u32),
    /// Changing a queue while it runs.
    #[error("The guest changed a queue that is running")]
    Running,
    /// A size that is no power of two, or too large.
    #[error("The guest asked for a queue of {0} entries")]
    Entries(u32),
    /// An index that is no index.
    #[error("The guest asked to start its queue at index {0}")]
    Base(u32),
    /// Rings outside the memory table, or not aligned.
    #[error("The guest's rings are not aligned or not inside its memory table")]
    Address,
    /// Starting a queue before all of it is known.
    #[error("The guest started a queue that was not set up")]
    Incomplete,
    /// A kick descriptor that cannot be watched.
    #[error("The guest's kick descriptor cannot be watched")]
    Kick,
    /// A call descriptor that could block.
    #[error("The guest's call descriptor is not a UNIX stream socket")]
    Call,
    /// The used ring cannot be read.
    #[error("The guest's used ring cannot be read")]
    Used(#[source] virtio_queue::Error),
}

/// A queue's state, as plain numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VringState {
    pub entries: u16,
    /// Guest-physical address of the descriptor table.
    pub descriptors: u64,
    /// Guest-physical address of the available ring.
    pub available: u64,
    /// Guest-physical address of the used ring.
    pub used: u64,
    /// The next available entry to be looked at.
    pub next_available: u16,
    /// The next used entry to be written.
    pub next_used: u16,
    /// The driver has started the queue.
    pub running: bool,
}

#[derive(Debug)]
pub(super) struct Vring {
    queue: Queue,
    address: Option<VringAddress>,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    running: bool,
    /// The last round of work left something to do.
    pub(super) unfinished: bool,
}

impl Vring {
    pub(super) fn new() -> Result<Self, VringError> {
        let queue = Queue::new(MAX_QUEUE_SIZE).map_err(|_| VringError::Entries(MAX_QUEUE_SIZE.into()))?;
        Ok(Self { queue, address: None, kick: None, call: None, running: false, unfinished: false })
    }

    pub(super) fn is_running(&self) -> bool {
        self.running
    }

    pub(super) fn running_queue(&mut self) -> Option<&mut Queue> {
        self.running.then_some(&mut self.queue)
    }

    pub(super) fn state(&self) -> VringState {
        let queue = self.queue.state();
        VringState {
            entries: queue.size,
            descriptors: queue.desc_table,
            available: queue.avail_ring,
            used: queue.used_ring,
            next_available: queue.next_avail,
            next_used: queue.next_used,
            running: self.running,
        }
    }

    fn stopped(&mut self) -> Result<&mut Self, VringError> {
        if self.running { Err(VringError::Running) } else { Ok(self) }
    }

    pub(super) fn set_entries(&mut self, entries: u32) -> Result<(), VringError> {
        let vring = self.stopped()?;
        let size = u16::try_from(entries).map_err(|_| VringError::Entries(entries))?;
        vring.queue.try_set_size(size).map_err(|_| VringError::Entries(entries))
    }

    pub(super) fn set_base(&mut self, base: u32) -> Result<(), VringError> {
        let index = u16::try_from(base).map_err(|_| VringError::Base(base))?;
        self.stopped()?.queue.set_next_avail(index);
        Ok(())
    }

    pub(super) fn set_address(&mut self, address: VringAddress) -> Result<(), VringError> {
        self.stopped()?.address = Some(address);
        Ok(())
    }

    /// Forgets where the rings were, because the memory table they were in is replaced.
    pub(super) fn forget_address(&mut self) {
        self.address = None;
    }

    /// Takes the new kick descriptor; returns the one that it replaces.
    pub(super) fn set_kick(&mut self, fd: OwnedFd) -> Result<Option<OwnedFd>, VringError> {
        let vring = self.stopped()?;
        // Files and devices may have a `poll` that blocks on another process; an event counter has not.
        let kind =
            fstat(&fd).map(|stat| FileType::from_raw_mode(stat.st_mode)).map_err(|_| VringError::Kick)?;
        match kind {
            FileType::Unknown | FileType::Fifo | FileType::Socket => Ok(vring.kick.replace(fd)),
            _ => Err(VringError::Kick),
        }
    }

    pub(super) fn kick(&self) -> Option<&OwnedFd> {
        self.kick.as_ref()
    }

    pub(super) fn take_kick(&mut self) -> Option<OwnedFd> {
        self.kick.take()
    }

    pub(super) fn set_call(&mut self, fd: Option<OwnedFd>) -> Result<(), VringError> {
        // A driver may replace this one at any time: nothing of a running queue depends on it.
        if let Some(fd) = &fd {
            check_stream_socket(fd).map_err(|()| VringError::Call)?;
        }
        self.call = fd;
        Ok(())
    }

    /// Starts the queue, after checking all of it against the memory table.
    pub(super) fn start(
        &mut self,
        mem: &GuestMemory,
        table: Region,
        event_idx: bool,
    ) -> Result<(), VringError> {
        let vring = self.stopped()?;
        let (Some(address), Some(_)) = (vring.address, &vring.kick) else {
            return Err(VringError::Incomplete);
        };
        let entries = u64::from(vring.queue.size());
        let rings = [
            (address.descriptors, 16 * entries),
            (address.available, 6 + 2 * entries),
            (address.used, 6 + 8 * entries),
        ];
        if !rings.iter().all(|(start, bytes)| table.contains(*start, *bytes)) {
            return Err(VringError::Address);
        }
        let queue = &mut vring.queue;
        queue
            .try_set_desc_table_address(GuestAddress(address.descriptors))
            .and_then(|()| queue.try_set_avail_ring_address(GuestAddress(address.available)))
            .and_then(|()| queue.try_set_used_ring_address(GuestAddress(address.used)))
            .map_err(|_| VringError::Address)?;
        let used = queue.used_idx(mem, Ordering::Acquire).map_err(VringError::Used)?;
        queue.set_next_used(used.0);
        queue.set_event_idx(event_idx);
        queue.set_ready(true);
        vring.running = true;
        Ok(())
    }

    /// Stops the queue; what it was working on stays in the guest's rings.
    pub(super) fn stop(&mut self) {
        self.queue.set_ready(false);
        self.running = false;
        self.unfinished = false;
    }

    /// Interrupts the guest. A socket that is full already holds an interrupt, and one that is closed wants none.
    pub(super) fn call(&self) -> Result<(), VringError> {
        let Some(call) = &self.call else { return Ok(()) };
        match send(call, &1_u64.to_ne_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(_) | Err(Errno::AGAIN | Errno::INTR | Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => {
                Ok(())
            }
            Err(_) => Err(VringError::Call),
        }
    }
}

impl Region {
    /// Whether the bytes from `start` on are all in the region.
    fn contains(&self, start: u64, bytes: u64) -> bool {
        let (Some(end), Some(own_end)) = (start.checked_add(bytes), self.guest.checked_add(self.bytes))
        else {
            return false;
        };
        start >= self.guest && end <= own_end
    }
}

/// Makes sure that a descriptor is of the one kind that can be written to without blocking.
pub(super) fn check_stream_socket(fd: impl AsFd) -> Result<(), ()> {
    let fd = fd.as_fd();
    match (socket_domain(fd), socket_type(fd)) {
        (Ok(AddressFamily::UNIX), Ok(SocketType::STREAM)) => Ok(()),
        _ => Err(()),
    }
}
