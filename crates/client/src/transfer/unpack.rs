//! Unpacks an archive from a guest into a file or tree on the host.
//!
//! The guest is hostile. Its names are single components, used only relative to folders that were opened
//! without following a link. Its sizes are not trusted, and what it sends is counted against limits. A file
//! gets its name only when it is complete.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use bathy_protocol::archive::{ArchiveDecoder, ArchiveError, ArchiveRecord, is_plain_name};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Timespec, Timestamps, UTIME_OMIT};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use thiserror::Error;

use super::Summary;
use super::links::stays_inside;
use super::run::{Sink, TransferError};
use super::tally::Tally;

/// The name prefix of incomplete files.
pub const TEMPORARY_PREFIX: &str = ".bathy-partial-";
/// Permission bits that a guest may choose: no setuid, setgid or sticky bit.
const MODE_MASK: u32 = 0o777;
/// Opens a folder only to look up entries in it.
const FOLDER: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// How many temporary names are tried.
const ATTEMPTS: usize = 16;

/// The archive cannot be unpacked.
#[derive(Debug, Error)]
pub enum UnpackError {
    /// The archive is invalid.
    #[error("The sandbox sent an invalid archive")]
    Archive(#[from] ArchiveError),
    /// The archive ended early.
    #[error("The sandbox stopped sending before the copy was complete")]
    Truncated,
    #[error("The copy is larger than the limit of {0} bytes (raise it with --limit)")]
    TooLarge(u64),
    /// Too many files, folders and links.
    #[error("The copy has more entries than the limit of {0} (raise it with --limit)")]
    TooMany(u64),
    #[error("Cannot write {0}: the host's disk is full")]
    Full(String),
    /// The destination is unusable.
    #[error("Cannot copy to {path}: {reason}")]
    Destination {
        /// The path as the user gave it.
        path: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// An existing entry cannot be replaced by the one that arrived. The path is controlled by the guest.
    #[error("Cannot write {path}: {what} is in the way")]
    InTheWay { path: String, what: &'static str },
    #[error("The sandbox sent a link in place of the file or folder")]
    TopLink,
    /// Writing failed. The path is controlled by the guest.
    #[error("Cannot write {path}")]
    Write { path: String, source: io::Error },
}

/// Limits on what a guest may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnpackLimits {
    /// Bytes of file content written.
    pub bytes: u64,
    /// Files, folders and links.
    pub entries: u64,
}

impl Default for UnpackLimits {
    fn default() -> Self {
        Self { bytes: 4 << 30, entries: 1_000_000 }
    }
}

/// A folder that is being filled.
struct Folder {
    fd: OwnedFd,
    /// The permission bits of a folder that was created here. They are set when it is complete, so that a
    /// read-only folder can be filled. Existing folders keep their own.
    mode: Option<u32>,
}

/// A file that is being written under a temporary name.
struct Partial {
    file: File,
    temporary: String,
    name: Vec<u8>,
    mode: u32,
    modified: i64,
}

pub struct Unpacker {
    decoder: ArchiveDecoder,
    /// The folder that the item is created in. The user's own path was followed to it, including links.
    base: OwnedFd,
    /// The item's local name in that folder.
    name: Vec<u8>,
    /// The item's whole path, for messages.
    path: PathBuf,
    /// Whether the destination ended with a slash.
    only_folder: bool,
    folders: Vec<Folder>,
    file: Option<Partial>,
    limits: UnpackLimits,
    left: UnpackLimits,
    total: Option<u64>,
    tally: Tally,
    failed: bool,
}

impl Unpacker {
    /// Prepares to unpack to `destination`. An existing folder receives the item as `name`; otherwise it is
    /// the item's new path, in an existing folder.
    pub fn new(destination: &Path, name: &OsStr, limits: UnpackLimits) -> Result<Self, UnpackError> {
        let shown = || destination.display().to_string();
        let bad = |reason| UnpackError::Destination { path: shown(), reason };
        let failed = |errno: Errno| UnpackError::Write { path: shown(), source: errno.into() };
        let (base, name, path, only_folder) = match rustix::fs::open(destination, FOLDER, Mode::empty()) {
            Ok(folder) => (folder, name.as_bytes(), destination.join(name), false),
            Err(Errno::NOENT | Errno::NOTDIR) => {
                let name = destination.file_name().ok_or_else(|| bad("there is no such folder"))?;
                let parent = match destination.parent() {
                    Some(parent) if !parent.as_os_str().is_empty() => parent,
                    _ => Path::new("."),
                };
                let parent =
                    rustix::fs::open(parent, FOLDER, Mode::empty()).map_err(|errno| match errno {
                        Errno::NOENT | Errno::NOTDIR => bad("its folder does not exist"),
                        _ => failed(errno),
                    })?;
                let only_folder = destination.as_os_str().as_bytes().ends_with(b"/");
                (parent, name.as_bytes(), destination.to_owned(), only_folder)
            }
            Err(errno) => return Err(failed(errno)),
        };
        if !is_plain_name(name) {
            return Err(bad("the copy needs a name there"));
        }
        Ok(Self {
            decoder: ArchiveDecoder::default(),
            base,
            name: name.to_vec(),
            path,
            only_folder,
            folders: Vec::new(),
            file: None,
            limits,
            left: limits,
            total: None,
            tally: Tally::default(),
            failed: false,
        })
    }

    /// How many bytes of content were written.
    pub fn done(&self) -> u64 {
        self.tally.bytes()
    }

    /// How many bytes of content there are, if the item is a file. The guest claims this: use it for a
    /// progress bar only.
    pub fn total(&self) -> Option<u64> {
        self.total
    }

    /// Consumes the archive's next bytes. After an error the archive cannot be continued.
    pub fn take(&mut self, bytes: &[u8]) -> Result<(), UnpackError> {
        if self.failed {
            return Err(UnpackError::Truncated);
        }
        let outcome = self.take_records(bytes);
        if outcome.is_err() {
            self.failed = true;
            self.clean_up();
        }
        outcome
    }

    /// Completes the copy at the end of the archive.
    pub fn finish(mut self) -> Result<Summary, UnpackError> {
        if self.failed || !self.decoder.is_complete() {
            return Err(UnpackError::Truncated);
        }
        Ok(std::mem::take(&mut self.tally).into_summary())
    }

    fn take_records(&mut self, bytes: &[u8]) -> Result<(), UnpackError> {
        self.decoder.push(bytes);
        while let Some(record) = self.decoder.next_record()? {
            self.apply(record)?;
        }
        Ok(())
    }

    fn apply(&mut self, record: ArchiveRecord) -> Result<(), UnpackError> {
        match record {
            ArchiveRecord::Enter { name, mode } => {
                self.count_entry()?;
                let name = self.local_name(name);
                self.enter(&name, mode & MODE_MASK)
            }
            ArchiveRecord::Leave => self.leave(),
            ArchiveRecord::File { name, mode, size, modified } => {
                self.count_entry()?;
                // Not trusted, only an early check: content is counted as it arrives.
                if size > self.left.bytes {
                    return Err(UnpackError::TooLarge(self.limits.bytes));
                }
                let top = self.folders.is_empty();
                let name = self.local_name(name);
                self.begin(name, mode & MODE_MASK, modified)?;
                self.total = top.then_some(size);
                Ok(())
            }
            ArchiveRecord::Data(content) => {
                // Empty content records cost nothing, so there could be an endless number of them.
                if content.is_empty() {
                    self.count_entry()?;
                }
                self.count_bytes(content.len())?;
                self.write(&content)
            }
            ArchiveRecord::FileEnd => self.complete(),
            ArchiveRecord::Link { name, target } => {
                self.count_entry()?;
                self.count_bytes(target.len())?;
                self.link(&name, &target)
            }
            ArchiveRecord::Skipped { name, reason } => {
                self.count_entry()?;
                self.count_bytes(reason.len())?;
                self.tally.skip(&name, &reason);
                Ok(())
            }
            ArchiveRecord::End => Ok(()),
        }
    }

    fn count_entry(&mut self) -> Result<(), UnpackError> {
        self.left.entries =
            self.left.entries.checked_sub(1).ok_or(UnpackError::TooMany(self.limits.entries))?;
        Ok(())
    }

    fn count_bytes(&mut self, count: usize) -> Result<(), UnpackError> {
        let left = self.left.bytes.checked_sub(count as u64);
        self.left.bytes = left.ok_or(UnpackError::TooLarge(self.limits.bytes))?;
        Ok(())
    }

    /// The innermost open folder.
    fn folder(&self) -> BorrowedFd<'_> {
        self.folders.last().map_or_else(|| self.base.as_fd(), |folder| folder.fd.as_fd())
    }

    /// The item has its local name, whatever the guest sends.
    fn local_name(&self, name: Vec<u8>) -> Vec<u8> {
        if self.folders.is_empty() { self.name.clone() } else { name }
    }

    fn enter(&mut self, name: &[u8], mode: u32) -> Result<(), UnpackError> {
        let folder = self.folder();
        let made = match rustix::fs::mkdirat(folder, name, Mode::RWXU) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(errno) => return Err(self.write_error(name, errno)),
        };
        // A folder that we created has to be readable, because its mode is set through the descriptor.
        let access = if made { FOLDER.difference(OFlags::PATH) } else { FOLDER };
        let fd =
            rustix::fs::openat(folder, name, access | OFlags::NOFOLLOW, Mode::empty()).map_err(|errno| {
                match errno {
                    Errno::NOTDIR | Errno::LOOP => self.in_the_way(name, "something that is not a folder"),
                    _ => self.write_error(name, errno),
                }
            })?;
        let display_name = self.display_name(name).to_vec();
        self.tally.enter(&display_name, mode);
        self.folders.push(Folder { fd, mode: made.then_some(mode) });
        Ok(())
    }

