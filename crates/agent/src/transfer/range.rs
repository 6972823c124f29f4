//! A range of one file, as an archive of that file.

use std::io::Write;
use std::os::fd::OwnedFd;

use bathy_protocol::archive::{ArchiveRecord, MAX_DATA, encode};
use rustix::fs::{AtFlags, CWD, FileType, OFlags, statat};
use rustix::io::{Errno, pread};

use super::TransferError;
use super::get::{kind, open_regular};

/// How much is read to determine the size of a file that does not report it.
const MAX_COUNTED: u64 = 16 * 1024 * 1024;

/// Writes at most `limit` bytes of the file at `path`, from `offset` on.
pub fn range(out: &mut impl Write, path: &[u8], offset: u64, limit: u64) -> Result<(), TransferError> {
    let failed = |error| TransferError::File(path.to_vec(), error);
    // Checked before opening, because opening a device can have side effects.
    let stat = statat(CWD, path, AtFlags::empty()).map_err(failed)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {}
        FileType::Directory => return Err(TransferError::NotAFile(path.to_vec(), "a folder")),
        other => return Err(TransferError::NotAFile(path.to_vec(), kind(other))),
    }
    let (fd, stat) = open_regular(CWD, path, OFlags::empty()).map_err(failed)?;
    let mut chunk = vec![0u8; MAX_DATA];
    // Kernel files report a size of zero.
    let size = match u64::try_from(stat.st_size) {
        Ok(0) | Err(_) => count(&fd, &mut chunk).map_err(failed)?,
        Ok(size) => size,
    };
    let begin =
        ArchiveRecord::File { name: Vec::new(), mode: stat.st_mode & 0o7777, size, modified: stat.st_mtime };
    send(out, &begin)?;
    let (mut at, mut left) = (offset, if offset < size { limit } else { 0 });
    while left > 0 {
        let space = usize::try_from(left).unwrap_or(usize::MAX).min(MAX_DATA);
        let part = chunk.get_mut(..space).unwrap_or_default();
        let count = read(&fd, part, at).map_err(failed)?;
        if count == 0 {
            break;
        }
        send(out, &ArchiveRecord::Data(part.get(..count).unwrap_or_default().to_vec()))?;
        at = at.saturating_add(count as u64);
        left = left.saturating_sub(count as u64);
    }
    send(out, &ArchiveRecord::FileEnd)?;
    send(out, &ArchiveRecord::End)
}

/// Determines the size of a file by reading it, up to a limit.
fn count(fd: &OwnedFd, chunk: &mut [u8]) -> Result<u64, Errno> {
    let mut size = 0u64;
    while size < MAX_COUNTED {
        match read(fd, chunk, size)? {
            0 => break,
            count => size = size.saturating_add(count as u64),
        }
    }
    Ok(size)
}

fn read(fd: &OwnedFd, chunk: &mut [u8], at: u64) -> Result<usize, Errno> {
    loop {
        match pread(fd, &mut *chunk, at) {
            Err(Errno::INTR) => {}
            // There may be more data later.
            Err(Errno::AGAIN) => return Ok(0),
            other => return other,
        }
    }
}

fn send(out: &mut impl Write, record: &ArchiveRecord) -> Result<(), TransferError> {
    let mut bytes = Vec::new();
    encode(record, &mut bytes)?;
    out.write_all(&bytes).map_err(TransferError::Stream)
}

#[cfg(test)]
#[path = "range_tests.rs"]
mod tests;
