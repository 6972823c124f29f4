//! One blob on its way into the store.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::{ContentError, FILE_MODE, Store, no_links};
use crate::digest::{Digest, Hasher};

/// How much is read at once of what is there already.
const CHUNK: usize = 1 << 18;

/// Writes one blob. No other process does as long as this exists. If it is dropped, what was written so far stays for the
/// next attempt.
pub struct BlobWriter {
    store: Store,
    file: File,
    partial: PathBuf,
    digest: Digest,
    size: u64,
    what: String,
    hasher: Hasher,
    length: u64,
    is_resumed: bool,
    restarts: u32,
}

impl std::fmt::Debug for BlobWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BlobWriter({}, {} of {})", self.digest, self.length, self.size)
    }
}

impl Store {
    /// Begins or resumes a blob of this size, which `what` names in errors. None if it is in the store already. While another process writes the same blob,
    /// `wait` is called repeatedly: it pauses for a moment, or returns an error to give up.
    pub fn begin<E: From<ContentError>>(
        &self,
        digest: &Digest,
        size: u64,
        what: &str,
        mut wait: impl FnMut() -> Result<(), E>,
    ) -> Result<Option<BlobWriter>, E> {
        let partial = self.partial_path(digest);
        loop {
            if self.has(digest, size)? {
                return Ok(None);
            }
            let locked = self.lock_partial(&partial);
            let Some(file) = locked.map_err(|error| self.failed(&partial, error))? else {
                wait()?;
                continue;
            };
            // It was finished after the look above: what was opened is a new file.
            if self.has(digest, size)? {
                fs::remove_file(&partial).map_err(|error| self.failed(&partial, error))?;
                return Ok(None);
            }
            let mut writer = BlobWriter {
                store: self.clone(),
                file,
                partial,
                digest: digest.clone(),
                size,
                what: what.to_owned(),
                hasher: Hasher::new(digest.algorithm()),
                length: 0,
                is_resumed: false,
                restarts: 0,
            };
            writer.resume()?;
            return Ok(Some(writer));
        }
    }

    /// Opens and locks the beginning of a blob. None if another process has it.
    fn lock_partial(&self, partial: &Path) -> io::Result<Option<File>> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(FILE_MODE).custom_flags(no_links());
        loop {
            let file = options.open(partial)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // The previous owner of the lock may have completed the blob, or removed this file.
                Ok(()) if is_at(&file, partial)? => return Ok(Some(file)),
                Ok(()) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Whether the open file still has this name.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let opened = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(named) => Ok((named.dev(), named.ino()) == (opened.dev(), opened.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

impl BlobWriter {
    /// How many bytes there are.
    pub fn length(&self) -> u64 {
        self.length
    }

    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether the file begins with data of an earlier attempt, which may have been interrupted by anything.
    pub fn is_resumed(&self) -> bool {
        self.is_resumed
    }

    /// How often what was written was discarded.
    pub fn restarts(&self) -> u32 {
        self.restarts
    }

    /// Hashes the data of an earlier attempt.
    fn resume(&mut self) -> Result<(), ContentError> {
        let read = || -> io::Result<Option<(Hasher, u64)>> {
            let found = self.file.metadata()?.len();
            if found > self.size {
                return Ok(None);
            }
            let (mut hasher, mut file) = (self.hasher.clone(), &self.file);
            let (mut chunk, mut length) = (vec![0; CHUNK], 0);
            file.seek(SeekFrom::Start(0))?;
            loop {
                let count = file.read(&mut chunk)?;
                if count == 0 {
                    return Ok(Some((hasher, length)));
                }
                hasher.update(&chunk[..count]);
                length += count as u64;
            }
        };
        match read().map_err(|error| self.store.failed(&self.partial, error))? {
            None => self.restart(),
            Some((hasher, length)) => {
                (self.hasher, self.length, self.is_resumed) = (hasher, length, length > 0);
                Ok(())
            }
        }
    }

    /// Forgets what was written.
    pub fn restart(&mut self) -> Result<(), ContentError> {
        let mut reset = || {
            self.file.set_len(0)?;
            self.file.seek(SeekFrom::Start(0))
        };
        reset().map_err(|error| self.store.failed(&self.partial, error))?;
        self.hasher = Hasher::new(self.digest.algorithm());
        (self.length, self.is_resumed) = (0, false);
        self.restarts = self.restarts.saturating_add(1);
        Ok(())
    }

    /// Appends `content`, of which there must not be more than the blob's size says.
    pub fn write(&mut self, content: &[u8]) -> Result<(), ContentError> {
        let length = self.length + content.len() as u64;
        if length > self.size {
            self.discard();
            return Err(ContentError::Size { what: self.what.clone(), expected: self.size, found: length });
        }
        if let Err(error) = self.file.write_all(content) {
            // Whole chunks only: what was hashed is what is there.
            let _ = self.file.set_len(self.length);
            return Err(self.store.failed(&self.partial, error));
        }
        self.hasher.update(content);
        self.length = length;
        Ok(())
    }

    /// Verifies the blob and moves it to its final name. If its digest is wrong, it is removed.
    pub fn finish(self) -> Result<(), ContentError> {
        if self.length != self.size {
            return Err(ContentError::Size { what: self.what, expected: self.size, found: self.length });
        }
        let found = self.hasher.clone().finish();
        if found != self.digest {
            self.discard();
            return Err(ContentError::Mismatch { what: self.what, expected: self.digest, found });
        }
        let path = self.store.blob_path(&self.digest);
        let publish = || {
            self.file.sync_all()?;
            fs::rename(&self.partial, &path)?;
            path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
        };
        publish().map_err(|error| self.store.failed(&path, error))
    }

    /// Whether what was written is what it should be.
    pub fn is_right(&self) -> bool {
        self.length == self.size && self.hasher.clone().finish() == self.digest
    }

    /// Removes what was written.
    fn discard(&self) {
        let _ = fs::remove_file(&self.partial);
    }
}
