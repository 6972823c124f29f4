//! Virtio device models that know nothing of how the guest reaches them.
//!
//! A transport (vhost-user for the `uml` engine, virtio-mmio for the `kvm` engine) negotiates features, sets up
//! queues and delivers notifications; a device here only ever sees its queues and the guest's memory. The guest, its
//! kernel included, is assumed hostile: every byte a device reads from guest memory is read once, copied, checked, and
//! only then used, and the work done for one notification is bounded by the queue's size, never by a guest's number.
//!
//! A queue that breaks the rules of virtio stops for good and yields exactly one [`DeviceError`]; the owner of the
//! device is expected to end the sandbox then.
#![deny(missing_docs)]

pub mod block;
mod bucket;
pub mod console;
mod device;
pub mod entropy;
pub mod memory;
pub mod net;
pub mod ring;
mod sys;
#[cfg(any(test, feature = "test-utils"))]
pub mod testing;
mod work;

pub use bucket::Clock;
pub use device::{DeviceError, MAX_QUEUE_SIZE, Outcome, TRANSPORT_FEATURES, VirtioDevice};
pub use memory::{GuestMemory, GuestRam, MemoryError};
/// The queue type that devices work on, named here so that transports agree on its version.
pub use virtio_queue::{Queue, QueueT};
pub use work::{ServedQueue, work};
