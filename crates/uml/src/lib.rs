//! The uml engine: a guest kernel built as User Mode Linux, run as a jailed process, with devices over vhost-user.
//!
//! * [`guest`]: how the guest kernel is started.
//! * [`vhost`]: how its drivers reach our device models.

pub mod guest;
pub mod vhost;
