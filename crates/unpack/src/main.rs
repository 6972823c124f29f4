//! The unpacker's process; see [`bathy_unpack::process`].

use std::os::fd::{FromRawFd, OwnedFd};
use std::process::ExitCode;

fn main() -> ExitCode {
    // SAFETY: the launcher opened these numbers for this process, and nothing has run before.
    bathy_unpack::process::run(|number| unsafe { OwnedFd::from_raw_fd(number) })
}
