//! The files of one sandbox that is kept.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::paths::Paths;
use crate::spec::SandboxSpec;

/// How often a removal is disturbed by others before it is given up.
const TRIES: u32 = 20;

/// Where a sandbox's files are.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// All sandboxes' folders.
    pub fn all(paths: &Paths) -> PathBuf {
        paths.state.join("sandboxes")
    }

    /// The folder of the sandbox with this id.
    pub fn of(paths: &Paths, id: &str) -> Self {
        Self { path: Self::all(paths).join(id) }
    }

    /// Makes it, for this user alone.
    pub fn create(&self) -> io::Result<()> {
        if let Some(parent) = self.path.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
        }
        DirBuilder::new().mode(0o700).create(&self.path)
    }

    /// Removes it with everything in it; one that is gone already is no error.
    pub fn remove(&self) -> io::Result<()> {
        let mut tries = 0;
        loop {
            match fs::remove_dir_all(&self.path) {
                // Another command, about to find that it comes too late, has just made its lock in there.
                Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty && tries < TRIES => tries += 1,
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => return Ok(()),
            }
        }
    }

    /// The folder itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The writable disk.
    pub fn disk(&self) -> PathBuf {
        self.path.join("disk")
    }

    /// The ring with the output of jobs.
    pub fn output_log(&self) -> PathBuf {
        self.path.join("output.ring")
    }

    /// The ring with the guest kernel's console.
    pub fn console_log(&self) -> PathBuf {
        self.path.join("console.ring")
    }

    /// How the image wants commands to be run.
    pub fn image_config(&self) -> PathBuf {
        self.path.join("image.json")
    }

    /// What the monitor itself had to say.
    pub fn monitor_log(&self) -> PathBuf {
        self.path.join("monitor.log")
    }

    /// Opens a file of this folder for reading and writing; it must be a file and no link.
    pub fn open(path: &Path) -> io::Result<File> {
        let file = File::options().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
        if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is not a file")) }
    }

    /// The file for the memory of a paused sandbox: empty until then.
    pub fn open_parking(&self, spec: &SandboxSpec) -> io::Result<File> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true).mode(0o600);
        let file = options.custom_flags(libc::O_NOFOLLOW).open(self.path.join("parking"))?;
        file.set_len(spec.memory.0)?;
        Ok(file)
    }
}
