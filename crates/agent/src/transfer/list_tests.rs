use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use bathy_protocol::archive::listing::{ListingDecoder, MAX_TARGET};

use super::*;

fn listed(path: &Path, limit: u64) -> Result<(Vec<Entry>, u64), TransferError> {
    let mut wire = Vec::new();
    list(&mut wire, path.as_os_str().as_bytes(), limit)?;
    let (mut decoder, mut entries) = (ListingDecoder::default(), Vec::new());
    decoder.push(&wire);
    loop {
        match decoder.next_item().unwrap().unwrap() {
            Item::Entry(entry) => entries.push(entry),
            Item::End { total } => return Ok((entries, total)),
        }
    }
}

#[test]
fn each_entry_is_listed_as_it_is_and_no_link_is_followed() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("file"), "12345").unwrap();
    fs::set_permissions(at("file"), fs::Permissions::from_mode(0o4751)).unwrap();
    fs::create_dir(at("a folder")).unwrap();
    symlink("/nowhere", at("link")).unwrap();
    rustix::fs::mknodat(CWD, at("fifo"), FileType::Fifo, Mode::RWXU, 0).unwrap();
    let (entries, total) = listed(folder.path(), 100).unwrap();
    let said: Vec<_> = entries.iter().map(|entry| (entry.name.as_slice(), entry.kind)).collect();
    assert_eq!(
        said,
        [
            (b"a folder".as_slice(), EntryType::Directory),
            (b"fifo", EntryType::Other),
            (b"file", EntryType::File),
            (b"link", EntryType::Symlink)
        ]
    );
    assert_eq!(total, 4);
    let stat = fs::metadata(at("file")).unwrap();
    let nanoseconds = u64::try_from(stat.mtime() * 1_000_000_000 + stat.mtime_nsec()).unwrap();
    assert_eq!((entries[2].size, entries[2].mode, entries[2].modified_ns), (5, 0o4751, nanoseconds));
    assert_eq!(entries[3].target.as_deref(), Some(b"/nowhere".as_slice()));
    assert_eq!(entries[2].target, None);
}

#[test]
fn the_first_names_are_listed_and_all_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    for number in 0..1000 {
        fs::write(folder.path().join(format!("{:03}", (number * 7) % 1000)), "").unwrap();
    }
    let (entries, total) = listed(folder.path(), 3).unwrap();
    let names: Vec<_> = entries.into_iter().map(|entry| entry.name).collect();
    assert_eq!((names, total), (vec![b"000".to_vec(), b"001".to_vec(), b"002".to_vec()], 1000));
    assert_eq!(listed(folder.path(), 0).unwrap(), (Vec::new(), 1000));
    let (entries, total) = listed(folder.path(), u64::MAX).unwrap();
    assert_eq!((entries.len(), total), (1000, 1000));
    assert!(entries.is_sorted_by(|one, other| one.name < other.name));
}

#[test]
fn a_listing_is_never_longer_than_the_host_accepts() {
    let folder = tempfile::tempdir().unwrap();
    let target = "x".repeat(MAX_TARGET - 1);
    let links = MAX_BYTES / MAX_TARGET + 100;
    for number in 0..links {
        symlink(&target, folder.path().join(number.to_string())).unwrap();
    }
    let (entries, total) = listed(folder.path(), u64::MAX).unwrap();
    assert_eq!(total, links as u64);
    assert!((links / 2..links).contains(&entries.len()), "{}", entries.len());
}

#[test]
fn what_is_not_a_folder_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let said = listed(&file, 1).unwrap_err().to_string();
    assert!(said.ends_with("/file: is not a folder"), "{said}");
    let said = listed(&folder.path().join("none"), 1).unwrap_err().to_string();
    assert!(said.ends_with("/none: No such file or directory"), "{said}");
}
