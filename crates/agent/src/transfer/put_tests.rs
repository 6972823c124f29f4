use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use bathy_protocol::archive::{ArchiveError, MAX_DEPTH, encode};

use super::*;

fn enter(name: &str, mode: u32) -> ArchiveRecord {
    ArchiveRecord::Enter { name: name.into(), mode }
}

fn file(name: &str, content: &str) -> [ArchiveRecord; 3] {
    let name = name.into();
    [
        ArchiveRecord::File { name, mode: 0o4640, size: 1, modified: 1_000_000_000 },
        ArchiveRecord::Data(content.into()),
        ArchiveRecord::FileEnd,
    ]
}

fn link(name: &str, target: &str) -> ArchiveRecord {
    ArchiveRecord::Link { name: name.into(), target: target.into() }
}

fn wire(records: &[ArchiveRecord]) -> Vec<u8> {
    let mut wire = Vec::new();
    for record in records {
        encode(record, &mut wire).unwrap();
    }
    wire
}

fn put_at(path: &Path, name: &str, records: &[ArchiveRecord]) -> Result<(), TransferError> {
    put(&mut wire(records).as_slice(), path.as_os_str().as_bytes(), name.as_bytes())
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn one_file(content: &str) -> Vec<ArchiveRecord> {
    [file("ignored", content).as_slice(), &[ArchiveRecord::End]].concat()
}

#[test]
fn a_file_gets_its_content_mode_and_time() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new");
    put_at(&path, "x", &one_file("hello")).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"hello");
    let stat = fs::metadata(&path).unwrap();
    // Without the set-user-ID bit that was sent.
    assert_eq!((stat.mode() & 0o7777, stat.mtime()), (0o640, 1_000_000_000));
    assert_eq!(names(folder.path()), ["new"]);
}

#[test]
fn an_existing_folder_receives_the_item_under_its_name() {
    let folder = tempfile::tempdir().unwrap();
    put_at(folder.path(), "given", &one_file("1")).unwrap();
    assert_eq!(names(folder.path()), ["given"]);
    for name in ["", "..", ".", "a/b"] {
        let error = put_at(folder.path(), name, &one_file("1")).unwrap_err();
        assert!(matches!(error, TransferError::Nameless), "{name:?}: {error}");
    }
}

#[test]
fn a_missing_parent_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = put_at(&folder.path().join("no/file"), "x", &one_file("1")).unwrap_err().to_string();
    assert!(error.contains("/no/: No such file or directory"), "{error}");
    let error = put_at(&folder.path().join("no/"), "x", &one_file("1")).unwrap_err().to_string();
    assert!(error.contains("No such file"), "{error}");
}

#[test]
fn a_file_replaces_a_file_or_a_link_but_not_its_target() {
    let folder = tempfile::tempdir().unwrap();
    let (path, target) = (folder.path().join("there"), folder.path().join("target"));
    fs::write(&path, "old").unwrap();
    put_at(&path, "x", &one_file("new")).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new");

    fs::write(&target, "old").unwrap();
    fs::remove_file(&path).unwrap();
    symlink(&target, &path).unwrap();
    put_at(&path, "x", &one_file("newer")).unwrap();
    assert!(!path.is_symlink());
    assert_eq!((fs::read(&path).unwrap(), fs::read(&target).unwrap()), (b"newer".into(), b"old".into()));
    assert_eq!(names(folder.path()), ["target", "there"]);
}

#[test]
fn a_tree_is_merged_into_a_folder_and_keeps_modes() {
    let folder = tempfile::tempdir().unwrap();
    let tree = folder.path().join("tree");
    fs::create_dir(&tree).unwrap();
    fs::set_permissions(&tree, fs::Permissions::from_mode(0o711)).unwrap();
    fs::write(tree.join("stays"), "").unwrap();
    let records = [
        &[enter("ignored", 0o755), enter("sub", 0o555)],
        file("a", "1").as_slice(),
        &[link("l", "../outside"), ArchiveRecord::Leave, ArchiveRecord::Leave, ArchiveRecord::End],
    ]
    .concat();
    put_at(folder.path(), "tree", &records).unwrap();
    assert_eq!(names(&tree), ["stays", "sub"]);
    assert_eq!(fs::metadata(&tree).unwrap().mode() & 0o777, 0o711, "what was there keeps its mode");
    let sub = tree.join("sub");
    assert_eq!(fs::metadata(&sub).unwrap().mode() & 0o777, 0o555);
    assert_eq!(fs::read_link(sub.join("l")).unwrap(), Path::new("../outside"));
    assert_eq!(fs::read(sub.join("a")).unwrap(), b"1");
}

