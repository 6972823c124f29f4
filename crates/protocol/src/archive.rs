//! Files and folders as a stream of records, for copies into and out of a guest.
//!
//! A record is a little-endian `u32` length and an encoded [`Record`] of at most [`MAX_RECORD`] bytes. The order is a walk
//! of the tree: a folder is entered and left, so that every name is one plain component and no path is ever joined
//! from what the other side said. An archive holds exactly one item, then [`Record::End`]. Both sides expect the other
//! to lie.
//!
//! A folder's [`listing`] is another stream of records.

pub mod listing;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The most bytes of one encoded record.
pub const MAX_RECORD: u32 = 48 * 1024;
/// The most bytes of file content in one [`Record::Data`].
pub const MAX_DATA: usize = 32 * 1024;
/// The longest name.
pub const MAX_NAME: usize = 255;
/// The deepest folder.
pub const MAX_DEPTH: usize = 128;

/// What is wanted of an item in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All of it, as an archive.
    Whole,
    /// Some content of a file, as an archive of that one file. Its size is that of the whole file.
    Range {
        /// How many bytes are left out before it.
        offset: u64,
        /// The most bytes.
        limit: u64,
    },
    /// What is in a folder, as a [`listing`].
    Listing {
        /// The most entries: the first ones by name.
        limit: u64,
    },
}

impl Part {
    /// As it is written in [`crate::Transfer::name`]: as text, because a program in the guest gets it as an argument.
    pub fn to_name(self) -> Vec<u8> {
        match self {
            Self::Whole => Vec::new(),
            Self::Range { offset, limit } => format!("range {offset} {limit}").into_bytes(),
            Self::Listing { limit } => format!("listing {limit}").into_bytes(),
        }
    }

    /// The part that was written so, if it is one.
    pub fn from_name(name: &[u8]) -> Option<Self> {
        let name = std::str::from_utf8(name).ok()?;
        let mut words = name.split(' ');
        let kind = words.next()?;
        let numbers = words.map(str::parse).collect::<Result<Vec<u64>, _>>().ok()?;
        match (kind, numbers.as_slice()) {
            ("", []) => Some(Self::Whole),
            ("range", [offset, limit]) => Some(Self::Range { offset: *offset, limit: *limit }),
            ("listing", [limit]) => Some(Self::Listing { limit: *limit }),
            _ => None,
        }
    }
}

/// One step of the walk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Record {
    /// A folder begins; what follows is inside it.
    Enter {
        /// One component; ignored for the archive's first item, whose name the receiver knows.
        name: Vec<u8>,
        /// Permission bits.
        mode: u32,
    },
    /// The folder ends.
    Leave,
    /// A file begins; its content follows.
    File {
        /// As in [`Record::Enter`].
        name: Vec<u8>,
        /// Permission bits.
        mode: u32,
        /// Its size when it was opened; what is really sent may differ if it changes meanwhile.
        size: u64,
        /// Modification time, seconds since 1970.
        modified: i64,
    },
    /// Content of the open file.
    Data(Vec<u8>),
    /// The file ends.
    FileEnd,
    /// A symbolic link.
    Link {
        /// As in [`Record::Enter`].
        name: Vec<u8>,
        /// Where it points, as it is written.
        target: Vec<u8>,
    },
    /// Something that is left out, with the reason: a socket, a device, a file that cannot be read.
    Skipped {
        /// As in [`Record::Enter`].
        name: Vec<u8>,
        /// Why. Guest-controlled text if it comes from a guest.
        reason: String,
    },
    /// All of it was sent.
    End,
}

/// What is wrong with an archive.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ArchiveError {
    /// A record that is too long.
    #[error("The archive has a record of {0} bytes; at most {MAX_RECORD} are accepted")]
    TooLong(u32),
    /// Bytes that are no record.
    #[error("The archive has a record that does not decode")]
    Malformed,
    /// A name that is not one plain component.
    #[error("The archive has the name {0:?}, which is not a plain file name")]
    Name(String),
    /// A record where it does not belong.
    #[error("The archive has a record where it does not belong: {0}")]
    Order(&'static str),
    /// Folders in folders in folders.
    #[error("The archive is more than {MAX_DEPTH} folders deep")]
    Depth,
}

