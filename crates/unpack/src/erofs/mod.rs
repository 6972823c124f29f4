//! Writes an image's merged tree as an EROFS file system without the data of its regular files.
//!
//! ```text
//! | 1024 bytes | superblock | inodes | blocks of directories and long symbolic links | to a multiple of 4096
//! ```
//!
//! An inode is followed by its attributes and by what is inline: a short symbolic link, the last block of a directory,
//! the block map of a sparse file. The blocks of regular files are behind the index, in the layers' files.

mod directory;
mod format;
mod output;
mod plan;

use std::io::{self, Seek, Write};

use crate::merge::{Image, Leaf, MergeError, Object, merge};
use crate::tree::{Kind, LayerTree, Layout, Metadata, Segment};
use directory::Packing;
use format::{DataLayout, InodeRecord, Superblock};
use output::Output;
use plan::{Plan, dirents};

/// What the index and each layer's file are padded to on the disk.
const ALIGNMENT: u64 = 4096;

/// A layer of an image.
#[derive(Clone, Copy, Debug)]
pub struct IndexLayer<'a> {
    pub tree: &'a LayerTree,
    /// The size of the layer's file.
    pub size: u64,
}

/// How a disk is put together from the index and the layers' files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexInfo {
    /// The size of the index, a multiple of 4096.
    pub size: u64,
    /// Where each layer's file begins on the disk, a multiple of 4096. What is between them is zeros.
    pub layers: Vec<u64>,
    /// The size of the disk, a multiple of 4096.
    pub disk: u64,
    pub inodes: u64,
}

/// Why no index was written.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    #[error(transparent)]
    Merge(#[from] MergeError),
    #[error("The image's layers have different layouts")]
    Layouts,
    #[error("The image is larger than its block addresses allow")]
    TooLarge,
    #[error("The tree of layer {0} refers to data that its file does not have")]
    Data(usize),
    #[error("The extended attributes of a file are too long")]
    Xattrs,
    #[error("Cannot write the image's index")]
    Write(#[from] io::Error),
}

/// Writes the index of an image, whose layers are given from the lowest on.
pub fn write_index(layers: &[IndexLayer<'_>], output: impl Write + Seek) -> Result<IndexInfo, IndexError> {
    let layout = layers.first().map_or(Layout::Tar, |layer| layer.tree.layout());
    if layers.iter().any(|layer| layer.tree.layout() != layout) {
        return Err(IndexError::Layouts);
    }
    let image = merge(layers.iter().map(|layer| layer.tree))?;
    let plan = Plan::new(&image, layout)?;
    let info = place(&image, &plan, layers)?;
    let writer = Writer { layers, offsets: &info.layers, image: &image, plan: &plan, scratch: Vec::new() };
    writer.write(Output::new(output), info.disk)?;
    Ok(info)
}

/// Where the layers are.
fn place(image: &Image<'_>, plan: &Plan, layers: &[IndexLayer<'_>]) -> Result<IndexInfo, IndexError> {
    let aligned = |size: u64| size.checked_next_multiple_of(ALIGNMENT).ok_or(IndexError::TooLarge);
    let size = aligned(plan.end)?;
    let mut disk = size;
    let mut offsets = Vec::new();
    for layer in layers {
        offsets.push(disk);
        disk = disk.checked_add(aligned(layer.size)?).ok_or(IndexError::TooLarge)?;
    }
    // Every block then has an address, and none has that of a hole.
    if disk >> plan.bits >= u64::from(format::NO_BLOCK) {
        return Err(IndexError::TooLarge);
    }
    Ok(IndexInfo { size, layers: offsets, disk, inodes: image.objects.len() as u64 })
}

struct Writer<'a> {
    layers: &'a [IndexLayer<'a>],
    offsets: &'a [u64],
    image: &'a Image<'a>,
    plan: &'a Plan,
    scratch: Vec<u8>,
}

/// What differs between kinds of inodes.
struct Form {
    layout: DataLayout,
    kind: u16,
    size: u64,
    data: u32,
    links: u32,
}

