//! The order in which a device's queues are worked on, which is the same whatever carries them.

#[cfg(test)]
mod tests;

use virtio_queue::Queue;

use crate::device::{DeviceError, Outcome, VirtioDevice};
use crate::memory::GuestMemory;

/// How often, for each queue that a device has, its queues may ask for one another before others get their turn.
const FOLLOW_UPS_PER_QUEUE: usize = 4;

/// One queue of a device, as its transport keeps it.
pub trait ServedQueue {
    /// What ends the device's service.
    type Error: From<DeviceError>;

    /// The queue itself, if the driver has started it.
    fn running(&mut self) -> Option<&mut Queue>;

    /// Whether the last round of work left something to do.
    fn unfinished(&mut self) -> &mut bool;

    /// Interrupts the driver: chains of this queue, which is the device's `number`th, were completed.
    ///
    /// # Errors
    /// When the driver cannot be reached.
    fn interrupt(&self, number: usize) -> Result<(), Self::Error>;
}

/// Works on the queue `first`, or on all that are unfinished, and then on what the device asks for in turn.
///
/// # Errors
/// When the device stops, or the driver cannot be reached.
pub fn work<Q: ServedQueue>(
    device: &mut impl VirtioDevice,
    queues: &mut [Q],
    mem: &GuestMemory,
    first: Option<usize>,
) -> Result<Outcome, Q::Error> {
    let mut total = Outcome::default();
    for (number, queue) in queues.iter_mut().enumerate() {
        let due = first.map_or_else(|| *queue.unfinished(), |wanted| wanted == number);
        if due {
            total = total.merge(round(device, number, queue, mem)?);
        }
    }
    for _ in 0..FOLLOW_UPS_PER_QUEUE * queues.len() {
        let Some(number) = device.follow_up() else { return Ok(total) };
        if let Some(queue) = queues.get_mut(number) {
            total = total.merge(round(device, number, queue, mem)?);
        }
    }
    total.more = true;
    Ok(total)
}

fn round<Q: ServedQueue>(
    device: &mut impl VirtioDevice,
    number: usize,
    queue: &mut Q,
    mem: &GuestMemory,
) -> Result<Outcome, Q::Error> {
    let Some(running) = queue.running() else { return Ok(Outcome::default()) };
    let outcome = device.process(number, running, mem)?;
    *queue.unfinished() = outcome.more || outcome.retry_after.is_some();
    if outcome.notify {
        queue.interrupt(number)?;
    }
    Ok(outcome)
}
