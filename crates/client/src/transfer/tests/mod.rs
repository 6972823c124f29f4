//! Copies against a hostile guest. The names of attacks begin with their number.

mod direct;
mod pack;
mod run;
mod unpack;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use bathy_protocol::archive::{ArchiveRecord, encode};
use tempfile::TempDir;

use super::unpack::TEMPORARY_PREFIX;
use super::{Packer, Summary, UnpackError, UnpackLimits, Unpacker};

fn enter(name: &str) -> ArchiveRecord {
    ArchiveRecord::Enter { name: name.into(), mode: 0o755 }
}

fn file(name: &str, size: u64) -> ArchiveRecord {
    ArchiveRecord::File { name: name.into(), mode: 0o644, size, modified: 1_000_000_000 }
}

fn data(content: &str) -> ArchiveRecord {
    ArchiveRecord::Data(content.into())
}

fn link(name: &str, target: &str) -> ArchiveRecord {
    ArchiveRecord::Link { name: name.into(), target: target.into() }
}

fn written(name: &str, content: &str) -> [ArchiveRecord; 3] {
    [file(name, content.len() as u64), data(content), ArchiveRecord::FileEnd]
}

fn wire(records: &[ArchiveRecord]) -> Vec<u8> {
    let mut wire = Vec::new();
    for record in records {
        encode(record, &mut wire).unwrap();
    }
    wire
}

/// Unpacks into the folder `destination`, as `item`.
fn unpack(destination: &Path, records: &[ArchiveRecord]) -> Result<Summary, UnpackError> {
    unpack_within(destination, records, UnpackLimits::default())
}

fn unpack_within(
    destination: &Path,
    records: &[ArchiveRecord],
    limits: UnpackLimits,
) -> Result<Summary, UnpackError> {
    let mut unpacker = Unpacker::new(destination, OsStr::new("item"), limits)?;
    unpacker.take(&wire(records))?;
    unpacker.finish()
}

fn pack(path: &Path) -> (Vec<u8>, Summary) {
    pack_all(Packer::open(path).unwrap())
}

fn pack_all(mut packer: Packer) -> (Vec<u8>, Summary) {
    let mut archive = Vec::new();
    while packer.fill(&mut archive, 64 * 1024).unwrap() {}
    (archive, packer.into_summary())
}

/// Everything below a folder, by path.
fn listing(folder: &Path) -> BTreeMap<String, String> {
    fn walk(root: &Path, folder: &Path, found: &mut BTreeMap<String, String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let metadata = fs::symlink_metadata(&path).unwrap();
            let mode = metadata.permissions().mode() & 0o7777;
            let what = if metadata.is_symlink() {
                format!("link to {}", fs::read_link(&path).unwrap().display())
            } else if metadata.is_dir() {
                walk(root, &path, found);
                format!("folder {mode:o}")
            } else {
                let content = fs::read(&path).unwrap();
                format!("file {mode:o} of {} {}", metadata.mtime(), blake3::hash(&content))
            };
            found.insert(path.strip_prefix(root).unwrap().display().to_string(), what);
        }
    }
    let mut found = BTreeMap::new();
    walk(folder, folder, &mut found);
    found
}

fn names(folder: &Path) -> Vec<String> {
    listing(folder).into_keys().collect()
}

fn no_temporary(folder: &Path) -> bool {
    !names(folder).iter().any(|name| name.contains(TEMPORARY_PREFIX))
}

/// A tree with every kind of entry that can be copied, and a pipe, which cannot.
fn sample() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let tree = folder.path().join("tree");
    fs::create_dir_all(tree.join("sub/deeper")).unwrap();
    fs::create_dir(tree.join("empty")).unwrap();
    fs::write(tree.join("small"), "hello").unwrap();
    fs::write(tree.join("nothing"), "").unwrap();
    let large: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    fs::write(tree.join("sub/large"), large).unwrap();
    fs::write(tree.join("sub/deeper/tool"), "#!/bin/sh\n").unwrap();
    symlink("../small", tree.join("sub/up")).unwrap();
    symlink("sub/deeper/tool", tree.join("down")).unwrap();
    let mode = |path: &str, mode| {
        fs::set_permissions(tree.join(path), fs::Permissions::from_mode(mode)).unwrap();
    };
    mode("sub/deeper/tool", 0o751);
    mode("sub/deeper", 0o711);
    mode("nothing", 0o400);
    folder
}