    fn leave(&mut self) -> Result<(), UnpackError> {
        if let Some(Folder { fd, mode: Some(mode) }) = self.folders.last() {
            self.set_mode(fd.as_fd(), *mode, b"")?;
        }
        self.folders.pop();
        self.tally.leave();
        Ok(())
    }

    fn begin(&mut self, name: Vec<u8>, mode: u32, modified: i64) -> Result<(), UnpackError> {
        if self.only_folder && self.folders.is_empty() {
            return Err(UnpackError::Destination {
                path: self.shown(&name),
                reason: "it ends with a slash, and what is copied is a file",
            });
        }
        self.check_replaceable(&name)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let (temporary, fd) = self.temporary(&name, |folder, temporary| {
            rustix::fs::openat(folder, temporary, flags, Mode::RUSR | Mode::WUSR)
        })?;
        self.tally.file(&name, mode);
        self.file = Some(Partial { file: File::from(fd), temporary, name, mode, modified });
        Ok(())
    }

    fn write(&mut self, content: &[u8]) -> Result<(), UnpackError> {
        if let Some(partial) = &mut self.file {
            if let Err(error) = partial.file.write_all(content) {
                let name = partial.name.clone();
                return Err(self.io_error(&name, error));
            }
            self.tally.data(content);
        }
        Ok(())
    }

