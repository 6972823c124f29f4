//! What Linux makes of an image: archives of GNU tar, mounted, against the files that they were made from.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::options;
use crate::{IndexLayer, Layout, unpack_layer, write_index};

/// Runs a program that has to succeed.
fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().expect("the program is there");
    let report = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {report}");
    report
}

/// A mounted disk, until it is dropped.
struct Mounted(PathBuf);

impl Mounted {
    fn new(disk: &Path, at: &Path) -> Self {
        fs::create_dir(at).unwrap();
        run("mount", &["-t", "erofs", "-o", "loop,ro", disk.to_str().unwrap(), at.to_str().unwrap()]);
        Self(at.into())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        run("umount", &[self.0.to_str().unwrap()]);
    }
}

/// What can be seen of a file.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    mode: u32,
    owner: (u32, u32),
    mtime: (i64, i64),
    links: u64,
    device: u64,
    size: u64,
    content: Vec<u8>,
    xattrs: BTreeMap<String, Vec<u8>>,
    /// The first path of the same file.
    same: String,
}

fn xattrs(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let path = CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
    let mut names = vec![0_u8; 1 << 16];
    let length = rustix::fs::llistxattr(&path, names.as_mut_slice()).unwrap();
    let mut found = BTreeMap::new();
    for name in names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let mut value = vec![0_u8; 1 << 16];
        let length = rustix::fs::lgetxattr(&path, name, value.as_mut_slice()).unwrap();
        found.insert(String::from_utf8(name.to_vec()).unwrap(), value[..length].to_vec());
    }
    found
}

fn survey(root: &Path) -> BTreeMap<String, Seen> {
    let mut rest = vec![root.to_path_buf()];
    let mut found = BTreeMap::new();
    let mut inodes: BTreeMap<u64, String> = BTreeMap::new();
    while let Some(path) = rest.pop() {
        let metadata = fs::symlink_metadata(&path).unwrap();
        let kind = metadata.file_type();
        let name = path.strip_prefix(root).unwrap().to_string_lossy().into_owned();
        let mut content = Vec::new();
        if kind.is_dir() {
            rest.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if kind.is_symlink() {
            content = fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes();
        } else if kind.is_file() {
            File::open(&path).unwrap().read_to_end(&mut content).unwrap();
        }
        let same = inodes.entry(metadata.ino()).or_insert_with(|| name.clone());
        // Paths come in no order that counts.
        if name < *same {
            same.clone_from(&name);
        }
        let is_device = kind.is_char_device() || kind.is_block_device();
        let seen = Seen {
            mode: metadata.mode(),
            owner: (metadata.uid(), metadata.gid()),
            mtime: (metadata.mtime(), metadata.mtime_nsec()),
            links: if kind.is_dir() { 0 } else { metadata.nlink() },
            device: if is_device { metadata.rdev() } else { 0 },
            size: if kind.is_dir() { 0 } else { metadata.size() },
            content,
            xattrs: xattrs(&path),
            same: metadata.ino().to_string(),
        };
        found.insert(name, seen);
    }
    for seen in found.values_mut() {
        seen.same = inodes[&seen.same.parse().unwrap()].clone();
    }
    found
}

/// Files of every kind.
const FILES: &str = r#"
umask 022; cd "$1"
mkdir -p etc usr/bin empty many
printf 'root:x:0:0\n' >etc/passwd
head -c 511 /dev/urandom >a511; head -c 512 /dev/urandom >a512; head -c 513 /dev/urandom >a513
head -c 4096 /dev/urandom >a4096; head -c 1000000 /dev/urandom >usr/bin/large; : >usr/bin/none
chmod 4755 a511; chmod 2755 usr; chmod 1777 empty; chmod 0 a512
chown 1000:2000 a513; chown 3000000000:70000 usr/bin
ln a511 usr/hard; ln a511 hard2
ln -s /etc/passwd absolute; ln -s "$(printf 'x%.0s' $(seq 1 255))/$(printf 'y%.0s' $(seq 1 200))" long
ln symlinked symlinked2 2>/dev/null || { ln -s a symlinked; ln -P symlinked symlinked2; }
mkfifo fifo; mknod character c 5 1; mknod block b 259 70000
touch -d '1969-12-31T23:00:00.5Z' a4096; touch -d '2100-01-01T00:00:00.123456789Z' a512
for i in $(seq 1 700); do echo "$i" >"many/$i-$(printf 'n%.0s' $(seq 1 $((i % 200))))"; done
mkdir -p "$(printf 'deep/%.0s' $(seq 1 100))"
printf 'start' >sparse; truncate -s 600K sparse; printf 'end' >>sparse; truncate -s 1M sparse
truncate -s 300K holes
python3 - <<'END'
import os, struct
os.setxattr("etc/passwd", "user.note", b"v" * 3000)
os.setxattr("usr/bin/large", "security.capability", struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0))
os.setxattr("etc", "trusted.thing", b"\0\1\2")
acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in
    [(1, 7, 0xffffffff), (2, 5, 1000), (4, 5, 0xffffffff), (16, 5, 0xffffffff), (32, 5, 0xffffffff)])
