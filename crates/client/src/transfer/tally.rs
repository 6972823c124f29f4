//! Counts and digests a copy, and tracks the position in the tree. Packing and unpacking use the same code,
//! so that both sides of a copy can be compared.

use blake3::Hasher;

use super::{MAX_SKIPPED, Summary};

/// Domain separation from file contents that look like an entry.
const ENTRY_CONTEXT: &str = "bathysphere 2026 entry of a copied tree";
/// The most characters of a path or reason in a report: a guest chooses them.
const MAX_TEXT: usize = 512;

/// The kind of an entry.
#[derive(Clone, Copy)]
enum Kind {
    Folder,
    File,
    Link,
}

impl Kind {
    fn byte(self) -> u8 {
        match self {
            Self::Folder => b'd',
            Self::File => b'f',
            Self::Link => b'l',
        }
    }
}

/// A folder or file in progress.
struct Open {
    /// For the topmost item, its whole local path.
    name: Vec<u8>,
    mode: u32,
}

#[derive(Default)]
pub(super) struct Tally {
    /// The open folders, each with the digests of its entries so far. A tree costs 32 bytes of memory per
    /// entry.
    folders: Vec<(Open, Vec<[u8; 32]>)>,
    file: Option<(Open, Hasher)>,
    summary: Summary,
}

impl Tally {
    pub(super) fn bytes(&self) -> u64 {
        self.summary.bytes
    }

    pub(super) fn enter(&mut self, name: &[u8], mode: u32) {
        self.summary.folders += 1;
        self.folders.push((Open { name: name.to_vec(), mode }, Vec::new()));
    }

    pub(super) fn leave(&mut self) {
        if let Some((folder, mut entries)) = self.folders.pop() {
            entries.sort_unstable();
            let mut hasher = Hasher::new();
            for entry in &entries {
                hasher.update(entry);
            }
            let content = *hasher.finalize().as_bytes();
            self.record(Kind::Folder, &folder, content);
        }
    }

    pub(super) fn file(&mut self, name: &[u8], mode: u32) {
        self.file = Some((Open { name: name.to_vec(), mode }, Hasher::new()));
    }

    pub(super) fn data(&mut self, bytes: &[u8]) {
        self.summary.bytes = self.summary.bytes.saturating_add(bytes.len() as u64);
        if let Some((_, hasher)) = &mut self.file {
            hasher.update(bytes);
        }
    }

    pub(super) fn file_end(&mut self) {
        if let Some((file, hasher)) = self.file.take() {
            self.summary.files += 1;
            self.record(Kind::File, &file, *hasher.finalize().as_bytes());
        }
    }

    pub(super) fn link(&mut self, name: &[u8], target: &[u8]) {
        self.summary.links += 1;
        let link = Open { name: name.to_vec(), mode: 0 };
        self.record(Kind::Link, &link, *blake3::hash(target).as_bytes());
    }

    pub(super) fn skip(&mut self, name: &[u8], reason: &str) {
        self.summary.skipped_count += 1;
        if self.summary.skipped.len() < MAX_SKIPPED {
            let entry = (self.path(name), clipped(reason));
            self.summary.skipped.push(entry);
        }
    }

    /// The path of `name`, for messages only.
    pub(super) fn path(&self, name: &[u8]) -> String {
        let mut path = String::new();
        for part in self.folders.iter().map(|(folder, _)| folder.name.as_slice()).chain([name]) {
            if !path.is_empty() && !path.ends_with('/') && !part.is_empty() {
                path.push('/');
            }
            path.push_str(&String::from_utf8_lossy(part));
        }
        clipped(&path)
    }

    pub(super) fn into_summary(self) -> Summary {
        self.summary
    }

    /// Adds a complete entry to its folder, or finishes the copy.
    fn record(&mut self, kind: Kind, entry: &Open, content: [u8; 32]) {
        match (self.folders.last_mut(), kind) {
            (Some((_, entries)), _) => entries.push(number(kind, &entry.name, entry.mode, &content)),
            (None, Kind::Folder) => {
                let number = number(kind, b"", entry.mode, &content);
                self.summary.digest = blake3::Hash::from_bytes(number).to_hex().to_string();
            }
            (None, Kind::File | Kind::Link) => {
                self.summary.digest = blake3::Hash::from_bytes(content).to_hex().to_string();
            }
        }
    }
}

fn number(kind: Kind, name: &[u8], mode: u32, content: &[u8; 32]) -> [u8; 32] {
    let length = u32::try_from(name.len()).unwrap_or(u32::MAX);
    let mut hasher = Hasher::new_derive_key(ENTRY_CONTEXT);
    hasher.update(&[kind.byte()]).update(&length.to_le_bytes()).update(name);
    hasher.update(&mode.to_le_bytes()).update(content);
    *hasher.finalize().as_bytes()
}

/// The end of a long path is more informative than its beginning.
fn clipped(text: &str) -> String {
    match text.char_indices().rev().nth(MAX_TEXT) {
        Some((cut, letter)) => format!("…{}", text.get(cut + letter.len_utf8()..).unwrap_or_default()),
        None => text.to_owned(),
    }
}
