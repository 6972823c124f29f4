//! How much an archive may ask for.

const MIB: u64 = 1 << 20;

/// Limits of one layer. Whatever exceeds one is refused, before anything is allocated for it.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of the archive, decompressed.
    pub bytes: u64,
    /// Decompressed bytes for each compressed one, beyond the first [`Limits::ratio_free`].
    pub ratio: u64,
    /// Decompressed bytes that the ratio does not count: small archives of zeros are common.
    pub ratio_free: u64,
    /// Headers of the archive and directories that they imply, together.
    pub entries: u64,
    /// Bytes of a path.
    pub path: usize,
    /// Bytes of one component of a path.
    pub component: usize,
    /// Components of a path.
    pub depth: usize,
    /// Bytes of a symbolic link's target.
    pub symlink: usize,
    /// Bytes of all extended attributes of an entry, names and values.
    pub xattrs: usize,
    /// Bytes of a PAX header.
    pub pax: usize,
    /// Data segments of a sparse file.
    pub segments: usize,
    /// Entries of the block maps of all sparse files; no more than the default.
    pub chunks: u64,
    /// Bytes of memory for the tree.
    pub tree: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            bytes: 32 << 30,
            ratio: 200,
            ratio_free: 10 * MIB,
            entries: 1_000_000,
            path: 4096,
            component: 255,
            depth: 256,
            symlink: 4095,
            xattrs: 64 << 10,
            pax: 1 << 20,
            segments: 1 << 16,
            chunks: crate::tree::MOST_CHUNKS,
            tree: 512 * MIB,
        }
    }
}
