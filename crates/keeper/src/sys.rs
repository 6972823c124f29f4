//! The keeper's unsafe code: taking over the descriptors it was started with.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// Takes over an inherited descriptor.
///
/// # Safety
/// The number must be open and must not be taken twice.
pub unsafe fn inherit(number: RawFd) -> OwnedFd {
    // SAFETY: by the function's contract the descriptor is open and has no other owner.
    unsafe { OwnedFd::from_raw_fd(number) }
}
