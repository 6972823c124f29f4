//! Hostile archives (C4, C5): each is refused, and the entry is named.

use super::archive::{Archive, Header, seal};
use super::{image, options, refusal, unpack, unpack_bytes};
use crate::{Compression, LayerError, Layout, Limits, Options, Refusal};

/// Refuses `bytes` with `limits`.
fn limited(bytes: &[u8], limits: Limits) -> Refusal {
    let options = Options { limits, ..options(Layout::Tar) };
    match unpack_bytes(bytes, &options) {
        Err(LayerError::Entry { refusal, .. } | LayerError::Layer(refusal)) => refusal,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("the archive was accepted"),
    }
}

/// An archive of one header, changed by `change` and sealed again.
fn changed(change: impl Fn(&mut [u8; 512])) -> Archive {
    let mut block = Header::new("victim", b'0').block();
    change(&mut block);
    seal(&mut block);
    Archive::new().raw(&block)
}

#[test]
fn c4_names_that_lead_out_are_refused() {
    for name in ["../outside", "a/../../outside", "/../outside", "..", "a/..", "./../x"] {
        let (entry, refusal) = refusal(&Archive::new().file("before", "x").file(name, "x"));
        assert_eq!(entry, name);
        assert!(matches!(refusal, Refusal::ParentInName), "{name}: {refusal}");
    }
    let absolute = image(&[&Archive::new().file("/etc/passwd", "x").directory("//")]);
    assert_eq!(absolute.keys().collect::<Vec<_>>(), ["", "etc", "etc/passwd"]);
}

#[test]
fn c4_names_in_long_headers_are_checked_too() {
    let long = format!("{}/../x", "a/".repeat(60));
    assert!(matches!(refusal(&Archive::new().file(&long, "")).1, Refusal::ParentInName));
    let pax = |value: &[u8]| refusal(&Archive::new().pax(&[("path", value)]).file("harmless", "")).1;
    assert!(matches!(pax(b"../x"), Refusal::ParentInName));
    assert!(matches!(pax(b"a\0b"), Refusal::NulInName));
    assert!(matches!(pax(&vec![b'a'; 256]), Refusal::ComponentTooLong(255)));
    assert!(matches!(pax(&b"a/".repeat(2049)), Refusal::PathTooLong(4096)));
    assert!(matches!(pax(&b"a/".repeat(300)), Refusal::TooDeep(256)));
    let sparse = [("GNU.sparse.name", b"../x".as_slice())];
    assert!(matches!(refusal(&Archive::new().pax(&sparse).file("harmless", "")).1, Refusal::ParentInName));
}

#[test]
fn c4_what_is_refused_is_named_without_escape_sequences() {
    let (entry, _) = refusal(&Archive::new().file("\x1b[2J/../\n", ""));
    assert_eq!(entry, "\\u{1b}[2J/../\\n");
    let error = unpack(&Archive::new().file("../x", ""), Layout::Tar).err().unwrap();
    assert_eq!(error.to_string(), "The layer's entry \"../x\" is refused: its name has \"..\" in it");
}

#[test]
fn c4_a_file_below_a_symbolic_link_is_refused() {
    let link = Archive::new().symlink("link", "/etc");
    for (name, archive) in [
        ("a file", link.clone().file("link/passwd", "x")),
        ("a directory", link.clone().directory("link/new")),
        ("a symbolic link", link.clone().symlink("link/new", "x")),
        ("a hard link", link.clone().file("a", "x").link("link/new", "a")),
        ("deeper", link.file("link/a/b/c", "x")),
        ("below a file", Archive::new().file("file", "").file("file/x", "x")),
        ("below a device", Archive::new().header(&Header::new("device", b'3')).file("device/x", "x")),
    ] {
        assert!(matches!(refusal(&archive).1, Refusal::BelowNonDirectory(_)), "{name}");
    }
}

