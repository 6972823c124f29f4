//! Images from registries as the roots of sandboxes.
//!
//! ```text
//! images/                 an OCI layout: see `bathy_registry::content`
//!   layers/ALGORITHM-HEX  a layer's plain archive, by its diff-id; shared by all images that have it
//!   trees/HEX             what is in it, by its blob and diff-id
//!   roots/HEX             the index of an image's root, by its layers' blobs and diff-ids
//!   unpacked              locked while one of them is made or removed
//! ```
//!
//! A layer's archive is hostile. It is unpacked by a process that can do nothing else ([`unpacker`]), and hashed here. The tree
//! comes from that process, so it counts for the blob that it was made of and for no other, even if that has the same content.

mod fetch;
mod layers;
mod sealed;
pub mod unpacker;

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use bathy_image::ImageConfig;
use bathy_registry::manifest::Platform;
use bathy_registry::{ContentError, Digest, PullError, Pulled, Record, Reference, Store, TransferError};
use bathy_spec::paths::Paths;
use bathy_unpack::IndexError;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use thiserror::Error;

use crate::assets::{AssetsError, ImagePart};
use unpacker::UnpackError;

pub use fetch::{Pull, client, logins};

/// The folders of what is unpacked.
const FOLDERS: [&str; 3] = [layers::LAYERS, layers::TREES, layers::ROOTS];
const LOCK: &str = "unpacked";
/// As for a sandbox's own environment.
const MAX_ENVIRONMENT: usize = bathy_spec::MAX_ENVIRONMENT;

