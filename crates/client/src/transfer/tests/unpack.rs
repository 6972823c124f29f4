use std::error::Error;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::Duration;

use bathy_protocol::archive::{ArchiveError, ArchiveRecord, MAX_DEPTH};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::io::Errno;
use tempfile::TempDir;

use super::{data, enter, file, link, listing, names, no_temporary, unpack, unpack_within, wire, written};
use crate::processor_time;
use crate::transfer::{MAX_SKIPPED, UnpackError, UnpackLimits, Unpacker};

/// A destination, and a folder beside it that must not change.
fn destination() -> (TempDir, std::path::PathBuf, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let (inside, outside) = (folder.path().join("inside"), folder.path().join("outside"));
    fs::create_dir(&inside).unwrap();
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("victim"), "untouched").unwrap();
    (folder, inside, outside)
}

fn untouched(outside: &Path) -> bool {
    names(outside) == ["victim"] && fs::read(outside.join("victim")).unwrap() == b"untouched"
}

fn tree(items: &[&[ArchiveRecord]]) -> Vec<ArchiveRecord> {
    let inner = items.iter().flat_map(|item| item.iter().cloned());
    [enter("t")].into_iter().chain(inner).chain([ArchiveRecord::Leave, ArchiveRecord::End]).collect()
}

#[test]
fn c4_names_that_lead_out_write_nothing() {
    for name in ["..", ".", "", "../outside/new", "/tmp/bathysphere-c4", "a/b"] {
        let (folder, inside, outside) = destination();
        let cases: [&[ArchiveRecord]; 3] =
            [&written(name, "x"), &[enter(name), ArchiveRecord::Leave], &[link(name, "item")]];
        for case in cases {
            let error = unpack(&inside, &tree(&[case])).unwrap_err();
            assert!(matches!(error, UnpackError::Archive(ArchiveError::Name(_))), "{name:?}: {error:?}");
        }
        assert_eq!(names(folder.path()), ["inside", "inside/item", "outside", "outside/victim"]);
        assert!(untouched(&outside));
    }
}

#[test]
fn c4_the_items_own_name_is_the_callers_whatever_the_guest_says() {
    for name in ["../outside/victim", "/tmp/bathysphere-c4", "other", "..", ""] {
        let (folder, inside, outside) = destination();
        let archive = [&written(name, "x")[..], &[ArchiveRecord::End]].concat();
        unpack(&inside, &archive).unwrap();
        assert_eq!(names(folder.path()), ["inside", "inside/item", "outside", "outside/victim"]);
        assert!(untouched(&outside));
        fs::remove_file(inside.join("item")).unwrap();
        unpack(&inside, &[enter(name), ArchiveRecord::Leave, ArchiveRecord::End]).unwrap();
        assert_eq!(names(&inside), ["item"]);
    }
    for name in ["..", ".", "", "a/b", "/"] {
        let (_folder, inside, _) = destination();
        assert!(Unpacker::new(&inside, OsStr::new(name), UnpackLimits::default()).is_err(), "{name:?}");
    }
}

#[test]
fn c4_links_that_lead_out_are_left_out_and_reported() {
    let leads_out = [
        "/etc/passwd",
        "..",
        "../outside/victim",
        "../../outside/victim",
        "./../outside",
        "sub/../../outside",
        "a/..",
        "",
        "//",
        "x\0y",
        &"x/".repeat(3000),
    ];
    for target in leads_out {
        let (_folder, inside, outside) = destination();
        let summary = unpack(&inside, &tree(&[&[link("l", target)]])).unwrap();
        assert_eq!(names(&inside), ["item"], "{target:?}");
        assert_eq!((summary.links, summary.skipped_count), (0, 1), "{target:?}");
        assert_eq!(summary.skipped[0].0, inside.join("item/l").display().to_string());
        assert!(untouched(&outside));
    }
    for target in ["a", "./a", ".", "sub/a", "sub//a/", "not-there", "..."] {
        let (_folder, inside, _) = destination();
        let summary = unpack(&inside, &tree(&[&[link("l", target)]])).unwrap();
        assert_eq!((summary.links, summary.skipped_count), (1, 0), "{target:?}");
        assert_eq!(fs::read_link(inside.join("item/l")).unwrap(), Path::new(target));
    }
}

