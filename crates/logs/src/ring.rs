//! Writes a ring file: appends records and overwrites the oldest ones.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use thiserror::Error;

use crate::Meta;
use crate::format::{
    HEADER, HEADER_SIZE, Header, MAX_CAPACITY, MAX_CHUNK, MIN_CAPACITY, PREFIX, Prefix, Slots,
};

/// More space is freed than the next record needs (capacity divided by this), so that most writes do not move
/// `start`.
const SLACK_PART: u64 = 16;

/// Output is not logged.
#[derive(Debug, Error)]
pub enum RingError {
    /// The capacity is out of range.
    #[error("A log of {0} bytes is not possible: the size must be {MIN_CAPACITY} to {MAX_CAPACITY}")]
    Capacity(u64),
    #[error("The host's disk is full: output is not logged")]
    Full(#[source] io::Error),
    /// The file cannot be read or written.
    #[error("Cannot write the log")]
    Io(#[source] io::Error),
}

impl From<io::Error> for RingError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full(error),
            _ => Self::Io(error),
        }
    }
}

/// The storage of a ring. Tests use one that records the writes.
pub(crate) trait Store {
    /// Reads from the offset `offset`.
    fn read(&self, bytes: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes all of `bytes` at the offset `offset`.
    fn write(&mut self, bytes: &[u8], offset: u64) -> io::Result<()>;
}

impl Store for File {
    fn read(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(bytes, offset)
    }

    fn write(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }
}

/// The writing side of a ring. A file must have only one writer at a time.
#[derive(Debug)]
pub struct Ring {
    inner: Writer<File>,
}

impl Ring {
    /// Opens a ring of `capacity` bytes in `file` for writing.
    ///
    /// The content of a ring with the same capacity is preserved. Any other content is overwritten.
    pub fn writer(file: File, capacity: u64) -> Result<Self, RingError> {
        Ok(Self { inner: Writer::new(file, capacity)? })
    }

    /// Appends `bytes`. After an error they count as dropped, and the content of the ring is unchanged.
    pub fn write(&mut self, meta: &Meta, bytes: &[u8]) -> Result<(), RingError> {
        self.inner.write(meta, bytes)
    }

    /// How many bytes of output are no longer in this file.
    pub fn dropped(&self) -> u64 {
        self.inner.header.dropped
    }

    /// The position after the newest record.
    pub fn end(&self) -> u64 {
        self.inner.header.end
    }
}

#[derive(Debug)]
pub(crate) struct Writer<S> {
    store: S,
    header: Header,
    /// The buffer for prefix and bytes of one record, so that it is written with one system call.
    scratch: Vec<u8>,
}

impl<S: Store> Writer<S> {
    pub fn new(store: S, capacity: u64) -> Result<Self, RingError> {
        if !(MIN_CAPACITY..=MAX_CAPACITY).contains(&capacity) {
            return Err(RingError::Capacity(capacity));
        }
        let mut page = [0; HEADER_SIZE];
        let found = match store.read(&mut page, 0) {
            Ok(()) => Slots::decode(&page).newest.filter(|header| header.capacity == capacity),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => None,
            Err(error) => return Err(error.into()),
        };
        let mut ring =
            Self { store, header: found.unwrap_or_else(|| Header::new(capacity)), scratch: vec![] };
        if found.is_none() {
            // The other slot may belong to another ring, with a larger turn, so both are written.
            ring.publish(ring.header)?;
        }
        ring.publish(ring.header)?;
        Ok(ring)
    }

    pub fn write(&mut self, meta: &Meta, bytes: &[u8]) -> Result<(), RingError> {
        let chunk = MAX_CHUNK.min(usize::try_from(self.header.capacity / 4).unwrap_or(MAX_CHUNK));
        let mut written = 0;
        for part in bytes.chunks(chunk) {
            if let Err(error) = self.write_record(meta, part) {
                // Published with the next record that succeeds.
                let lost = u64::try_from(bytes.len() - written).unwrap_or(u64::MAX);
                self.header.dropped = self.header.dropped.saturating_add(lost);
                return Err(error);
            }
            written += part.len();
        }
        Ok(())
    }

    fn write_record(&mut self, meta: &Meta, bytes: &[u8]) -> Result<(), RingError> {
        let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
        let prefix = Prefix { length, meta: *meta, position: self.header.end };
        self.free_space(prefix.size())?;
        self.scratch.clear();
        self.scratch.extend_from_slice(&prefix.encode());
        self.scratch.extend_from_slice(bytes);
        let offset = self.header.end % self.header.capacity;
        let until_edge = usize::try_from(self.header.capacity - offset).unwrap_or(usize::MAX);
        let (before, behind) = self.scratch.split_at(until_edge.min(self.scratch.len()));
        self.store.write(before, HEADER + offset)?;
        if !behind.is_empty() {
            self.store.write(behind, HEADER)?;
        }
        self.publish(Header { end: self.header.end + prefix.size(), ..self.header })
    }

    /// Frees at least `size` bytes by dropping the oldest records.
    fn free_space(&mut self, size: u64) -> Result<(), RingError> {
        let Header { capacity, end, .. } = self.header;
        if capacity - (end - self.header.start) >= size {
            return Ok(());
        }
        let wanted = (size + capacity / SLACK_PART).min(capacity);
        let mut header = self.header;
        while capacity - (end - header.start) < wanted {
            let (removed, dropped) = match self.prefix(&header)? {
                Some(prefix) => (prefix.size(), u64::from(prefix.length)),
                // The data is damaged, so the start of the next record is unknown.
                None => (end - header.start, end - header.start),
            };
            header.start += removed;
            header.dropped = header.dropped.saturating_add(dropped);
        }
        self.publish(header)
    }

    /// Reads the oldest record's prefix.
    fn prefix(&self, header: &Header) -> Result<Option<Prefix>, RingError> {
        let mut bytes = [0; PREFIX];
        let offset = header.start % header.capacity;
        let until_edge = usize::try_from(header.capacity - offset).unwrap_or(usize::MAX).min(PREFIX);
        let (before, behind) = bytes.split_at_mut(until_edge);
        let read = self.store.read(before, HEADER + offset).and_then(|()| self.store.read(behind, HEADER));
        match read {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        Ok(Prefix::decode(&bytes, header.start).filter(|prefix| header.holds(header.start, prefix.size())))
    }

    fn publish(&mut self, header: Header) -> Result<(), RingError> {
        let header = Header { turn: self.header.turn + 1, ..header };
        self.store.write(&header.encode(), header.offset())?;
        self.header = header;
        Ok(())
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
