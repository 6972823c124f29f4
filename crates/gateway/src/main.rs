//! The gateway's process; see the library.

use std::os::fd::{FromRawFd, OwnedFd};
use std::process::ExitCode;

use bathy_protocol::network::fd;

fn main() -> ExitCode {
    // SAFETY: the launcher opened these numbers for this process, and nothing has run before.
    let inherit = |number| unsafe { OwnedFd::from_raw_fd(number) };
    let [control, link, counts] = [fd::CONTROL, fd::LINK, fd::COUNTS].map(inherit);
    bathy_gateway::run(inherit(fd::CONFIG).into(), control, link, counts, inherit)
}