#[test]
fn c4_links_below_may_go_up_as_far_as_the_topmost_folder() {
    let (_folder, inside, _) = destination();
    let sub = [
        enter("sub"),
        link("up", "../a"),
        link("top", ".."),
        link("out", "../.."),
        link("round", "../sub/../a"),
        ArchiveRecord::Leave,
    ];
    let summary = unpack(&inside, &tree(&[&sub])).unwrap();
    assert_eq!(names(&inside), ["item", "item/sub", "item/sub/top", "item/sub/up"]);
    assert_eq!((summary.links, summary.skipped_count), (2, 2));
}

#[test]
fn c4_two_links_that_only_together_lead_out_do_not() {
    let (_folder, inside, outside) = destination();
    // `sub/top` is the topmost folder, so `sub/top/..` is above it.
    let links =
        [enter("sub"), link("top", ".."), ArchiveRecord::Leave, link("out", "sub/top/../../outside/victim")];
    unpack(&inside, &tree(&[&links])).unwrap();
    assert!(fs::canonicalize(inside.join("item/out")).is_err());
    assert!(untouched(&outside));
}

#[test]
fn c4_a_file_after_a_link_of_the_same_name_replaces_the_link() {
    let (_folder, inside, outside) = destination();
    // This link is allowed; the file must still not be written through it.
    let items = [&written("a", "first")[..], &[link("l", "a")], &written("l", "second")].concat();
    unpack(&inside, &tree(&[&items])).unwrap();
    assert_eq!(fs::read(inside.join("item/a")).unwrap(), b"first");
    assert!(fs::symlink_metadata(inside.join("item/l")).unwrap().is_file());
    assert!(untouched(&outside));
}

#[test]
fn c4_a_folder_through_a_link_is_refused() {
    let (_folder, inside, _) = destination();
    let items = [enter("real"), ArchiveRecord::Leave, link("l", "real"), enter("l")];
    let error = unpack(&inside, &tree(&[&items, &written("f", "x")])).unwrap_err();
    assert!(matches!(error, UnpackError::InTheWay { .. }), "{error:?}");
    assert_eq!(names(&inside), ["item", "item/l", "item/real"]);
}

#[test]
fn c4_links_that_were_there_are_replaced_and_not_followed() {
    // Tested for the item itself, as a folder and as a new path, and for an entry inside the item.
    let (_folder, inside, outside) = destination();
    let victim = outside.join("victim");
    let archive = [&written("x", "new")[..], &[ArchiveRecord::End]].concat();
    symlink(&victim, inside.join("item")).unwrap();
    unpack(&inside, &archive).unwrap();
    assert!(untouched(&outside));
    assert_eq!(fs::read(inside.join("item")).unwrap(), b"new");
    assert!(fs::symlink_metadata(inside.join("item")).unwrap().is_file());

    for target in [victim.as_path(), Path::new("/no/such/file")] {
        let path = inside.join("path");
        let _ = fs::remove_file(&path);
        symlink(target, &path).unwrap();
        unpack(&path, &archive).unwrap();
        assert!(untouched(&outside));
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
    }

    fs::remove_file(inside.join("item")).unwrap();
    fs::create_dir(inside.join("item")).unwrap();
    symlink(&victim, inside.join("item/f")).unwrap();
    symlink(&victim, inside.join("item/l")).unwrap();
    unpack(&inside, &tree(&[&written("f", "new"), &[link("l", "f")]])).unwrap();
    assert!(untouched(&outside));
    assert_eq!(fs::read(inside.join("item/f")).unwrap(), b"new");
    assert_eq!(fs::read_link(inside.join("item/l")).unwrap(), Path::new("f"));
}

#[test]
fn c4_a_link_in_the_way_of_a_folder_is_an_error_and_not_followed() {
    for name in ["item", "item/sub"] {
        let (_folder, inside, outside) = destination();
        if name != "item" {
            fs::create_dir(inside.join("item")).unwrap();
        }
        symlink(&outside, inside.join(name)).unwrap();
        let sub = [&[enter("sub")][..], &written("f", "x"), &[ArchiveRecord::Leave]].concat();
        let error = unpack(&inside, &tree(&[&sub])).unwrap_err();
        assert!(matches!(error, UnpackError::InTheWay { .. }), "{error:?}");
        assert!(untouched(&outside));
    }
}

