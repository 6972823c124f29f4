//! Unpacks an archive into files. Below the destination no link is followed: every name is a single
//! component, opened relative to its folder.

use std::ffi::OsStr;
use std::fs::DirBuilder;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;

use bathy_protocol::archive::{ArchiveDecoder, ArchiveRecord, is_plain_name};
use rustix::fs::{
    Access, AtFlags, CWD, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_OMIT, Uid, accessat,
    fchmod, fchown, futimens, linkat, mkdirat, openat, readlinkat, renameat, statat, symlinkat, syncfs,
    unlinkat,
};
use rustix::io::Errno;

use super::{TransferError, join};

/// No set-user-ID and the like: a copy gains no privileges.
const MODE_BITS: u32 = 0o777;
const CHUNK: usize = 64 * 1024;
/// How many names are tried for a temporary file.
const TEMPORARY_NAMES: u32 = 1000;
/// How many links are followed to a file that is written.
const MAX_LINKS: usize = 40;
/// The permissions of created parent folders.
const FOLDER_MODE: u32 = 0o755;

/// Unpacks an archive to `path`, or into it under `name` if `path` is a folder.
pub fn put(input: &mut impl Read, path: &[u8], name: &[u8]) -> Result<(), TransferError> {
    fill(Tree::at(path, name)?, input)
}

/// Unpacks an archive of one file to `path`, as an editor would write it: following links, keeping the
/// permissions and owner of an existing file, with the present time.
pub fn write(input: &mut impl Read, path: &[u8]) -> Result<(), TransferError> {
    fill(Tree::of_file(path)?, input)
}

fn fill(mut tree: Tree, input: &mut impl Read) -> Result<(), TransferError> {
    let mut decoder = ArchiveDecoder::default();
    let mut buffer = vec![0u8; CHUNK];
    loop {
        let count = match input.read(&mut buffer) {
            Ok(0) => return Err(TransferError::Truncated),
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(TransferError::Stream(error)),
        };
        decoder.push(buffer.get(..count).unwrap_or_default());
        while let Some(record) = decoder.next_record()? {
            if record == ArchiveRecord::End {
                return tree.finish();
            }
            tree.take(record)?;
        }
    }
}

/// A folder of the archive, or the one that receives its item.
struct Folder {
    fd: OwnedFd,
    path: Vec<u8>,
    /// The mode to set when it is complete; `None` if it existed before.
    mode: Option<Mode>,
}

/// A file that is being written.
struct Pending {
    fd: OwnedFd,
    name: Vec<u8>,
    path: Vec<u8>,
    mode: Mode,
    modified: Option<i64>,
    owner: Option<(Uid, Gid)>,
    temporary: Option<Temporary>,
}

/// A temporary name that is removed unless it was renamed.
struct Temporary {
    folder: OwnedFd,
    name: String,
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // After a rename there is nothing left to remove.
        let _ = unlinkat(&self.folder, &self.name, AtFlags::empty());
    }
}

struct Tree {
    folders: Vec<Folder>,
    /// The local name of the archive's first item.
    top: Vec<u8>,
    file: Option<Pending>,
    /// Whether the content of an existing file is replaced. Otherwise the file itself is replaced.
    rewrites: bool,
}

impl Tree {
    fn at(path: &[u8], name: &[u8]) -> Result<Self, TransferError> {
        let failed = |path: &[u8]| {
            let path = path.to_vec();
            move |error| TransferError::File(path, error)
        };
        let (parent, top) = match open_folder(CWD, path, OFlags::empty()) {
            Ok(_) if !is_plain_name(name) => return Err(TransferError::Nameless),
            Ok(fd) => (Folder { fd, path: path.to_vec(), mode: None }, name),
            Err(Errno::NOENT | Errno::NOTDIR) if !path.ends_with(b"/") => {
                let (parent, top) = split(path);
                let fd = open_folder(CWD, parent, OFlags::empty()).map_err(failed(parent))?;
                (Folder { fd, path: parent.to_vec(), mode: None }, top)
            }
            Err(error) => return Err(failed(path)(error)),
        };
        if !is_plain_name(top) {
            return Err(TransferError::Nameless);
        }
        Ok(Self { folders: vec![parent], top: top.to_vec(), file: None, rewrites: false })
    }

