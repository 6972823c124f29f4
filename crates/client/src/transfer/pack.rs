//! Packs a file or tree of the host into an archive.
//!
//! The walk opens each folder relative to its parent and never follows a link; the path that was given is
//! followed only on request, because whoever wrote a project chooses what its links lead to.

use std::ffi::{CStr, OsStr, OsString};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use bathy_protocol::archive::{self, ArchiveError, ArchiveRecord, MAX_DATA, MAX_DEPTH};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use thiserror::Error;

use super::Summary;
use super::links::MAX_TARGET;
use super::run::{Source, TransferError};
use super::tally::Tally;

/// The longest record without content: a link with its name and target.
const MAX_STEP: usize = 5 * 1024;
/// The size of a content record without its content.
const DATA_OVERHEAD: usize = 16;
/// For reading, without acquiring a controlling terminal and without blocking on a pipe.
const READ: OFlags = OFlags::RDONLY.union(OFlags::CLOEXEC).union(OFlags::NOCTTY).union(OFlags::NONBLOCK);

/// The host's files cannot be packed.
#[derive(Debug, Error)]
pub enum PackError {
    #[error("Cannot read {path}")]
    Read { path: String, source: io::Error },
    /// A pipe, socket or device.
    #[error("Cannot copy {0}: it is neither a file nor a folder")]
    Special(String),
    /// Folders are nested too deeply.
    #[error("Cannot copy {0}: it is more than {MAX_DEPTH} folders deep")]
    TooDeep(String),
    /// A record cannot be written.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
}

/// The named item, until its record is written.
enum Top {
    Folder(OwnedFd, Stat),
    File(OwnedFd, Stat),
    Link(Vec<u8>),
}

/// Packs one file or tree.
pub struct Packer {
    path: PathBuf,
    name: Option<OsString>,
    top: Option<Top>,
    folders: Vec<Dir>,
    /// The open file and its name.
    file: Option<(OwnedFd, Vec<u8>)>,
    total: Option<u64>,
    tally: Tally,
    ended: bool,
}

impl Packer {
    /// Opens the file, folder or link at `path`. A link whose path ends in a slash is followed, as everywhere.
    pub fn open(path: &Path) -> Result<Self, PackError> {
        Self::open_with(path, false)
    }

    /// Opens the file or folder at `path`, or that a link there leads to.
    pub fn open_followed(path: &Path) -> Result<Self, PackError> {
        Self::open_with(path, true)
    }

    fn open_with(path: &Path, follow: bool) -> Result<Self, PackError> {
        let failed = |errno: Errno| PackError::Read { path: shown(path), source: errno.into() };
        // Checked before opening, because opening a device can have side effects.
        let kind = |stat: &Stat| FileType::from_raw_mode(stat.st_mode);
        let found = if follow { rustix::fs::stat(path) } else { rustix::fs::lstat(path) };
        let open = |flags: OFlags| {
            let flags = if follow { flags } else { flags | OFlags::NOFOLLOW };
            let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(failed)?;
            let stat = rustix::fs::fstat(&fd).map_err(failed)?;
            match kind(&stat) {
                FileType::Directory => Ok((Top::Folder(fd, stat), None)),
                FileType::RegularFile => Ok((Top::File(fd, stat), Some(size(&stat)))),
                _ => Err(PackError::Special(shown(path))),
            }
        };
        let (top, total) = match kind(&found.map_err(failed)?) {
            FileType::Directory => open(READ | OFlags::DIRECTORY)?,
            FileType::RegularFile => open(READ)?,
            FileType::Symlink => {
                let target = rustix::fs::readlink(path, Vec::new()).map_err(failed)?.into_bytes();
                if target.len() > MAX_TARGET {
                    return Err(failed(Errno::NAMETOOLONG));
                }
                (Top::Link(target), Some(0))
            }
            _ => return Err(PackError::Special(shown(path))),
        };
        let name = match path.file_name() {
            Some(name) => Some(name.to_owned()),
            // Paths such as `.` and `..`.
            None => path.canonicalize().ok().and_then(|path| path.file_name().map(OsStr::to_owned)),
        };
        Ok(Self {
            path: path.to_owned(),
            name,
            top: Some(top),
            folders: Vec::new(),
            file: None,
            total,
            tally: Tally::default(),
            ended: false,
        })
    }

