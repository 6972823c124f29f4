//! One device in its place on the bus: its registers for the processors' threads, its work for the keeper's.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bathy_devices::{GuestRam, Outcome, VirtioDevice};
use rustix::event::epoll::{self, EventData, EventFlags};
use thiserror::Error;
use vmm_sys_util::eventfd::EventFd;

use crate::arch::layout;
use crate::bus::Registers;
use crate::machine::{Machine, MachineError};
use crate::mmio::{self, Effect, Interrupt, Mmio, MmioError};
use crate::sys;

/// A device could not be put into its place.
#[derive(Debug, Error)]
pub enum SlotError {
    /// More devices than there are places.
    #[error("There is no place for device {0}")]
    NoPlace(usize),
    /// Its interrupt or its notifications.
    #[error(transparent)]
    Machine(#[from] MachineError),
    #[error("The device cannot be served")]
    Mmio(#[from] MmioError),
    #[error("A descriptor cannot be made or watched")]
    Descriptor(#[source] io::Error),
}

/// A device in its place.
///
/// The guest's notifications arrive as events of `token + 1 + queue`, without a processor's thread taking part; what
/// else asks for work arrives as an event of `token`.
#[derive(Debug)]
pub struct Slot<D> {
    mmio: Mutex<Mmio<D>>,
    interrupt: Arc<Interrupt>,
    wake: EventFd,
    kicks: Vec<EventFd>,
    token: u64,
}

/// What the devices of a virtual machine have in common.
#[derive(Clone, Copy)]
pub struct Wiring<'a> {
    /// The virtual machine that they are part of.
    pub machine: &'a Machine,
    /// Its guest memory.
    pub ram: &'a Arc<GuestRam>,
    /// Reports the events of all devices.
    pub epoll: &'a OwnedFd,
}

impl<D: VirtioDevice> Slot<D> {
    /// Puts `device` into place number `index` of a machine, and watches for its events, whose tokens begin at `token`.
    ///
    /// # Errors
    /// When there is no such place, or the host refuses.
    pub fn new(device: D, index: usize, token: u64, wiring: &Wiring<'_>) -> Result<Self, SlotError> {
        let Wiring { machine, ram, epoll } = *wiring;
        let place = Some(index).filter(|index| *index < layout::MOST_DEVICES).map(u32::try_from);
        let Some(Ok(place)) = place else { return Err(SlotError::NoPlace(index)) };
        let interrupt = Arc::new(Interrupt::new().map_err(SlotError::Descriptor)?);
        machine.connect_line(interrupt.line(), layout::FIRST_LINE + place)?;
        let notify = layout::DEVICES + u64::from(place) * layout::DEVICE_SIZE + mmio::QUEUE_NOTIFY;
        let kicks = (0..device.queue_count())
            .filter_map(|queue| u32::try_from(queue).ok())
            .map(|queue| machine.notification(notify, queue))
            .collect::<Result<Vec<_>, _>>()?;
        let wake = sys::event().map_err(SlotError::Descriptor)?;
        for (event, token) in std::iter::once(&wake).chain(&kicks).zip(token..) {
            // By edges, so that nothing ever has to be read: every write is one.
            let flags = EventFlags::IN | EventFlags::ET;
            epoll::add(epoll, sys::borrow(event), EventData::new_u64(token), flags)
                .map_err(|error| SlotError::Descriptor(error.into()))?;
        }
        let mmio = Mutex::new(Mmio::new(device, Arc::clone(ram), Arc::clone(&interrupt))?);
        Ok(Self { mmio, interrupt, wake, kicks, token })
    }

    /// The device with its registers. While it is held, processors that want a register of it wait.
    pub fn lock(&self) -> MutexGuard<'_, Mmio<D>> {
        // A panic ends the whole process: no thread is left to find the lock poisoned.
        self.mmio.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An event that epoll reported.
    ///
    /// # Errors
    /// When the guest broke the device's rules, for the first time.
    pub fn on_event(&self, token: u64) -> Result<Outcome, MmioError> {
        let queue = token.checked_sub(self.token + 1).and_then(|queue| usize::try_from(queue).ok());
        match queue {
            Some(queue) => self.lock().on_kick(queue),
            None => self.lock().service(),
        }
    }
}

impl<D: VirtioDevice + Send> Registers for Slot<D> {
    fn read(&self, offset: u64, out: &mut [u8]) {
        match <&mut [u8; 4]>::try_from(&mut *out) {
            // Not under the lock: a guest that serves an interrupt does not wait for the device's next piece of work.
            Ok(value) if offset == mmio::INTERRUPT_STATUS => *value = self.interrupt.status().to_le_bytes(),
            _ => self.lock().read(offset, out),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let (mmio::INTERRUPT_ACKNOWLEDGE, Ok(value)) = (offset, <[u8; 4]>::try_from(data)) {
            return self.interrupt.acknowledge(u32::from_le_bytes(value));
        }
        let effect = self.lock().write(offset, data);
        let event = match effect {
            Effect::None => return,
            // Only if KVM did not take the notification itself.
            Effect::Kick(queue) => self.kicks.get(queue),
            Effect::Work => Some(&self.wake),
        };
        if let Some(event) = event {
            // A counter that is full has been noticed already.
            let _ = event.write(1);
        }
    }
}
