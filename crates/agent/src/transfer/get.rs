//! Packs files into an archive. Memory is bounded by the depth of the tree, not by its size, and no open
//! blocks.

use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bathy_protocol::archive::{ArchiveRecord, MAX_DATA, MAX_DEPTH, MAX_NAME, encode, is_plain_name};
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, fstat, openat, readlinkat, statat};
use rustix::io::Errno;

use super::{TransferError, join, reason};

const MODE_BITS: u32 = 0o7777;
/// How much is buffered before it is written.
const CHUNK: usize = 64 * 1024;

/// Writes the file or folder at `path` as an archive. Only the top item may be a link that is followed.
pub fn get(out: &mut impl Write, path: &[u8]) -> Result<(), TransferError> {
    let mut walk = Walk { out, gathered: Vec::new(), folders: Vec::new(), chunk: vec![0u8; MAX_DATA] };
    walk.top(path)?;
    while !walk.folders.is_empty() {
        walk.step()?;
    }
    walk.send(&ArchiveRecord::End)?;
    walk.flush()
}

/// Describes a special file.
pub fn kind(kind: FileType) -> &'static str {
    match kind {
        FileType::Fifo => "a fifo",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        _ => "something unknown",
    }
}

struct Folder {
    fd: OwnedFd,
    entries: Dir,
    path: Vec<u8>,
    name: Vec<u8>,
}

/// A file with its first bytes, which prove that it is readable.
struct Opened {
    fd: OwnedFd,
    stat: Stat,
    first: usize,
}

struct Walk<'a, W> {
    out: &'a mut W,
    gathered: Vec<u8>,
    folders: Vec<Folder>,
    chunk: Vec<u8>,
}

