//! Decides where everything of the index is, before anything is written.

use super::IndexError;
use super::directory::{Dirent, Packing};
use super::format::{INODE_SIZE, NO_BLOCK, SLOT, SUPER_OFFSET, SUPER_SIZE, xattr_size};
use crate::merge::{Image, Object};
use crate::tree::{Kind, Layout};

/// The type of a directory in its inode's mode.
pub(super) const DIRECTORY: u16 = 0o040_000;
/// The same in the records of the directory that it is in.
pub(super) const DIRECTORY_TYPE: u8 = 2;

/// The type of a file that is not a directory, in its mode and in directories.
pub(super) fn types(kind: &Kind) -> (u16, u8) {
    match kind {
        Kind::File { .. } | Kind::Sparse { .. } => (0o100_000, 1),
        Kind::Character { .. } => (0o020_000, 3),
        Kind::Block { .. } => (0o060_000, 4),
        Kind::Fifo => (0o010_000, 5),
        Kind::Symlink(_) => (0o120_000, 7),
    }
}

pub(super) struct Plan {
    pub(super) bits: u32,
    /// Where each object's inode is, in bytes.
    pub(super) positions: Vec<u64>,
    /// Whether the last part of its data follows the inode.
    pub(super) inline: Vec<bool>,
    /// The first block of what does not.
    pub(super) blocks: Vec<Option<u64>>,
    pub(super) end: u64,
    /// Whether there is a sparse file.
    pub(super) chunked: bool,
}

/// What of an object has to be placed, in bytes.
struct Needs {
    /// The inode with its attributes, and what always follows these.
    inode: u64,
    /// What follows if it fits into the inode's block.
    tail: u64,
    /// The size of its further whole blocks.
    blocks: u64,
}

impl Plan {
    pub(super) fn new(image: &Image<'_>, layout: Layout) -> Result<Self, IndexError> {
        let mut plan = Self {
            bits: layout.block_bits(),
            positions: Vec::new(),
            inline: Vec::new(),
            blocks: Vec::new(),
            end: SUPER_OFFSET + SUPER_SIZE,
            chunked: false,
        };
        // How many blocks each object has elsewhere.
        let mut counts = Vec::new();
        for index in 0..image.objects.len() {
            let needs = plan.needs(image, index);
            counts.push(plan.place_inode(&needs)?);
        }
        let block = layout.block_size();
        for count in counts {
            let start = (count > 0).then_some(plan.end.next_multiple_of(block));
            plan.blocks.push(start.map(|start| start / block));
            if let Some(start) = start {
                plan.end = count
                    .checked_mul(block)
                    .and_then(|size| start.checked_add(size))
                    .ok_or(IndexError::TooLarge)?;
            }
        }
        // The checksum is that of a whole block.
        plan.end = plan.end.max(SUPER_OFFSET + block);
        Ok(plan)
    }

    /// The number of an object's inode.
    pub(super) fn nid(&self, object: usize) -> u64 {
        self.positions.get(object).map_or(0, |position| position / SLOT)
    }

    pub(super) fn block(&self) -> usize {
        1 << self.bits
    }

    pub(super) fn first_block(&self, object: usize) -> Result<u32, IndexError> {
        match self.blocks.get(object).copied().flatten() {
            // Where everything follows the inode, the address means nothing.
            None => Ok(NO_BLOCK),
            Some(block) => u32::try_from(block).map_err(|_| IndexError::TooLarge),
        }
    }

    fn needs(&mut self, image: &Image<'_>, index: usize) -> Needs {
        let block = 1 << self.bits;
        match &image.objects[index] {
            Object::Directory { metadata, .. } => {
                let dirents = dirents(image, index);
                let packing = Packing::new(dirents.iter().map(|dirent| dirent.name), self.block());
                let xattrs = metadata.map_or(0, |metadata| xattr_size(&metadata.xattrs));
                Needs { inode: INODE_SIZE + xattrs, tail: packing.last as u64, blocks: packing.full_blocks() }
            }
            Object::Leaf { leaf, .. } => {
                let inode = INODE_SIZE + xattr_size(&leaf.inode.metadata.xattrs);
                match &leaf.inode.kind {
                    Kind::Symlink(target) => {
                        let length = target.len() as u64;
                        // A link is inline as a whole or not at all.
                        if inode + length <= block {
                            Needs { inode, tail: length, blocks: 0 }
                        } else {
                            Needs { inode, tail: 0, blocks: length.div_ceil(block) }
                        }
                    }
                    Kind::Sparse { size, segments } => {
                        self.chunked = true;
                        let (_, chunks) = Kind::chunks(*size, segments, self.bits);
                        Needs { inode: inode.saturating_add(chunks.saturating_mul(4)), tail: 0, blocks: 0 }
                    }
                    _ => Needs { inode, tail: 0, blocks: 0 },
                }
            }
        }
    }

    /// Places an inode, and returns how many further blocks it needs.
    fn place_inode(&mut self, needs: &Needs) -> Result<u64, IndexError> {
        let block = 1 << self.bits;
        let inline = needs.tail > 0 && needs.inode + needs.tail <= block;
        let size = if inline { needs.inode + needs.tail } else { needs.inode };
        let mut position = self.end.next_multiple_of(SLOT);
        // What is larger than a block begins with one, everything else is within one.
        if position % block + size.min(block) > block {
            position = position.next_multiple_of(block);
        }
        self.positions.push(position);
        self.inline.push(inline);
        self.end = position.checked_add(size).ok_or(IndexError::TooLarge)?;
        Ok(needs.blocks + u64::from(needs.tail > 0 && !inline))
    }
}

/// The names in a directory, sorted, with `.` and `..` among them.
pub(super) fn dirents<'a>(image: &Image<'a>, index: usize) -> Vec<Dirent<'a>> {
    let Object::Directory { parent, children, .. } = &image.objects[index] else { return Vec::new() };
    let special: [Dirent<'a>; 2] = [
        Dirent { name: b".", object: index, kind: DIRECTORY_TYPE },
        Dirent { name: b"..", object: *parent, kind: DIRECTORY_TYPE },
    ];
    let mut dirents = Vec::from(special);
    for (name, object) in &image.names[children.clone()] {
        let kind = match &image.objects[*object] {
            Object::Directory { .. } => DIRECTORY_TYPE,
            Object::Leaf { leaf, .. } => types(&leaf.inode.kind).1,
        };
        dirents.push(Dirent { name, object: *object, kind });
    }
    dirents.sort_unstable_by_key(|dirent| dirent.name);
    dirents
}
