//! What the formats of archives have: long names, attributes, sparse files, compression.

use std::collections::BTreeMap;
use std::io::Write;

use ring::digest::{SHA256, digest};

use super::archive::{Archive, Header, seal};
use super::{image, options, unpack, unpack_bytes};
use crate::{Compression, LayerError, LayerTree, Layout, Options, Refusal};

pub(super) fn compress(bytes: &[u8], compression: Compression) -> Vec<u8> {
    match compression {
        Compression::None => bytes.to_vec(),
        Compression::Gzip => {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
        Compression::Zstd => zstd::encode_all(bytes, 1).unwrap(),
    }
}

/// A number in base 256.
fn wide(number: u64) -> [u8; 12] {
    let mut field = [0; 12];
    field[0] = 0x80;
    field[4..].copy_from_slice(&number.to_be_bytes());
    field
}

/// The header of a sparse file, with as many blocks of its map behind it as are needed.
pub(super) fn gnu_sparse(name: &str, parts: &[(u64, u64)], stored: u64, real: u64) -> Vec<u8> {
    let mut block = Header { size: stored, magic: b"ustar  \0", ..Header::new(name, b'S') }.block();
    block[345..500].fill(0);
    let field = |(start, length): &(u64, u64)| [wide(*start), wide(*length)].concat();
    let (first, rest) = parts.split_at(parts.len().min(4));
    for (index, part) in first.iter().enumerate() {
        block[386 + index * 24..][..24].copy_from_slice(&field(part));
    }
    block[482] = u8::from(!rest.is_empty());
    block[483..495].copy_from_slice(&wide(real));
    seal(&mut block);
    let mut bytes = block.to_vec();
    let mut rest = rest.chunks(21).peekable();
    while let Some(parts) = rest.next() {
        let mut block = [0; 512];
        for (index, part) in parts.iter().enumerate() {
            block[index * 24..][..24].copy_from_slice(&field(part));
        }
        block[504] = u8::from(rest.peek().is_some());
        bytes.extend(block);
    }
    bytes
}

#[test]
fn an_entry_keeps_what_its_header_says() {
    let header = |name: &str, kind| Header {
        mode: 0o6751,
        uid: 1000,
        gid: 100,
        mtime: 1_700_000_000,
        ..Header::new(name, kind)
    };
    let archive = Archive::new()
        .header(&header("directory", b'5'))
        .header(&Header { size: 5, ..header("directory/file", b'0') })
        .data(b"hello")
        .header(&Header { link: b"file".to_vec(), ..header("directory/symlink", b'2') })
        .header(&Header { device: (5, 1), ..header("console", b'3') })
        .header(&Header { device: (259, 70_000), ..header("disk", b'4') })
        .header(&header("fifo", b'6'));
    let found = image(&[&archive]);
    for (path, kind) in [
        ("directory", 0o040_000),
        ("directory/file", 0o100_000),
        ("directory/symlink", 0o120_000),
        ("console", 0o020_000),
        ("disk", 0o060_000),
        ("fifo", 0o010_000),
    ] {
        let file = &found[path];
        assert_eq!((file.mode, file.uid, file.gid), (kind | 0o6751, 1000, 100), "{path}");
        assert_eq!(file.mtime, (1_700_000_000, 0), "{path}");
        assert_eq!(file.links, if path == "directory" { 2 } else { 1 }, "{path}");
    }
    assert_eq!(found["directory/file"].data, b"hello");
    assert_eq!(found["directory/symlink"].data, b"file");
    assert_eq!(found["console"].device, 0x501);
    assert_eq!(found["disk"].device, 0x1111_0370);
    assert_eq!((found[""].mode, found[""].links), (0o040_755, 3));
}

#[test]
fn long_names_come_in_three_ways() {
    let long = format!("{}/{}", "d".repeat(120), "f".repeat(200));
    let gnu = Archive::new().file(&long, "gnu");
    let pax = Archive::new().pax(&[("path", long.as_bytes()), ("linkpath", b"ignored")]).file("short", "pax");
    let mut ustar = Header { size: 5, ..Header::new("f".repeat(100), b'0') }.block();
    ustar[345..345 + 120].fill(b'd');
    seal(&mut ustar);
    let ustar = Archive::new().raw(&ustar).data(b"ustar");
    assert_eq!(image(&[&gnu])[&long].data, b"gnu");
    assert_eq!(image(&[&pax])[&long].data, b"pax");
    assert_eq!(image(&[&ustar])[&format!("{}/{}", "d".repeat(120), "f".repeat(100))].data, b"ustar");
    let target = "t/".repeat(150);
    assert_eq!(image(&[&Archive::new().symlink("a", &target)])["a"].data, target.as_bytes());
}

#[test]
fn pax_headers_are_of_the_next_entry_only() {
    let archive = Archive::new()
        .pax(&[
            ("uid", b"3000000000"),
            ("mtime", b"-1.5"),
            ("SCHILY.xattr.security.capability", b"\x01\0\0\x02caps"),
        ])
        .file("one", "1")
        .file("two", "2")
        .meta(b'g', b"13 path=three\n")
        .file("four", "4");
    let found = image(&[&archive]);
    assert_eq!((found["one"].uid, found["one"].mtime), (3_000_000_000, (-2, 500_000_000)));
    let capability = ("security.capability".to_owned(), b"\x01\0\0\x02caps".to_vec());
    assert_eq!(found["one"].xattrs, BTreeMap::from([capability]));
    assert_eq!((found["two"].uid, found["two"].mtime), (0, (0, 0)));
    assert!(found["two"].xattrs.is_empty());
    assert_eq!(found["four"].data, b"4");
}

#[test]
fn attributes_may_be_longer_than_a_block() {
    let value = vec![b'v'; 60_000];
    let attribute =
        [("SCHILY.xattr.user.large", value.as_slice()), ("SCHILY.xattr.system.posix_acl_access", b"acl")];
    let archive = Archive::new()
        .pax(&attribute)
        .file("file", "x")
        .pax(&attribute)
        .directory("directory")
        .file("directory/a", "a")
        .pax(&attribute)
        .symlink("symlink", "target")
        .pax(&attribute)
        .directory(".");
    let found = image(&[&archive]);
    for path in ["", "file", "directory", "symlink"] {
        assert_eq!(found[path].xattrs["user.large"], value, "{path}");
        assert_eq!(found[path].xattrs["system.posix_acl_access"], b"acl", "{path}");
    }
    assert_eq!(found["symlink"].data, b"target");
}

#[test]
fn directories_may_have_many_names() {
    let mut archive = Archive::new();
    for number in 0..3000 {
        archive = archive.file(format!("d/{number}{}", "n".repeat(number % 240)), format!("{number}"));
    }
    for name in ["!", "-", "..a", ".a", "..."] {
        archive = archive.file(format!("d/{name}"), name);
    }
    let found = image(&[&archive]);
    assert_eq!(found.len(), 3007);
    assert_eq!(found[&format!("d/239{}", "n".repeat(239))].data, b"239");
    assert_eq!(found["d/..."].data, b"...");
}

#[test]
fn symbolic_links_of_every_length_are_kept() {
    let lengths = [1, 59, 60, 447, 448, 449, 511, 512, 513, 1024, 4031, 4032, 4033, 4095];
    let archive = lengths
        .iter()
        .fold(Archive::new(), |archive, length| archive.symlink(format!("{length}"), "x".repeat(*length)));
    let found = image(&[&archive]);
    for length in lengths {
        assert_eq!(found[&length.to_string()].data, "x".repeat(length).as_bytes());
    }
}

/// The file of each format: 512 bytes at 0, 512 at 8192, one at 12288, 20,000 in all.
fn sparse_content() -> Vec<u8> {
    let mut content = vec![0; 20_000];
    content[..512].fill(b'a');
    content[8192..8704].fill(b'b');
    content[12_288] = b'c';
    content
}

const SPARSE_PARTS: [(u64, u64); 4] = [(0, 512), (8192, 512), (12_288, 1), (20_000, 0)];

fn sparse_data() -> Vec<u8> {
    [[b'a'; 512].as_slice(), &[b'b'; 512], b"c"].concat()
}

#[test]
fn sparse_files_come_in_four_ways() {
    let stored = sparse_data();
    let list = SPARSE_PARTS.map(|(start, length)| [start.to_string(), length.to_string()]).concat();
    let map = list.join(",");
    let lines = format!("4\n{}\n", list.join("\n"));
    let mut separate: Vec<(&str, &[u8])> =
        vec![("GNU.sparse.size", b"20000"), ("GNU.sparse.numblocks", b"4")];
    for pair in list.chunks(2) {
        separate.push(("GNU.sparse.offset", pair[0].as_bytes()));
        separate.push(("GNU.sparse.numbytes", pair[1].as_bytes()));
    }
    let named: [(&str, &[u8]); 3] =
        [("GNU.sparse.name", b"sparse"), ("GNU.sparse.size", b"20000"), ("GNU.sparse.map", map.as_bytes())];
    let newest: [(&str, &[u8]); 4] = [
        ("GNU.sparse.major", b"1"),
        ("GNU.sparse.minor", b"0"),
        ("GNU.sparse.name", b"sparse"),
        ("GNU.sparse.realsize", b"20000"),
    ];
    let mut with_map = lines.into_bytes();
    with_map.resize(512, 0);
    with_map.extend(&stored);
    for (format, archive) in [
        ("GNU", Archive::new().raw(&gnu_sparse("sparse", &SPARSE_PARTS, 1025, 20_000)).data(&stored)),
        ("0.0", Archive::new().pax(&separate).file("sparse", &stored)),
        ("0.1", Archive::new().pax(&named).file("GNUSparseFile.1/sparse", &stored)),
        ("1.0", Archive::new().pax(&newest).file("GNUSparseFile.1/sparse", &with_map)),
    ] {
        let found = image(&[&archive.file("behind", "it")]);
        assert_eq!(found["sparse"].data, sparse_content(), "{format}");
        assert_eq!(found["behind"].data, b"it", "{format}");
    }
}

#[test]
fn sparse_maps_may_be_long() {
    let parts: Vec<(u64, u64)> = (0..100).map(|index| (index * 8192, 4096)).collect();
    let data: Vec<u8> = (0..100_u8).flat_map(|index| [index + 1; 4096]).collect();
    let size = 100 * 8192;
    let archive = Archive::new().raw(&gnu_sparse("sparse", &parts, 409_600, size)).data(&data);
    let found = image(&[&archive]);
    assert_eq!(found["sparse"].size, size);
    for (index, chunk) in found["sparse"].data.chunks(8192).enumerate() {
        assert!(chunk[..4096].iter().all(|byte| usize::from(*byte) == index + 1), "{index}");
        assert!(chunk[4096..].iter().all(|byte| *byte == 0), "{index}");
    }
}

#[test]
fn holes_cost_little() {
    // A terabyte, with data at its start and at its end.
    let end = (1_u64 << 40) - 4096;
    let parts = [(0, 4096), (end, 4096)];
    let terabyte = gnu_sparse("far", &[(0, 4096), (1 << 33, 4096)], 8192, (1 << 33) + 4096);
    let archive = Archive::new().raw(&terabyte).data(&[b'x'; 8192]);
    let found = image(&[&archive]);
    assert_eq!(found["far"].size, (1 << 33) + 4096);
    let only_holes = Archive::new().raw(&gnu_sparse("holes", &[(1 << 32, 0)], 0, 1 << 32));
    assert_eq!(image(&[&only_holes])["holes"].size, 1 << 32);
    let archive = Archive::new().raw(&gnu_sparse("far", &parts, 8192, 1 << 40)).data(&[b'x'; 8192]);
    let too_fine =
        |layout| matches!(unpack(&archive, layout).err().unwrap().refusal(), Some(Refusal::SparseTooFine));
    assert!(too_fine(Layout::Tar) && too_fine(Layout::Aligned));
}

#[test]
fn old_archives_are_read() {
    let magic = b"\0\0\0\0\0\0\0\0";
    let old = |name: &str, kind, size| Header { magic, size, ..Header::new(name, kind) };
    let archive = Archive::new()
        .header(&old("directory/", 0, 0))
        .header(&old("directory/file", 0, 3))
        .data(b"old")
        .header(&Header { magic: b"ustar  \0", size: 1, ..Header::new("contiguous", b'7') })
        .data(b"7");
    let found = image(&[&archive]);
    assert_eq!(found["directory"].mode & 0o170_000, 0o040_000);
    assert_eq!(found["directory/file"].data, b"old");
    assert_eq!(found["contiguous"].data, b"7");
}

#[test]
fn compression_changes_nothing() {
    let data: Vec<u8> = (0..150_000_u32).flat_map(u32::to_le_bytes).collect();
    let archive = Archive::new().file("data", &data).bytes();
    let expected = digest(&SHA256, &archive);
    for compression in [Compression::None, Compression::Gzip, Compression::Zstd] {
        let compressed = compress(&archive, compression);
        assert_eq!(Compression::detect(&compressed), compression);
        for layout in [Layout::Tar, Layout::Aligned] {
            let unpacked = unpack_bytes(&compressed, &Options { compression, ..options(layout) }).unwrap();
            assert_eq!(unpacked.layer.diff_id, expected.as_ref());
            if layout == Layout::Tar {
                assert!(unpacked.file == archive);
            }
        }
    }
}

#[test]
fn compressed_layers_may_have_parts() {
    let archive = Archive::new().file("a", "a").file("b", "b").bytes();
    let (one, two) = archive.split_at(700);
    for compression in [Compression::Gzip, Compression::Zstd] {
        let options = Options { compression, ..options(Layout::Tar) };
        let mut parts = [compress(one, compression), compress(two, compression)].concat();
        if compression == Compression::Zstd {
            // A skippable frame.
            parts = [b"\x50\x2a\x4d\x18\x03\0\0\0abc".as_slice(), &parts].concat();
            assert_eq!(Compression::detect(&parts), compression);
        }
        assert!(unpack_bytes(&parts, &options).unwrap().file == archive);
    }
}

#[test]
fn damaged_streams_are_refused() {
    let archive = Archive::new().file("a", "a".repeat(100_000)).bytes();
    for compression in [Compression::Gzip, Compression::Zstd] {
        let options = Options { compression, ..options(Layout::Tar) };
        let compressed = compress(&archive, compression);
        let cut = &compressed[..compressed.len() - 3];
        assert!(matches!(unpack_bytes(cut, &options), Err(LayerError::Read(_))), "{compression:?}");
        let garbage = [compressed.as_slice(), b"garbage"].concat();
        assert!(matches!(unpack_bytes(&garbage, &options), Err(LayerError::Read(_))), "{compression:?}");
        assert!(
            matches!(unpack_bytes(b"\x1f\x8bgarbage", &options), Err(LayerError::Read(_))),
            "{compression:?}"
        );
    }
    // A frame that wants four gigabytes to be remembered.
    let window = b"\x28\xb5\x2f\xfd\x00\xb0\x01\x00\x00";
    let options = Options { compression: Compression::Zstd, ..options(Layout::Tar) };
    assert!(matches!(unpack_bytes(window, &options), Err(LayerError::Read(_))));
}

#[test]
fn what_follows_the_archive_is_part_of_the_digest() {
    let bytes = [Archive::new().file("a", "a").bytes(), b"anything".repeat(100)].concat();
    let unpacked = unpack_bytes(&bytes, &options(Layout::Tar)).unwrap();
    assert_eq!(unpacked.layer.diff_id, digest(&SHA256, &bytes).as_ref());
    assert!(unpacked.file == bytes);
    assert_eq!(unpack_bytes(b"", &options(Layout::Tar)).unwrap().layer.tree.names(), 1);
}

#[test]
fn a_full_disk_is_no_fault_of_the_archive() {
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let archive = Archive::new().file("a", "a").bytes();
    for layout in [Layout::Tar, Layout::Aligned] {
        let result = crate::unpack_layer(archive.as_slice(), Full, &options(layout));
        assert!(matches!(result, Err(LayerError::Write(_))));
    }
}

#[test]
fn a_trees_bytes_are_not_trusted() {
    let archive = Archive::new().file("a/b", "b").symlink("c", "d").link("e", "a/b").file(".wh.x", "");
    let tree = unpack(&archive, Layout::Tar).unwrap().layer.tree;
    let encoded = tree.encode().unwrap();
    assert!(LayerTree::decode(&encoded[..encoded.len() - 1]).is_err());
    assert!(LayerTree::decode(b"").is_err());
    let mut refused = 0;
    for index in 0..encoded.len() {
        for bit in 0..8 {
            let mut damaged = encoded.clone();
            damaged[index] ^= 1 << bit;
            // Whatever is accepted can be merged and written.
            match LayerTree::decode(&damaged) {
                Err(_) => refused += 1,
                Ok(tree) => {
                    let layer = crate::IndexLayer { tree: &tree, size: 4096 };
                    let _ = crate::write_index(&[layer], std::io::Cursor::new(Vec::new()));
                }
            }
        }
    }
    assert!(refused > encoded.len());
}

#[test]
fn c4_a_tree_of_more_names_than_a_layer_can_have_is_refused_while_it_is_read() {
    // The layout, how many nodes there are, and whiteouts without a name below the root.
    let encoded = |count: u32| {
        let mut bytes = vec![0];
        let mut rest = count;
        while rest >= 0x80 {
            bytes.push(u8::try_from(rest & 0x7f).unwrap() | 0x80);
            rest >>= 7;
        }
        bytes.push(u8::try_from(rest).unwrap());
        bytes.extend([0, 0, 3].repeat(count as usize));
        bytes.push(0);
        bytes
    };
    let most = u32::try_from(crate::tree::MOST_ENTRIES).unwrap();
    let error = LayerTree::decode(&encoded(most + 1)).unwrap_err();
    assert!(matches!(error, crate::TreeError::Format(_)), "{error}");
    let error = LayerTree::decode(&encoded(most)).unwrap_err();
    assert!(matches!(error, crate::TreeError::Contradiction("its root")), "it was read: {error}");
}