#[test]
fn c4_hard_links_that_lead_nowhere_are_refused() {
    let file = Archive::new().file("a/file", "x").symlink("a/link", "file").symlink("s", "a");
    let of = |target: &str| refusal(&file.clone().link("b", target)).1;
    assert!(matches!(of("../outside"), Refusal::LinkTarget(_)));
    assert!(matches!(of("a/../../etc/passwd"), Refusal::LinkTarget(_)));
    assert!(matches!(of(""), Refusal::LinkTarget(_)));
    assert!(matches!(of("a"), Refusal::LinkToDirectory(_)));
    assert!(matches!(of("."), Refusal::LinkToDirectory(_)));
    assert!(matches!(of("/"), Refusal::LinkToDirectory(_)));
    assert!(matches!(of("b"), Refusal::LinkToItself));
    assert!(matches!(of("./b"), Refusal::LinkToItself));
    // Symbolic links and files on the way are not directories.
    assert!(matches!(of("s/file"), Refusal::LinkToMissing(_)));
    assert!(matches!(of("a/file/x"), Refusal::LinkToMissing(_)));
}

#[test]
fn c5_whiteouts_that_lead_out_are_refused() {
    for name in [".wh.", ".wh...", ".wh..", "a/.wh.", "a/.wh..."] {
        let (_, refusal) = refusal(&Archive::new().file(name, ""));
        assert!(matches!(refusal, Refusal::WhiteoutName), "{name}: {refusal}");
    }
    assert!(matches!(refusal(&Archive::new().file(".wh.../x", "")).1, Refusal::BelowWhiteout));
    assert!(matches!(refusal(&Archive::new().file("../.wh.x", "")).1, Refusal::ParentInName));
    assert!(matches!(refusal(&Archive::new().file(".wh.a/b", "")).1, Refusal::BelowWhiteout));
    assert!(matches!(refusal(&Archive::new().file(".wh.a/.wh..wh..opq", "")).1, Refusal::BelowWhiteout));
}

#[test]
fn c5_whiteouts_do_not_go_through_symbolic_links() {
    let lower = Archive::new().file("etc/passwd", "root").symlink("link", "etc");
    let wanted = ["", "etc", "etc/passwd", "link"];
    for (name, upper) in [
        ("of the same layer", Archive::new().symlink("link", "etc").file("link/.wh.passwd", "")),
        ("opaque, of the same layer", Archive::new().symlink("link", "etc").file("link/.wh..wh..opq", "")),
        ("absolute", Archive::new().symlink("link", "/etc").file("link/.wh.passwd", "")),
        ("of a lower layer", Archive::new().file("link/.wh.passwd", "")),
        ("opaque, of a lower layer", Archive::new().file("link/.wh..wh..opq", "")),
    ] {
        assert_eq!(image(&[&lower, &upper]).keys().collect::<Vec<_>>(), wanted, "{name}");
    }
}

#[test]
fn c4_the_root_is_a_directory() {
    for kind in [b'0', b'1', b'2', b'3', b'6'] {
        let header = Header { link: b"x".to_vec(), ..Header::new(".", kind) };
        assert!(matches!(refusal(&Archive::new().header(&header)).1, Refusal::Root), "{kind}");
    }
    assert!(matches!(refusal(&Archive::new().header(&Header::new("", b'5'))).1, Refusal::EmptyName));
}

#[test]
fn c4_sizes_that_lie_are_refused() {
    let size = |field: &'static [u8]| refusal(&changed(|block| block[124..136].copy_from_slice(field))).1;
    assert!(matches!(size(b"77777777777\0"), Refusal::Truncated));
    assert!(matches!(size(b"777777777777"), Refusal::TooLarge(_)));
    assert!(matches!(size(b"\x80\0\0\0\x7f\xff\xff\xff\xff\xff\xff\xff"), Refusal::TooLarge(_)));
    assert!(matches!(size(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), Refusal::Number("size")));
    assert!(matches!(size(b"\x80\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"), Refusal::Number("size")));
    assert!(matches!(size(b"-0000000001\0"), Refusal::Number("size")));
    let pax = |value: &[u8]| refusal(&Archive::new().pax(&[("size", value)]).file("a", "x")).1;
    assert!(matches!(pax(b"1537"), Refusal::Truncated));
    assert!(matches!(pax(b"9223372036854775808"), Refusal::TooLarge(_)));
    assert!(matches!(pax(b"18446744073709551615"), Refusal::TooLarge(_)));
    assert!(matches!(pax(b"-1"), Refusal::Number("size")));
}

#[test]
fn c4_long_headers_have_limits() {
    let claim = |kind| {
        let header = Header { size: 0o77_777_777_777, ..Header::new("meta", kind) };
        refusal(&Archive::new().raw(&header.block())).1
    };
    assert!(matches!(claim(b'x'), Refusal::PaxTooLong(_)));
    assert!(matches!(claim(b'L'), Refusal::PathTooLong(_)));
    assert!(matches!(claim(b'K'), Refusal::PathTooLong(_)));
    assert!(matches!(claim(b'g'), Refusal::Truncated));
    let within = Header { size: 1 << 20, ..Header::new("meta", b'x') };
    assert!(matches!(refusal(&Archive::new().raw(&within.block())).1, Refusal::Truncated));
}