#[test]
fn c4_a_link_as_the_item_is_refused() {
    let (_folder, inside, _) = destination();
    let error = unpack(&inside, &[link("x", "y"), ArchiveRecord::End]).unwrap_err();
    assert!(matches!(error, UnpackError::TopLink));
    assert!(names(&inside).is_empty());
}

#[test]
fn c4_too_many_entries_of_any_kind_end_the_copy() {
    let limits = UnpackLimits { bytes: 1000, entries: 10 };
    let kinds: [&[ArchiveRecord]; 5] = [
        &[file("f", 0), ArchiveRecord::FileEnd],
        &[enter("d"), ArchiveRecord::Leave],
        &[link("l", "f")],
        &[ArchiveRecord::Skipped { name: b"s".into(), reason: String::new() }],
        &[enter("deep")],
    ];
    for kind in kinds {
        let (_folder, inside, _) = destination();
        // Ten with the topmost folder.
        let enough: Vec<_> = kind.iter().cloned().cycle().take(9 * kind.len()).collect();
        let mut unpacker = Unpacker::new(&inside, OsStr::new("item"), limits).unwrap();
        unpacker.take(&wire(&[&[enter("t")], &enough[..]].concat())).unwrap();
        let error = unpacker.take(&wire(kind)).unwrap_err();
        assert!(matches!(error, UnpackError::TooMany(10)), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("limit of 10") && text.contains("--limit"), "{text}");
    }
}

#[test]
fn c1_content_without_content_is_not_endless() {
    let (_folder, inside, _) = destination();
    let records = [&[file("f", 0)][..], &vec![data(""); 20]].concat();
    let error = unpack_within(&inside, &records, UnpackLimits { bytes: 10, entries: 10 }).unwrap_err();
    assert!(matches!(error, UnpackError::TooMany(10)), "{error:?}");
    assert!(names(&inside).is_empty());
}

#[test]
fn c4_too_much_content_ends_the_copy_whatever_was_announced() {
    let limits = UnpackLimits { bytes: 1000, entries: 10 };
    let kilobyte = "x".repeat(1000);
    let cases: [(&str, &[ArchiveRecord]); 5] = [
        ("one byte too many", &[file("f", 0), data(&kilobyte), data("y")]),
        ("announced as one byte", &[file("f", 1), data(&kilobyte), data("y")]),
        ("announced honestly", &[file("f", 1001)]),
        ("announced beyond all", &[file("f", u64::MAX)]),
        ("over two files", &[&[enter("t")], &written("a", &kilobyte)[..], &written("b", "y")].concat()),
    ];
    for (case, records) in cases {
        let (_folder, inside, _) = destination();
        let error = unpack_within(&inside, records, limits).unwrap_err();
        assert!(matches!(error, UnpackError::TooLarge(1000)), "{case}: {error:?}");
        let text = error.to_string();
        assert!(text.contains("1000 bytes") && text.contains("--limit"), "{text}");
        assert!(no_temporary(&inside), "{case}");
        assert!(!inside.join("item").is_file(), "{case}");
    }
    let (_folder, inside, _) = destination();
    let exactly = [&written("f", &kilobyte)[..], &[ArchiveRecord::End]].concat();
    assert_eq!(unpack_within(&inside, &exactly, limits).unwrap().bytes, 1000);
}

#[test]
fn c4_texts_count_as_content() {
    let limits = UnpackLimits { bytes: 1000, entries: 10 };
    let kilobyte = "x".repeat(1001);
    for record in
        [link("l", &kilobyte), ArchiveRecord::Skipped { name: b"s".into(), reason: kilobyte.clone() }]
    {
        let (_folder, inside, _) = destination();
        let error = unpack_within(&inside, &[enter("t"), record], limits).unwrap_err();
        assert!(matches!(error, UnpackError::TooLarge(1000)), "{error:?}");
    }
}

