//! Disk space that the log reserves beyond the end of its file.
//!
//! On a full disk no operation is started, because it could not be recorded. But what ends has to be recorded
//! on a full disk as well. The reserve is part of this file, so no other program or guest can use it.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

/// The size of the reserve: some thousands of events.
const RESERVE: u64 = 1 << 20;
/// The minimum that must remain after an ordinary line.
const MIN_RESERVE: u64 = RESERVE / 2;
/// The unit of `st_blocks`.
const BLOCK: u64 = 512;

/// Makes sure that a file of `size` bytes can grow by `more` and still has its reserve.
///
/// # Errors
/// The disk is full. A file system that cannot reserve space is no error.
pub(super) fn keep(file: &File, size: u64, more: u64) -> io::Result<()> {
    if held(file, size)? >= MIN_RESERVE.saturating_add(more) {
        return Ok(());
    }
    allocate(file, size, RESERVE.saturating_add(more))
}

/// Makes sure that a file of `size` bytes can grow by `more`, from the reserve if necessary. Without this
/// check, a failed write would have to be truncated, which would release the reserve.
///
/// # Errors
/// As for [`keep`].
pub(super) fn fit(file: &File, size: u64, more: u64) -> io::Result<()> {
    if held(file, size)? >= more { Ok(()) } else { allocate(file, size, more) }
}

fn held(file: &File, size: u64) -> io::Result<u64> {
    Ok(file.metadata()?.blocks().saturating_mul(BLOCK).saturating_sub(size))
}

fn allocate(file: &File, size: u64, more: u64) -> io::Result<()> {
    loop {
        return match fallocate(file, FallocateFlags::KEEP_SIZE, size, more) {
            Err(Errno::INTR) => continue,
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            Err(error) => Err(error.into()),
        };
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// The use of the reserve is tested in `tests/processes.rs`.
    #[test]
    fn a_reserve_is_filled_up_when_half_of_it_is_gone() {
        let mut file = tempfile::tempfile().unwrap();
        if fallocate(tempfile::tempfile().unwrap(), FallocateFlags::KEEP_SIZE, 0, 1) == Err(Errno::OPNOTSUPP)
        {
            return; // This file system cannot reserve space.
        }
        let mut held_after = |size: usize| {
            let more = size - usize::try_from(file.metadata().unwrap().len()).unwrap();
            file.write_all(&vec![b'x'; more]).unwrap();
            keep(&file, size as u64, 0).unwrap();
            file.metadata().unwrap().blocks() * BLOCK
        };
        let first = held_after(0);
        assert!(first >= 1 << 20, "{first}");
        let with_most_of_it = held_after(400 << 10);
        assert!(with_most_of_it < (1400 << 10), "every line would have to wait for it: {with_most_of_it}");
        let with_little_of_it = held_after(600 << 10);
        assert!(with_little_of_it >= (1600 << 10), "{with_little_of_it}");
    }
}