    /// A single file at `path`, whose parent folders are created.
    fn of_file(path: &[u8]) -> Result<Self, TransferError> {
        let path = follow(path)?;
        let (parent, top) = split(&path);
        if matches!(top, b"" | b"." | b"..") {
            return Err(TransferError::NotAFile(path, "a folder"));
        }
        let made = DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(OsStr::from_bytes(parent));
        let made = made.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO));
        let fd = match made.and_then(|()| open_folder(CWD, parent, OFlags::empty())) {
            Ok(fd) => fd,
            Err(Errno::EXIST | Errno::NOTDIR) => return Err(TransferError::NoFolder(parent.to_vec())),
            Err(error) => return Err(TransferError::File(parent.to_vec(), error)),
        };
        let parent = Folder { fd, path: parent.to_vec(), mode: None };
        Ok(Self { folders: vec![parent], top: top.to_vec(), file: None, rewrites: true })
    }

    fn take(&mut self, record: ArchiveRecord) -> Result<(), TransferError> {
        match record {
            ArchiveRecord::Enter { name, mode } => self.enter(&self.name(name), mode),
            ArchiveRecord::Leave => self.leave(),
            ArchiveRecord::File { name, mode, modified, .. } => self.begin(self.name(name), mode, modified),
            ArchiveRecord::Data(bytes) => self.write(&bytes),
            ArchiveRecord::FileEnd => self.end_file(),
            ArchiveRecord::Link { name, target } => self.link(&self.name(name), &target),
            // The host has reported these itself.
            ArchiveRecord::Skipped { .. } | ArchiveRecord::End => Ok(()),
        }
    }

    /// The decoder has checked every name but the first item's, which we choose.
    fn name(&self, name: Vec<u8>) -> Vec<u8> {
        if self.folders.len() == 1 { self.top.clone() } else { name }
    }

    fn here(&self) -> Result<&Folder, TransferError> {
        self.folders.last().ok_or(TransferError::Truncated)
    }

    fn enter(&mut self, name: &[u8], mode: u32) -> Result<(), TransferError> {
        let here = self.here()?;
        let path = join(&here.path, name);
        let mode = match mkdirat(&here.fd, name, Mode::RWXU) {
            Ok(()) => Some(mode_of(mode)),
            Err(Errno::EXIST) => None,
            Err(error) => return Err(TransferError::File(path, error)),
        };
        match open_folder(here.fd.as_fd(), name, OFlags::NOFOLLOW) {
            Ok(fd) => {
                self.folders.push(Folder { fd, path, mode });
                Ok(())
            }
            Err(Errno::NOTDIR | Errno::LOOP) => Err(TransferError::NoFolder(path)),
            Err(error) => Err(TransferError::File(path, error)),
        }
    }

    fn leave(&mut self) -> Result<(), TransferError> {
        let Some(folder) = self.folders.pop() else { return Err(TransferError::Truncated) };
        // Set last: a read-only folder could not have been filled.
        if let Some(mode) = folder.mode {
            fchmod(&folder.fd, mode).map_err(|error| TransferError::File(folder.path, error))?;
        }
        Ok(())
    }

    fn begin(&mut self, name: Vec<u8>, mode: u32, modified: i64) -> Result<(), TransferError> {
        let here = self.here()?;
        let path = join(&here.path, &name);
        let present = check_replaceable(here, &name, &path)?;
        let (mut mode, mut owner) = (mode_of(mode), None);
        if let Some(stat) = present.filter(|_| self.rewrites) {
            // Replacing the file requires no permission on it, but writing to it does.
            accessat(&here.fd, &name, Access::WRITE_OK, AtFlags::empty())
                .map_err(|error| TransferError::File(path.clone(), error))?;
            mode = mode_of(stat.st_mode);
            owner = Some((Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid)));
        }
        let modified = (!self.rewrites).then_some(modified);
        let (fd, temporary) = match nameless_file(here) {
            Ok(fd) => (fd, None),
            // Some file systems do not support unnamed files.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
                let made = temporary(here, |folder, name| {
                    let flags =
                        OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                    openat(folder, name, flags, Mode::RUSR | Mode::WUSR)
                });
                let (fd, temporary) = made.map_err(|error| TransferError::File(path.clone(), error))?;
                (fd, Some(temporary))
            }
            Err(error) => return Err(TransferError::File(path, error)),
        };
        self.file = Some(Pending { fd, name, path, mode, modified, owner, temporary });
        Ok(())
    }

    fn write(&mut self, mut bytes: &[u8]) -> Result<(), TransferError> {
        let Some(file) = &self.file else { return Err(TransferError::Truncated) };
        while !bytes.is_empty() {
            match rustix::io::write(&file.fd, bytes) {
                Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(error) => return Err(TransferError::File(file.path.clone(), error)),
            }
        }
        Ok(())
    }

    /// Renames the file into place, so that readers see it whole or not at all.
    fn end_file(&mut self) -> Result<(), TransferError> {
        let Some(file) = self.file.take() else { return Err(TransferError::Truncated) };
        self.complete(&file).map_err(|error| match error {
            Errno::ISDIR | Errno::NOTEMPTY => TransferError::FolderInTheWay(file.path.clone()),
            error => TransferError::File(file.path.clone(), error),
        })
    }

    fn complete(&self, file: &Pending) -> Result<(), Errno> {
        let Some(here) = self.folders.last() else { return Err(Errno::IO) };
        if let Some((user, group)) = file.owner {
            // Only root can change the owner; otherwise the file belongs to the writing user.
            let _ = fchown(&file.fd, Some(user), Some(group));
        }
        fchmod(&file.fd, file.mode)?;
        if let Some(modified) = file.modified {
            let times = Timestamps {
                last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
                last_modification: Timespec { tv_sec: modified, tv_nsec: 0 },
            };
            futimens(&file.fd, &times)?;
        }
        if let Some(temporary) = &file.temporary {
            return renameat(&here.fd, &temporary.name, &here.fd, &file.name);
        }
        create_or_replace(here, &file.name, |folder, name| {
            linkat(&file.fd, "", folder, name, AtFlags::EMPTY_PATH)
        })
    }

    fn link(&self, name: &[u8], target: &[u8]) -> Result<(), TransferError> {
        let here = self.here()?;
        let path = join(&here.path, name);
        check_replaceable(here, name, &path)?;
        create_or_replace(here, name, |folder, name| symlinkat(target, folder, name)).map_err(|error| {
            match error {
                Errno::ISDIR | Errno::NOTEMPTY => TransferError::FolderInTheWay(path),
                error => TransferError::File(path, error),
            }
        })
    }

    /// Flushes everything to the disk: a copy that was reported survives a crash of the guest.
    fn finish(self) -> Result<(), TransferError> {
        let here = self.here()?;
        match syncfs(&here.fd) {
            // A folder that cannot be listed was opened with O_PATH.
            Ok(()) | Err(Errno::BADF) => {}
            Err(error) => return Err(TransferError::File(here.path.clone(), error)),
        }
        if !self.rewrites {
            // This also covers file systems mounted inside the tree.
            rustix::fs::sync();
        }
        Ok(())
    }
}

