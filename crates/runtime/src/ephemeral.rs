//! Reservations of ephemeral sandboxes, so that they count towards the operator's limit on sandboxes.
//!
//! A reservation is a locked byte of one file in the state folder. The kernel releases the lock however the
//! command ends; a row in the store would stay behind.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::folder::make_durable_folder;
use crate::sys;

const FILE: &str = "ephemeral";
/// More ephemeral sandboxes than a machine can run.
const MAX_RESERVATIONS: u64 = 1 << 20;

/// Counts as one sandbox until it is dropped or its process ends.
#[derive(Debug)]
pub struct Reservation {
    /// Held open to keep the lock.
    _lock: File,
}

impl Reservation {
    /// Reserves one more, whatever the operator allows.
    pub fn take(state: &Path) -> io::Result<Self> {
        make_durable_folder(state)?;
        let file = open(state, true)?;
        for byte in 0..MAX_RESERVATIONS {
            if sys::lock_byte(&file, byte)? {
                return Ok(Self { _lock: file });
            }
        }
        Err(io::Error::other("all reservations are in use"))
    }
}

/// The reservation file of a state folder.
pub fn file(state: &Path) -> PathBuf {
    state.join(FILE)
}

/// The number of ephemeral sandboxes.
pub fn count(state: &Path) -> io::Result<u32> {
    match open(state, false) {
        Ok(file) => sys::count_locked_bytes(&file, MAX_RESERVATIONS),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}

fn open(state: &Path, create: bool) -> io::Result<File> {
    let mut options = File::options();
    options.create(create).truncate(false).read(true).write(true).mode(0o600);
    options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(file(state))
}
