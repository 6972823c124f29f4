//! Records of the EROFS on-disk format. Everything is little-endian.

use crate::tree::Xattr;

/// Where the superblock is.
pub(super) const SUPER_OFFSET: u64 = 1024;
pub(super) const SUPER_SIZE: u64 = 128;
pub(super) const INODE_SIZE: u64 = 64;
/// What a number of an inode counts.
pub(super) const SLOT: u64 = 32;
pub(super) const DIRENT_SIZE: usize = 12;
/// The block of a hole.
pub(super) const NO_BLOCK: u32 = u32::MAX;

const MAGIC: u32 = 0xe0f5_e1e2;
const FEATURE_CHECKSUM: u32 = 1;
const FEATURE_MTIME: u32 = 2;
const FEATURE_CHUNKS: u32 = 4;

/// How the data of an inode is found.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum DataLayout {
    /// The data is in consecutive blocks.
    Plain = 0,
    /// The same, but the last part of it follows the inode.
    Inline = 2,
    /// By a table of block numbers that follows the inode.
    Chunks = 4,
}

pub(super) struct Superblock {
    pub(super) block_bits: u8,
    pub(super) root: u16,
    pub(super) inodes: u64,
    pub(super) blocks: u32,
    pub(super) chunked: bool,
}

impl Superblock {
    /// Its bytes, without the checksum.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(MAGIC.to_le_bytes());
        out.extend([0; 4]);
        out.extend((FEATURE_CHECKSUM | FEATURE_MTIME).to_le_bytes());
        out.extend([self.block_bits, 0]);
        out.extend(self.root.to_le_bytes());
        out.extend(self.inodes.to_le_bytes());
        // The time that compact inodes have, of which there are none.
        out.extend([0; 12]);
        out.extend(self.blocks.to_le_bytes());
        // Inodes are counted from the first block; there are no shared attributes, and neither id nor name.
        out.extend([0; 8 + 16 + 16]);
        out.extend(if self.chunked { FEATURE_CHUNKS } else { 0 }.to_le_bytes());
        out.resize(usize::try_from(SUPER_SIZE).unwrap_or_default(), 0);
        out
    }
}

/// The checksum of the superblock's block, from the superblock on. In it, the checksum itself counts as zero.
pub(super) fn checksum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 })
    })
}

/// Where the checksum is in the superblock.
pub(super) const CHECKSUM: std::ops::Range<usize> = 4..8;

pub(super) struct InodeRecord {
    pub(super) layout: DataLayout,
    pub(super) xattr_units: u16,
    pub(super) mode: u16,
    pub(super) size: u64,
    /// The first block, the number of a device, or how a table of blocks is to be read.
    pub(super) data: u32,
    pub(super) number: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) seconds: i64,
    pub(super) nanoseconds: u32,
    pub(super) links: u32,
}

impl InodeRecord {
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        // The lowest bit: 64 bytes rather than 32.
        out.extend((1 | (self.layout as u16) << 1).to_le_bytes());
        out.extend(self.xattr_units.to_le_bytes());
        out.extend(self.mode.to_le_bytes());
        out.extend([0; 2]);
        out.extend(self.size.to_le_bytes());
        out.extend(self.data.to_le_bytes());
        out.extend(self.number.to_le_bytes());
        out.extend(self.uid.to_le_bytes());
        out.extend(self.gid.to_le_bytes());
        out.extend(self.seconds.to_le_bytes());
        out.extend(self.nanoseconds.to_le_bytes());
        out.extend(self.links.to_le_bytes());
        out.extend([0; 16]);
    }
}

/// The number of a device as Linux stores it.
pub(super) fn device(major: u16, minor: u32) -> u32 {
    (minor & 0xff) | u32::from(major) << 8 | (minor & !0xff) << 12
}

/// What an inode's attributes take, in bytes.
pub(super) fn xattr_size(xattrs: &[Xattr]) -> u64 {
    if xattrs.is_empty() {
        return 0;
    }
    let size = |xattr: &Xattr| (4 + xattr.name.len() + xattr.value.len()).next_multiple_of(4) as u64;
    12 + xattrs.iter().map(size).sum::<u64>()
}

/// The same as an inode counts it.
pub(super) fn xattr_units(xattrs: &[Xattr]) -> Option<u16> {
    match xattr_size(xattrs) {
        0 => Some(0),
        size => u16::try_from((size - 12) / 4 + 1).ok(),
    }
}

pub(super) fn encode_xattrs(xattrs: &[Xattr], out: &mut Vec<u8>) {
    if xattrs.is_empty() {
        return;
    }
    out.extend([0; 12]);
    for xattr in xattrs {
        // Lengths were checked when the tree was made.
        let length = u8::try_from(xattr.name.len()).unwrap_or(u8::MAX);
        let size = u16::try_from(xattr.value.len()).unwrap_or(u16::MAX);
        out.extend([length, xattr.namespace as u8]);
        out.extend(size.to_le_bytes());
        out.extend(&*xattr.name);
        out.extend(&*xattr.value);
        out.resize(out.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_crc32c() {
        // The usual check value, which is inverted at the end.
        assert_eq!(!checksum(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn devices_are_encoded_as_linux_does() {
        assert_eq!(device(5, 1), 0x501);
        assert_eq!(device(0xfff, 0xf_ffff), u32::MAX);
        assert_eq!(device(259, 0x12345), 0x1231_0345);
    }
}
