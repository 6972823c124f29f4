//! The blocks of a directory. Each has records of fixed size, then their names; all names are sorted.

use super::format::DIRENT_SIZE;

/// A name in a directory, the object that it is of, and the type of that.
pub(super) struct Dirent<'a> {
    pub(super) name: &'a [u8],
    pub(super) object: usize,
    pub(super) kind: u8,
}

/// How many of the names go into each block, and the size of the directory: the last block ends with its last name.
pub(super) struct Packing {
    pub(super) counts: Vec<usize>,
    pub(super) last: usize,
}

impl Packing {
    pub(super) fn new<'a>(names: impl Iterator<Item = &'a [u8]>, block: usize) -> Self {
        let mut packing = Self { counts: Vec::new(), last: 0 };
        let mut count = 0;
        for name in names {
            let size = DIRENT_SIZE + name.len();
            if packing.last + size > block {
                packing.counts.push(count);
                (count, packing.last) = (0, 0);
            }
            count += 1;
            packing.last += size;
        }
        packing.counts.push(count);
        packing
    }

    /// Blocks before the last one.
    pub(super) fn full_blocks(&self) -> u64 {
        self.counts.len() as u64 - 1
    }

    pub(super) fn size(&self, block: u64) -> u64 {
        self.full_blocks() * block + self.last as u64
    }
}

/// One block's records and names. `nid` is the number of an object's inode.
pub(super) fn encode(dirents: &[Dirent<'_>], nid: impl Fn(usize) -> u64, out: &mut Vec<u8>) {
    let mut offset = dirents.len() * DIRENT_SIZE;
    for dirent in dirents {
        out.extend(nid(dirent.object).to_le_bytes());
        // Within a block of at most 4096 bytes.
        out.extend(u16::try_from(offset).unwrap_or(u16::MAX).to_le_bytes());
        out.extend([dirent.kind, 0]);
        offset += dirent.name.len();
    }
    for dirent in dirents {
        out.extend(dirent.name);
    }
}