/// Appends `record` to `out`.
pub fn encode(record: &Record, out: &mut Vec<u8>) -> Result<(), ArchiveError> {
    write(record, out)
}

fn write<R: Serialize>(record: &R, out: &mut Vec<u8>) -> Result<(), ArchiveError> {
    let bytes = postcard::to_allocvec(record).map_err(|_| ArchiveError::Malformed)?;
    let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    if length > MAX_RECORD {
        return Err(ArchiveError::TooLong(length));
    }
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(&bytes);
    Ok(())
}

/// Cuts a byte stream into records of any kind. It keeps no more than what was pushed since the last whole record.
#[derive(Debug, Default)]
struct Cutter {
    buffer: Vec<u8>,
    start: usize,
}

impl Cutter {
    fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    fn next<R: DeserializeOwned>(&mut self) -> Result<Option<R>, ArchiveError> {
        let unread = self.buffer.get(self.start..).unwrap_or_default();
        let Some((header, rest)) = unread.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*header);
        if length > MAX_RECORD {
            return Err(ArchiveError::TooLong(length));
        }
        let Some(payload) = rest.get(..length as usize) else { return Ok(None) };
        let record = match postcard::take_from_bytes(payload) {
            Ok((record, [])) => record,
            _ => return Err(ArchiveError::Malformed),
        };
        self.start += 4 + length as usize;
        Ok(Some(record))
    }
}

/// Cuts a byte stream into records, and checks names and their order.
#[derive(Debug, Default)]
pub struct Decoder {
    cutter: Cutter,
    depth: usize,
    in_file: bool,
    begun: bool,
    ended: bool,
}

impl Decoder {
    /// Adds bytes that arrived.
    pub fn push(&mut self, bytes: &[u8]) {
        self.cutter.push(bytes);
    }

    /// Whether the archive came to its end.
    pub fn is_complete(&self) -> bool {
        self.ended
    }

    /// The next whole record, or `None` until more bytes arrive.
    pub fn next_record(&mut self) -> Result<Option<Record>, ArchiveError> {
        let record = self.cutter.next()?;
        if let Some(record) = &record {
            self.check(record)?;
        }
        Ok(record)
    }

    fn check(&mut self, record: &Record) -> Result<(), ArchiveError> {
        if self.ended {
            return Err(ArchiveError::Order("something follows the end"));
        }
        let data = matches!(record, Record::Data(_) | Record::FileEnd);
        if data != self.in_file {
            return Err(ArchiveError::Order("content without a file, or a file without its end"));
        }
        let whole = self.begun && self.depth == 0;
        match record {
            Record::Enter { name, .. } | Record::File { name, .. } | Record::Link { name, .. } => {
                if whole {
                    return Err(ArchiveError::Order("a second item"));
                }
                self.check_name(name)?;
                self.begun = true;
                match record {
                    Record::Enter { .. } => self.depth += 1,
                    Record::File { .. } => self.in_file = true,
                    _ => {}
                }
                if self.depth > MAX_DEPTH {
                    return Err(ArchiveError::Depth);
                }
            }
            Record::Skipped { name, .. } => self.check_name(name)?,
            Record::Leave => {
                self.depth = self.depth.checked_sub(1).ok_or(ArchiveError::Order("left once too often"))?;
            }
            Record::FileEnd => self.in_file = false,
            Record::Data(bytes) if bytes.len() > MAX_DATA => {
                return Err(ArchiveError::Order("too much content at once"));
            }
            Record::Data(_) => {}
            Record::End if whole => self.ended = true,
            Record::End => return Err(ArchiveError::Order("an end before the end")),
        }
        Ok(())
    }

