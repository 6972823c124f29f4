//! What an inode looked like when a file's digest was verified.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};

/// The metadata of a file's inode. A write changes the inode's change time, which cannot be set back by ordinary calls, so an
/// equal stamp saves hashing the file again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    size: u64,
    inode: u64,
    changed: (i64, i64),
    modified: (i64, i64),
}

impl From<Metadata> for Stamp {
    fn from(data: Metadata) -> Self {
        Self {
            size: data.size(),
            inode: data.ino(),
            changed: (data.ctime(), data.ctime_nsec()),
            modified: (data.mtime(), data.mtime_nsec()),
        }
    }
}
