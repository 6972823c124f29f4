use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;

use bathy_protocol::archive::{ArchiveDecoder, ArchiveRecord, MAX_DEPTH};
use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::{listing, pack, sample, unpack, wire, written};
use crate::transfer::{PackError, Packer, UnpackLimits, Unpacker};

fn records(archive: &[u8]) -> Vec<ArchiveRecord> {
    let mut decoder = ArchiveDecoder::default();
    decoder.push(archive);
    let mut records = Vec::new();
    while let Some(record) = decoder.next_record().unwrap() {
        records.push(record);
    }
    assert!(decoder.is_complete());
    records
}

#[test]
fn a_tree_arrives_as_it_was_and_both_sides_agree_on_its_digest() {
    let source = sample();
    let target = tempfile::tempdir().unwrap();
    let (archive, sent) = pack(&source.path().join("tree"));
    let mut unpacker = Unpacker::new(target.path(), OsStr::new("tree"), UnpackLimits::default()).unwrap();
    for piece in archive.chunks(7777) {
        unpacker.take(piece).unwrap();
    }
    let received = unpacker.finish().unwrap();
    assert_eq!(sent, received);
    assert_eq!((sent.files, sent.folders, sent.links), (4, 4, 2));
    assert_eq!(sent.bytes, 5 + 1_200_000 + 10);
    assert_eq!(listing(source.path()), listing(target.path()));
    // Packed again at its new location.
    assert_eq!(pack(&target.path().join("tree")).1.digest, sent.digest);
}

#[test]
fn a_trees_digest_depends_on_what_is_in_it_and_not_on_the_order() {
    let folder = tempfile::tempdir().unwrap();
    let enter = || super::enter("t");
    let tree = |items: &[&[ArchiveRecord]]| {
        let copy_folder = tempfile::tempdir_in(folder.path()).unwrap();
        let inner = items.iter().flat_map(|item| item.iter().cloned());
        let records: Vec<_> =
            [enter()].into_iter().chain(inner).chain([ArchiveRecord::Leave, ArchiveRecord::End]).collect();
        unpack(copy_folder.path(), &records).unwrap().digest
    };
    let (a, b) = (written("a", "1"), written("b", "2"));
    let digest = tree(&[&a, &b]);
    assert_eq!(digest, tree(&[&b, &a]));
    let different: [&[&[ArchiveRecord]]; 6] = [
        &[&a],
        &[&written("a", "2"), &written("b", "1")],
        &[&a, &written("c", "2")],
        &[&a, &b, &[super::link("c", "a")]],
        &[&a, &[super::enter("b"), ArchiveRecord::Leave]],
        &[&a, &[ArchiveRecord::File { name: b"b".into(), mode: 0o600, size: 1, modified: 0 }], &b[1..]],
    ];
    for (number, items) in different.into_iter().enumerate() {
        assert_ne!(digest, tree(items), "case {number}");
    }
}

#[test]
fn a_files_digest_is_that_of_its_content() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f");
    fs::write(&path, "hello").unwrap();
    let summary = pack(&path).1;
    assert_eq!(summary.digest, blake3::hash(b"hello").to_hex().to_string());
    assert_eq!((summary.files, summary.folders, summary.bytes), (1, 0, 5));
}

#[test]
fn c4_a_named_link_is_copied_as_a_link_unless_it_is_to_be_followed() {
    let folder = sample();
    let (tree, secret) = (folder.path().join("tree"), folder.path().join("secret"));
    fs::write(&secret, "of the host").unwrap();
    for (name, target) in [("alias", "tree"), ("planted", "secret"), ("nowhere", "gone")] {
        let link = folder.path().join(name);
        symlink(target, &link).unwrap();
        let (archive, summary) = pack(&link);
        let expected = ArchiveRecord::Link { name: Vec::new(), target: target.into() };
        assert_eq!(records(&archive), [expected, ArchiveRecord::End], "{name}");
        assert_eq!((summary.links, summary.files, summary.bytes), (1, 0, 0), "{name}");
    }
    let alias = folder.path().join("alias");
    assert_eq!(pack(&alias.join("")), pack(&tree), "a path that ends in a slash");
    let followed = |path: &Path| super::pack_all(Packer::open_followed(path).unwrap());
    assert_eq!(followed(&alias), pack(&tree));
    assert_eq!(followed(&folder.path().join("planted")), pack(&secret));
    assert!(Packer::open_followed(&folder.path().join("nowhere")).is_err());
}