#[test]
fn c4_a_lie_about_the_size_changes_nothing_but_the_progress_bar() {
    for announced in [0, 1, 3, 4 << 30] {
        let (_folder, inside, _) = destination();
        let archive = wire(&[file("f", announced), data("abc"), ArchiveRecord::FileEnd, ArchiveRecord::End]);
        let mut unpacker = Unpacker::new(&inside, OsStr::new("item"), UnpackLimits::default()).unwrap();
        unpacker.take(&archive).unwrap();
        assert_eq!((unpacker.done(), unpacker.total()), (3, Some(announced)));
        assert_eq!(unpacker.finish().unwrap().bytes, 3);
        let metadata = fs::metadata(inside.join("item")).unwrap();
        assert_eq!(metadata.len(), 3);
        assert!(metadata.blocks() * 512 <= 8192, "nothing is set aside for what was only announced");
    }
}

#[test]
fn c4_an_archive_cut_anywhere_leaves_no_temporary_and_no_partial_file() {
    let records = tree(&[
        &written("a", "first"),
        &[enter("sub")],
        &[file("b", 10), data("01234"), data("56789"), ArchiveRecord::FileEnd],
        &[ArchiveRecord::Leave],
    ]);
    let archive = wire(&records);
    let whole = ["first".as_bytes(), b"0123456789"];
    for cut in 0..archive.len() {
        for dropped in [true, false] {
            let (_folder, inside, _) = destination();
            let mut unpacker = Unpacker::new(&inside, OsStr::new("item"), UnpackLimits::default()).unwrap();
            unpacker.take(&archive[..cut]).unwrap();
            if dropped {
                drop(unpacker);
            } else {
                assert!(matches!(unpacker.finish(), Err(UnpackError::Truncated)), "cut at {cut}");
            }
            assert!(no_temporary(&inside), "cut at {cut}");
            for file in ["item/a", "item/sub/b"].map(|name| inside.join(name)) {
                assert!(fs::read(file).map_or(true, |content| whole.contains(&content.as_slice())));
            }
        }
    }
}

#[test]
fn c4_garbage_in_the_middle_leaves_no_temporary_and_ends_the_copy() {
    let (_folder, inside, _) = destination();
    let mut unpacker = Unpacker::new(&inside, OsStr::new("item"), UnpackLimits::default()).unwrap();
    unpacker.take(&wire(&[file("f", 5), data("hel")])).unwrap();
    assert!(!no_temporary(&inside), "so that the next line can fail");
    assert!(matches!(unpacker.take(&[0xff; 64]), Err(UnpackError::Archive(_))));
    assert!(names(&inside).is_empty());
    assert!(unpacker.take(&wire(&[data("lo"), ArchiveRecord::FileEnd, ArchiveRecord::End])).is_err());
    assert!(unpacker.finish().is_err());
    assert!(names(&inside).is_empty());
}

#[test]
fn c4_after_an_error_nothing_more_is_written() {
    let (_folder, inside, _) = destination();
    fs::create_dir_all(inside.join("item/f")).unwrap();
    let mut unpacker = Unpacker::new(&inside, OsStr::new("item"), UnpackLimits::default()).unwrap();
    let error = unpacker.take(&wire(&[enter("t"), file("f", 1)])).unwrap_err();
    assert!(matches!(error, UnpackError::InTheWay { .. }), "{error:?}");
    let rest = [
        &[data("x"), ArchiveRecord::FileEnd][..],
        &written("g", "x"),
        &[ArchiveRecord::Leave, ArchiveRecord::End],
    ]
    .concat();
    assert!(matches!(unpacker.take(&wire(&rest)), Err(UnpackError::Truncated)));
    assert!(matches!(unpacker.finish(), Err(UnpackError::Truncated)));
    assert_eq!(names(&inside), ["item", "item/f"]);
}

