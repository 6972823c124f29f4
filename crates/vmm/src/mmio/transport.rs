//! One device behind its registers.

use std::io;
use std::sync::Arc;

use bathy_devices::{DeviceError, GuestRam, MAX_QUEUE_SIZE, Outcome, VirtioDevice};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::interrupt::Interrupt;
use super::queue::{Half, MmioQueue, QueueState, RingPart};
use super::registers::{LAYOUT, MAGIC, NO_SHARED_MEMORY, Register, Target, VENDOR};
use super::status::{Status, Step};

const F_VERSION_1: u64 = 1 << 32;
const F_EVENT_IDX: u64 = 1 << 29;

/// Why a device's service ended.
#[derive(Debug, Error)]
pub enum MmioError {
    #[error("The device stopped")]
    Device(#[from] DeviceError),
    /// The guest cannot be interrupted any more.
    #[error("Cannot interrupt the guest")]
    Interrupt(#[source] io::Error),
    /// The device has a queue that cannot be.
    #[error("Cannot make a queue of {MAX_QUEUE_SIZE} entries")]
    Queue(#[source] virtio_queue::Error),
}

/// What the owner of a device has to do after the guest wrote to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Effect {
    None,
    /// The driver wants this queue to be looked at: call [`Mmio::on_kick`].
    Kick(usize),
    /// The device was started, or put out of work: call [`Mmio::service`], and look at the device itself.
    Work,
}

/// A device's registers and queues, as plain numbers; the device's own state is separate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MmioState {
    pub status: u32,
    /// The features of the device that the driver accepts.
    pub driver_features: u64,
    /// Which half of the device's features the driver reads.
    pub device_features_select: u32,
    /// Which half of its own features the driver writes.
    pub driver_features_select: u32,
    /// Which queue the driver sets up.
    pub queue_select: u32,
    /// The reasons of the interrupt that the driver has not acknowledged.
    pub interrupt_status: u32,
    pub queues: Vec<QueueState>,
}

/// A device, served to one guest through registers.
///
/// The guest's processors call [`read`](Self::read) and [`write`](Self::write), which do none of the device's work. The
/// owner's event loop does it: with [`on_kick`](Self::on_kick) when the driver has notified a queue, and with
/// [`service`](Self::service) after it used [`device_mut`](Self::device_mut) and whenever an [`Outcome`] or an
/// [`Effect`] asked for work.
#[derive(Debug)]
pub struct Mmio<D> {
    device: D,
    ram: Arc<GuestRam>,
    interrupt: Arc<Interrupt>,
    status: Status,
    driver_features: u64,
    device_features_select: u32,
    driver_features_select: u32,
    queue_select: u32,
    queues: Vec<MmioQueue>,
    /// An error has ended the device.
    ended: bool,
}

impl<D: VirtioDevice> Mmio<D> {
    /// Serves `device`, which finds its queues in `ram` and raises `interrupt`.
    ///
    /// # Errors
    /// When the queues cannot be made.
    pub fn new(device: D, ram: Arc<GuestRam>, interrupt: Arc<Interrupt>) -> Result<Self, MmioError> {
        let queues = (0..device.queue_count())
            .map(|_| MmioQueue::new(Arc::clone(&interrupt)))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            device,
            ram,
            interrupt,
            status: Status::default(),
            driver_features: 0,
            device_features_select: 0,
            driver_features_select: 0,
            queue_select: 0,
            queues,
            ended: false,
        })
    }

    pub fn device(&self) -> &D {
        &self.device
    }

    /// The device, to be followed by [`service`](Self::service).
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Whether an error has ended the device.
    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// The registers' and queues' state.
    pub fn save(&self) -> MmioState {
        MmioState {
            status: self.status.bits(),
            driver_features: self.driver_features,
            device_features_select: self.device_features_select,
            driver_features_select: self.driver_features_select,
            queue_select: self.queue_select,
            interrupt_status: self.interrupt.status(),
            queues: self.queues.iter().map(MmioQueue::state).collect(),
        }
    }

    /// What a processor of the guest's reads. Where there is nothing, that is zeros.
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        out.fill(0);
        match Target::at(offset, out.len()) {
            Some(Target::Register(register)) => {
                out.copy_from_slice(&self.read_register(register).to_le_bytes());
            }
            Some(Target::Config(place)) => self.device.read_config(place, out),
            None => {}
        }
    }

    /// What a processor of the guest's writes. What means nothing, or nothing now, changes nothing.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Effect {
        if self.ended {
            return Effect::None;
        }
        match (Target::at(offset, data.len()), data) {
            (Some(Target::Register(register)), &[a, b, c, d]) => {
                self.write_register(register, u32::from_le_bytes([a, b, c, d]))
            }
            (Some(Target::Config(place)), _) => {
                self.device.write_config(place, data);
                Effect::None
            }
            _ => Effect::None,
        }
    }

    /// Works on a queue that the driver has notified. Nothing happens if the queue is not running.
    ///
    /// # Errors
    /// When the guest broke the device's rules. The first error ends the device; after that, nothing happens and
    /// nothing is reported.
    pub fn on_kick(&mut self, queue: usize) -> Result<Outcome, MmioError> {
        self.work(Some(queue))
    }

    /// Works on all queues that have something left to do.
    ///
    /// # Errors
    /// As for [`on_kick`](Self::on_kick).
    pub fn service(&mut self) -> Result<Outcome, MmioError> {
        self.work(None)
    }

    fn work(&mut self, first: Option<usize>) -> Result<Outcome, MmioError> {
        if self.ended {
            return Ok(Outcome::default());
        }
        let outcome = bathy_devices::work(&mut self.device, &mut self.queues, self.ram.memory(), first);
        self.ended = outcome.is_err();
        outcome
    }

    fn selected(&self) -> Option<&MmioQueue> {
        self.queues.get(usize::try_from(self.queue_select).ok()?)
    }

    fn read_register(&self, register: Register) -> u32 {
        match register {
            Register::Magic => MAGIC,
            Register::Layout => LAYOUT,
            Register::DeviceType => self.device.device_type(),
            Register::Vendor => VENDOR,
            Register::DeviceFeatures => Half::selected_by(self.device_features_select)
                .map_or(0, |half| half.get(self.device.features())),
            Register::QueueSizeMax => self.selected().map_or(0, |_| MAX_QUEUE_SIZE.into()),
            Register::QueueReady => self.selected().map_or(0, |queue| queue.is_ready().into()),
            Register::InterruptStatus => self.interrupt.status(),
            Register::Status => self.status.bits(),
            Register::SharedMemory => NO_SHARED_MEMORY,
            // No device's configuration changes while the guest lives.
            Register::ConfigGeneration => 0,
            Register::DeviceFeaturesSelect
            | Register::DriverFeatures
            | Register::DriverFeaturesSelect
            | Register::QueueSelect
            | Register::QueueSize
            | Register::QueueNotify
            | Register::InterruptAcknowledge
            | Register::DescriptorsLow
            | Register::DescriptorsHigh
            | Register::AvailableLow
            | Register::AvailableHigh
            | Register::UsedLow
            | Register::UsedHigh => 0,
        }
    }

    fn write_register(&mut self, register: Register, value: u32) -> Effect {
        match register {
            Register::DeviceFeaturesSelect => self.device_features_select = value,
            Register::DriverFeaturesSelect => self.driver_features_select = value,
            Register::DriverFeatures => self.accept_features(value),
            Register::QueueSelect => self.queue_select = value,
            Register::QueueSize => self.set_up(|queue| queue.set_size(value)),
            Register::DescriptorsLow => self.set_address(RingPart::Descriptors, Half::Low, value),
            Register::DescriptorsHigh => self.set_address(RingPart::Descriptors, Half::High, value),
            Register::AvailableLow => self.set_address(RingPart::Available, Half::Low, value),
            Register::AvailableHigh => self.set_address(RingPart::Available, Half::High, value),
            Register::UsedLow => self.set_address(RingPart::Used, Half::Low, value),
            Register::UsedHigh => self.set_address(RingPart::Used, Half::High, value),
            Register::QueueReady => self.set_ready(value),
            Register::QueueNotify => return self.notified(value),
            Register::InterruptAcknowledge => self.interrupt.acknowledge(value),
            Register::Status => return self.set_status(value),
            Register::Magic
            | Register::Layout
            | Register::DeviceType
            | Register::Vendor
            | Register::DeviceFeatures
            | Register::QueueSizeMax
            | Register::InterruptStatus
            | Register::SharedMemory
            | Register::ConfigGeneration => {}
        }
        Effect::None
    }

    /// Takes one half of what the driver accepts. There is nothing to be accepted beyond the second.
    fn accept_features(&mut self, value: u32) {
        let half = Half::selected_by(self.driver_features_select);
        if let Some(half) = half.filter(|_| self.status.is_negotiating()) {
            half.put(&mut self.driver_features, value);
        }
    }

    /// Changes the selected queue, if there is one and it is the time for that.
    fn set_up(&mut self, change: impl FnOnce(&mut MmioQueue)) {
        let Ok(index) = usize::try_from(self.queue_select) else { return };
        if let Some(queue) = self.queues.get_mut(index).filter(|_| self.status.is_setting_up()) {
            change(queue);
        }
    }

    fn set_address(&mut self, part: RingPart, half: Half, value: u32) {
        self.set_up(|queue| queue.set_address(part, half, value));
    }

    fn set_ready(&mut self, value: u32) {
        let ram = Arc::clone(&self.ram);
        let event_idx = self.driver_features & F_EVENT_IDX != 0;
        self.set_up(|queue| match value {
            0 => queue.make_unready(),
            1 => queue.make_ready(ram.memory(), event_idx),
            _ => {}
        });
    }

    fn notified(&self, value: u32) -> Effect {
        let Ok(index) = usize::try_from(value) else { return Effect::None };
        match self.queues.get(index) {
            Some(queue) if queue.is_running() => Effect::Kick(index),
            _ => Effect::None,
        }
    }

    fn set_status(&mut self, bits: u32) -> Effect {
        let was_running = self.status.is_running();
        let step = self.status.step(bits);
        match step {
            Step::None | Step::Greet => {}
            Step::Features => {
                if !self.agree() {
                    return Effect::None;
                }
            }
            Step::Start => self.queues.iter_mut().for_each(MmioQueue::start),
            Step::Fail => self.queues.iter_mut().for_each(MmioQueue::stop),
            Step::Reset => self.reset(),
        }
        self.status = self.status.after(step);
        if self.status.is_running() == was_running { Effect::None } else { Effect::Work }
    }

    /// Takes the driver's features, if they are all on offer and the one that is needed is among them.
    fn agree(&mut self) -> bool {
        let accepted = self.driver_features;
        if accepted & !self.device.features() != 0 || accepted & F_VERSION_1 == 0 {
            return false;
        }
        self.device.set_features(accepted);
        true
    }

    fn reset(&mut self) {
        // A driver resets the device before it does anything else, and the host may have queued data by then.
        if self.status.has_agreed() {
            self.device.reset();
        }
        self.queues.iter_mut().for_each(MmioQueue::reset);
        self.interrupt.reset();
        self.driver_features = 0;
        (self.device_features_select, self.driver_features_select, self.queue_select) = (0, 0, 0);
    }
}