os.setxattr("usr", "system.posix_acl_access", acl)
os.setxattr("usr", "system.posix_acl_default", acl)
END
"#;

#[test]
fn linux_mounts_what_was_archived() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("files")).unwrap();
    run("bash", &["-ec", FILES, "bash", at("files").to_str().unwrap()]);
    let wanted = survey(&at("files"));
    let formats: [&[&str]; 5] = [
        &["--format=pax", "--sparse", "--sparse-version=1.0"],
        &["--format=pax", "--sparse", "--sparse-version=0.1"],
        &["--format=pax", "--sparse", "--sparse-version=0.0"],
        &["--format=pax"],
        &["--format=gnu", "--sparse"],
    ];
    for (number, format) in formats.into_iter().enumerate() {
        // The layouts differ in nothing that the format of the archive decides, except for the sparse ones' blocks.
        let layouts: &[Layout] = if number == 0 { &[Layout::Tar, Layout::Aligned] } else { &[Layout::Tar] };
        for layout in layouts.iter().copied() {
            let archive = at("archive");
            let (files, path) = (at("files"), archive.to_str().unwrap());
            let gnu = format.contains(&"--format=gnu");
            let attributes: &[&str] = if gnu { &[] } else { &["--xattrs", "--xattrs-include=*"] };
            let common = ["--numeric-owner", "-C", files.to_str().unwrap(), "-cf", path, "."];
            run("tar", &[format, attributes, &common].concat());
            let disk = at(&format!("disk{number}{layout:?}"));
            make_disk(&archive, layout, &disk);
            if layout == Layout::Aligned {
                run("fsck.erofs", &[disk.to_str().unwrap()]);
            }
            let mounted = Mounted::new(&disk, &at(&format!("mount{number}{layout:?}")));
            let found = survey(&mounted.0);
            assert_eq!(found.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>());
            for (path, seen) in &found {
                let mut wanted = wanted[path].clone();
                if gnu {
                    // The format has neither attributes nor fractions of a second.
                    wanted.xattrs.clear();
                    wanted.mtime.1 = 0;
                }
                assert!(*seen == wanted, "{path}, {format:?}, {layout:?}: {seen:?}, not {wanted:?}");
                // Looking up is another way than listing.
                assert!(fs::symlink_metadata(mounted.0.join(path)).is_ok());
            }
            assert!(fs::symlink_metadata(mounted.0.join("many/0")).is_err());
            assert!(fs::symlink_metadata(mounted.0.join("many/zzz")).is_err());
        }
    }
}

fn make_disk(archive: &Path, layout: Layout, disk: &Path) {
    let mut file = Vec::new();
    let layer = unpack_layer(File::open(archive).unwrap(), &mut file, &options(layout)).unwrap();
    let mut out = File::create(disk).unwrap();
    let info = write_index(&[IndexLayer { tree: &layer.tree, size: layer.size }], &mut out).unwrap();
    assert_eq!(fs::metadata(disk).unwrap().len(), info.layers[0]);
    let mut out = fs::OpenOptions::new().append(true).open(disk).unwrap();
    out.write_all(&file).unwrap();
    out.set_len(info.disk).unwrap();
}
