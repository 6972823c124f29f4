//! The writable disk of a sandbox: a sparse file with an empty file system.
//!
//! Creating a file system takes longer than starting a guest, so a template of each size is created once, and
//! its few hundred kilobytes are copied for every sandbox.

mod template;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use bathy_spec::Size;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use thiserror::Error;

use crate::folder::make_durable_folder;
use template::Template;

/// The unit in which templates are copied and compared: their file system's block size.
const BLOCK: usize = 4096;

/// A disk cannot be created.
#[derive(Debug, Error)]
pub enum DiskError {
    /// The host's disk is full.
    #[error(
        "The host's disk is full: no space for the sandbox's disk in {0}. Free some space, or point XDG_STATE_HOME elsewhere"
    )]
    Full(PathBuf),
    #[error("Cannot make the sandbox's disk in {0}")]
    Io(PathBuf, #[source] io::Error),
    /// Another program writes to the templates.
    #[error("{0} changes while it is read; does another program write to it?")]
    Changing(PathBuf),
    #[error("mke2fs failed (install it with: apt-get install e2fsprogs): {0}")]
    MakeFileSystem(String),
}

/// Creates the disk of an ephemeral sandbox: an unnamed file.
pub fn make(cache: &Path, state: &Path, size: Size) -> Result<File, DiskError> {
    make_durable_folder(state).map_err(failed(state))?;
    let disk = nameless_file(state).map_err(failed(state))?;
    fill(&disk, state, cache, size, Journal::Without)?;
    Ok(disk)
}

/// Creates the disk of a persistent sandbox at `path`, which must not exist.
pub fn make_persistent(cache: &Path, path: &Path, size: Size) -> Result<(), DiskError> {
    let mut options = File::options();
    let disk = options.read(true).write(true).create_new(true).mode(0o600).open(path);
    fill(&disk.map_err(failed(path))?, path, cache, size, Journal::With)
}

/// Copies a template. A template that was damaged by a power loss or a failing disk is created again.
fn fill(disk: &File, path: &Path, cache: &Path, size: Size, journal: Journal) -> Result<(), DiskError> {
    let found = template::find(cache, size, journal);
    let found = match found {
        Some(found) => found,
        None => template::make(cache, size, journal)?,
    };
    if copy(&found, disk, path, size)? {
        return Ok(());
    }
    template::discard(&found);
    disk.set_len(0).map_err(failed(path))?;
    let made = template::make(cache, size, journal)?;
    if copy(&made, disk, path, size)? { Ok(()) } else { Err(DiskError::Changing(made.path)) }
}

/// Copies a template onto an empty disk. False if the template is damaged.
fn copy(template: &Template, disk: &File, path: &Path, size: Size) -> Result<bool, DiskError> {
    let Some(source) = template.open(size).map_err(failed(&template.path))? else { return Ok(false) };
    disk.set_len(size.0).map_err(failed(path))?;
    let digest = copy_data(&source, disk).map_err(failed(path))?;
    Ok(digest == template.digest)
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> DiskError {
    let path = path.to_owned();
    move |error: io::Error| match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => DiskError::Full(path),
        _ => DiskError::Io(path, error),
    }
}

/// Whether a file system has a journal. A persistent disk is read again after a sudden end, and the journal
/// repairs it. An ephemeral disk is never read again.
#[derive(Clone, Copy)]
enum Journal {
    With,
    Without,
}

/// Creates an unnamed file, which disappears with its last descriptor.
fn nameless_file(folder: &Path) -> io::Result<File> {
    let open = |flags| File::options().read(true).write(true).mode(0o600).custom_flags(flags).open(folder);
    match open(libc::O_TMPFILE) {
        // For file systems without O_TMPFILE: a temporary name that is removed at once.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
            let path = folder.join(format!("disk-{}", std::process::id()));
            let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
            fs::remove_file(path)?;
            Ok(file)
        }
        result => result,
    }
}

/// Copies everything but holes and returns its digest.
fn copy_data(source: &File, target: &File) -> io::Result<String> {
    read_data(source, |at, block| target.write_all_at(block, at))
}

/// Reads everything but holes, block by block, and returns the digest. Blocks of zeros count as holes,
/// because file systems differ in which of these they store as holes.
fn read_data(source: &File, mut each: impl FnMut(u64, &[u8]) -> io::Result<()>) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0u8; 64 * 1024];
    let mut position = 0;
    loop {
        let start = match seek(source, SeekFrom::Data(position)) {
            Ok(start) => start - start % BLOCK as u64,
            Err(Errno::NXIO) => return Ok(hasher.finalize().to_hex().to_string()),
            Err(error) => return Err(error.into()),
        };
        let end = seek(source, SeekFrom::Hole(start.max(position)))?;
        let mut at = start;
        while at < end {
            let length = usize::try_from(end - at).unwrap_or(usize::MAX).min(buffer.len());
            let piece = buffer.get_mut(..length).unwrap_or_default();
            source.read_exact_at(piece, at)?;
            for block in piece.chunks(BLOCK) {
                if block.iter().any(|byte| *byte != 0) {
                    hasher.update(&at.to_le_bytes()).update(block);
                    each(at, block)?;
                }
                at += block.len() as u64;
            }
        }
        position = end;
    }
}

/// No reserved blocks: the sandbox may use the whole disk. A journal of a few megabytes is large enough. No
/// metadata checksums: the superblock spans two sectors and is written without the journal on mount, so a
/// power loss between them would leave an unmountable disk.
fn format(path: &Path, size: Size, journal: Journal) -> Result<(), DiskError> {
    const SMALL: u64 = 256 * 1024 * 1024;
    let journal: &[&str] = match journal {
        Journal::Without => &["-O", "^has_journal"],
        Journal::With if size.0 < SMALL => &["-O", "has_journal", "-J", "size=4"],
        Journal::With => &["-O", "has_journal", "-J", "size=16"],
    };
    let output = Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-I", "256", "-O"])
        .arg("^resize_inode,sparse_super2,^huge_file,^metadata_csum,uninit_bg")
        .args(journal)
        .args(["-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0", "-L", "sandbox"])
        .arg(path)
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| DiskError::MakeFileSystem(error.to_string()))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(DiskError::MakeFileSystem(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
    }
}