    /// The item's name; the root folder has none.
    pub fn name(&self) -> Option<&OsStr> {
        self.name.as_deref()
    }

    /// How many bytes of content there are to send, if known before the walk.
    pub fn total(&self) -> Option<u64> {
        self.total
    }

    /// How many bytes of content were packed.
    pub fn done(&self) -> u64 {
        self.tally.bytes()
    }

    /// Appends whole records to `out`: at most `max` bytes if `max` is at least 64 KiB, but at least one
    /// record. Returns whether there are more.
    pub fn fill(&mut self, out: &mut Vec<u8>, max: usize) -> Result<bool, PackError> {
        let full = out.len().saturating_add(max);
        while !self.ended {
            self.step(out, full.saturating_sub(out.len()))?;
            if full.saturating_sub(out.len()) < MAX_STEP {
                break;
            }
        }
        Ok(!self.ended)
    }

    /// The summary; complete once there are no more records.
    pub fn into_summary(self) -> Summary {
        self.tally.into_summary()
    }

    fn step(&mut self, out: &mut Vec<u8>, max: usize) -> Result<(), PackError> {
        if let Some((file, name)) = self.file.take() {
            return self.read(file, name, out, max);
        }
        match self.top.take() {
            // The guest chooses this folder's name.
            Some(Top::Folder(fd, stat)) => return self.enter(b"", fd, &stat, out),
            Some(Top::File(fd, stat)) => return self.begin(b"", fd, &stat, out),
            Some(Top::Link(target)) => return self.link(b"", target, out),
            None => {}
        }
        let Some(folder) = self.folders.last_mut() else {
            self.ended = true;
            return Ok(archive::encode(&ArchiveRecord::End, out)?);
        };
        match folder.next() {
            Some(Ok(entry)) if matches!(entry.file_name().to_bytes(), b"." | b"..") => Ok(()),
            Some(Ok(entry)) => self.entry(entry.file_name(), out),
            Some(Err(errno)) => Err(self.failed(b"", errno)),
            None => {
                self.folders.pop();
                self.tally.leave();
                Ok(archive::encode(&ArchiveRecord::Leave, out)?)
            }
        }
    }

    /// Packs one entry of the innermost folder.
    fn entry(&mut self, name: &CStr, out: &mut Vec<u8>) -> Result<(), PackError> {
        let bytes = name.to_bytes();
        if !archive::is_plain_name(bytes) {
            return self.skip(b"?", "its name is too long", out);
        }
        match self.open_entry(name) {
            Ok(Entry::Folder(..)) if self.folders.len() >= MAX_DEPTH => {
                Err(PackError::TooDeep(self.shown(bytes)))
            }
            Ok(Entry::Folder(fd, stat)) => self.enter(bytes, fd, &stat, out),
            Ok(Entry::File(fd, stat)) => self.begin(bytes, fd, &stat, out),
            Ok(Entry::Link(target)) if target.len() > MAX_TARGET => {
                self.skip(bytes, "its target is too long", out)
            }
            Ok(Entry::Link(target)) => self.link(bytes, target, out),
            Ok(Entry::Special(kind)) => self.skip(bytes, kind, out),
            Err(errno) if concerns_one_entry(errno) => self.skip(bytes, &reason(errno), out),
            Err(errno) => Err(self.failed(bytes, errno)),
        }
    }

