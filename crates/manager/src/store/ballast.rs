//! Space that is kept for a full disk.
//!
//! SQLite needs some room even to look something up. Without it a person with a full disk could not remove the sandbox that
//! filled it. The ballast is a file that is removed when there is no room left, and made again when there is.

use std::fs::{self, File};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate, statvfs};

/// Enough for the log and the index of some changes.
const SIZE: u64 = 1 << 20;
/// A disk with less room than this is full.
const LEAST: u64 = 256 << 10;

fn file(state: &Path) -> PathBuf {
    state.join("ballast")
}

/// Takes the space, if there is some. A disk that has none has other worries.
pub fn keep(state: &Path) {
    let path = file(state);
    let there = path.symlink_metadata().is_ok_and(|data| data.len() == SIZE);
    if there || room(state).is_none_or(|room| room < 4 * SIZE) {
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

/// Gives the space back; false if there was none.
pub fn release(state: &Path) -> bool {
    fs::remove_file(file(state)).is_ok()
}

/// Whether the disk that a file is on is full.
pub fn is_full(path: &Path) -> bool {
    let found = path.parent().and_then(|folder| statvfs(folder).ok());
    // Names can run out, too.
    found.is_some_and(|found| found.f_bavail.saturating_mul(found.f_frsize) < LEAST || found.f_favail == 0)
}

/// How much room there is, if that can be known.
fn room(folder: &Path) -> Option<u64> {
    statvfs(folder).ok().map(|found| found.f_bavail.saturating_mul(found.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_space_is_taken_once_and_given_back_once() {
        let state = tempfile::tempdir().unwrap();
        assert!(!release(state.path()));
        keep(state.path());
        keep(state.path());
        let data = file(state.path()).metadata().unwrap();
        assert_eq!(data.len(), SIZE);
        assert!(std::os::unix::fs::MetadataExt::blocks(&data) * 512 >= SIZE, "it is no hole");
        assert!(release(state.path()));
        assert!(!release(state.path()));
    }
}
