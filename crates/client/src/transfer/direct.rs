//! Transfers one file or one listing of a guest to or from memory.
//!
//! What a guest sends is buffered, so it is limited to what was requested, and that has a maximum.

use std::time::Duration;

use bathy_protocol::archive::listing::{self, Entry, EntryType, Item, MAX_ENTRIES};
use bathy_protocol::archive::{self, ArchiveDecoder, ArchiveError, ArchiveRecord, ItemPart, MAX_DATA};
use bathy_protocol::{CopyDirection, Transfer};
use serde::Serialize;
use thiserror::Error;

use super::Summary;
use super::run::{Sink, Source, TransferError, TransferOptions, TransferSession, receive, send};
use super::tally::Tally;
use crate::connection::Connection;

/// The most bytes of a file that are read or written at once.
pub(crate) const MAX_CONTENT: usize = 64 * 1024 * 1024;
/// The longest path that Linux accepts, without the terminating NUL.
pub const MAX_PATH: usize = 4095;

/// How long a transfer may make no progress.
const STALL: Duration = Duration::from_secs(60);
/// How long a whole transfer may take.
const TIMEOUT: Duration = Duration::from_secs(180);
/// The permissions of a newly created file.
const NEW_FILE: u32 = 0o644;
/// The size of a content record without its content.
const DATA_OVERHEAD: usize = 16;

/// A direct read, write or listing failed.
#[derive(Debug, Error)]
pub enum DirectError {
    #[error("The path is empty")]
    EmptyPath,
    #[error("The path {0:?} has a zero byte, which no path can have")]
    ZeroByte(String),
    /// The path is too long.
    #[error("The path has {0} bytes; at most {MAX_PATH} are possible")]
    LongPath(usize),
    /// The content is too large to write.
    #[error("The content has {0} bytes; at most {MAX_CONTENT} can be written at once")]
    TooLarge(usize),
    /// The guest sent an invalid archive.
    #[error("The sandbox sent an invalid answer")]
    Archive(#[from] ArchiveError),
    /// The guest sent a folder or a link instead of a file.
    #[error("The sandbox did not send a file")]
    NotAFile,
    /// The guest sent too much.
    #[error("The sandbox sent more than was asked for")]
    TooMuch,
    /// The guest stopped too early.
    #[error("The sandbox stopped sending before its answer was complete")]
    Truncated,
}

/// Part of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileContent {
    pub bytes: Vec<u8>,
    /// The size of the whole file, as the guest reports it.
    pub total: u64,
}

/// The content of a folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Listing {
    /// The first entries by name.
    pub entries: Vec<DirEntry>,
    /// The number of entries in total, as the guest reports it.
    pub total: u64,
}

/// One entry of a folder. All of it is controlled by the guest: escape texts before printing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DirEntry {
    /// The name; invalid UTF-8 is replaced.
    pub name: String,
    pub kind: EntryKind,
    /// The size in bytes.
    pub size: u64,
    pub mode: u32,
    /// Modification time in nanoseconds since 1970.
    pub modified_ns: u64,
    /// The target of a link; invalid UTF-8 is replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
}

/// The kind of an entry. Links are not followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EntryKind {
    File,
    Directory,
    Symlink,
    /// A device, a fifo or a socket.
    Other,
}

/// The file of a transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileTarget {
    /// The path; a relative path starts in the user's home.
    pub path: Vec<u8>,
    /// The guest user that reads or writes.
    pub user: String,
    /// The tag of this piece of work.
    pub tag: u64,
}

impl FileTarget {
    fn transfer(self, direction: CopyDirection, name: Vec<u8>) -> Transfer {
        Transfer { direction, path: self.path, name, user: self.user }
    }
}

/// Checks that a path is valid.
pub fn check_path(path: &str) -> Result<(), DirectError> {
    match path.len() {
        0 => Err(DirectError::EmptyPath),
        length if length > MAX_PATH => Err(DirectError::LongPath(length)),
        _ if path.contains('\0') => Err(DirectError::ZeroByte(path.to_owned())),
        _ => Ok(()),
    }
}

