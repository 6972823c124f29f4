//! A listing of one folder in a guest: an [`Item`] for each of the first entries by name, then [`Item::End`].
//!
//! It is framed like an archive. The number of entries and their bytes are limited, so that a reader can hold
//! them in memory: the guest leaves out what does not fit, the host accepts no more.

use serde::{Deserialize, Serialize};

use super::{ArchiveError, RecordSplitter, is_plain_name, write};

/// The most entries of a listing.
pub const MAX_ENTRIES: usize = 65_536;
/// The most encoded bytes of a listing's entries.
pub const MAX_BYTES: usize = 16 * 1024 * 1024;
/// The longest target of a link in bytes.
pub const MAX_TARGET: usize = 4096;

/// The type of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EntryType {
    /// A regular file entry.
    File,
    /// A folder, which is not descended into.
    Directory,
    /// A symbolic link, which is not followed.
    Symlink,
    /// A device, a fifo or a socket.
    Other,
}

/// One entry of a folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The name, a single component.
    pub name: Vec<u8>,
    /// The type; links are not followed.
    pub kind: EntryType,
    /// The size in bytes.
    pub size: u64,
    /// The permission bits of the entry.
    pub mode: u32,
    /// Modification time, nanoseconds since 1970.
    pub modified_ns: u64,
    /// The target of a link, exactly as stored.
    pub target: Option<Vec<u8>>,
}

/// One record of a listing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Item {
    /// An entry of the folder.
    Entry(Entry),
    /// The listing is complete.
    End {
        /// How many entries the folder has, including those that were left out.
        total: u64,
    },
}

/// Appends `item` to `out`.
pub fn encode(item: &Item, out: &mut Vec<u8>) -> Result<(), ArchiveError> {
    write(item, out)
}

/// Splits a byte stream into the items of a listing and validates them.
#[derive(Debug, Default)]
pub struct ListingDecoder {
    cutter: RecordSplitter,
    received: usize,
    entries: usize,
    ended: bool,
}

impl ListingDecoder {
    /// Adds bytes that arrived from the peer.
    pub fn push(&mut self, bytes: &[u8]) {
        self.received = self.received.saturating_add(bytes.len());
        self.cutter.push(bytes);
    }

    /// Whether the end of the listing was reached.
    pub fn is_complete(&self) -> bool {
        self.ended
    }

    /// The next complete item, or `None` until more bytes arrive.
    pub fn next_item(&mut self) -> Result<Option<Item>, ArchiveError> {
        // The end item has to fit as well.
        if self.received > MAX_BYTES + 64 {
            return Err(ArchiveError::Order("more than a listing may be"));
        }
        let item = self.cutter.next()?;
        if let Some(item) = &item {
            self.check(item)?;
        }
        Ok(item)
    }

    fn check(&mut self, item: &Item) -> Result<(), ArchiveError> {
        if self.ended {
            return Err(ArchiveError::Order("something follows the end"));
        }
        match item {
            Item::End { .. } => self.ended = true,
            Item::Entry(entry) => {
                self.entries += 1;
                if self.entries > MAX_ENTRIES {
                    return Err(ArchiveError::Order("more entries than a listing may have"));
                }
                if !is_plain_name(&entry.name) {
                    return Err(ArchiveError::Name(String::from_utf8_lossy(&entry.name).into_owned()));
                }
                let target = entry.target.as_ref();
                if target.is_some_and(|target| target.len() > MAX_TARGET) {
                    return Err(ArchiveError::Order("a link's target that is too long"));
                }
                if target.is_some() && entry.kind != EntryType::Symlink {
                    return Err(ArchiveError::Order("a target without a link"));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &[u8]) -> Entry {
        Entry {
            name: name.to_vec(),
            kind: EntryType::File,
            size: 1,
            mode: 0o644,
            modified_ns: 2,
            target: None,
        }
    }

    fn link(target: usize) -> Item {
        Item::Entry(Entry { kind: EntryType::Symlink, target: Some(vec![b'x'; target]), ..entry(b"l") })
    }

    fn feed(items: &[Item]) -> Result<Vec<Item>, ArchiveError> {
        let mut wire = Vec::new();
        for item in items {
            encode(item, &mut wire).unwrap();
        }
        let (mut decoder, mut seen) = (ListingDecoder::default(), Vec::new());
        for bytes in wire.chunks(997) {
            decoder.push(bytes);
            while let Some(item) = decoder.next_item()? {
                seen.push(item);
            }
        }
        Ok(seen)
    }

    #[test]
    fn a_listing_survives_in_pieces() {
        let items = [Item::Entry(entry(b"\xff")), link(MAX_TARGET), Item::End { total: u64::MAX }];
        assert_eq!(feed(&items).unwrap(), items);
    }

    #[test]
    fn c1_names_and_targets_that_cannot_be_are_refused() {
        for name in [b"..".as_slice(), b".", b"", b"a/b", b"a\0b", &[b'x'; 256]] {
            assert!(matches!(feed(&[Item::Entry(entry(name))]), Err(ArchiveError::Name(_))), "{name:?}");
        }
        assert!(matches!(feed(&[link(MAX_TARGET + 1)]), Err(ArchiveError::Order(_))));
        let odd = Item::Entry(Entry { target: Some(Vec::new()), ..entry(b"f") });
        assert!(matches!(feed(&[odd]), Err(ArchiveError::Order(_))));
    }

    #[test]
    fn c1_a_listing_has_a_most_of_entries_and_bytes_and_one_end() {
        let end = Item::End { total: 0 };
        assert!(matches!(feed(&[end.clone(), end]), Err(ArchiveError::Order(_))));
        let many = vec![Item::Entry(entry(b"n")); MAX_ENTRIES];
        assert_eq!(feed(&many).unwrap().len(), MAX_ENTRIES);
        assert!(matches!(
            feed(&[many, vec![Item::Entry(entry(b"n"))]].concat()),
            Err(ArchiveError::Order(_))
        ));
        let long = vec![link(MAX_TARGET); MAX_BYTES / MAX_TARGET + 1];
        assert!(matches!(feed(&long), Err(ArchiveError::Order(_))));
        let mut decoder = ListingDecoder::default();
        decoder.push(&u32::MAX.to_le_bytes());
        assert_eq!(decoder.next_item(), Err(ArchiveError::TooLong(u32::MAX)));
    }
}