    fn open_entry(&self, name: &CStr) -> Result<Entry, Errno> {
        let folder = self.innermost()?;
        let stat = rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let open = |flags| rustix::fs::openat(folder, name, READ | OFlags::NOFOLLOW | flags, Mode::empty());
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let fd = open(OFlags::DIRECTORY)?;
                let stat = rustix::fs::fstat(&fd)?;
                Ok(Entry::Folder(fd, stat))
            }
            FileType::RegularFile => {
                let fd = open(OFlags::empty())?;
                let stat = rustix::fs::fstat(&fd)?;
                // It may have been replaced meanwhile.
                match FileType::from_raw_mode(stat.st_mode) {
                    FileType::RegularFile => Ok(Entry::File(fd, stat)),
                    other => Ok(Entry::Special(special(other))),
                }
            }
            FileType::Symlink => {
                Ok(Entry::Link(rustix::fs::readlinkat(folder, name, Vec::new())?.into_bytes()))
            }
            other => Ok(Entry::Special(special(other))),
        }
    }

    fn innermost(&self) -> Result<BorrowedFd<'_>, Errno> {
        self.folders.last().ok_or(Errno::BADF)?.fd()
    }

    fn enter(&mut self, name: &[u8], fd: OwnedFd, stat: &Stat, out: &mut Vec<u8>) -> Result<(), PackError> {
        let folder = Dir::new(fd).map_err(|errno| self.failed(name, errno))?;
        let mode = stat.st_mode & 0o777;
        archive::encode(&ArchiveRecord::Enter { name: name.to_vec(), mode }, out)?;
        let display_name = self.display_name(name).to_vec();
        self.tally.enter(&display_name, mode);
        self.folders.push(folder);
        Ok(())
    }

    fn begin(&mut self, name: &[u8], fd: OwnedFd, stat: &Stat, out: &mut Vec<u8>) -> Result<(), PackError> {
        let mode = stat.st_mode & 0o777;
        let (size, modified) = (size(stat), stat.st_mtime);
        archive::encode(&ArchiveRecord::File { name: name.to_vec(), mode, size, modified }, out)?;
        self.tally.file(name, mode);
        self.file = Some((fd, name.to_vec()));
        Ok(())
    }

    fn read(&mut self, file: OwnedFd, name: Vec<u8>, out: &mut Vec<u8>, max: usize) -> Result<(), PackError> {
        let mut content = vec![0; max.saturating_sub(DATA_OVERHEAD).clamp(1, MAX_DATA)];
        match rustix::io::read(&file, content.as_mut_slice()) {
            Ok(0) => {
                self.tally.file_end();
                return Ok(archive::encode(&ArchiveRecord::FileEnd, out)?);
            }
            Ok(count) => {
                content.truncate(count);
                self.tally.data(&content);
                archive::encode(&ArchiveRecord::Data(content), out)?;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(self.failed(&name, errno)),
        }
        self.file = Some((file, name));
        Ok(())
    }

    fn link(&mut self, name: &[u8], target: Vec<u8>, out: &mut Vec<u8>) -> Result<(), PackError> {
        self.tally.link(name, &target);
        Ok(archive::encode(&ArchiveRecord::Link { name: name.to_vec(), target }, out)?)
    }

    fn skip(&mut self, name: &[u8], reason: &str, out: &mut Vec<u8>) -> Result<(), PackError> {
        self.tally.skip(name, reason);
        Ok(archive::encode(&ArchiveRecord::Skipped { name: name.to_vec(), reason: reason.to_owned() }, out)?)
    }

    fn failed(&self, name: &[u8], errno: Errno) -> PackError {
        PackError::Read { path: self.shown(name), source: errno.into() }
    }

    fn shown(&self, name: &[u8]) -> String {
        self.tally.path(self.display_name(name))
    }

    /// The item itself is named by its local path.
    fn display_name<'a>(&'a self, name: &'a [u8]) -> &'a [u8] {
        if self.folders.is_empty() { self.path.as_os_str().as_bytes() } else { name }
    }
}

impl Source for Packer {
    fn fill(&mut self, out: &mut Vec<u8>, max: usize) -> Result<bool, TransferError> {
        Ok(self.fill(out, max)?)
    }

    fn done(&self) -> u64 {
        self.done()
    }

    fn total(&self) -> Option<u64> {
        self.total()
    }

    fn into_summary(self) -> Summary {
        self.into_summary()
    }
}

enum Entry {
    Folder(OwnedFd, Stat),
    File(OwnedFd, Stat),
    Link(Vec<u8>),
    Special(&'static str),
}

/// Whether the rest of the tree can still be read.
fn concerns_one_entry(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::ACCESS | Errno::PERM | Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NXIO | Errno::STALE
    )
}

fn special(kind: FileType) -> &'static str {
    match kind {
        FileType::Fifo => "it is a pipe",
        FileType::Socket => "it is a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "it is a device",
        _ => "it is neither a file nor a folder",
    }
}

fn size(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or_default()
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

fn reason(errno: Errno) -> String {
    let text = errno.to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}
