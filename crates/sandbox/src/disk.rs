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

/// Makes a disk of `size` for one sandbox.
pub fn make(cache: &Path, state: &Path, size: Size) -> Result<File, DiskError> {
    let template = template(cache, size)?;
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |error: io::Error| match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => DiskError::Full(path),
            _ => DiskError::Io(path, error),
        }
    };
    let source = open_template(&template, size).map_err(failed(&template))?;
    fs::create_dir_all(state).map_err(failed(state))?;
    let disk = nameless_file(state).map_err(failed(state))?;
    disk.set_len(size.0).map_err(failed(state))?;
    copy_data(&source, &disk).map_err(failed(state))?;
    Ok(disk)
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
fn template(cache: &Path, size: Size) -> Result<PathBuf, DiskError> {
    let folder = cache.join("disk");
    let path = folder.join(format!("ext4-{size}"));
    if path.symlink_metadata().is_ok() {
        return Ok(path);
    }
    let failed = |error| DiskError::Io(folder.clone(), error);
    fs::create_dir_all(&folder).map_err(failed)?;
    let fresh = folder.join(format!("ext4-{size}.{}-{}", std::process::id(), unix_ns()));
    // A new file, or none: nothing that somebody put at its place is written to.
    let file = File::options().write(true).create_new(true).open(&fresh).map_err(failed)?;
    let made = file.set_len(size.0).map_err(failed).and_then(|()| format(&fresh));
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

/// No journal: the disk of a sandbox that dies is not read again. No reserved blocks: all of it is the sandbox's.
fn format(path: &Path) -> Result<(), DiskError> {
    let output = Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-I", "256", "-O"])
        .arg("^has_journal,^resize_inode,sparse_super2,^huge_file")
        .args(["-E", "lazy_itable_init=1,nodiscard,root_owner=0:0", "-L", "sandbox"])
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