    fn complete(&mut self) -> Result<(), UnpackError> {
        if let Some(partial) = &self.file {
            let fd = partial.file.as_fd();
            self.set_mode(fd, partial.mode, &partial.name)?;
            let times = Timestamps {
                last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
                last_modification: Timespec { tv_sec: partial.modified, tv_nsec: 0 },
            };
            // A time that the file system cannot store does not fail the copy.
            let _ = rustix::fs::futimens(fd, &times);
            let folder = self.folder();
            rustix::fs::renameat(folder, partial.temporary.as_str(), folder, partial.name.as_slice())
                .map_err(|errno| self.replace_error(&partial.name, errno))?;
        }
        self.file = None;
        self.tally.file_end();
        Ok(())
    }

    fn link(&mut self, name: &[u8], target: &[u8]) -> Result<(), UnpackError> {
        if self.folders.is_empty() {
            return Err(UnpackError::TopLink);
        }
        // The topmost folder is inside the tree, its parent is not.
        if let Err(reason) = stays_inside(target, self.folders.len() - 1) {
            self.tally.skip(name, reason);
            return Ok(());
        }
        match rustix::fs::symlinkat(target, self.folder(), name) {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                self.check_replaceable(name)?;
                let (temporary, ()) = self
                    .temporary(name, |folder, temporary| rustix::fs::symlinkat(target, folder, temporary))?;
                let folder = self.folder();
                if let Err(errno) = rustix::fs::renameat(folder, temporary.as_str(), folder, name) {
                    let _ = rustix::fs::unlinkat(folder, temporary.as_str(), AtFlags::empty());
                    return Err(self.replace_error(name, errno));
                }
            }
            Err(errno) => return Err(self.write_error(name, errno)),
        }
        self.tally.link(name, target);
        Ok(())
    }

    /// Only a file or link may be replaced: never a folder or a device.
    fn check_replaceable(&self, name: &[u8]) -> Result<(), UnpackError> {
        match rustix::fs::statat(self.folder(), name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile | FileType::Symlink => Ok(()),
                FileType::Directory => Err(self.in_the_way(name, "a folder")),
                _ => Err(self.in_the_way(name, "a device, a pipe or a socket")),
            },
            Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(self.write_error(name, errno)),
        }
    }

    /// Creates an entry in the innermost folder under an unpredictable name.
    fn temporary<T>(
        &self,
        name: &[u8],
        make: impl Fn(BorrowedFd<'_>, &str) -> Result<T, Errno>,
    ) -> Result<(String, T), UnpackError> {
        for _ in 0..ATTEMPTS {
            let mut random = [0u8; 8];
            getrandom(&mut random, GetRandomFlags::empty()).map_err(|errno| self.write_error(name, errno))?;
            let temporary = format!("{TEMPORARY_PREFIX}{:016x}", u64::from_le_bytes(random));
            match make(self.folder(), &temporary) {
                Ok(made) => return Ok((temporary, made)),
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(self.write_error(name, errno)),
            }
        }
        Err(self.write_error(name, Errno::EXIST))
    }

    fn set_mode(&self, fd: BorrowedFd<'_>, mode: u32, name: &[u8]) -> Result<(), UnpackError> {
        match rustix::fs::fchmod(fd, Mode::from_raw_mode(mode)) {
            // Some file systems have no modes; theirs are never wider than requested.
            Ok(()) | Err(Errno::PERM | Errno::OPNOTSUPP) => Ok(()),
            Err(errno) => Err(self.write_error(name, errno)),
        }
    }

    /// Removes partial files. A remaining folder gets its mode, so that a second attempt finds it as it
    /// should be.
    fn clean_up(&mut self) {
        if let Some(partial) = self.file.take() {
            let _ = rustix::fs::unlinkat(self.folder(), partial.temporary.as_str(), AtFlags::empty());
        }
        for folder in self.folders.drain(..).rev() {
            if let Some(mode) = folder.mode {
                let _ = rustix::fs::fchmod(&folder.fd, Mode::from_raw_mode(mode));
            }
        }
    }

    fn shown(&self, name: &[u8]) -> String {
        self.tally.path(self.display_name(name))
    }

    /// The item itself is named by its local path.
    fn display_name<'a>(&'a self, name: &'a [u8]) -> &'a [u8] {
        if self.folders.is_empty() { self.path.as_os_str().as_bytes() } else { name }
    }

    fn in_the_way(&self, name: &[u8], what: &'static str) -> UnpackError {
        UnpackError::InTheWay { path: self.shown(name), what }
    }

    fn replace_error(&self, name: &[u8], errno: Errno) -> UnpackError {
        match errno {
            Errno::ISDIR | Errno::NOTEMPTY | Errno::EXIST => self.in_the_way(name, "a folder"),
            _ => self.write_error(name, errno),
        }
    }

    pub(super) fn write_error(&self, name: &[u8], errno: Errno) -> UnpackError {
        self.io_error(name, errno.into())
    }

    fn io_error(&self, name: &[u8], source: io::Error) -> UnpackError {
        let path = self.shown(name);
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => UnpackError::Full(path),
            _ => UnpackError::Write { path, source },
        }
    }
}

impl Sink for Unpacker {
    type Whole = Summary;

    fn take(&mut self, bytes: &[u8]) -> Result<(), TransferError> {
        Ok(self.take(bytes)?)
    }

    fn done(&self) -> u64 {
        self.done()
    }

    fn total(&self) -> Option<u64> {
        self.total()
    }

    fn finish(self) -> Result<Summary, TransferError> {
        Ok(self.finish()?)
    }
}

impl Drop for Unpacker {
    fn drop(&mut self) {
        self.clean_up();
    }
}
