//! One file or one listing of a guest, to and from the caller's memory.
//!
//! What a guest sends is kept in memory, so there is never more of it than the caller asked for, and a limit to that.

use std::time::Duration;

use bathy_protocol::archive::listing::{self, Entry, Item, Kind, MAX_ENTRIES};
use bathy_protocol::archive::{self, ArchiveError, Decoder, MAX_DATA, Part, Record};
use bathy_protocol::{Direction, Transfer};
use serde::Serialize;
use thiserror::Error;

use super::Summary;
use super::run::{Options, Session, Sink, Source, TransferError, receive, send};
use super::tally::Tally;
use crate::connection::Connection;

/// The most bytes of a file that are read or written at once.
pub const MAX_CONTENT: usize = 64 * 1024 * 1024;
/// The longest path that Linux takes, without the zero byte at its end.
pub const MAX_PATH: usize = 4095;

/// For so long nothing may move.
const STALL: Duration = Duration::from_secs(60);
/// For so long a guest may take for all of it.
const PATIENCE: Duration = Duration::from_secs(180);
/// The permissions of a file that was not there before.
const NEW_FILE: u32 = 0o644;
/// What a content record adds to its content.
const DATA_OVERHEAD: usize = 16;

/// A file cannot be read, written or listed directly.
#[derive(Debug, Error)]
pub enum DirectError {
    #[error("The path is empty")]
    EmptyPath,
    #[error("The path {0:?} has a zero byte, which no path can have")]
    ZeroByte(String),
    /// A path without end.
    #[error("The path has {0} bytes; at most {MAX_PATH} are possible")]
    LongPath(usize),
    /// Too much to write.
    #[error("The content has {0} bytes; at most {MAX_CONTENT} can be written at once")]
    TooLarge(usize),
    /// What came is not what was asked for.
    #[error("The sandbox sent something that is no answer")]
    Archive(#[from] ArchiveError),
    /// A folder or a link came in place of a file.
    #[error("The sandbox sent something else than a file")]
    NotAFile,
    /// The guest does not stop.
    #[error("The sandbox sent more than was asked for")]
    TooMuch,
    /// The guest stopped early.
    #[error("The sandbox stopped sending before its answer was complete")]
    Truncated,
}

/// Some content of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileContent {
    pub bytes: Vec<u8>,
    /// How long the whole file is, as far as the guest knows.
    pub total: u64,
}

/// What is in a folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Listing {
    /// The first entries by name.
    pub entries: Vec<DirEntry>,
    /// How many there are in all, as the guest says.
    pub total: u64,
}

/// One entry of a folder. All of it is the guest's word: escape its texts before showing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DirEntry {
    /// Its name; what is no UTF-8 is replaced.
    pub name: String,
    pub kind: EntryKind,
    /// The size in bytes.
    pub size: u64,
    pub mode: u32,
    /// Modification time, nanoseconds since 1970.
    pub modified_ns: u64,
    /// Where a link points; what is no UTF-8 is replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
}

/// What an entry is. A link is not followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EntryKind {
    File,
    Directory,
    Symlink,
    /// A device, a fifo, a socket.
    Other,
}

/// What is asked of which file, by whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The path; one that begins nowhere begins at the user's home.
    pub path: Vec<u8>,
    /// Who reads or writes in the guest.
    pub user: String,
    /// The number of this piece of work.
    pub tag: u64,
}

/// Checks that a path can be one.
pub fn check_path(path: &str) -> Result<(), DirectError> {
    match path.len() {
        0 => Err(DirectError::EmptyPath),
        length if length > MAX_PATH => Err(DirectError::LongPath(length)),
        _ if path.contains('\0') => Err(DirectError::ZeroByte(path.to_owned())),
        _ => Ok(()),
    }
}

/// Reads at most `limit` bytes of a file, and at most [`MAX_CONTENT`], from `offset` on.
pub fn read(
    connection: &mut Connection,
    stream: u32,
    target: Target,
    offset: u64,
    limit: u64,
) -> Result<FileContent, TransferError> {
    let limit = usize::try_from(limit).unwrap_or(MAX_CONTENT).min(MAX_CONTENT);
    let part = Part::Range { offset, limit: as_u64(limit) };
    let sink = FileSink { decoder: Decoder::default(), content: Vec::new(), size: 0, offset, limit };
    ask(connection, stream, target, part, sink)
}

