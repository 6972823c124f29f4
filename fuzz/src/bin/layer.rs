//! Layers of images: whatever an archive holds, its layer is refused, or it is a tree that can be merged with others and
//! written as a file system whose data is all in the layers' files.
#![no_main]

use std::io::Cursor;

use bathy_fuzz::{Input, MAX_STEPS};
use bathy_unpack::{
    Compression, IndexError, IndexLayer, Layer, LayerTree, Layout, Limits, Options, unpack_layer, write_index,
};
use libfuzzer_sys::fuzz_target;

/// Few, so that they meet each other. The last ones are refused.
const NAMES: [&[u8]; 20] = [
    b"a",
    b"b",
    b"c",
    b"a/b",
    b"a/b/c",
    b"./a/",
    b"/b",
    b"a//a",
    b"b/c",
    b".",
    b".wh.a",
    b"a/.wh.b",
    b".wh..wh..opq",
    b"a/.wh..wh..opq",
    b".wh..wh.x/y",
    b"..",
    b"a/../b",
    b".wh...",
    b"b/.wh.a/c",
    b"",
];
const ACCEPTED: usize = 15;
const KEYS: [&[u8]; 16] = [
    b"path",
    b"linkpath",
    b"size",
    b"uid",
    b"mtime",
    b"SCHILY.xattr.user.a",
    b"SCHILY.xattr.security.capability",
    b"SCHILY.xattr.system.posix_acl_access",
    b"GNU.sparse.major",
    b"GNU.sparse.minor",
    b"GNU.sparse.name",
    b"GNU.sparse.size",
    b"GNU.sparse.realsize",
    b"GNU.sparse.map",
    b"GNU.sparse.offset",
    b"GNU.sparse.numbytes",
];
const VALUES: [&[u8]; 12] = [
    b"0",
    b"1",
    b"512",
    b"1024",
    b"8192",
    b"0,512,1024,512",
    b"512,512",
    b"18446744073709551615",
    b"-1.5",
    b"a/b",
    b"",
    b"1048576",
];
const KINDS: &[u8] = b"00000000111111222255555533446SSxxxxLKg77\0\0?";

fuzz_target!(|data: &[u8]| {
    let mut input = Input::new(data);
    let choice = input.u8();
    let layout = if choice & 1 == 0 { Layout::Tar } else { Layout::Aligned };
    let mut layers = Vec::new();
    for _ in 0..=choice >> 1 & 1 {
        let compression = match choice >> 2 & 7 {
            0 => Compression::Gzip,
            1 => Compression::Zstd,
            _ => Compression::None,
        };
        let archive = if choice >> 2 & 7 < 3 { input.take(1024).to_vec() } else { drawn(&mut input) };
        let limits = Limits {
            bytes: 1 << 20,
            ratio_free: 1 << 16,
            entries: 200,
            segments: 64,
            chunks: 1 << 12,
            tree: 1 << 18,
            ..Limits::default()
        };
        let mut file = Vec::new();
        let options = Options { compression, layout, limits };
        let Ok(layer) = unpack_layer(archive.as_slice(), &mut file, &options) else { return };
        assert_eq!(layer.size, file.len() as u64);
        let encoded = layer.tree.encode().expect("every tree is encoded");
        assert!(LayerTree::decode(&encoded).expect("what was made is valid") == layer.tree);
        layers.push(layer);
    }
    write(&layers);
});

fn write(layers: &[Layer]) {
    let given: Vec<_> =
        layers.iter().map(|layer| IndexLayer { tree: &layer.tree, size: layer.size }).collect();
    let mut index = Cursor::new(Vec::new());
    match write_index(&given, &mut index) {
        Ok(info) => {
            assert_eq!(info.size, index.get_ref().len() as u64);
            assert!(info.size % 4096 == 0 && info.disk % 4096 == 0 && info.inodes > 0);
        }
        // A hard link to what the lower layer does not have.
        Err(IndexError::Merge(_)) => {}
        Err(error) => panic!("{error}"),
    }
}

/// Plausible headers with valid checksums, and data.
fn drawn(input: &mut Input<'_>) -> Vec<u8> {
    let mut archive = Vec::new();
    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        let mut block = [0_u8; 512];
        let path = name(input);
        block[..path.len()].copy_from_slice(path);
        let kind = KINDS[usize::from(input.u8()) % KINDS.len()];
        let data = data(kind, input);
        block[124..135].copy_from_slice(format!("{:011o}", data.len()).as_bytes());
        block[156] = kind;
        let target = name(input);
        block[157..157 + target.len()].copy_from_slice(target);
        block[257..265].copy_from_slice(if kind == b'S' { b"ustar  \0" } else { b"ustar\x0000" });
        if kind == b'S' {
            sparse(&mut block, input);
        }
        for _ in 0..input.u8().saturating_sub(250) {
            let at = usize::from(input.u16()) % 512;
            block[at] = input.u8();
        }
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().copied().map(u32::from).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        archive.extend(block);
        archive.extend(data);
        archive.resize(archive.len().next_multiple_of(512), 0);
    }
    archive
}

/// Mostly one that is accepted: one that is not ends it all.
fn name(input: &mut Input<'_>) -> &'static [u8] {
    match usize::from(input.u8()) {
        number @ 0..250 => NAMES[number % ACCEPTED],
        number => NAMES[number % NAMES.len()],
    }
}

fn data(kind: u8, input: &mut Input<'_>) -> Vec<u8> {
    match kind {
        b'x' => {
            let mut records = Vec::new();
            for _ in 0..input.u8() % 6 {
                let key = KEYS[usize::from(input.u8()) % KEYS.len()];
                let value = VALUES[usize::from(input.u8()) % VALUES.len()];
                let rest = key.len() + value.len() + 3;
                let length = if rest < 9 { rest + 1 } else { rest + 2 };
                records.extend([length.to_string().as_bytes(), b" ", key, b"=", value, b"\n"].concat());
            }
            records
        }
        b'L' | b'K' => [name(input), b"\0"].concat(),
        b'0' | b'S' | b'7' => match input.u8() % 4 {
            0 => Vec::new(),
            1 => [b"1\n0\n512\n".as_slice(), &[0; 504], &[b'x'; 512]].concat(),
            2 => vec![b'x'; 512 * (1 + usize::from(input.u8() % 20))],
            _ => {
                let length = usize::from(input.u8());
                input.take(length).to_vec()
            }
        },
        _ => Vec::new(),
    }
}

fn sparse(block: &mut [u8; 512], input: &mut Input<'_>) {
    let number = |input: &mut Input<'_>| 512 * (u64::from(input.u8()) % 16);
    for index in 0..usize::from(input.u8() % 5) {
        let at = 386 + 24 * index;
        block[at..at + 11].copy_from_slice(format!("{:011o}", number(input)).as_bytes());
        block[at + 12..at + 23].copy_from_slice(format!("{:011o}", number(input)).as_bytes());
    }
    block[482] = input.u8() & 1;
    block[483..494].copy_from_slice(format!("{:011o}", number(input) * 64).as_bytes());
}
