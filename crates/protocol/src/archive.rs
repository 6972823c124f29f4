//! Files and folders as a stream of records, for copies into and out of a guest.
//!
//! A record is a little-endian `u32` length and an encoded [`ArchiveRecord`] of at most [`MAX_RECORD`] bytes. The
//! records are a depth-first walk of the tree, in which folders are entered and left. So every name is a
//! single component, and no path is built from what the peer sent. An archive holds exactly one item, then
//! [`ArchiveRecord::End`]. Neither side trusts the other.
//!
//! A [`listing`] of a folder is another stream of records.

pub mod listing;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The most bytes of one encoded record.
pub const MAX_RECORD: u32 = 48 * 1024;
/// The most bytes of file content in one [`ArchiveRecord::Data`].
pub const MAX_DATA: usize = 32 * 1024;
/// The longest name in bytes.
pub const MAX_NAME: usize = 255;
/// The maximum nesting depth of folders.
pub const MAX_DEPTH: usize = 128;

/// Which part of an item in the guest is requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ItemPart {
    /// The whole item, as an archive.
    Whole,
    /// A range of a file's content, as an archive of that file. Its size is that of the whole file.
    Range {
        /// How many bytes to skip.
        offset: u64,
        /// The maximum number of bytes.
        limit: u64,
    },
    /// The entries of a folder, as a [`listing`].
    Listing {
        /// The maximum number of entries, sorted by name.
        limit: u64,
    },
}

impl ItemPart {
    /// The encoding in [`crate::Transfer::name`]: text, because a program in the guest gets it as an
    /// argument.
    pub fn to_name(self) -> Vec<u8> {
        match self {
            Self::Whole => Vec::new(),
            Self::Range { offset, limit } => format!("range {offset} {limit}").into_bytes(),
            Self::Listing { limit } => format!("listing {limit}").into_bytes(),
        }
    }