/// Lists the first `limit` entries of a folder. A guest sends no more than [`MAX_ENTRIES`] of them, and fewer if their
/// names and targets are very long.
pub fn list(
    connection: &mut Connection,
    stream: u32,
    target: Target,
    limit: usize,
) -> Result<Listing, TransferError> {
    let limit = limit.min(MAX_ENTRIES);
    let sink = ListSink { decoder: listing::Decoder::default(), entries: Vec::new(), total: 0, limit };
    ask(connection, stream, target, Part::Listing { limit: as_u64(limit) }, sink)
}

/// Gives a file new content, which a reader sees whole or not at all. A file that is there keeps its permissions;
/// missing folders on the way are made.
pub fn write(
    connection: &mut Connection,
    stream: u32,
    target: Target,
    content: &[u8],
) -> Result<Summary, TransferError> {
    if content.len() > MAX_CONTENT {
        return Err(DirectError::TooLarge(content.len()).into());
    }
    with_session(connection, stream, target, Direction::IntoGuest, Vec::new(), |session| {
        send(session, Bytes::new(content))
    })
}

fn ask<S: Sink>(
    connection: &mut Connection,
    stream: u32,
    target: Target,
    part: Part,
    sink: S,
) -> Result<S::Whole, TransferError> {
    with_session(connection, stream, target, Direction::OutOfGuest, part.to_name(), |session| {
        receive(session, sink)
    })
}

fn with_session<T>(
    connection: &mut Connection,
    stream: u32,
    target: Target,
    direction: Direction,
    name: Vec<u8>,
    work: impl FnOnce(Session<'_, '_>) -> Result<T, TransferError>,
) -> Result<T, TransferError> {
    let transfer = Transfer { direction, path: target.path, name, user: target.user };
    let options = Options { progress: &mut |_, _| {}, interrupt: None, stall: STALL };
    work(Session::start(connection, stream, transfer, target.tag, options)?.within(PATIENCE))
}

/// Bytes of the caller's that become an archive of one file.
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
    fn fill(&mut self, out: &mut Vec<u8>, room: usize) -> Result<bool, TransferError> {
        let encode =
            |record: &Record, out: &mut Vec<u8>| archive::encode(record, out).map_err(DirectError::from);
        let full = out.len().saturating_add(room);
        if !self.begun {
            self.begun = true;
            // The guest knows the time and the name.
            let (name, size) = (Vec::new(), as_u64(self.total));
            encode(&Record::File { name, mode: NEW_FILE, size, modified: 0 }, out)?;
            self.tally.file(b"", NEW_FILE);
        }
        while !self.rest.is_empty() {
            let (now, later) = self.rest.split_at(self.rest.len().min(MAX_DATA));
            if out.len() + now.len() + DATA_OVERHEAD > full && !out.is_empty() {
                return Ok(true);
            }
            encode(&Record::Data(now.to_vec()), out)?;
            self.tally.data(now);
            self.rest = later;
        }
        self.tally.file_end();
        encode(&Record::FileEnd, out)?;
        encode(&Record::End, out)?;
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
    decoder: Decoder,
    content: Vec<u8>,
    /// Of the whole file.
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
                Record::File { size, .. } => self.size = size,
                Record::Data(bytes) if bytes.len() > self.limit - self.content.len() => {
                    return Err(DirectError::TooMuch.into());
                }
                Record::Data(bytes) => self.content.extend_from_slice(&bytes),
                Record::FileEnd | Record::End => {}
                Record::Enter { .. } | Record::Leave | Record::Link { .. } | Record::Skipped { .. } => {
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
        // What stops early stops at the end: some files of the kernel say that they are longer than they are.
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
    decoder: listing::Decoder,
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
            Kind::File => EntryKind::File,
            Kind::Directory => EntryKind::Directory,
            Kind::Symlink => EntryKind::Symlink,
            Kind::Other => EntryKind::Other,
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
