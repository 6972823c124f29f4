//! Reads an EROFS file system as its specification says, and shares nothing with what writes it.

use std::collections::BTreeMap;

/// A file, and what can be seen of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: (i64, u32),
    pub(crate) links: u32,
    /// The first name, in the order of paths, that the same inode has.
    pub(crate) same: String,
    pub(crate) device: u32,
    pub(crate) size: u64,
    /// Of files without large holes and symbolic links.
    pub(crate) data: Vec<u8>,
    pub(crate) xattrs: BTreeMap<String, Vec<u8>>,
}

struct Disk<'a> {
    bytes: &'a [u8],
    block: usize,
}

struct Inode {
    layout: u16,
    mode: u16,
    size: u64,
    data: u32,
    /// Where what follows the inode and its attributes is.
    after: usize,
    found: Found,
}

impl Disk<'_> {
    fn u8(&self, at: usize) -> u8 {
        self.bytes[at]
    }

    fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.bytes[at..at + 2].try_into().unwrap())
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.bytes[at..at + 4].try_into().unwrap())
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.bytes[at..at + 8].try_into().unwrap())
    }

    fn inode(&self, nid: u64) -> Inode {
        let at = usize::try_from(nid).unwrap() * 32;
        let format = self.u16(at);
        assert_eq!(format & 1, 1, "inodes have 64 bytes");
        assert!(at % self.block + 64 <= self.block, "an inode is within a block");
        let mode = self.u16(at + 4);
        let (size, data) = (self.u64(at + 8), self.u32(at + 16));
        let (xattrs, after) = self.xattrs(at + 64, self.u16(at + 2));
        let special = matches!(mode & 0o170_000, 0o020_000 | 0o060_000);
        let found = Found {
            mode,
            uid: self.u32(at + 24),
            gid: self.u32(at + 28),
            mtime: (self.u64(at + 32).cast_signed(), self.u32(at + 40)),
            links: self.u32(at + 44),
            same: String::new(),
            device: if special { data } else { 0 },
            size: if mode & 0o170_000 == 0o040_000 { 0 } else { size },
            data: Vec::new(),
            xattrs,
        };
        Inode { layout: format >> 1, mode, size, data, after, found }
    }

    fn xattrs(&self, at: usize, units: u16) -> (BTreeMap<String, Vec<u8>>, usize) {
        let mut xattrs = BTreeMap::new();
        if units == 0 {
            return (xattrs, at);
        }
        let end = at + 12 + 4 * (usize::from(units) - 1);
        let mut at = at + 12;
        while at < end {
            let (name, index, value) =
                (usize::from(self.u8(at)), self.u8(at + 1), usize::from(self.u16(at + 2)));
            let prefix = match index {
                1 => "user.",
                2 => "system.posix_acl_access",
                3 => "system.posix_acl_default",
                4 => "trusted.",
                6 => "security.",
                other => panic!("attributes of {other}"),
            };
            let text = String::from_utf8_lossy(&self.bytes[at + 4..at + 4 + name]);
            let value_at = at + 4 + name;
            xattrs.insert(format!("{prefix}{text}"), self.bytes[value_at..value_at + value].to_vec());
            at = (value_at + value).next_multiple_of(4);
        }
        assert_eq!(at, end);
        (xattrs, end)
    }

    fn content(&self, inode: &Inode) -> Vec<u8> {
        let size = usize::try_from(inode.size).unwrap();
        let start = inode.data as usize * self.block;
        match inode.layout {
            0 if size == 0 => Vec::new(),
            0 => self.bytes[start..start + size].to_vec(),
            2 => {
                let full = (size.div_ceil(self.block) - 1) * self.block;
                let tail = size - full;
                assert!(inode.after % self.block + tail <= self.block, "what is inline is within a block");
                let blocks = if full > 0 { &self.bytes[start..start + full] } else { &[] };
                [blocks, &self.bytes[inode.after..inode.after + tail]].concat()
            }
            4 => {
                let chunk = self.block << (inode.data & 31);
                let mut content = Vec::new();
                for index in 0..size.div_ceil(chunk) {
                    let wanted = chunk.min(size - content.len());
                    match self.u32(inode.after + 4 * index) {
                        u32::MAX => content.resize(content.len() + wanted, 0),
                        block => {
                            let start = block as usize * self.block;
                            content.extend(&self.bytes[start..start + wanted]);
                        }
                    }
                }
                content
            }
            other => panic!("layout {other}"),
        }
    }

    /// The names in a directory, the inodes that they are of, and the types that the directory says these have.
    fn names(&self, inode: &Inode) -> Vec<(Vec<u8>, u64, u8)> {
        let content = self.content(inode);
        let mut names = Vec::new();
        for block in content.chunks(self.block) {
            let u16_at = |at: usize| usize::from(u16::from_le_bytes([block[at], block[at + 1]]));
            let count = u16_at(8) / 12;
            for index in 0..count {
                let at = index * 12;
                let start = u16_at(at + 8);
                let name = if index + 1 < count {
                    &block[start..u16_at(at + 12 + 8)]
                } else {
                    block[start..].split(|byte| *byte == 0).next().unwrap()
                };
                assert!((1..=255).contains(&name.len()));
                names.push((
                    name.to_vec(),
                    u64::from_le_bytes(block[at..at + 8].try_into().unwrap()),
                    block[at + 10],
                ));
            }
        }
        assert!(names.is_sorted_by(|one, other| one.0 < other.0), "names are sorted");
        names
    }
}

