//! The content store: blobs by their digest, and which references lead to which image.
//!
//! The folder is an OCI image layout, which other programs read too:
//!
//! * `blobs/ALGORITHM/HEX`: whole and verified, never changed again.
//! * `partial/ALGORITHM-HEX`: the beginning of a blob. It is locked while a process writes it.
//! * `index.json`: the references.
//! * `lock`: locked while the references change. `in-use`: a shared lock of processes that add blobs, an
//!   exclusive one of a process that removes them.

mod blob;
mod references;
#[cfg(test)]
mod tests;

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bathy_image::trust::{self, TrustError};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::Deserialize;
use thiserror::Error;

pub use blob::BlobWriter;
pub use references::Record;

use crate::cancel::Cancel;
use crate::digest::{Algorithm, Digest};

const LAYOUT: &[u8] = br#"{"imageLayoutVersion":"1.0.0"}"#;
const MAX_LAYOUT: u64 = 4 << 10;
const FILE_MODE: u32 = 0o600;
const FOLDER_MODE: u32 = 0o700;
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// Why content cannot be stored or read.
#[derive(Debug, Error)]
pub enum ContentError {
    #[error(transparent)]
    Trust(#[from] TrustError),
    #[error(
        "There is no space left for images in {0}. What was downloaded so far is kept: free some space, then try again"
    )]
    NoSpace(PathBuf),
    #[error("Cannot access {0}")]
    Access(PathBuf, #[source] io::Error),
    #[error("{what} has the wrong content: its digest is {found}, expected {expected}")]
    Mismatch { what: String, expected: Digest, found: Digest },
    #[error("{what} has {found} bytes, expected {expected}")]
    Size { what: String, expected: u64, found: u64 },
    #[error("The store has no blob {0}")]
    Missing(Digest),
    #[error("{0} is not an index of references that this version can read")]
    Index(PathBuf, #[source] serde_json::Error),
    #[error("It was cancelled")]
    Cancelled,
}

/// What is in `oci-layout`.
#[derive(Deserialize)]
struct LayoutFile {
    #[serde(rename = "imageLayoutVersion")]
    _version: String,
}

/// A content store in a folder of this user.
#[derive(Clone, Debug)]
pub struct Store {
    root: PathBuf,
    cancel: Cancel,
}

/// While it exists, no blob is removed.
#[derive(Debug)]
#[must_use]
pub struct InUse {
    /// Closing it ends the lock.
    _lock: File,
}

/// While it exists, no other process adds blobs or relies on any that no reference leads to.
#[derive(Debug)]
#[must_use]
pub struct Alone {
    /// Closing it ends the lock.
    _lock: File,
}

impl Store {
    /// Opens the store in this folder, and makes it if it does not exist.
    pub fn open(root: &Path) -> Result<Self, ContentError> {
        trust::check_folder(root)?;
        let store = Self { root: root.to_owned(), cancel: Cancel::default() };
        for folder in ["blobs/sha256", "blobs/sha512", "partial"] {
            let path = root.join(folder);
            let made = DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(&path);
            made.map_err(|error| store.failed(&path, error))?;
        }
        if !store.has_layout()? {
            let _alone = store.locked("lock", FlockOperation::NonBlockingLockExclusive)?;
            if !store.has_layout()? {
                store.replace(&root.join("oci-layout"), LAYOUT)?;
            }
        }
        Ok(store)
    }

    /// Whether the folder says which layout it has. An empty file, as a loss of power leaves it, does not.
    fn has_layout(&self) -> Result<bool, ContentError> {
        let path = self.root.join("oci-layout");
        let mut text = Vec::new();
        match File::open(&path).and_then(|file| file.take(MAX_LAYOUT).read_to_end(&mut text)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(self.failed(&path, error)),
            Ok(_) => Ok(serde_json::from_slice::<LayoutFile>(&text).is_ok()),
        }
    }

    /// The same store, whose waiting for other processes ends with `cancel`.
    #[must_use]
    pub fn with_cancel(mut self, cancel: Cancel) -> Self {
        self.cancel = cancel;
        self
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The path of a complete blob.
    pub fn blob_path(&self, digest: &Digest) -> PathBuf {
        self.root.join("blobs").join(digest.algorithm().name()).join(digest.hex())
    }

    /// Whether there is a blob of this size. It was verified before it got its name.
    pub fn has(&self, digest: &Digest, size: u64) -> Result<bool, ContentError> {
        let path = self.blob_path(digest);
        match fs::symlink_metadata(&path) {
            Ok(found) => Ok(found.is_file() && found.len() == size),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(self.failed(&path, error)),
        }
    }

    /// Opens a blob. The reader has to verify it, because the disk may have changed it.
    pub fn open_blob(&self, digest: &Digest) -> Result<File, ContentError> {
        let path = self.blob_path(digest);
        match File::options().read(true).custom_flags(no_links()).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(ContentError::Missing(digest.clone()))
            }
            opened => opened.map_err(|error| self.failed(&path, error)),
        }
    }

    /// Reads and verifies a small blob. `what` names it in an error.
    pub fn read(&self, digest: &Digest, limit: u64, what: &str) -> Result<Vec<u8>, ContentError> {
        let file = self.open_blob(digest)?;
        let mut content = Vec::new();
        let read = file.take(limit + 1).read_to_end(&mut content);
        read.map_err(|error| self.failed(&self.blob_path(digest), error))?;
        let found = content.len() as u64;
        if found > limit {
            return Err(ContentError::Size { what: what.into(), expected: limit, found });
        }
        if digest.matches(&content) {
            return Ok(content);
        }
        let found = Digest::of(&content);
        Err(ContentError::Mismatch { what: what.into(), expected: digest.clone(), found })
    }

    /// Removes a blob whose content does not match its digest, so that the next pull fetches it again.
    pub fn discard(&self, digest: &Digest) -> Result<(), ContentError> {
        let path = self.blob_path(digest);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(self.failed(&path, error)),
            _ => Ok(()),
        }
    }

    /// Stores a small blob, such as a manifest, whose digest was checked. Waits while another process does.
    pub fn put(&self, digest: &Digest, content: &[u8], what: &str) -> Result<(), ContentError> {
        let mut waiting = Waiting::default();
        let begun = self.begin(digest, content.len() as u64, what, || waiting.pause(&self.cancel))?;
        let Some(mut writer) = begun else { return Ok(()) };
        writer.restart()?;
        writer.write(content)?;
        writer.finish()
    }

    /// Keeps blobs from being removed until the references to them are written.
    pub fn use_blobs(&self) -> Result<InUse, ContentError> {
        self.locked("in-use", FlockOperation::NonBlockingLockShared).map(|lock| InUse { _lock: lock })
    }

    /// Waits until no process adds blobs.
    pub fn alone(&self) -> Result<Alone, ContentError> {
        self.locked("in-use", FlockOperation::NonBlockingLockExclusive).map(|lock| Alone { _lock: lock })
    }

    /// Removes blobs that no reference leads to and that `keep` does not want, and beginnings of blobs. Returns how many
    /// bytes were freed.
    pub fn sweep(&self, _alone: &Alone, keep: impl Fn(&Digest) -> bool) -> Result<u64, ContentError> {
        // Only now: nothing becomes reachable any more.
        let reachable = self.reachable()?;
        let mut freed = self.sweep_folder(&self.root.join("partial"), |_| false)?;
        for algorithm in Algorithm::ALL {
            let folder = self.root.join("blobs").join(algorithm.name());
            freed += self.sweep_folder(&folder, |name| {
                let digest = format!("{}:{name}", algorithm.name()).parse();
                digest.is_ok_and(|digest| reachable.contains(&digest) || keep(&digest))
            })?;
        }
        Ok(freed)
    }

    fn sweep_folder(&self, folder: &Path, keep: impl Fn(&str) -> bool) -> Result<u64, ContentError> {
        let failed = |error| self.failed(folder, error);
        let mut freed = 0;
        for entry in fs::read_dir(folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            if !entry.file_name().to_str().is_some_and(&keep) {
                let size = entry.metadata().map_err(failed)?.len();
                fs::remove_file(entry.path()).map_err(failed)?;
                freed += size;
            }
        }
        Ok(freed)
    }

    fn partial_path(&self, digest: &Digest) -> PathBuf {
        self.root.join("partial").join(format!("{}-{}", digest.algorithm().name(), digest.hex()))
    }

    fn locked(&self, name: &str, operation: FlockOperation) -> Result<File, ContentError> {
        let path = self.root.join(name);
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(FILE_MODE);
        let file = options.open(&path).map_err(|error| self.failed(&path, error))?;
        let mut waiting = Waiting::default();
        loop {
            match flock(&file, operation) {
                Ok(()) => return Ok(file),
                Err(Errno::INTR) => {}
                // Not by a call that blocks, which nothing would end.
                Err(Errno::AGAIN) => waiting.pause(&self.cancel)?,
                Err(error) => return Err(self.failed(&path, error.into())),
            }
        }
    }

    /// Puts a whole new file in place of another one, also for a reader, and after a loss of power. The caller has `lock`.
    fn replace(&self, path: &Path, content: &[u8]) -> Result<(), ContentError> {
        let new = path.with_extension("new");
        let write = || {
            let mut file =
                File::options().write(true).create(true).truncate(true).mode(FILE_MODE).open(&new)?;
            file.set_permissions(Permissions::from_mode(FILE_MODE))?;
            file.write_all(content)?;
            file.sync_all()?;
            fs::rename(&new, path)?;
            File::open(&self.root)?.sync_all()
        };
        write().map_err(|error| {
            let _ = fs::remove_file(&new);
            self.failed(path, error)
        })
    }

    fn failed(&self, path: &Path, error: io::Error) -> ContentError {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                ContentError::NoSpace(self.root.clone())
            }
            _ => ContentError::Access(path.to_owned(), error),
        }
    }
}

/// Pauses between two looks whether another process has finished: short ones first.
#[derive(Default)]
struct Waiting {
    last: Duration,
}

impl Waiting {
    fn pause(&mut self, cancel: &Cancel) -> Result<(), ContentError> {
        self.last = (2 * self.last).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        if cancel.pause(self.last) { Ok(()) } else { Err(ContentError::Cancelled) }
    }
}

/// Symbolic links have no place in the store.
fn no_links() -> i32 {
    rustix::fs::OFlags::NOFOLLOW.bits().cast_signed()
}
