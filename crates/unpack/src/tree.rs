//! What a layer's archive describes.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::name::is_component;

/// The most entries that the block maps of a layer's sparse files have together: a map is as long as its file is large.
pub(crate) const MOST_CHUNKS: u64 = 4 << 20;

/// The most names, and the most inodes, of a layer: [`crate::Limits::entries`] by default, and the root.
pub(crate) const MOST_ENTRIES: usize = 1_000_001;

/// What the file of a layer holds, beside which blocks of it are those of the image's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Layout {
    /// The archive itself. The image has blocks of 512 bytes, as an archive has.
    Tar,
    /// The data of its files, each at a multiple of 4096 bytes. The image has blocks of 4096 bytes.
    Aligned,
}

impl Layout {
    /// How many bits of an offset are within a block.
    pub(crate) fn block_bits(self) -> u32 {
        match self {
            Self::Tar => 9,
            Self::Aligned => 12,
        }
    }

    /// The size of a block.
    pub fn block_size(self) -> u64 {
        1 << self.block_bits()
    }
}

/// A layer, as a tree of names. Parents come before their children, and the children of a directory are together and
/// sorted by name; the first node is the root.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerTree {
    pub(crate) layout: Layout,
    #[serde(deserialize_with = "at_most")]
    pub(crate) nodes: Vec<Node>,
    #[serde(deserialize_with = "at_most")]
    pub(crate) inodes: Vec<Inode>,
}