#[test]
fn what_is_of_another_kind_is_in_the_way_and_named() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), "old").unwrap();
    fs::create_dir_all(folder.path().join("folder/x")).unwrap();
    let error = put_at(folder.path(), "file", &[enter("", 0o755), ArchiveRecord::Leave, ArchiveRecord::End])
        .unwrap_err();
    assert!(error.to_string().ends_with("/file: something that is not a folder is in the way"), "{error}");
    let error = put_at(&folder.path().join("folder"), "x", &one_file("1")).unwrap_err();
    assert!(error.to_string().ends_with("/folder/x: a folder is in the way"), "{error}");
    let error = put_at(&folder.path().join("folder"), "x", &[link("", "t"), ArchiveRecord::End]).unwrap_err();
    assert!(error.to_string().ends_with("/folder/x: a folder is in the way"), "{error}");
    let error = put_at(Path::new("/dev/null"), "x", &one_file("1")).unwrap_err();
    assert_eq!(error.to_string(), "/dev/null: a device is in the way");
}

#[test]
fn c4_nothing_goes_through_a_link_of_the_archive() {
    let outside = tempfile::tempdir().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let target = outside.path().to_str().unwrap();
    let through = [
        &[enter("", 0o755), link("door", target), enter("door", 0o755)],
        file("stolen", "1").as_slice(),
        &[ArchiveRecord::Leave, ArchiveRecord::Leave, ArchiveRecord::End],
    ]
    .concat();
    let error = put_at(folder.path(), "tree", &through).unwrap_err();
    assert!(matches!(error, TransferError::NoFolder(_)), "{error}");
    assert!(names(outside.path()).is_empty());

    // The same for a link to a file: the link is replaced, its target is unchanged.
    let victim = outside.path().join("victim");
    fs::write(&victim, "old").unwrap();
    let over = [
        &[enter("", 0o755), link("door", victim.to_str().unwrap())],
        file("door", "1").as_slice(),
        &[ArchiveRecord::Leave, ArchiveRecord::End],
    ]
    .concat();
    put_at(folder.path(), "other", &over).unwrap();
    assert_eq!(fs::read(&victim).unwrap(), b"old");
    assert_eq!(fs::read(folder.path().join("other/door")).unwrap(), b"1");
}

#[test]
fn c4_names_that_lead_elsewhere_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["..", ".", "", "a/b", "/etc/x"] {
        let records = [&[enter("", 0o755)], file(name, "1").as_slice()].concat();
        let error = put_at(folder.path(), "tree", &records).unwrap_err();
        assert!(matches!(error, TransferError::Archive(ArchiveError::Name(_))), "{name:?}: {error}");
    }
    assert_eq!(names(folder.path()), ["tree"]);
    assert!(names(&folder.path().join("tree")).is_empty());
}

#[test]
fn a_copy_that_breaks_off_leaves_no_half_a_file() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("x"), "old").unwrap();
    let whole = wire(&one_file("new content"));
    for length in 0..whole.len() {
        let mut part = whole.as_slice().take(length as u64);
        let path = folder.path().as_os_str().as_bytes();
        let error = put(&mut part, path, b"x").unwrap_err();
        assert!(matches!(error, TransferError::Truncated), "{error}");
        assert_eq!(names(folder.path()), ["x"], "cut at {length}");
    }
    // Only the end of the archive was missing.
    assert_eq!(fs::read(folder.path().join("x")).unwrap(), b"new content");
}

#[test]
fn a_named_temporary_file_goes_with_its_copy() {
    let folder = tempfile::tempdir().unwrap();
    let fd = open_folder(CWD, folder.path().as_os_str().as_bytes(), OFlags::empty()).unwrap();
    let here = Folder { fd, path: Vec::new(), mode: None };
    let made = temporary(&here, |folder, name| symlinkat("t", folder, name)).unwrap();
    let again = temporary(&here, |folder, name| symlinkat("t", folder, name)).unwrap();
    assert_eq!(names(folder.path()).len(), 2);
    drop((made, again));
    assert!(names(folder.path()).is_empty());
}