#[test]
fn a_reader_sees_the_old_file_until_the_new_one_is_complete() {
    let (_folder, inside, _) = destination();
    fs::write(inside.join("item"), "old").unwrap();
    let mut unpacker = Unpacker::new(&inside, OsStr::new("item"), UnpackLimits::default()).unwrap();
    unpacker.take(&wire(&[file("f", 3), data("new")])).unwrap();
    assert_eq!(fs::read(inside.join("item")).unwrap(), b"old");
    let temporary = names(&inside).into_iter().find(|name| name != "item").unwrap();
    let mode = fs::metadata(inside.join(temporary)).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode, 0o600);
    unpacker.take(&wire(&[ArchiveRecord::FileEnd, ArchiveRecord::End])).unwrap();
    unpacker.finish().unwrap();
    assert_eq!(fs::read(inside.join("item")).unwrap(), b"new");
}

#[test]
fn c4_only_nine_permission_bits_are_a_guests_to_choose() {
    let (_folder, inside, _) = destination();
    let items = [
        ArchiveRecord::File { name: b"f".into(), mode: 0o107_755, size: 0, modified: 7 },
        ArchiveRecord::FileEnd,
        ArchiveRecord::Enter { name: b"d".into(), mode: 0o47_705 },
        ArchiveRecord::Leave,
    ];
    unpack(&inside, &tree(&[&items])).unwrap();
    let found = listing(&inside);
    assert!(found["item/f"].starts_with("file 755 of 7 "), "{found:?}");
    assert_eq!(found["item/d"], "folder 705");
}

#[test]
fn times_that_cannot_be_are_no_reason_to_lose_the_file() {
    for modified in [i64::MIN, -1, i64::MAX] {
        let (_folder, inside, _) = destination();
        let begin = ArchiveRecord::File { name: b"f".into(), mode: 0o644, size: 0, modified };
        unpack(&inside, &[begin, ArchiveRecord::FileEnd, ArchiveRecord::End]).unwrap();
        assert_eq!(names(&inside), ["item"]);
    }
}

#[test]
fn c4_too_many_folders_in_each_other_end_the_copy() {
    let (_folder, inside, _) = destination();
    let error = unpack(&inside, &vec![enter("d"); MAX_DEPTH + 1]).unwrap_err();
    assert!(matches!(error, UnpackError::Archive(ArchiveError::Depth)), "{error:?}");
}

#[test]
fn c4_a_device_or_a_folder_is_not_replaced_by_a_file() {
    let (_folder, inside, _) = destination();
    let path = inside.join("item");
    let archive = [&written("x", "new")[..], &[ArchiveRecord::End]].concat();
    mknodat(CWD, &path, FileType::Fifo, Mode::RUSR, 0).unwrap();
    assert!(matches!(unpack(&path, &archive), Err(UnpackError::InTheWay { .. })));
    assert!(!fs::metadata(&path).unwrap().is_file());
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(matches!(unpack(&inside, &archive), Err(UnpackError::InTheWay { .. })));
    let linked = tree(&[&[link("l", "x")]]);
    fs::create_dir(path.join("l")).unwrap();
    assert!(matches!(unpack(&inside, &linked), Err(UnpackError::InTheWay { .. })));
    fs::remove_dir(path.join("l")).unwrap();
    mknodat(CWD, path.join("l"), FileType::Fifo, Mode::RUSR, 0).unwrap();
    assert!(matches!(unpack(&inside, &linked), Err(UnpackError::InTheWay { .. })));
    assert_eq!(fs::read_dir(&path).unwrap().count(), 1);
    fs::remove_dir_all(&path).unwrap();
    fs::write(&path, "a file").unwrap();
    assert!(matches!(unpack(&inside, &tree(&[])), Err(UnpackError::InTheWay { .. })));
    assert_eq!(fs::read(&path).unwrap(), b"a file");
}