/// Reads a list that is no longer than that of the largest layer. A few bytes stand for an entry that takes a hundred.
fn at_most<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    struct Bounded<T>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Bounded<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "at most {MOST_ENTRIES} entries")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
            let mut entries = Vec::new();
            while let Some(entry) = list.next_element()? {
                if entries.len() >= MOST_ENTRIES {
                    return Err(de::Error::invalid_length(entries.len(), &self));
                }
                entries.push(entry);
            }
            Ok(entries)
        }
    }

    deserializer.deserialize_seq(Bounded(PhantomData))
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Node {
    pub(crate) parent: u32,
    pub(crate) name: Box<[u8]>,
    pub(crate) entry: Entry,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Entry {
    /// Without metadata if the archive names only what is in it. An opaque one hides what lower layers have in it.
    Directory { metadata: Option<Box<Metadata>>, opaque: bool },
    /// A name of an inode of this layer. Hard links are names of one inode.
    Inode(u32),
    /// A hard link to a file of a lower layer, by its path.
    Link(Box<[u8]>),
    /// Hides what lower layers have here.
    Whiteout,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Metadata {
    /// The permission bits, among them those for setuid, setgid and the sticky bit.
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) seconds: i64,
    pub(crate) nanoseconds: u32,
    pub(crate) xattrs: Vec<Xattr>,
}

impl Metadata {
    /// What a directory has that no layer's archive has an entry of.
    pub(crate) const IMPLIED: Self =
        Self { mode: 0o755, uid: 0, gid: 0, seconds: 0, nanoseconds: 0, xattrs: Vec::new() };
}

/// The first part of an attribute's name, with the number that EROFS has for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Namespace {
    User = 1,
    AclAccess = 2,
    AclDefault = 3,
    Trusted = 4,
    Security = 6,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Xattr {
    pub(crate) namespace: Namespace,
    pub(crate) name: Box<[u8]>,
    pub(crate) value: Box<[u8]>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Inode {
    pub(crate) metadata: Metadata,
    pub(crate) kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// `offset` is where its data begins in the layer's file.
    File {
        size: u64,
        offset: u64,
    },
    Sparse {
        size: u64,
        segments: Box<[Segment]>,
    },
    Symlink(Box<[u8]>),
    Character {
        major: u16,
        minor: u32,
    },
    Block {
        major: u16,
        minor: u32,
    },
    Fifo,
}

/// A part of a sparse file that is not a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Segment {
    /// Where it is in the file.
    pub(crate) start: u64,
    pub(crate) length: u64,
    /// Where it is in the layer's file.
    pub(crate) offset: u64,
}

/// Why bytes are not a layer's tree.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    #[error("The layer's index is not in the expected format")]
    Format(#[source] postcard::Error),
    #[error("The layer's index contradicts itself at {0}")]
    Contradiction(&'static str),
}

impl LayerTree {
    /// The tree as bytes that [`LayerTree::decode`] reads.
    pub fn encode(&self) -> Result<Vec<u8>, TreeError> {
        postcard::to_allocvec(self).map_err(TreeError::Format)
    }

    /// Reads a tree. It comes from the process that read the hostile archive, so nothing in it is trusted.
    pub fn decode(bytes: &[u8]) -> Result<Self, TreeError> {
        let tree: Self = postcard::from_bytes(bytes).map_err(TreeError::Format)?;
        tree.check()?;
        Ok(tree)
    }

    /// What the layer's file holds.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// How many names the layer has, whiteouts among them.
    pub fn names(&self) -> usize {
        self.nodes.len()
    }

    /// The directory at `index`, if there is one.
    pub(crate) fn is_directory(&self, index: u32) -> bool {
        let node = usize::try_from(index).ok().and_then(|index| self.nodes.get(index));
        node.is_some_and(|node| matches!(node.entry, Entry::Directory { .. }))
    }

    pub(crate) fn inode(&self, index: u32) -> Option<&Inode> {
        usize::try_from(index).ok().and_then(|index| self.inodes.get(index))
    }

    fn check(&self) -> Result<(), TreeError> {
        let wrong = |what| Err(TreeError::Contradiction(what));
        let Some((root, rest)) = self.nodes.split_first() else { return wrong("its root") };
        if root.parent != 0 || !root.name.is_empty() || !self.is_directory(0) {
            return wrong("its root");
        }
        let mut before = root;
        for (index, node) in rest.iter().enumerate() {
            // `index` is that of the node before.
            if usize::try_from(node.parent).map_or(true, |parent| parent > index)
                || !self.is_directory(node.parent)
            {
                return wrong("a parent");
            }
            if !is_component(&node.name) {
                return wrong("a name");
            }
            if (node.parent, &node.name) <= (before.parent, &before.name) {
                return wrong("the order of its names");
            }
            before = node;
        }
        for node in &self.nodes {
            match &node.entry {
                Entry::Directory { metadata: Some(metadata), .. } => check_metadata(metadata)?,
                Entry::Inode(inode) if self.inode(*inode).is_none() => return wrong("an inode's number"),
                _ => {}
            }
        }
        let mut chunks = 0_u64;
        for inode in &self.inodes {
            self.check_inode(inode)?;
            if let Kind::Sparse { size, segments } = &inode.kind {
                chunks = chunks.saturating_add(Kind::chunks(*size, segments, self.layout.block_bits()).1);
            }
        }
        if chunks > MOST_CHUNKS { wrong("the size of its block maps") } else { Ok(()) }
    }

    fn check_inode(&self, inode: &Inode) -> Result<(), TreeError> {
        let wrong = |what| Err(TreeError::Contradiction(what));
        check_metadata(&inode.metadata)?;
        let unaligned = |number: u64| !number.is_multiple_of(self.layout.block_size());
        match &inode.kind {
            Kind::File { size, .. } | Kind::Sparse { size, .. } if i64::try_from(*size).is_err() => {
                wrong("a file's size")
            }
            Kind::File { offset, .. } if unaligned(*offset) => wrong("a file's offset"),
            Kind::Symlink(target) if target.is_empty() || target.len() > 4095 || target.contains(&0) => {
                wrong("a symbolic link's target")
            }
            Kind::Character { major, minor } | Kind::Block { major, minor }
                if *major > 0xfff || *minor > 0xf_ffff =>
            {
                wrong("a device's number")
            }
            Kind::Sparse { size, segments } => {
                let mut end = 0;
                for segment in segments {
                    let aligned = !unaligned(segment.start) && !unaligned(segment.offset);
                    if !aligned || segment.length == 0 || segment.start < end {
                        return wrong("a sparse file's segments");
                    }
                    end = segment.start.saturating_add(segment.length);
                }
                if end > *size { wrong("a sparse file's size") } else { Ok(()) }
            }
            _ => Ok(()),
        }
    }
}

fn check_metadata(metadata: &Metadata) -> Result<(), TreeError> {
    let mut bytes = 0;
    for xattr in &metadata.xattrs {
        if xattr.name.len() > 255 || xattr.value.len() > usize::from(u16::MAX) || xattr.name.contains(&0) {
            return Err(TreeError::Contradiction("an attribute"));
        }
        bytes += xattr.name.len() + xattr.value.len() + 8;
    }
    let valid = metadata.mode <= 0o7777 && metadata.nanoseconds < 1_000_000_000 && bytes <= 256 << 10;
    if valid { Ok(()) } else { Err(TreeError::Contradiction("the metadata of an inode")) }
}

impl Kind {
    /// How many blocks, as a power of two, one entry of a sparse file's block map stands for, and how many entries the
    /// map has. Data begins and ends where an entry does; only at the end of the file it need not.
    pub(crate) fn chunks(size: u64, segments: &[Segment], block_bits: u32) -> (u32, u64) {
        // Kernels take more. No file gains by it.
        const MOST_BITS: u32 = 30;
        let mut bits = MOST_BITS;
        for segment in segments {
            bits = bits.min(segment.start.trailing_zeros());
            let end = segment.start.saturating_add(segment.length);
            if end < size {
                bits = bits.min(end.trailing_zeros().max(block_bits));
            }
        }
        let bits = bits.max(block_bits);
        (bits, size.div_ceil(1 << bits))
    }
}