/// Checks the superblock, and reads every file; the root's path is empty.
pub(crate) fn read(bytes: &[u8]) -> BTreeMap<String, Found> {
    let mut disk = Disk { bytes, block: 512 };
    assert_eq!(disk.u32(1024), 0xe0f5_e1e2);
    disk.block = 1 << disk.u8(1024 + 12);
    check_superblock(&disk);
    let root = u64::from(disk.u16(1024 + 14));
    let mut found = BTreeMap::new();
    let mut nids: BTreeMap<String, u64> = BTreeMap::new();
    let mut rest = vec![(String::new(), root, root)];
    while let Some((path, nid, parent)) = rest.pop() {
        let inode = disk.inode(nid);
        let kind = inode.mode & 0o170_000;
        let mut file = inode.found.clone();
        if kind == 0o040_000 {
            for (name, child, kind) in disk.names(&inode) {
                let mode = disk.inode(child).mode;
                assert_eq!(
                    kind,
                    [0, 5, 3, 0, 2, 0, 4, 0, 1, 0, 7][usize::from(mode >> 12)],
                    "the type of {name:?}"
                );
                match name.as_slice() {
                    b"." => assert_eq!(child, nid),
                    b".." => assert_eq!(child, parent),
                    name => {
                        let name = String::from_utf8_lossy(name);
                        rest.push((
                            if path.is_empty() { name.into() } else { format!("{path}/{name}") },
                            child,
                            nid,
                        ));
                    }
                }
            }
        } else if matches!(kind, 0o100_000 | 0o120_000) && inode.size < 64 << 20 {
            file.data = disk.content(&inode);
        }
        nids.insert(path.clone(), nid);
        found.insert(path, file);
    }
    let mut first: BTreeMap<u64, String> = BTreeMap::new();
    for (path, nid) in nids {
        let same = first.entry(nid).or_insert_with(|| path.clone()).clone();
        found.get_mut(&path).unwrap().same = same;
    }
    assert_eq!(disk.u64(1024 + 16), first.len() as u64, "the superblock counts the inodes");
    found
}

fn check_superblock(disk: &Disk<'_>) {
    let end = if disk.block > 1024 { disk.block } else { 1024 + disk.block };
    let mut block = disk.bytes[1024..end].to_vec();
    block[4..8].fill(0);
    let mut crc = u32::MAX;
    for byte in block {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    assert_eq!(disk.u32(1024 + 4), crc, "the superblock's checksum");
    assert_eq!(disk.u32(1024 + 36) as usize, disk.bytes.len() / disk.block);
    assert_eq!(disk.bytes.len() % 4096, 0);
}