#[test]
fn a_full_disk_is_reported_and_leaves_nothing() {
    // A device that is always full, opened in the place of the file.
    let folder = tempfile::tempdir().unwrap();
    let mut tree = Tree::at(folder.path().as_os_str().as_bytes(), b"x").unwrap();
    tree.begin(b"x".to_vec(), 0o644, 0).unwrap();
    let full = openat(CWD, "/dev/full", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    tree.file.as_mut().unwrap().fd = full;
    let error = tree.write(b"data").unwrap_err().to_string();
    assert!(error.ends_with("/x: the sandbox's disk is full"), "{error}");
    drop(tree);
    assert!(names(folder.path()).is_empty());
}

#[test]
fn depth_is_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let error = put_at(folder.path(), "d", &vec![enter("d", 0o755); MAX_DEPTH + 1]).unwrap_err();
    assert!(matches!(error, TransferError::Archive(ArchiveError::Depth)), "{error}");
}

fn write_to(path: &Path, content: &str) -> Result<(), TransferError> {
    write(&mut wire(&one_file(content)).as_slice(), path.as_os_str().as_bytes())
}

#[test]
fn a_file_is_written_with_the_folders_on_its_way() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a/b c/file");
    let before = std::time::SystemTime::now() - std::time::Duration::from_secs(5);
    write_to(&path, "hello").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"hello");
    let stat = fs::metadata(&path).unwrap();
    assert_eq!(stat.mode() & 0o7777, 0o640);
    assert!(stat.modified().unwrap() >= before, "a build has to see that it is new");
    assert_eq!(fs::metadata(folder.path().join("a")).unwrap().mode() & 0o777, 0o755);
    assert_eq!(names(path.parent().unwrap()), ["file"]);
}

#[test]
fn a_file_that_is_written_again_keeps_its_mode_and_its_owner() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tool");
    fs::write(&path, "long content").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o711)).unwrap();
    let root = rustix::process::getuid().is_root();
    if root {
        std::os::unix::fs::chown(&path, Some(12_345), Some(54_321)).unwrap();
    }
    write_to(&path, "short").unwrap();
    let stat = fs::metadata(&path).unwrap();
    assert_eq!((fs::read(&path).unwrap(), stat.mode() & 0o7777), (b"short".to_vec(), 0o711));
    assert_eq!((stat.uid(), stat.gid()) == (12_345, 54_321), root);
}

#[test]
fn a_link_leads_to_the_file_that_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("sub")).unwrap();
    fs::write(at("sub/target"), "old").unwrap();
    symlink("sub/hop", at("link")).unwrap();
    symlink("target", at("sub/hop")).unwrap();
    write_to(&at("link"), "new").unwrap();
    assert!(at("link").is_symlink() && at("sub/hop").is_symlink());
    assert_eq!(fs::read(at("sub/target")).unwrap(), b"new");
    symlink(at("made/later"), at("dangling")).unwrap();
    write_to(&at("dangling"), "1").unwrap();
    assert_eq!(fs::read(at("made/later")).unwrap(), b"1");
    symlink("loop", at("loop")).unwrap();
    let error = write_to(&at("loop"), "1").unwrap_err().to_string();
    assert!(error.contains("/loop: Too many levels of symbolic links"), "{error}");
}

#[test]
fn what_cannot_be_written_is_named_and_stays() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), "old").unwrap();
    fs::create_dir(folder.path().join("folder")).unwrap();
    let said = |path: &str| {
        let error = write_to(&folder.path().join(path), "1").unwrap_err().to_string();
        error.replace(folder.path().to_str().unwrap(), "")
    };
    assert_eq!(said("folder"), "/folder: a folder is in the way");
    assert_eq!(said("folder/"), "/folder/: is a folder, not a file");
    assert_eq!(said("folder/.."), "/folder/..: is a folder, not a file");
    assert_eq!(said("file/x"), "/file/: something that is not a folder is in the way");
    assert_eq!(
        write_to(Path::new("/dev/null"), "1").unwrap_err().to_string(),
        "/dev/null: a device is in the way"
    );
    let read_only = write_to(Path::new("/proc/version"), "1").unwrap_err().to_string();
    assert!(read_only.starts_with("/proc/version: "), "{read_only}");
    assert_eq!(fs::read(folder.path().join("file")).unwrap(), b"old");
    assert_eq!(names(folder.path()), ["file", "folder"]);
}