pub fn read(
    connection: &mut Connection,
    stream: u32,
    target: FileTarget,
    offset: u64,
    limit: u64,
) -> Result<FileContent, TransferError> {
    let limit = usize::try_from(limit).unwrap_or(MAX_CONTENT).min(MAX_CONTENT);
    let part = ItemPart::Range { offset, limit: as_u64(limit) };
    let sink = FileSink { decoder: ArchiveDecoder::default(), content: Vec::new(), size: 0, offset, limit };
    ask(connection, stream, target, part, sink)
}

/// Lists the first `limit` entries of a folder. A guest sends at most [`MAX_ENTRIES`], and fewer if names and
/// targets are very long.
pub fn list(
    connection: &mut Connection,
    stream: u32,
    target: FileTarget,
    limit: usize,
) -> Result<Listing, TransferError> {
    let limit = limit.min(MAX_ENTRIES);
    let sink = ListSink { decoder: listing::ListingDecoder::default(), entries: Vec::new(), total: 0, limit };
    ask(connection, stream, target, ItemPart::Listing { limit: as_u64(limit) }, sink)
}

/// Replaces a file's content atomically. An existing file keeps its permissions; missing folders are created.
pub fn write(
    connection: &mut Connection,
    stream: u32,
    target: FileTarget,
    content: &[u8],
) -> Result<Summary, TransferError> {
    if content.len() > MAX_CONTENT {
        return Err(DirectError::TooLarge(content.len()).into());
    }
    let tag = target.tag;
    let transfer = target.transfer(CopyDirection::IntoGuest, Vec::new());
    with_session(connection, stream, transfer, tag, |session| send(session, Bytes::new(content)))
}

fn ask<S: Sink>(
    connection: &mut Connection,
    stream: u32,
    target: FileTarget,
    part: ItemPart,
    sink: S,
) -> Result<S::Whole, TransferError> {
    let tag = target.tag;
    let transfer = target.transfer(CopyDirection::OutOfGuest, part.to_name());
    with_session(connection, stream, transfer, tag, |session| receive(session, sink))
}

fn with_session<T>(
    connection: &mut Connection,
    stream: u32,
    transfer: Transfer,
    tag: u64,
    work: impl FnOnce(TransferSession<'_, '_>) -> Result<T, TransferError>,
) -> Result<T, TransferError> {
    let options = TransferOptions { progress: &mut |_, _| {}, interrupt: None, stall: STALL };
    work(TransferSession::start(connection, stream, transfer, tag, options)?.within(TIMEOUT))
}

/// A [`Source`] that packs bytes in memory as an archive of one file.
struct Bytes<'a> {
    rest: &'a [u8],
    total: usize,
    begun: bool,
    tally: Tally,
}

impl<'a> Bytes<'a> {
    fn new(content: &'a [u8]) -> Self {
        Self { rest: content, total: content.len(), begun: false, tally: Tally::default() }
    }
}

impl Source for Bytes<'_> {
    fn fill(&mut self, out: &mut Vec<u8>, max: usize) -> Result<bool, TransferError> {
        let encode = |record: &ArchiveRecord, out: &mut Vec<u8>| {
            archive::encode(record, out).map_err(DirectError::from)
        };
        let full = out.len().saturating_add(max);
        if !self.begun {
            self.begun = true;
            // The guest chooses the time and already has the name.
            let (name, size) = (Vec::new(), as_u64(self.total));
            encode(&ArchiveRecord::File { name, mode: NEW_FILE, size, modified: 0 }, out)?;
            self.tally.file(b"", NEW_FILE);
        }
        while !self.rest.is_empty() {
            let (now, later) = self.rest.split_at(self.rest.len().min(MAX_DATA));
            if out.len() + now.len() + DATA_OVERHEAD > full && !out.is_empty() {
                return Ok(true);
            }
            encode(&ArchiveRecord::Data(now.to_vec()), out)?;
            self.tally.data(now);
            self.rest = later;
        }
        self.tally.file_end();
        encode(&ArchiveRecord::FileEnd, out)?;
        encode(&ArchiveRecord::End, out)?;
        Ok(false)
    }

    fn done(&self) -> u64 {
        self.tally.bytes()
    }

    fn total(&self) -> Option<u64> {
        Some(as_u64(self.total))
    }

    fn into_summary(self) -> Summary {
        self.tally.into_summary()
    }
}