impl Writer<'_> {
    fn write<W: Write + Seek>(mut self, mut output: Output<W>, disk: u64) -> Result<(), IndexError> {
        for (index, object) in self.image.objects.iter().enumerate() {
            output.pad_to(self.plan.positions[index])?;
            self.scratch.clear();
            match object {
                Object::Directory { metadata, .. } => {
                    self.directory(index, metadata.unwrap_or(&Metadata::IMPLIED))?;
                }
                Object::Leaf { leaf, links } => self.leaf(index, *leaf, *links)?,
            }
            output.write(&self.scratch)?;
        }
        for (index, object) in self.image.objects.iter().enumerate() {
            let Some(block) = self.plan.blocks[index] else { continue };
            output.pad_to(block << self.plan.bits)?;
            self.scratch.clear();
            match object {
                Object::Directory { .. } => self.directory_blocks(index),
                Object::Leaf { leaf, .. } => {
                    if let Kind::Symlink(target) = &leaf.inode.kind {
                        self.scratch.extend(&**target);
                    }
                }
            }
            output.write(&self.scratch)?;
        }
        output.pad_to(self.plan.end.next_multiple_of(ALIGNMENT))?;
        let narrow = |_| IndexError::TooLarge;
        output.finish(&Superblock {
            block_bits: u8::try_from(self.plan.bits).map_err(narrow)?,
            root: u16::try_from(self.plan.nid(0)).map_err(narrow)?,
            inodes: self.image.objects.len() as u64,
            blocks: u32::try_from(disk >> self.plan.bits).map_err(narrow)?,
            chunked: self.plan.chunked,
        })?;
        Ok(())
    }

    fn record(&mut self, index: usize, metadata: &Metadata, form: &Form) -> Result<(), IndexError> {
        let record = InodeRecord {
            layout: form.layout,
            xattr_units: format::xattr_units(&metadata.xattrs).ok_or(IndexError::Xattrs)?,
            mode: form.kind | metadata.mode,
            size: form.size,
            data: form.data,
            number: u32::try_from(index + 1).map_err(|_| IndexError::TooLarge)?,
            uid: metadata.uid,
            gid: metadata.gid,
            seconds: metadata.seconds,
            nanoseconds: metadata.nanoseconds,
            links: form.links,
        };
        record.encode(&mut self.scratch);
        format::encode_xattrs(&metadata.xattrs, &mut self.scratch);
        Ok(())
    }

    fn directory(&mut self, index: usize, metadata: &Metadata) -> Result<(), IndexError> {
        let dirents = dirents(self.image, index);
        let packing = Packing::new(dirents.iter().map(|dirent| dirent.name), self.plan.block());
        let folders = dirents.iter().filter(|dirent| dirent.kind == plan::DIRECTORY_TYPE).count();
        let inline = self.plan.inline[index];
        self.record(
            index,
            metadata,
            &Form {
                layout: if inline { DataLayout::Inline } else { DataLayout::Plain },
                kind: plan::DIRECTORY,
                size: packing.size(1 << self.plan.bits),
                data: self.plan.first_block(index)?,
                // Its name, its `.`, and the `..` of each directory in it. The root's own `..` is in place of a name.
                links: u32::try_from(folders).map_err(|_| IndexError::TooLarge)?,
            },
        )?;
        if inline {
            let last = packing.counts.last().copied().unwrap_or_default();
            let tail = &dirents[dirents.len() - last..];
            directory::encode(tail, |object| self.plan.nid(object), &mut self.scratch);
        }
        Ok(())
    }

    /// The blocks of a directory that do not follow its inode.
    fn directory_blocks(&mut self, index: usize) {
        let dirents = dirents(self.image, index);
        let packing = Packing::new(dirents.iter().map(|dirent| dirent.name), self.plan.block());
        let mut rest = &dirents[..];
        let outside = packing.counts.len() - usize::from(self.plan.inline[index]);
        for count in &packing.counts[..outside] {
            let (block, after) = rest.split_at(*count);
            rest = after;
            let padded = self.scratch.len().next_multiple_of(self.plan.block());
            self.scratch.resize(padded, 0);
            directory::encode(block, |object| self.plan.nid(object), &mut self.scratch);
        }
    }

    fn leaf(&mut self, index: usize, leaf: Leaf<'_>, links: u32) -> Result<(), IndexError> {
        let inode = leaf.inode;
        let (kind, _) = plan::types(&inode.kind);
        let mut form = Form { layout: DataLayout::Plain, kind, size: 0, data: 0, links };
        match &inode.kind {
            Kind::File { size, offset } => {
                form.size = *size;
                if *size > 0 {
                    form.data = self.address(leaf.layer, *offset, *size)?;
                }
            }
            Kind::Sparse { size, segments } => {
                let (bits, _) = Kind::chunks(*size, segments, self.plan.bits);
                form = Form { layout: DataLayout::Chunks, size: *size, data: bits - self.plan.bits, ..form };
            }
            Kind::Symlink(target) => {
                form.size = target.len() as u64;
                form.data = self.plan.first_block(index)?;
                if self.plan.inline[index] {
                    form.layout = DataLayout::Inline;
                }
            }
            Kind::Character { major, minor } | Kind::Block { major, minor } => {
                form.data = format::device(*major, *minor);
            }
            Kind::Fifo => {}
        }
        self.record(index, &inode.metadata, &form)?;
        match &inode.kind {
            Kind::Symlink(target) if self.plan.inline[index] => self.scratch.extend(&**target),
            Kind::Sparse { size, segments } => self.block_map(leaf.layer, *size, segments)?,
            _ => {}
        }
        Ok(())
    }

    /// The table of a sparse file's chunks.
    fn block_map(&mut self, layer: usize, size: u64, segments: &[Segment]) -> Result<(), IndexError> {
        let (bits, chunks) = Kind::chunks(size, segments, self.plan.bits);
        let mut segments = segments.iter().peekable();
        for chunk in 0..chunks {
            let start = chunk << bits;
            while segments.next_if(|segment| segment.start + segment.length <= start).is_some() {}
            let block = match segments.peek() {
                Some(segment) if segment.start <= start => {
                    let within = start - segment.start;
                    self.address(layer, segment.offset + within, segment.length - within)?
                }
                _ => format::NO_BLOCK,
            };
            self.scratch.extend(block.to_le_bytes());
        }
        Ok(())
    }

    /// The block at which data of a layer is.
    fn address(&self, layer: usize, offset: u64, size: u64) -> Result<u32, IndexError> {
        let wrong = IndexError::Data(layer);
        let (Some(file), Some(start)) = (self.layers.get(layer), self.offsets.get(layer)) else {
            return Err(wrong);
        };
        match offset.checked_add(size) {
            Some(end) if end <= file.size => {}
            _ => return Err(wrong),
        }
        u32::try_from((start + offset) >> self.plan.bits).map_err(|_| IndexError::TooLarge)
    }
}