#[test]
fn a_link_inside_stays_one() {
    let folder = sample();
    let (archive, _) = pack(&folder.path().join("tree"));
    assert!(
        records(&archive)
            .contains(&ArchiveRecord::Link { name: b"down".to_vec(), target: b"sub/deeper/tool".to_vec() })
    );
}

#[test]
fn a_missing_source_is_named() {
    let error = Packer::open(Path::new("/no/such/thing")).err().unwrap();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert_eq!(error.to_string(), "Cannot read /no/such/thing");
    assert!(source.starts_with("No such file or directory"), "{source}");
}

#[test]
fn pipes_and_sockets_are_left_out_and_named_without_blocking() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR, 0).unwrap();
    let _listener = UnixListener::bind(folder.path().join("socket")).unwrap();
    fs::write(folder.path().join("file"), "x").unwrap();
    let (archive, mut summary) = pack(folder.path());
    summary.skipped.sort();
    let folder_path = folder.path().display();
    let expected = [
        (format!("{folder_path}/pipe"), "it is a pipe".to_owned()),
        (format!("{folder_path}/socket"), "it is a socket".to_owned()),
    ];
    assert_eq!(summary.skipped, expected);
    assert_eq!((summary.skipped_count, summary.files), (2, 1));
    let skipped = |record: &&ArchiveRecord| matches!(record, ArchiveRecord::Skipped { .. });
    assert_eq!(records(&archive).iter().filter(skipped).count(), 2);
    assert!(matches!(Packer::open(&pipe), Err(PackError::Special(_))));
    assert!(matches!(Packer::open(Path::new("/dev/null")), Err(PackError::Special(_))));
}

#[test]
fn every_call_respects_its_limit_and_makes_progress() {
    let source = sample();
    let whole = pack(&source.path().join("tree")).0;
    for max in [64 * 1024, 64 * 1024 + 1, 100_000, 1 << 20] {
        let mut packer = Packer::open(&source.path().join("tree")).unwrap();
        let mut total = 0;
        loop {
            let mut out = b"before".to_vec();
            let more = packer.fill(&mut out, max).unwrap();
            assert!(out.starts_with(b"before") && out.len() <= 6 + max, "{} for {max}", out.len());
            total += out.len() - 6;
            if !more {
                break;
            }
        }
        // Pieces of a file may be split differently, which changes the number of headers.
        assert!(total.abs_diff(whole.len()) < 4096, "{total} of {}", whole.len());
    }
    let mut packer = Packer::open(&source.path().join("tree/small")).unwrap();
    let mut out = Vec::new();
    for _ in 0..4 {
        let before = out.len();
        assert!(packer.fill(&mut out, 0).unwrap());
        assert!(out.len() > before);
    }
}

#[test]
fn permission_bits_beyond_the_nine_are_not_sent() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f");
    fs::write(&path, "").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o6755)).unwrap();
    let sent = records(&pack(&path).0);
    assert!(matches!(sent.first(), Some(ArchiveRecord::File { mode: 0o755, .. })), "{sent:?}");
}

#[test]
fn a_tree_as_deep_as_allowed_is_packed_and_one_deeper_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut path = folder.path().to_owned();
    // The topmost folder counts as well.
    path.extend(vec!["d"; MAX_DEPTH - 1]);
    fs::create_dir_all(&path).unwrap();
    assert_eq!(pack(folder.path()).1.folders, MAX_DEPTH as u64);
    fs::create_dir(path.join("d")).unwrap();
    let mut packer = Packer::open(folder.path()).unwrap();
    assert!(matches!(packer.fill(&mut Vec::new(), 1 << 20), Err(PackError::TooDeep(_))));
}

#[test]
fn names_are_the_callers() {
    assert_eq!(Packer::open(Path::new("/usr/../etc/")).unwrap().name(), Some(OsStr::new("etc")));
    assert_eq!(Packer::open(Path::new("/usr/..")).unwrap().name(), None);
    let here = std::env::current_dir().unwrap();
    assert_eq!(Packer::open(Path::new(".")).unwrap().name(), here.file_name());
}

#[test]
fn an_archive_without_its_end_is_not_what_a_packer_makes() {
    let source = sample();
    let (archive, _) = pack(&source.path().join("tree"));
    assert!(archive.ends_with(&wire(&[ArchiveRecord::Leave, ArchiveRecord::End])));
}