impl<W: Write> Walk<'_, W> {
    fn top(&mut self, path: &[u8]) -> Result<(), TransferError> {
        let failed = |error| TransferError::File(path.to_vec(), error);
        let stat = statat(CWD, path, AtFlags::empty()).map_err(failed)?;
        let name = path.rsplit(|byte| *byte == b'/').find(|name| !name.is_empty()).unwrap_or_default();
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let folder = open_folder(CWD, path, path, name, OFlags::empty()).map_err(failed)?;
                self.enter(folder, &stat)
            }
            FileType::RegularFile => {
                let opened = open_file(CWD, path, OFlags::empty(), &mut self.chunk).map_err(failed)?;
                self.file(name, path, &opened)
            }
            other => Err(TransferError::Uncopyable(path.to_vec(), kind(other))),
        }
    }

    /// Processes the next entry of the innermost folder, or its end.
    fn step(&mut self) -> Result<(), TransferError> {
        let Some(folder) = self.folders.last_mut() else { return Ok(()) };
        let name = match folder.entries.read() {
            Some(Ok(entry)) => entry.file_name().to_bytes().to_vec(),
            Some(Err(error)) => return self.leave(Some(error)),
            None => return self.leave(None),
        };
        if name == b"." || name == b".." {
            return Ok(());
        }
        if !is_plain_name(&name) {
            let beginning = name.get(..MAX_NAME).unwrap_or(&name);
            return self.skip(beginning, "its name is too long");
        }
        match self.entry(&name)? {
            Ok(()) => Ok(()),
            Err(error) => self.skip(&name, &reason(error)),
        }
    }

    /// Sends one entry. The inner error is about reading this entry; the outer one ends the copy.
    fn entry(&mut self, name: &[u8]) -> Result<Result<(), Errno>, TransferError> {
        let Some(folder) = self.folders.last() else { return Ok(Ok(())) };
        let here = folder.fd.as_fd();
        let stat = match statat(here, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(error) => return Ok(Err(error)),
        };
        let path = join(&folder.path, name);
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory if self.folders.len() >= MAX_DEPTH => {
                self.skip(name, &format!("it is more than {MAX_DEPTH} folders deep"))?;
            }
            FileType::Directory => match open_folder(here, name, &path, name, OFlags::NOFOLLOW) {
                Ok(folder) => self.enter(folder, &stat)?,
                Err(error) => return Ok(Err(error)),
            },
            FileType::RegularFile => match open_file(here, name, OFlags::NOFOLLOW, &mut self.chunk) {
                Ok(opened) => self.file(name, &path, &opened)?,
                Err(error) => return Ok(Err(error)),
            },
            FileType::Symlink => match readlinkat(here, name, Vec::new()) {
                Ok(target) => {
                    self.send(&ArchiveRecord::Link { name: name.to_vec(), target: target.into_bytes() })?;
                }
                Err(error) => return Ok(Err(error)),
            },
            other => self.skip(name, &format!("it is {}", kind(other)))?,
        }
        Ok(Ok(()))
    }

    fn enter(&mut self, folder: Folder, stat: &Stat) -> Result<(), TransferError> {
        self.send(&ArchiveRecord::Enter { name: folder.name.clone(), mode: stat.st_mode & MODE_BITS })?;
        self.folders.push(folder);
        Ok(())
    }

    fn leave(&mut self, broken: Option<Errno>) -> Result<(), TransferError> {
        let Some(folder) = self.folders.pop() else { return Ok(()) };
        self.send(&ArchiveRecord::Leave)?;
        match broken {
            None => Ok(()),
            Some(error) if self.folders.is_empty() => Err(TransferError::File(folder.path, error)),
            Some(error) => self.skip(&folder.name, &format!("it was not listed whole: {}", reason(error))),
        }
    }

    fn file(&mut self, name: &[u8], path: &[u8], opened: &Opened) -> Result<(), TransferError> {
        let size = u64::try_from(opened.stat.st_size).unwrap_or(0);
        self.send(&ArchiveRecord::File {
            name: name.to_vec(),
            mode: opened.stat.st_mode & MODE_BITS,
            size,
            modified: opened.stat.st_mtime,
        })?;
        // A file that grows faster than it is read would never end. Kernel files report a size of zero.
        let mut left = if size == 0 { u64::MAX } else { size };
        let mut count = opened.first;
        while count > 0 && left > 0 {
            let part = usize::try_from(left).unwrap_or(usize::MAX).min(count);
            left -= part as u64;
            self.send(&ArchiveRecord::Data(self.chunk.get(..part).unwrap_or_default().to_vec()))?;
            count = match read(&opened.fd, &mut self.chunk) {
                Ok(count) => count,
                // There may be more data later.
                Err(Errno::AGAIN) => 0,
                Err(error) => return Err(TransferError::File(path.to_vec(), error)),
            };
        }
        self.send(&ArchiveRecord::FileEnd)
    }

    fn skip(&mut self, name: &[u8], reason: &str) -> Result<(), TransferError> {
        self.send(&ArchiveRecord::Skipped { name: name.to_vec(), reason: reason.to_owned() })
    }

    fn send(&mut self, record: &ArchiveRecord) -> Result<(), TransferError> {
        encode(record, &mut self.gathered)?;
        if self.gathered.len() >= CHUNK { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), TransferError> {
        let sent = self.out.write_all(&self.gathered).and_then(|()| self.out.flush());
        self.gathered.clear();
        sent.map_err(TransferError::Stream)
    }
}

fn open_folder(
    from: BorrowedFd<'_>,
    at: &[u8],
    path: &[u8],
    name: &[u8],
    flags: OFlags,
) -> Result<Folder, Errno> {
    let flags = flags | OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = openat(from, at, flags, Mode::empty())?;
    let entries = Dir::read_from(&fd)?;
    Ok(Folder { fd, entries, path: path.to_vec(), name: name.to_vec() })
}

/// Opens a file and reads its start into `chunk`.
fn open_file(from: BorrowedFd<'_>, at: &[u8], flags: OFlags, chunk: &mut [u8]) -> Result<Opened, Errno> {
    let (fd, stat) = open_regular(from, at, flags)?;
    let first = read(&fd, chunk)?;
    Ok(Opened { fd, stat, first })
}

/// Opens a regular file and nothing else.
pub fn open_regular(from: BorrowedFd<'_>, at: &[u8], flags: OFlags) -> Result<(OwnedFd, Stat), Errno> {
    // If a fifo or terminal has taken its place meanwhile, the open does not block or acquire a controlling
    // terminal.
    let flags = flags | OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let fd = openat(from, at, flags, Mode::empty())?;
    let stat = fstat(&fd)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok((fd, stat)),
        _ => Err(Errno::INVAL),
    }
}

fn read(fd: &OwnedFd, chunk: &mut [u8]) -> Result<usize, Errno> {
    loop {
        match rustix::io::read(fd, &mut *chunk) {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

#[cfg(test)]
#[path = "get_tests.rs"]
mod tests;