    /// Decodes what [`Self::to_name`] encoded.
    pub fn from_name(name: &[u8]) -> Option<Self> {
        let name = std::str::from_utf8(name).ok()?;
        let mut parts = name.split(' ');
        let kind = parts.next()?;
        let numbers = parts.map(str::parse).collect::<Result<Vec<u64>, _>>().ok()?;
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
pub enum ArchiveRecord {
    /// A folder begins; the following records are inside it.
    Enter {
        /// A single component; ignored for the first item, whose name the receiver chooses.
        name: Vec<u8>,
        /// The permission bits of the folder.
        mode: u32,
    },
    /// The innermost open folder ends.
    Leave,
    /// A file begins; its content follows.
    File {
        /// A single component, as in [`ArchiveRecord::Enter`].
        name: Vec<u8>,
        /// The permission bits of the file.
        mode: u32,
        /// Its size when it was opened; the content differs if the file changes meanwhile.
        size: u64,
        /// Modification time, seconds since 1970.
        modified: i64,
    },
    /// The next content of the open file.
    Data(Vec<u8>),
    /// The open file is complete.
    FileEnd,
    /// A symbolic link in the innermost open folder.
    Link {
        /// A single component, as in [`ArchiveRecord::Enter`].
        name: Vec<u8>,
        /// The target, exactly as stored in the link.
        target: Vec<u8>,
    },
    /// An entry that is left out: a socket, a device, an unreadable file.
    Skipped {
        /// A single component, as in [`ArchiveRecord::Enter`].
        name: Vec<u8>,
        /// The reason. Controlled by the guest if it comes from one.
        reason: String,
    },
    /// The archive is complete.
    End,
}

/// A violation of the archive format.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ArchiveError {
    /// A record exceeds the maximum length.
    #[error("The archive has a record of {0} bytes; at most {MAX_RECORD} are accepted")]
    TooLong(u32),
    /// The bytes of a record do not decode.
    #[error("The archive has a record that does not decode")]
    Malformed,
    /// A name is not a single component.
    #[error("The archive has the name {0:?}, which is not a plain file name")]
    Name(String),
    /// A record is not allowed at its position.
    #[error("The archive has a record where it does not belong: {0}")]
    Order(&'static str),
    /// Folders are nested too deeply.
    #[error("The archive is more than {MAX_DEPTH} folders deep")]
    Depth,
}

/// Appends `record` to `out`.
pub fn encode(record: &ArchiveRecord, out: &mut Vec<u8>) -> Result<(), ArchiveError> {
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

/// Splits a byte stream into records of any kind. It buffers no more than what was pushed since the last
/// complete record.
#[derive(Debug, Default)]
struct RecordSplitter {
    buffer: Vec<u8>,
    start: usize,
}

impl RecordSplitter {
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

/// Splits a byte stream into records and validates names and order.
#[derive(Debug, Default)]
pub struct ArchiveDecoder {
    cutter: RecordSplitter,
    depth: usize,
    in_file: bool,
    begun: bool,
    ended: bool,
}

impl ArchiveDecoder {
    /// Adds bytes that arrived from the peer.
    pub fn push(&mut self, bytes: &[u8]) {
        self.cutter.push(bytes);
    }

    /// Whether the end of the archive was reached.
    pub fn is_complete(&self) -> bool {
        self.ended
    }

    /// The next complete record, or `None` until more bytes arrive.
    pub fn next_record(&mut self) -> Result<Option<ArchiveRecord>, ArchiveError> {
        let record = self.cutter.next()?;
        if let Some(record) = &record {
            self.check(record)?;
        }
        Ok(record)
    }

    fn check(&mut self, record: &ArchiveRecord) -> Result<(), ArchiveError> {
        if self.ended {
            return Err(ArchiveError::Order("something follows the end"));
        }
        let data = matches!(record, ArchiveRecord::Data(_) | ArchiveRecord::FileEnd);
        if data != self.in_file {
            return Err(ArchiveError::Order("content without a file, or a file without its end"));
        }
        let whole = self.begun && self.depth == 0;
        match record {
            ArchiveRecord::Enter { name, .. }
            | ArchiveRecord::File { name, .. }
            | ArchiveRecord::Link { name, .. } => {
                if whole {
                    return Err(ArchiveError::Order("a second item"));
                }
                self.check_name(name)?;
                self.begun = true;
                match record {
                    ArchiveRecord::Enter { .. } => self.depth += 1,
                    ArchiveRecord::File { .. } => self.in_file = true,
                    _ => {}
                }
                if self.depth > MAX_DEPTH {
                    return Err(ArchiveError::Depth);
                }
            }
            ArchiveRecord::Skipped { name, .. } => self.check_name(name)?,
            ArchiveRecord::Leave => {
                self.depth = self.depth.checked_sub(1).ok_or(ArchiveError::Order("left once too often"))?;
            }
            ArchiveRecord::FileEnd => self.in_file = false,
            ArchiveRecord::Data(bytes) if bytes.len() > MAX_DATA => {
                return Err(ArchiveError::Order("too much content at once"));
            }
            ArchiveRecord::Data(_) => {}
            ArchiveRecord::End if whole => self.ended = true,
            ArchiveRecord::End => return Err(ArchiveError::Order("an end before the end")),
        }
        Ok(())
    }

    /// The first item's name is not used, so it may be anything.
    fn check_name(&self, name: &[u8]) -> Result<(), ArchiveError> {
        if self.depth == 0 || is_plain_name(name) {
            Ok(())
        } else {
            Err(ArchiveError::Name(String::from_utf8_lossy(name).into_owned()))
        }
    }
}

/// Whether `name` is a single component that cannot lead elsewhere.
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

    fn feed(records: &[ArchiveRecord]) -> Result<usize, ArchiveError> {
        let mut wire = Vec::new();
        for record in records {
            encode(record, &mut wire).unwrap();
        }
        let mut decoder = ArchiveDecoder::default();
        let mut seen = 0;
        for byte in wire {
            decoder.push(&[byte]);
            while decoder.next_record()?.is_some() {
                seen += 1;
            }
        }
        Ok(seen)
    }

    fn enter(name: &[u8]) -> ArchiveRecord {
        ArchiveRecord::Enter { name: name.to_vec(), mode: 0o755 }
    }

    fn file(name: &[u8]) -> ArchiveRecord {
        ArchiveRecord::File { name: name.to_vec(), mode: 0o644, size: 1, modified: 0 }
    }

    #[test]
    fn a_part_is_read_as_it_was_written_and_nothing_else_is_one() {
        let parts = [
            ItemPart::Whole,
            ItemPart::Range { offset: 0, limit: u64::MAX },
            ItemPart::Range { offset: u64::MAX, limit: 0 },
            ItemPart::Listing { limit: 7 },
        ];
        for part in parts {
            assert_eq!(ItemPart::from_name(&part.to_name()), Some(part));
        }
        for name in ["range", "range 1", "range 1 2 3", "range -1 2", "listing ", "file", " 1", "listing 1x"]
        {
            assert_eq!(ItemPart::from_name(name.as_bytes()), None, "{name:?}");
        }
        assert_eq!(ItemPart::from_name(b"\xff"), None);
    }

    #[test]
    fn a_tree_survives_byte_by_byte() {
        let tree = [
            enter(b"top"),
            file(b"a"),
            ArchiveRecord::Data(vec![1]),
            ArchiveRecord::FileEnd,
            enter(b"sub"),
            ArchiveRecord::Leave,
            ArchiveRecord::Link { name: b"l".to_vec(), target: b"a".to_vec() },
            ArchiveRecord::Leave,
            ArchiveRecord::End,
        ];
        assert_eq!(feed(&tree), Ok(tree.len()));
    }

    #[test]
    fn c4_names_that_lead_elsewhere_are_refused() {
        for name in [b"..".as_slice(), b".", b"", b"a/b", b"/etc", b"a\0b", &[b'x'; 256]] {
            for record in
                [file(name), enter(name), ArchiveRecord::Link { name: name.to_vec(), target: vec![] }]
            {
                assert!(matches!(feed(&[enter(b"t"), record]), Err(ArchiveError::Name(_))), "{name:?}");
            }
        }
    }

    #[test]
    fn c4_records_out_of_order_are_refused() {
        let data = || ArchiveRecord::Data(vec![0]);
        let cases: [&[ArchiveRecord]; 8] = [
            &[data()],
            &[ArchiveRecord::FileEnd],
            &[ArchiveRecord::Leave],
            &[ArchiveRecord::End],
            &[file(b"a"), file(b"b")],
            &[file(b"a"), ArchiveRecord::FileEnd, file(b"b")],
            &[enter(b"a"), ArchiveRecord::Leave, ArchiveRecord::Leave],
            &[file(b"a"), ArchiveRecord::FileEnd, ArchiveRecord::End, ArchiveRecord::End],
        ];
        for (number, case) in cases.iter().enumerate() {
            assert!(matches!(feed(case), Err(ArchiveError::Order(_))), "case {number}");
        }
    }

    #[test]
    fn c4_depth_and_lengths_are_bounded() {
        assert_eq!(feed(&vec![enter(b"d"); MAX_DEPTH + 1]), Err(ArchiveError::Depth));
        let mut decoder = ArchiveDecoder::default();
        decoder.push(&u32::MAX.to_le_bytes());
        assert_eq!(decoder.next_record(), Err(ArchiveError::TooLong(u32::MAX)));
    }
}