/// An image cannot be used.
#[derive(Debug, Error)]
pub enum ImagesError {
    #[error(transparent)]
    Content(#[from] ContentError),
    #[error(transparent)]
    Pull(#[from] PullError),
    #[error("The image {0} cannot be read")]
    Stored(String, #[source] Box<TransferError>),
    #[error("The image {0} is not on this machine. To fetch it: bathy pull {0}")]
    Missing(Reference),
    #[error("Layer {number} of {image} cannot be used, and nothing of it was kept")]
    Layer { image: Reference, number: usize, source: Box<UnpackError> },
    #[error("The layers of {image} cannot be one root")]
    Index { image: Reference, source: Box<IndexError> },
    #[error(
        "There is no space left to unpack images in {0}. Nothing half-unpacked was kept: free some space"
    )]
    NoSpace(PathBuf),
    #[error("Cannot access {0}")]
    Access(PathBuf, #[source] io::Error),
    #[error("The layers of {image} have more {what} than an image may have: {} MiB", .limit >> 20)]
    TooLarge { image: Box<Reference>, what: &'static str, limit: u64 },
    #[error("The environment of {image} has {bytes} bytes; the most is {MAX_ENVIRONMENT}")]
    Environment { image: Reference, bytes: usize },
    #[error(transparent)]
    Program(Box<AssetsError>),
}

/// The images of this user.
#[derive(Clone, Debug)]
pub struct Images {
    store: Store,
}

/// While it exists, nothing is unpacked or removed by another process.
struct Unpacking {
    /// Closing it ends the lock.
    _lock: File,
}

impl Images {
    /// Opens the folder, and makes it if it does not exist.
    pub fn open(paths: &Paths) -> Result<Self, ImagesError> {
        let images = Self { store: Store::open(&Self::folder(paths))? };
        for folder in FOLDERS {
            let path = images.store.root().join(folder);
            let made = DirBuilder::new().recursive(true).mode(0o700).create(&path);
            made.map_err(|error| images.failed(&path, error))?;
        }
        Ok(images)
    }

    /// Whether an image was ever pulled.
    pub fn is_there(paths: &Paths) -> bool {
        Self::folder(paths).exists()
    }

    fn folder(paths: &Paths) -> PathBuf {
        paths.state.join("images")
    }

    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The image that a reference leads to. With a digest in it, any reference to that image will do.
    pub fn find(&self, reference: &Reference) -> Result<Option<Pulled>, ImagesError> {
        let records = self.store.references()?;
        let exact = records.iter().find(|record| record.reference == *reference);
        let same =
            || records.iter().find(|record| reference.digest().is_some_and(|pin| leads_to(record, pin)));
        let Some(record) = exact.or_else(same) else { return Ok(None) };
        self.load(record)
    }

    /// The image of a record. None if a part of it is missing.
    pub fn load(&self, record: &Record) -> Result<Option<Pulled>, ImagesError> {
        let stored = |error| ImagesError::Stored(record.reference.to_string(), Box::new(error));
        Pulled::load(&self.store, record.clone(), &Platform::default()).map_err(stored)
    }

    /// The files of an image's root. What is not unpacked yet is unpacked.
    pub fn root(
        &self,
        pulled: &Pulled,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Vec<ImagePart>, ImagesError> {
        if let Some(parts) = self.unpacked_root(pulled)? {
            return Ok(parts);
        }
        let lock = self.lock(progress)?;
        self.sweep_unfinished(&lock)?;
        self.unpack(pulled, &lock, progress)
    }

    /// Removes what was unpacked of images that no reference leads to. Returns how many bytes were freed.
    pub fn sweep_unpacked(&self) -> Result<u64, ImagesError> {
        let lock = self.lock(&mut |_| {})?;
        self.sweep_unfinished(&lock)?;
        let mut wanted = std::collections::HashSet::new();
        for record in self.store.references()? {
            if let Ok(Some(pulled)) = self.load(&record) {
                wanted.extend(layers::files_of(&pulled));
            }
        }
        let mut freed = 0;
        for folder in FOLDERS {
            let is_wanted = |name: &str| wanted.contains(&Path::new(folder).join(sealed::sealed_name(name)));
            freed += self.sweep_folder(folder, is_wanted)?;
        }
        Ok(freed)
    }

    /// Removes what a process that was killed left behind.
    fn sweep_unfinished(&self, _lock: &Unpacking) -> Result<(), ImagesError> {
        for folder in FOLDERS {
            self.sweep_folder(folder, |name| !sealed::is_unfinished(name))?;
        }
        Ok(())
    }

    fn sweep_folder(&self, folder: &str, keep: impl Fn(&str) -> bool) -> Result<u64, ImagesError> {
        let path = self.store.root().join(folder);
        let sweep = || -> io::Result<u64> {
            let mut freed = 0;
            for entry in fs::read_dir(&path)? {
                let entry = entry?;
                if !entry.file_name().to_str().is_some_and(&keep) {
                    let size = entry.metadata()?.len();
                    fs::remove_file(entry.path())?;
                    freed += size;
                }
            }
            Ok(freed)
        };
        sweep().map_err(|error| self.failed(&path, error))
    }

    fn lock(&self, progress: &mut dyn FnMut(&str)) -> Result<Unpacking, ImagesError> {
        let path = self.store.root().join(LOCK);
        let mut take = || -> io::Result<File> {
            let mut options = File::options();
            let file = options.create(true).truncate(false).write(true).mode(0o600).open(&path)?;
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
                progress("waiting for another bathy that unpacks an image");
                while let Err(error) = flock(&file, FlockOperation::LockExclusive) {
                    if error != Errno::INTR {
                        return Err(error.into());
                    }
                }
            }
            Ok(file)
        };
        take().map(|lock| Unpacking { _lock: lock }).map_err(|error| self.failed(&path, error))
    }

    fn failed(&self, path: &Path, error: io::Error) -> ImagesError {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                ImagesError::NoSpace(self.store.root().to_owned())
            }
            _ => ImagesError::Access(path.to_owned(), error),
        }
    }
}

/// Whether a record is of the image with this digest, of its manifest or of the index that names it.
pub fn leads_to(record: &Record, digest: &Digest) -> bool {
    record.pinned == *digest || record.manifest == *digest
}

/// An image's defaults for commands, read as docker reads them.
pub fn defaults(pulled: &Pulled) -> Result<ImageConfig, ImagesError> {
    let run = &pulled.config.config;
    let bytes: usize = run.env.iter().map(|variable| variable.len() + 1).sum();
    if bytes > MAX_ENVIRONMENT {
        return Err(ImagesError::Environment { image: pulled.record.reference.clone(), bytes });
    }
    let variable = |text: &String| {
        let (name, value) = text.split_once('=')?;
        let is_valid = !name.is_empty() && !text.contains('\0');
        is_valid.then(|| (name.to_owned(), value.to_owned()))
    };
    let or = |text: &str, other: &str| if text.is_empty() { other.to_owned() } else { text.to_owned() };
    let cwd = or(&run.working_dir, "/");
    Ok(ImageConfig {
        // A number, because an image need not have a list of users.
        user: or(run.user.trim_end_matches(':'), "0"),
        cwd: if cwd.starts_with('/') { cwd } else { format!("/{cwd}") },
        env: run.env.iter().filter_map(variable).collect(),
        entrypoint: run.entrypoint.clone(),
        cmd: run.cmd.clone(),
        stop_signal: run.stop_signal.clone(),
    })
}