struct FileSink {
    decoder: ArchiveDecoder,
    content: Vec<u8>,
    /// The size of the whole file.
    size: u64,
    offset: u64,
    limit: usize,
}

impl Sink for FileSink {
    type Whole = FileContent;

    fn take(&mut self, bytes: &[u8]) -> Result<(), TransferError> {
        self.decoder.push(bytes);
        while let Some(record) = self.decoder.next_record().map_err(DirectError::from)? {
            match record {
                ArchiveRecord::File { size, .. } => self.size = size,
                ArchiveRecord::Data(bytes) if bytes.len() > self.limit - self.content.len() => {
                    return Err(DirectError::TooMuch.into());
                }
                ArchiveRecord::Data(bytes) => self.content.extend_from_slice(&bytes),
                ArchiveRecord::FileEnd | ArchiveRecord::End => {}
                ArchiveRecord::Enter { .. }
                | ArchiveRecord::Leave
                | ArchiveRecord::Link { .. }
                | ArchiveRecord::Skipped { .. } => {
                    return Err(DirectError::NotAFile.into());
                }
            }
        }
        Ok(())
    }

    fn done(&self) -> u64 {
        as_u64(self.content.len())
    }

    fn total(&self) -> Option<u64> {
        None
    }

    fn finish(self) -> Result<FileContent, TransferError> {
        if !self.decoder.is_complete() {
            return Err(DirectError::Truncated.into());
        }
        let end = self.offset.saturating_add(as_u64(self.content.len()));
        // A short read is the end of the file: some kernel files report a size larger than their content.
        let total = match (self.content.len() < self.limit, self.content.is_empty()) {
            (true, true) => self.size.min(end),
            (true, false) => end,
            (false, true) => self.size,
            (false, false) => self.size.max(end),
        };
        Ok(FileContent { bytes: self.content, total })
    }
}

struct ListSink {
    decoder: listing::ListingDecoder,
    entries: Vec<Entry>,
    total: u64,
    limit: usize,
}

impl Sink for ListSink {
    type Whole = Listing;

    fn take(&mut self, bytes: &[u8]) -> Result<(), TransferError> {
        self.decoder.push(bytes);
        while let Some(item) = self.decoder.next_item().map_err(DirectError::from)? {
            match item {
                Item::Entry(_) if self.entries.len() >= self.limit => return Err(DirectError::TooMuch.into()),
                Item::Entry(entry) => self.entries.push(entry),
                Item::End { total } => self.total = total,
            }
        }
        Ok(())
    }

    fn done(&self) -> u64 {
        as_u64(self.entries.len())
    }

    fn total(&self) -> Option<u64> {
        None
    }

    fn finish(mut self) -> Result<Listing, TransferError> {
        if !self.decoder.is_complete() {
            return Err(DirectError::Truncated.into());
        }
        self.entries.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        let total = self.total.max(as_u64(self.entries.len()));
        Ok(Listing { entries: self.entries.into_iter().map(DirEntry::from).collect(), total })
    }
}

impl From<Entry> for DirEntry {
    fn from(entry: Entry) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let kind = match entry.kind {
            EntryType::File => EntryKind::File,
            EntryType::Directory => EntryKind::Directory,
            EntryType::Symlink => EntryKind::Symlink,
            EntryType::Other => EntryKind::Other,
        };
        Self {
            name: text(&entry.name),
            kind,
            size: entry.size,
            mode: entry.mode,
            modified_ns: entry.modified_ns,
            target: entry.target.map(|target| text(&target)),
        }
    }
}

fn as_u64(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}