#[test]
fn a_read_only_folder_is_filled_first_even_if_the_copy_is_cut() {
    let (_folder, inside, _) = destination();
    let closed = ArchiveRecord::Enter { name: b"closed".into(), mode: 0o500 };
    let records = [&[enter("t"), closed][..], &written("f", "x"), &[file("g", 1)]].concat();
    assert!(matches!(unpack(&inside, &records), Err(UnpackError::Truncated)));
    let found = listing(&inside);
    // Restored so that the folder can be removed.
    fs::set_permissions(inside.join("item/closed"), fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(found["item/closed"], "folder 500");
    assert_eq!(found["item"], "folder 755");
    assert!(found.contains_key("item/closed/f"));
}

#[test]
fn a_folder_that_was_there_keeps_its_mode_and_content() {
    let (_folder, inside, _) = destination();
    fs::create_dir_all(inside.join("item/sub")).unwrap();
    fs::write(inside.join("item/sub/mine"), "mine").unwrap();
    fs::set_permissions(inside.join("item"), fs::Permissions::from_mode(0o700)).unwrap();
    let sub = [&[enter("sub")][..], &written("f", "x"), &[ArchiveRecord::Leave]].concat();
    unpack(&inside, &tree(&[&sub])).unwrap();
    assert_eq!(names(&inside), ["item", "item/sub", "item/sub/f", "item/sub/mine"]);
    assert_eq!(listing(&inside)["item"], "folder 700");
}

#[test]
fn destinations_follow_one_rule() {
    let (folder, inside, _) = destination();
    let archive = [&written("x", "new")[..], &[ArchiveRecord::End]].concat();
    unpack(&inside.join("as"), &archive).unwrap();
    unpack(&inside, &archive).unwrap();
    unpack(&inside.join("tree/"), &tree(&[])).unwrap();
    assert_eq!(names(&inside), ["as", "item", "tree"]);
    let reason = |path: &Path| unpack(path, &archive).unwrap_err().to_string();
    assert!(reason(&inside.join("no/such")).ends_with("its folder does not exist"));
    assert!(reason(&inside.join("new/")).contains("ends with a slash"));
    assert!(reason(&inside.join("no/..")).ends_with("there is no such folder"));
    // The user's own link to a folder is followed.
    symlink(&inside, folder.path().join("alias")).unwrap();
    unpack(&folder.path().join("alias"), &tree(&[])).unwrap_err();
    fs::remove_file(inside.join("item")).unwrap();
    unpack(&folder.path().join("alias"), &tree(&[])).unwrap();
    assert!(inside.join("item").is_dir());
}

#[test]
fn a_full_disk_is_called_one() {
    let (_folder, inside, _) = destination();
    let unpacker = Unpacker::new(&inside, OsStr::new("item"), UnpackLimits::default()).unwrap();
    for errno in [Errno::NOSPC, Errno::DQUOT] {
        let text = unpacker.write_error(b"x", errno).to_string();
        assert!(text.ends_with("the host's disk is full"), "{text}");
    }
    let error = unpacker.write_error(b"x", Errno::IO);
    assert!(error.source().unwrap().to_string().contains("nput/output error"));
}

#[test]
fn what_is_left_out_is_counted_and_some_of_it_named() {
    let (_folder, inside, _) = destination();
    let skipped = |_| ArchiveRecord::Skipped { name: vec![b'n'; 255], reason: "r".repeat(40_000) };
    let many: Vec<_> = (0..300).map(skipped).collect();
    let summary = unpack(&inside, &tree(&[&many])).unwrap();
    assert_eq!(summary.skipped_count, 300);
    assert_eq!(summary.skipped.len(), MAX_SKIPPED);
    assert!(summary.skipped.iter().all(|(path, why)| path.len() < 600 && why.len() < 600));
}

#[test]
fn c4_a_hundred_thousand_empty_files_are_no_trouble() {
    let (_folder, inside, _) = destination();
    let mut unpacker = Unpacker::new(&inside, OsStr::new("item"), UnpackLimits::default()).unwrap();
    let begun = processor_time();
    unpacker.take(&wire(&[enter("t")])).unwrap();
    for number in 0..100_000 {
        unpacker.take(&wire(&[file(&number.to_string(), 0), ArchiveRecord::FileEnd])).unwrap();
    }
    unpacker.take(&wire(&[ArchiveRecord::Leave, ArchiveRecord::End])).unwrap();
    assert_eq!(unpacker.finish().unwrap().files, 100_000);
    let took = processor_time() - begun;
    println!("100,000 empty files: {took:?}");
    assert!(took < Duration::from_secs(60), "{took:?}");
    assert_eq!(fs::read_dir(inside.join("item")).unwrap().count(), 100_000);
}