#[test]
fn c4_broken_headers_are_refused() {
    let mut block = Header::new("victim", b'0').block();
    block[0] ^= 1;
    assert!(matches!(refusal(&Archive::new().raw(&block)).1, Refusal::Checksum));
    assert!(matches!(refusal(&Archive::new().file("a", "").raw(&[b'x'; 512])).1, Refusal::Checksum));
    assert!(matches!(refusal(&Archive::new().raw(&[0; 512]).file("a", "")).1, Refusal::LoneZeroBlock));
    for kind in [b'V', b'M', b'N', b'D', b'X', b'?', 0xff] {
        assert!(matches!(
            refusal(&Archive::new().header(&Header::new("a", kind))).1,
            Refusal::UnknownType(_)
        ));
    }
    assert!(matches!(refusal(&changed(|block| block[100] = b'x')).1, Refusal::Number("mode")));
    assert!(matches!(refusal(&changed(|block| block[108..116].fill(0xff))).1, Refusal::Number("user")));
    let user = |value: &[u8]| refusal(&Archive::new().pax(&[("uid", value)]).file("a", "")).1;
    assert!(matches!(user(b"4294967295"), Refusal::Range("user")));
    assert!(matches!(user(b"4294967296"), Refusal::Range("user")));
    let device = Header { device: (4096, 0), ..Header::new("device", b'3') };
    assert!(matches!(refusal(&Archive::new().header(&device)).1, Refusal::Range("device number")));
}

#[test]
fn c4_truncated_archives_are_refused() {
    let whole = Archive::new().pax(&[("path", b"long")]).file("a", [7; 1000]).without_end();
    assert!(unpack_bytes(&whole, &options(Layout::Tar)).is_ok(), "the end may be missing");
    for length in (1..whole.len()).step_by(101).chain([512, 1024, 1536, 2048]) {
        let result = unpack_bytes(&whole[..length], &options(Layout::Tar));
        let Err(LayerError::Entry { refusal, .. } | LayerError::Layer(refusal)) = result else {
            panic!("{length} bytes are accepted")
        };
        assert!(matches!(refusal, Refusal::Truncated), "{length}: {refusal}");
    }
}

#[test]
fn c4_symbolic_links_have_targets() {
    let of = |target: &[u8]| refusal(&Archive::new().pax(&[("linkpath", target)]).symlink("a", "x")).1;
    assert!(matches!(of(b"a\0b"), Refusal::SymlinkTarget(_)));
    assert!(matches!(of(&[b'a'; 4096]), Refusal::SymlinkTarget(4095)));
    assert!(matches!(refusal(&Archive::new().symlink("a", "")).1, Refusal::SymlinkTarget(_)));
    // Wherever it leads is the guest's matter.
    let found = image(&[&Archive::new().symlink("a", "../../../etc/shadow").symlink("b", [b'x'; 4095])]);
    assert_eq!(found["a"].data, b"../../../etc/shadow");
    assert_eq!(found["b"].data, [b'x'; 4095]);
}

#[test]
fn c4_many_entries_are_refused() {
    let entries = |entries| Limits { entries, ..Limits::default() };
    let many = (0..100).fold(Archive::new(), |archive, number| archive.file(format!("{number}"), "")).bytes();
    assert!(matches!(limited(&many, entries(99)), Refusal::TooManyEntries(99)));
    assert!(unpack_bytes(&many, &Options { limits: entries(100), ..options(Layout::Tar) }).is_ok());
    // The same name counts as often as it comes, so do headers that make no entry and directories without a header.
    let same = (0..100).fold(Archive::new(), |archive, _| archive.file("same", "")).bytes();
    assert!(matches!(limited(&same, entries(99)), Refusal::TooManyEntries(99)));
    let headers = (0..100).fold(Archive::new(), |archive, _| archive.meta(b'g', b"")).bytes();
    assert!(matches!(limited(&headers, entries(99)), Refusal::TooManyEntries(99)));
    let deep = Archive::new().file("a/".repeat(100) + "b", "").bytes();
    assert!(matches!(limited(&deep, entries(99)), Refusal::TooManyEntries(99)));
    let tree = Limits { tree: 20_000, ..Limits::default() };
    assert!(matches!(limited(&many, tree), Refusal::TreeTooLarge(20_000)));
}

