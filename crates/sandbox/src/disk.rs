//! The writable disk of a sandbox: a sparse file with an empty file system, gone with its last descriptor.
//!
//! Making a file system takes longer than starting a guest, so one of each size is made once and its few hundred
//! kilobytes are copied for every sandbox.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use thiserror::Error;

use crate::launch::unix_ns;
use crate::spec::Size;

/// A disk cannot be made.
#[derive(Debug, Error)]
pub enum DiskError {
    /// The host's disk is full.
    #[error(
        "The host's disk is full: no room for the sandbox's disk in {0}. Free some space, or point XDG_STATE_HOME elsewhere"
    )]
    Full(PathBuf),
    /// Some other failure.
    #[error("Cannot make the sandbox's disk in {0}")]
    Io(PathBuf, #[source] io::Error),
    /// The file system could not be made.
    #[error("mke2fs failed (install it with: apt-get install e2fsprogs): {0}")]
    MakeFileSystem(String),
}

/// Makes a disk of `size` for a sandbox that does not outlive us: it has no name.
pub fn make(cache: &Path, state: &Path, size: Size) -> Result<File, DiskError> {
    fs::create_dir_all(state).map_err(failed(state))?;
    let disk = nameless_file(state).map_err(failed(state))?;
    fill(&disk, state, &template(cache, size, Journal::Without)?, size)?;
    Ok(disk)
}

/// Makes a disk of `size` for a sandbox that is kept, at `path`, where nothing may be yet.
pub fn make_kept(cache: &Path, path: &Path, size: Size) -> Result<(), DiskError> {
    let template = template(cache, size, Journal::With)?;
    let mut options = File::options();
    let disk = options.read(true).write(true).create_new(true).mode(0o600).open(path);
    fill(&disk.map_err(failed(path))?, path, &template, size)
}

fn fill(disk: &File, place: &Path, template: &Path, size: Size) -> Result<(), DiskError> {
    let source = open_template(template, size).map_err(failed(template))?;
    disk.set_len(size.0).map_err(failed(place))?;
    copy_data(&source, disk).map_err(failed(place))
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> DiskError {
    let path = path.to_owned();
    move |error: io::Error| match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => DiskError::Full(path),
        _ => DiskError::Io(path, error),
    }
}

/// Whether a file system keeps a journal. The disk of a sandbox that is kept is read again after any sudden end, and a
/// journal brings it in order; the disk of one that is not is never read again.
#[derive(Clone, Copy)]
enum Journal {
    With,
    Without,
}

/// Opens a template as what it has to be: whatever else lies at its place is not followed, waited for, or copied.
fn open_template(path: &Path, size: Size) -> io::Result<File> {
    let file = File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    let data = file.metadata()?;
    if data.is_file() && data.len() == size.0 {
        Ok(file)
    } else {
        Err(io::Error::other("it is not a disk of the right size; remove it, and it will be made again"))
    }
}

/// A file without a name: whatever happens to us, nothing is left.
fn nameless_file(folder: &Path) -> io::Result<File> {
    let open = |flags| File::options().read(true).write(true).mode(0o600).custom_flags(flags).open(folder);
    match open(libc::O_TMPFILE) {
        // File systems that do not know O_TMPFILE: a name for a moment.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
            let path = folder.join(format!("disk-{}", std::process::id()));
            let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
            fs::remove_file(path)?;
            Ok(file)
        }
        result => result,
    }
}

/// Copies what is not a hole.
fn copy_data(source: &File, target: &File) -> io::Result<()> {
    let mut buffer = vec![0u8; 64 * 1024];
    let mut position = 0;
    loop {
        let start = match seek(source, SeekFrom::Data(position)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let end = seek(source, SeekFrom::Hole(start))?;
        let mut at = start;
        while at < end {
            let room = usize::try_from(end - at).unwrap_or(usize::MAX).min(buffer.len());
            let count = source.read_at(buffer.get_mut(..room).unwrap_or_default(), at)?;
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            target.write_all_at(buffer.get(..count).unwrap_or_default(), at)?;
            at += count as u64;
        }
        position = end;
    }
}

/// The file with an empty file system of this size, made if it is not there.
fn template(cache: &Path, size: Size, journal: Journal) -> Result<PathBuf, DiskError> {
    let folder = cache.join("disk");
    let kind = match journal {
        Journal::With => "journal-ext4",
        Journal::Without => "ext4",
    };
    let path = folder.join(format!("{kind}-{size}"));
    if path.symlink_metadata().is_ok() {
        return Ok(path);
    }
    let failed = |error| DiskError::Io(folder.clone(), error);
    fs::create_dir_all(&folder).map_err(failed)?;
    let fresh = folder.join(format!("{kind}-{size}.{}-{}", std::process::id(), unix_ns()));
    // A new file, or none: nothing that somebody put at its place is written to.
    let file = File::options().write(true).create_new(true).open(&fresh).map_err(failed)?;
    let made = file.set_len(size.0).map_err(failed).and_then(|()| format(&fresh, size, journal));
    match made {
        Ok(()) => fs::rename(&fresh, &path).map_err(failed)?,
        Err(error) => {
            // Already failing; a left-over is only untidy.
            let _ = fs::remove_file(&fresh);
            return Err(error);
        }
    }
    Ok(path)
}

/// No reserved blocks: all of it is the sandbox's. A journal of a few megabytes holds what a sandbox changes at once.
fn format(path: &Path, size: Size, journal: Journal) -> Result<(), DiskError> {
    const SMALL: u64 = 256 * 1024 * 1024;
    let journal: &[&str] = match journal {
        Journal::Without => &["-O", "^has_journal"],
        Journal::With if size.0 < SMALL => &["-O", "has_journal", "-J", "size=4"],
        Journal::With => &["-O", "has_journal", "-J", "size=16"],
    };
    let output = Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-I", "256", "-O"])
        .arg("^resize_inode,sparse_super2,^huge_file")
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
