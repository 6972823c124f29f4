//! Serving virtio devices to the guest kernel over vhost-user.
//!
//! The guest kernel's `virtio_uml` driver is the client, and it is assumed hostile: it may send any bytes and any file
//! descriptors, in any order, slowly, and from several threads at once. This server speaks only the dozen messages that
//! the driver needs. Anything else ends the connection with a typed error, and the owner of the server is expected
//! to end the sandbox then.
//!
//! Three rules keep descriptors of the guest's from doing harm. Guest memory is never mapped from a descriptor that
//! the guest sent: it only has to be the same file as the one that we made. A kick descriptor is never read, only
//! watched, because a read could be made to block. A call descriptor has to be a UNIX stream socket, which can be
//! written to with a promise not to block.

mod backend;
mod message;
mod socket;
#[cfg(any(test, feature = "test-utils"))]
pub mod testing;
#[cfg(test)]
mod tests;
mod vring;

pub use backend::{Backend, BackendState, VhostError};
pub use message::{MAX_CONFIG_BYTES, MessageError};
pub use socket::SocketError;
pub use vring::{VringError, VringState};