#[test]
fn c4_bombs_are_refused() {
    let zeros = vec![0_u8; 1 << 20];
    let archive = Archive::new().file("before", "x").file("bomb", &zeros);
    let limits = |bytes, ratio| Limits { bytes, ratio, ratio_free: 64 << 10, ..Limits::default() };
    assert!(matches!(limited(&archive.bytes(), limits(1 << 20, 2)), Refusal::TooLarge(_)));
    for compression in [Compression::Gzip, Compression::Zstd] {
        let compressed = super::formats::compress(&archive.bytes(), compression);
        let options = |limits| Options { compression, limits, ..options(Layout::Tar) };
        let result = unpack_bytes(&compressed, &options(limits(1 << 30, 50)));
        let refused = result.err().unwrap();
        assert!(matches!(refused.refusal(), Some(Refusal::Ratio(50))), "{compression:?}: {refused}");
        assert!(unpack_bytes(&compressed, &options(Limits::default())).is_ok(), "10 MiB are free");
    }
    // What follows the archive's end counts too.
    let behind = [Archive::new().bytes(), zeros].concat();
    assert!(matches!(limited(&behind, limits(1 << 20, 1000)), Refusal::TooLarge(_)));
}

#[test]
fn c4_sparse_maps_that_lie_are_refused() {
    let gnu = |parts: &[(u64, u64)], stored: u64, real: u64| {
        let archive = Archive::new().raw(&super::formats::gnu_sparse("sparse", parts, stored, real));
        refusal(&archive.data(&vec![b'x'; usize::try_from(stored).unwrap()])).1
    };
    assert!(matches!(gnu(&[(0, 1024), (512, 512)], 1536, 4096), Refusal::SparseMap), "overlap");
    assert!(matches!(gnu(&[(1024, 512), (0, 512)], 1024, 4096), Refusal::SparseMap), "order");
    assert!(matches!(gnu(&[(0, 1024)], 1024, 512), Refusal::SparseMap), "beyond the end");
    assert!(matches!(gnu(&[(0, 1024)], 512, 1024), Refusal::SparseMap), "less data than the map has");
    assert!(matches!(gnu(&[(0, 512)], 1024, 1024), Refusal::SparseMap), "more data than the map has");
    assert!(matches!(gnu(&[(1, 512)], 512, 1024), Refusal::SparseUnaligned(512)));
    assert!(matches!(gnu(&[(0, 100), (512, 512)], 612, 1024), Refusal::SparseUnaligned(512)));
    assert!(matches!(gnu(&[(0, 512), (1024, 512)], 1024, 1 << 32), Refusal::SparseTooFine));
    let pax = |records: &[(&str, &[u8])], data: &str| refusal(&Archive::new().pax(records).file("a", data)).1;
    let block = |text: &str| format!("{text:\0<512}");
    let new =
        [("GNU.sparse.major", b"1".as_slice()), ("GNU.sparse.minor", b"0"), ("GNU.sparse.realsize", b"512")];
    assert!(matches!(pax(&new, ""), Refusal::SparseMap));
    assert!(matches!(pax(&new, &block("1\n0\n")), Refusal::SparseMap));
    assert!(matches!(pax(&new, &block("99999999\n")), Refusal::TooManySegments(_)));
    assert!(matches!(
        pax(&[("GNU.sparse.major", b"2"), ("GNU.sparse.map", b"0,1")], "x"),
        Refusal::SparseMap
    ));
    assert!(matches!(pax(&[("GNU.sparse.map", b"0,1")], "x"), Refusal::SparseMap), "no size");
    assert!(matches!(
        pax(&[("GNU.sparse.map", b"0,1,"), ("GNU.sparse.size", b"1")], "x"),
        Refusal::SparseMap
    ));
    assert!(matches!(pax(&[("GNU.sparse.numbytes", b"1")], "x"), Refusal::SparseMap));
}

#[test]
fn c4_headers_without_an_entry_are_refused() {
    for archive in [Archive::new().pax(&[("path", b"a")]), Archive::new().meta(b'L', b"a")] {
        assert!(matches!(refusal(&archive).1, Refusal::Truncated));
    }
}