/// Splits a path into its folder and name.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    let cut = path.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    let (parent, top) = path.split_at(cut);
    (if parent.is_empty() { b"." } else { parent }, top)
}

/// Follows links from a path to its target, which need not exist.
fn follow(path: &[u8]) -> Result<Vec<u8>, TransferError> {
    let mut here = path.to_vec();
    for _ in 0..MAX_LINKS {
        // If it is no link or does not exist, opening it later reports that.
        let Ok(target) = readlinkat(CWD, here.as_slice(), Vec::new()) else { return Ok(here) };
        let target = target.into_bytes();
        here = if target.starts_with(b"/") { target } else { join(split(&here).0, &target) };
    }
    Err(TransferError::File(path.to_vec(), Errno::LOOP))
}

fn mode_of(bits: u32) -> Mode {
    Mode::from_bits_truncate(bits & MODE_BITS)
}

/// Falls back to O_PATH: a folder that may be entered but not listed can still be written to.
fn open_folder(from: BorrowedFd<'_>, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match openat(from, path, flags | OFlags::RDONLY, Mode::empty()) {
        Err(Errno::ACCESS) => openat(from, path, flags | OFlags::PATH, Mode::empty()),
        other => other,
    }
}

/// Checks that a file would replace only a file or a link.
fn check_replaceable(here: &Folder, name: &[u8], path: &[u8]) -> Result<Option<Stat>, TransferError> {
    match statat(&here.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(TransferError::File(path.to_vec(), error)),
        Ok(stat) => match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile | FileType::Symlink => Ok(Some(stat)),
            FileType::Directory => Err(TransferError::FolderInTheWay(path.to_vec())),
            other => Err(TransferError::Special(path.to_vec(), super::get::kind(other))),
        },
    }
}

/// A file that disappears with this process.
fn nameless_file(here: &Folder) -> Result<OwnedFd, Errno> {
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    openat(&here.fd, ".", flags, Mode::RUSR | Mode::WUSR)
}

/// Creates something under `name`; if that exists, under a temporary name that is then renamed.
fn create_or_replace(
    here: &Folder,
    name: &[u8],
    make: impl Fn(BorrowedFd<'_>, &[u8]) -> Result<(), Errno>,
) -> Result<(), Errno> {
    match make(here.fd.as_fd(), name) {
        Err(Errno::EXIST) => {}
        outcome => return outcome,
    }
    let ((), temporary) = temporary(here, |folder, name| make(folder, name.as_bytes()))?;
    renameat(&here.fd, &temporary.name, &here.fd, name)
}

/// Creates something under an unused name.
fn temporary<T>(
    here: &Folder,
    make: impl Fn(BorrowedFd<'_>, &str) -> Result<T, Errno>,
) -> Result<(T, Temporary), Errno> {
    let folder = rustix::io::fcntl_dupfd_cloexec(&here.fd, 0)?;
    let process = rustix::process::getpid().as_raw_nonzero();
    for number in 0..TEMPORARY_NAMES {
        let name = format!(".bathysphere-{process}-{number}.part");
        match make(here.fd.as_fd(), &name) {
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
            Ok(made) => return Ok((made, Temporary { folder, name })),
        }
    }
    Err(Errno::EXIST)
}

#[cfg(test)]
#[path = "put_tests.rs"]
mod tests;
