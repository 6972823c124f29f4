//! Reservations of ephemeral sandboxes, so that they count where the operator limits how many sandboxes there may be.
//!
//! A reservation is a byte of one file in the state folder, locked by the command for as long as it lives: whatever ends the
//! command, the kernel releases the byte. A row of the store would stay.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::folder::make_durable_folder;
use crate::sys;

const FILE: &str = "ephemeral";
/// More ephemeral sandboxes than a machine runs.
const MOST: u64 = 1 << 20;

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
        let places = open(state, true)?;
        for byte in 0..MOST {
            if sys::lock_byte(&places, byte)? {
                return Ok(Self { _lock: places });
            }
        }
        Err(io::Error::other("all places are taken"))
    }
}

/// Where the reservations of a state folder are.
pub fn file(state: &Path) -> PathBuf {
    state.join(FILE)
}

/// How many ephemeral sandboxes there are.
pub fn count(state: &Path) -> io::Result<u32> {
    match open(state, false) {
        Ok(places) => sys::count_locked_bytes(&places, MOST),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}

fn open(state: &Path, create: bool) -> io::Result<File> {
    let mut options = File::options();
    options.create(create).truncate(false).read(true).write(true).mode(0o600);
    options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(file(state))
}
