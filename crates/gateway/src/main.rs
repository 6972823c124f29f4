//! The gateway's process; see the library.

use std::os::fd::{FromRawFd, OwnedFd};
use std::process::ExitCode;

fn main() -> ExitCode {
    // SAFETY: the launcher opened these numbers for this process, and nothing has run before.
    bathy_gateway::run(|number| unsafe { OwnedFd::from_raw_fd(number) })
}
