//! The virtio-mmio transport: registers that a hostile driver writes, in front of our device models.
//!
//! The guest's processors read and write one page of registers per device; this module defines the effect of each access,
//! in every state that driver and device can be in, and nothing here knows how an access gets here. Three rules keep
//! the registers harmless: what a driver wrote is checked when it starts to count, all of it at once; once the
//! device has been started it cannot be changed; and from then on only a reset of all of it makes it changeable again.
//!
//! * `registers`: which accesses there are.
//! * `status`: how far the driver has come.
//! * `queue`: one queue, from its registers to its rings.
//! * `interrupt`: notifications from the device to the driver.
//! * `transport`: all of it together.

mod interrupt;
mod queue;
mod registers;
mod status;
#[cfg(test)]
mod tests;
mod transport;

pub use interrupt::Interrupt;
pub use queue::QueueState;
pub use registers::{INTERRUPT_ACKNOWLEDGE, INTERRUPT_STATUS, QUEUE_NOTIFY, WINDOW_BYTES};
pub use transport::{Effect, Mmio, MmioError, MmioState};
