//! Creates a ring's file.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use thiserror::Error;

use crate::format::{HEADER, MAX_CAPACITY, MIN_CAPACITY};

/// A ring's file cannot be created.
#[derive(Debug, Error)]
pub enum CreateError {
    /// The capacity is out of range.
    #[error("A log of {0} bytes is not possible: the size must be {MIN_CAPACITY} to {MAX_CAPACITY}")]
    Capacity(u64),
    /// The path exists and is not a regular file.
    #[error("{0} is not a regular file")]
    NotAFile(PathBuf),
    #[error("Cannot make the log {0}")]
    Io(PathBuf, #[source] io::Error),
}

/// Creates the file of a ring of `capacity` bytes, for its owner only. It occupies no disk space before it is
/// written.
///
/// An existing file is opened and resized: a sandbox that is started again continues its log.
pub fn create(path: &Path, capacity: u64) -> Result<File, CreateError> {
    if !(MIN_CAPACITY..=MAX_CAPACITY).contains(&capacity) {
        return Err(CreateError::Capacity(capacity));
    }
    let failed = |error| CreateError::Io(path.to_owned(), error);
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(no_surprises())
        .open(path)
        .map_err(failed)?;
    let data = file.metadata().map_err(failed)?;
    if !data.is_file() {
        return Err(CreateError::NotAFile(path.to_owned()));
    }
    if data.len() != HEADER + capacity {
        file.set_len(HEADER + capacity).map_err(failed)?;
    }
    Ok(file)
}

/// The open flags: links are not followed, and a fifo does not block.
pub(crate) fn no_surprises() -> i32 {
    (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;

    #[test]
    fn the_file_is_sparse_and_private() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ring");
        let data = create(&path, 1 << 20).unwrap().metadata().unwrap();
        assert_eq!((data.len(), data.mode() & 0o777, data.blocks()), ((1 << 20) + 4096, 0o600, 0));
    }

    #[test]
    fn what_is_no_ring_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        symlink("elsewhere", &link).unwrap();
        assert!(matches!(create(&link, 8192), Err(CreateError::Io(..))));
        assert!(!folder.path().join("elsewhere").exists());
        assert!(matches!(create(folder.path(), 8192), Err(CreateError::Io(..))));
        assert!(matches!(create(&folder.path().join("tiny"), 10), Err(CreateError::Capacity(10))));
    }
}
