//! Lists one folder. Memory is bounded by the number of requested entries.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};

use bathy_protocol::archive::is_plain_name;
use bathy_protocol::archive::listing::{Entry, EntryType, Item, MAX_BYTES, MAX_ENTRIES, encode};
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, openat, readlinkat, statat};
use rustix::io::Errno;

use super::TransferError;

/// How much is buffered before it is written.
const CHUNK: usize = 64 * 1024;
const NANOSECONDS: u64 = 1_000_000_000;

/// Writes the first `limit` entries of the folder at `path`, by name, and their total number.
pub fn list(out: &mut impl Write, path: &[u8], limit: u64) -> Result<(), TransferError> {
    let failed = |error| match error {
        Errno::NOTDIR => TransferError::NotAFolder(path.to_vec()),
        error => TransferError::File(path.to_vec(), error),
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = openat(CWD, path, flags, Mode::empty()).map_err(failed)?;
    let limit = usize::try_from(limit).unwrap_or(MAX_ENTRIES).min(MAX_ENTRIES);
    let (names, mut total) = first_names(folder.as_fd(), limit).map_err(failed)?;
    let (mut gathered, mut written) = (Vec::new(), 0usize);
    for (name, kind) in names {
        let Some(entry) = entry(folder.as_fd(), name, kind) else {
            total = total.saturating_sub(1);
            continue;
        };
        let before = gathered.len();
        encode(&Item::Entry(entry), &mut gathered)?;
        if written.saturating_add(gathered.len()) > MAX_BYTES {
            gathered.truncate(before);
            break;
        }
        if gathered.len() >= CHUNK {
            out.write_all(&gathered).map_err(TransferError::Stream)?;
            written = written.saturating_add(gathered.len());
            gathered.clear();
        }
    }
    encode(&Item::End { total }, &mut gathered)?;
    out.write_all(&gathered).map_err(TransferError::Stream)
}

/// The first names with the types that the folder reports, and the total number.
fn first_names(folder: BorrowedFd<'_>, limit: usize) -> Result<(BTreeMap<Vec<u8>, FileType>, u64), Errno> {
    let (mut names, mut total) = (BTreeMap::new(), 0u64);
    for read in Dir::read_from(folder)? {
        let read = read?;
        let name = read.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        total = total.saturating_add(1);
        let last = names.last_key_value().map(|(last, _): (&Vec<u8>, _)| last.as_slice());
        let full = names.len() >= limit;
        if !is_plain_name(name) || full && last.is_none_or(|last| last <= name) {
            continue;
        }
        names.insert(name.to_vec(), read.file_type());
        if names.len() > limit {
            names.pop_last();
        }
    }
    Ok((names, total))
}

/// The entry of a name; none if it was removed meanwhile.
fn entry(folder: BorrowedFd<'_>, name: Vec<u8>, listed: FileType) -> Option<Entry> {
    let stat = match statat(folder, name.as_slice(), AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return None,
        // A folder that may be listed but not entered only reveals the type.
        Err(_) => {
            return Some(Entry { name, kind: kind(listed), size: 0, mode: 0, modified_ns: 0, target: None });
        }
    };
    let kind = kind(FileType::from_raw_mode(stat.st_mode));
    let target = match kind {
        EntryType::Symlink => {
            readlinkat(folder, name.as_slice(), Vec::new()).ok().map(|target| target.into_bytes())
        }
        _ => None,
    };
    Some(Entry {
        name,
        kind,
        size: u64::try_from(stat.st_size).unwrap_or(0),
        mode: stat.st_mode & 0o7777,
        modified_ns: modified(&stat),
        target,
    })
}

fn kind(kind: FileType) -> EntryType {
    match kind {
        FileType::RegularFile => EntryType::File,
        FileType::Directory => EntryType::Directory,
        FileType::Symlink => EntryType::Symlink,
        _ => EntryType::Other,
    }
}

fn modified(stat: &Stat) -> u64 {
    let seconds = u64::try_from(stat.st_mtime).unwrap_or(0);
    seconds.saturating_mul(NANOSECONDS).saturating_add(stat.st_mtime_nsec)
}

#[cfg(test)]
#[path = "list_tests.rs"]
mod tests;