    /// The first item's name is not used, so anything goes.
    fn check_name(&self, name: &[u8]) -> Result<(), ArchiveError> {
        if self.depth == 0 || is_plain_name(name) {
            Ok(())
        } else {
            Err(ArchiveError::Name(String::from_utf8_lossy(name).into_owned()))
        }
    }
}

/// Whether `name` is one component that stays where it is put.
pub fn is_plain_name(name: &[u8]) -> bool {
    !name.is_empty()
        && name.len() <= MAX_NAME
        && name != b"."
        && name != b".."
        && !name.iter().any(|byte| *byte == b'/' || *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(records: &[Record]) -> Result<usize, ArchiveError> {
        let mut wire = Vec::new();
        for record in records {
            encode(record, &mut wire).unwrap();
        }
        let mut decoder = Decoder::default();
        let mut seen = 0;
        for byte in wire {
            decoder.push(&[byte]);
            while decoder.next_record()?.is_some() {
                seen += 1;
            }
        }
        Ok(seen)
    }

    fn enter(name: &[u8]) -> Record {
        Record::Enter { name: name.to_vec(), mode: 0o755 }
    }

    fn file(name: &[u8]) -> Record {
        Record::File { name: name.to_vec(), mode: 0o644, size: 1, modified: 0 }
    }

    #[test]
    fn a_part_is_read_as_it_was_written_and_nothing_else_is_one() {
        let parts = [
            Part::Whole,
            Part::Range { offset: 0, limit: u64::MAX },
            Part::Range { offset: u64::MAX, limit: 0 },
            Part::Listing { limit: 7 },
        ];
        for part in parts {
            assert_eq!(Part::from_name(&part.to_name()), Some(part));
        }
        for name in ["range", "range 1", "range 1 2 3", "range -1 2", "listing ", "file", " 1", "listing 1x"]
        {
            assert_eq!(Part::from_name(name.as_bytes()), None, "{name:?}");
        }
        assert_eq!(Part::from_name(b"\xff"), None);
    }

    #[test]
    fn a_tree_survives_byte_by_byte() {
        let tree = [
            enter(b"top"),
            file(b"a"),
            Record::Data(vec![1]),
            Record::FileEnd,
            enter(b"sub"),
            Record::Leave,
            Record::Link { name: b"l".to_vec(), target: b"a".to_vec() },
            Record::Leave,
            Record::End,
        ];
        assert_eq!(feed(&tree), Ok(tree.len()));
    }

    #[test]
    fn c4_names_that_lead_elsewhere_are_refused() {
        for name in [b"..".as_slice(), b".", b"", b"a/b", b"/etc", b"a\0b", &[b'x'; 256]] {
            for record in [file(name), enter(name), Record::Link { name: name.to_vec(), target: vec![] }] {
                assert!(matches!(feed(&[enter(b"t"), record]), Err(ArchiveError::Name(_))), "{name:?}");
            }
        }
    }

    #[test]
    fn c4_records_out_of_order_are_refused() {
        let data = || Record::Data(vec![0]);
        let cases: [&[Record]; 8] = [
            &[data()],
            &[Record::FileEnd],
            &[Record::Leave],
            &[Record::End],
            &[file(b"a"), file(b"b")],
            &[file(b"a"), Record::FileEnd, file(b"b")],
            &[enter(b"a"), Record::Leave, Record::Leave],
            &[file(b"a"), Record::FileEnd, Record::End, Record::End],
        ];
        for (number, case) in cases.iter().enumerate() {
            assert!(matches!(feed(case), Err(ArchiveError::Order(_))), "case {number}");
        }
    }

    #[test]
    fn c4_depth_and_lengths_are_bounded() {
        assert_eq!(feed(&vec![enter(b"d"); MAX_DEPTH + 1]), Err(ArchiveError::Depth));
        let mut decoder = Decoder::default();
        decoder.push(&u32::MAX.to_le_bytes());
        assert_eq!(decoder.next_record(), Err(ArchiveError::TooLong(u32::MAX)));
    }
}
