use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use bathy_protocol::archive::ArchiveDecoder;
use rustix::fs::mkfifoat;

use super::super::put::put;
use super::*;

fn wire(path: &Path) -> Result<Vec<u8>, TransferError> {
    let mut wire = Vec::new();
    get(&mut wire, path.as_os_str().as_bytes()).map(|()| wire)
}

/// What the receiver, which checks names and order, accepts.
fn records(path: &Path) -> Vec<ArchiveRecord> {
    let mut decoder = ArchiveDecoder::default();
    decoder.push(&wire(path).unwrap());
    let records: Vec<_> = std::iter::from_fn(|| decoder.next_record().unwrap()).collect();
    assert!(decoder.is_complete());
    records
}

fn skipped(records: &[ArchiveRecord]) -> Vec<(String, String)> {
    let one = |record: &ArchiveRecord| match record {
        ArchiveRecord::Skipped { name, reason } => {
            Some((String::from_utf8_lossy(name).into_owned(), reason.clone()))
        }
        _ => None,
    };
    let mut all: Vec<_> = records.iter().filter_map(one).collect();
    all.sort();
    all
}

fn content(records: &[ArchiveRecord]) -> Vec<u8> {
    let data = |record: &ArchiveRecord| match record {
        ArchiveRecord::Data(bytes) => Some(bytes.clone()),
        _ => None,
    };
    records.iter().filter_map(data).flatten().collect()
}

#[test]
fn a_tree_comes_back_as_it_went() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let tree = from.path().join("tree");
    fs::create_dir_all(tree.join("sub/empty")).unwrap();
    let large: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    fs::write(tree.join("sub/large"), &large).unwrap();
    fs::write(tree.join("nothing"), "").unwrap();
    fs::write(tree.join("exact"), vec![7u8; MAX_DATA]).unwrap();
    fs::set_permissions(tree.join("nothing"), fs::Permissions::from_mode(0o751)).unwrap();
    symlink("/etc/passwd", tree.join("sub/link")).unwrap();

    let path = to.path().as_os_str().as_bytes();
    put(&mut wire(&tree).unwrap().as_slice(), path, b"copy").unwrap();

    let copy = to.path().join("copy");
    assert_eq!(fs::read(copy.join("sub/large")).unwrap(), large);
    assert_eq!(fs::read(copy.join("exact")).unwrap(), vec![7u8; MAX_DATA]);
    assert!(copy.join("sub/empty").is_dir());
    assert_eq!(fs::read_link(copy.join("sub/link")).unwrap(), Path::new("/etc/passwd"));
    let (before, after) =
        (fs::metadata(tree.join("nothing")).unwrap(), fs::metadata(copy.join("nothing")).unwrap());
    assert_eq!((after.len(), after.mode(), after.mtime()), (0, before.mode(), before.mtime()));
}

#[test]
fn fifos_sockets_and_devices_are_skipped_without_waiting() {
    let folder = tempfile::tempdir().unwrap();
    mkfifoat(CWD, folder.path().join("fifo"), Mode::RUSR | Mode::WUSR).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(folder.path().join("socket")).unwrap();
    fs::write(folder.path().join("file"), "1").unwrap();
    let records = records(folder.path());
    let said = |name: &str, reason: &str| (name.to_owned(), reason.to_owned());
    assert_eq!(skipped(&records), [said("fifo", "it is a fifo"), said("socket", "it is a socket")]);
    assert_eq!(content(&records), b"1");

    let error = wire(&folder.path().join("fifo")).unwrap_err().to_string();
    assert!(error.ends_with("/fifo: is a fifo, which cannot be copied"), "{error}");
    assert!(wire(Path::new("/dev/zero")).is_err());
}

#[test]
fn only_the_top_link_is_followed() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("real")).unwrap();
    fs::write(folder.path().join("real/a"), "1").unwrap();
    symlink("real", folder.path().join("top")).unwrap();
    symlink("/", folder.path().join("real/inner")).unwrap();
    let records = records(&folder.path().join("top"));
    assert!(matches!(records.first(), Some(ArchiveRecord::Enter { .. })));
    assert!(records.contains(&ArchiveRecord::Link { name: b"inner".to_vec(), target: b"/".to_vec() }));
    assert_eq!(records.iter().filter(|record| matches!(record, ArchiveRecord::Enter { .. })).count(), 1);
}

#[test]
fn what_is_missing_is_named() {
    let error = wire(Path::new("/no/such")).unwrap_err();
    assert_eq!(error.to_string(), "/no/such: No such file or directory");
}

#[test]
fn files_of_the_kernel_that_say_they_are_empty_are_not() {
    let sent = records(Path::new("/proc/self/status"));
    assert!(content(&sent).starts_with(b"Name:"));
    // A file that fails when it is read, in a folder: skipped, with the reason.
    let own = records(Path::new("/proc/self/attr"));
    assert!(matches!(own.last(), Some(ArchiveRecord::End)));
    let error = wire(Path::new("/proc/self/mem")).unwrap_err().to_string();
    assert!(error.contains("/proc/self/mem: "), "{error}");
}

#[test]
fn folders_too_deep_are_skipped_and_the_rest_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let mut path = folder.path().to_owned();
    for _ in 0..MAX_DEPTH + 5 {
        path.push("d");
    }
    fs::create_dir_all(&path).unwrap();
    fs::write(folder.path().join("file"), "1").unwrap();
    let records = records(folder.path());
    assert_eq!(
        records.iter().filter(|record| matches!(record, ArchiveRecord::Enter { .. })).count(),
        MAX_DEPTH
    );
    assert_eq!(skipped(&records).len(), 1);
    assert_eq!(content(&records), b"1");
}

#[test]
fn a_file_that_grows_is_sent_at_its_size() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    fs::write(&path, vec![1u8; MAX_DATA + 10]).unwrap();
    let mut chunk = vec![0u8; MAX_DATA];
    let opened = open_file(CWD, path.as_os_str().as_bytes(), OFlags::empty(), &mut chunk).unwrap();
    fs::write(&path, vec![1u8; 4 * MAX_DATA]).unwrap();
    let mut out = Vec::new();
    let mut walk = Walk { out: &mut out, gathered: Vec::new(), folders: Vec::new(), chunk };
    walk.file(b"log", b"log", &opened).unwrap();
    walk.flush().unwrap();
    let mut decoder = ArchiveDecoder::default();
    decoder.push(&out);
    let records: Vec<_> = std::iter::from_fn(|| decoder.next_record().unwrap()).collect();
    assert_eq!(content(&records).len(), MAX_DATA + 10);
}
