//! Disk space reserved for a full disk.
//!
//! SQLite needs some space even to read. Without a reserve, a user could not remove the sandbox that filled
//! the disk. The ballast is a file that is deleted when the disk is full and recreated when there is space
//! again.

use std::fs::{self, File};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate, statvfs};

/// Enough for the write-ahead log and the index of a few changes.
const SIZE: u64 = 1 << 20;
/// A disk with less free space than this counts as full.
const FULL_BELOW: u64 = 256 << 10;

fn file(state: &Path) -> PathBuf {
    state.join("ballast")
}

/// Creates the ballast file, if there is enough space.
pub fn reserve(state: &Path) {
    let path = file(state);
    let there = path.symlink_metadata().is_ok_and(|data| data.len() == SIZE);
    if there || free_space(state).is_none_or(|free| free < 4 * SIZE) {
        return;
    }
    let mut options = File::options();
    options.create(true).truncate(false).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    let made =
        options.open(&path).is_ok_and(|file| fallocate(&file, FallocateFlags::empty(), 0, SIZE).is_ok());
    if !made {
        let _ = fs::remove_file(&path);
    }
}

/// Deletes the ballast file. False if there was none.
pub fn release(state: &Path) -> bool {
    fs::remove_file(file(state)).is_ok()
}

/// Whether the disk that holds `path` is full.
pub fn is_full(path: &Path) -> bool {
    let found = path.parent().and_then(|folder| statvfs(folder).ok());
    // A disk can also run out of inodes.
    found.is_some_and(|found| {
        found.f_bavail.saturating_mul(found.f_frsize) < FULL_BELOW || found.f_favail == 0
    })
}

/// The free space in bytes, if known.
fn free_space(folder: &Path) -> Option<u64> {
    statvfs(folder).ok().map(|found| found.f_bavail.saturating_mul(found.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_space_is_taken_once_and_given_back_once() {
        let state = tempfile::tempdir().unwrap();
        assert!(!release(state.path()));
        reserve(state.path());
        reserve(state.path());
        let data = file(state.path()).metadata().unwrap();
        assert_eq!(data.len(), SIZE);
        assert!(std::os::unix::fs::MetadataExt::blocks(&data) * 512 >= SIZE, "it is no hole");
        assert!(release(state.path()));
        assert!(!release(state.path()));
    }
}
