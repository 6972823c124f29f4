//! The host side's unsafe code: one lock that has no safe wrapper.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Locks one byte of `file` for this open file, if nobody else has. The lock goes with the open file's last descriptor,
/// in whatever process that is.
pub fn lock_byte(file: &File, byte: u64) -> io::Result<bool> {
    // SAFETY: `flock` is plain data, for which zero is a valid value of every field.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = WRITE_LOCK;
    range.l_whence = FROM_START;
    range.l_start = i64::try_from(byte).map_err(io::Error::other)?;
    range.l_len = 1;
    // SAFETY: the argument is a valid `flock` for the duration of the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) } {
        0 => Ok(true),
        _ => match io::Error::last_os_error() {
            error if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
            error => Err(error),
        },
    }
}

/// `F_WRLCK` and `SEEK_SET` in the width of `flock`'s fields.
const WRITE_LOCK: i16 = 1;
const FROM_START: i16 = 0;
