//! The keeper's process; see the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    // SAFETY: the launcher opened the keeper's descriptors for this process, and nothing has run before.
    unsafe { bathy_keeper::run() }
}
