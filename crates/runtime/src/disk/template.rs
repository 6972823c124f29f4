//! Empty file systems, one of each size, to be copied for every sandbox. The name of a template has the digest of its content, which
//! is compared while it is copied: whatever happened to the file, no sandbox gets a disk that is not whole.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use bathy_image::trust;
use bathy_protocol::unix_ns;
use bathy_spec::Size;

use super::{DiskError, Journal, format, read_data};
use crate::folder::sync_folder;

const DIGEST_LENGTH: usize = 64;
/// How many templates are kept: those that were used last. Each has some hundred kilobytes, with a journal up to a gigabyte.
const KEPT: usize = 8;
/// After how long a template that is being made counts as left over.
const LEFT_OVER: Duration = Duration::from_secs(3600);

/// A file with an empty file system.
pub(super) struct Template {
    pub path: PathBuf,
    /// What it has to have.
    pub digest: String,
}

impl Template {
    /// Opens it as what it has to be: whatever else lies at its place is not followed, waited for, or copied. None if it cannot be
    /// that template.
    pub fn open(&self, size: Size) -> io::Result<Option<File>> {
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        match File::options().read(true).custom_flags(flags).open(&self.path) {
            Ok(file) => {
                let data = file.metadata()?;
                // Only how long it is kept depends on it.
                let _ = file.set_modified(SystemTime::now());
                Ok((data.is_file() && data.len() == size.0).then_some(file))
            }
            // A link, or discarded by another process that found it damaged.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if error.raw_os_error() == Some(libc::ELOOP) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn folder(cache: &Path) -> PathBuf {
    cache.join("disk")
}

/// How the name of a template of this kind begins.
fn beginning(size: Size, journal: Journal) -> String {
    let kind = match journal {
        Journal::With => "journal-ext4",
        Journal::Without => "ext4",
    };
    format!("{kind}-{size}-")
}

/// The template of this kind, if there is one.
pub(super) fn find(cache: &Path, size: Size, journal: Journal) -> Option<Template> {
    let beginning = beginning(size, journal);
    let is_digest = |text: &str| {
        text.len() == DIGEST_LENGTH && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    // One that others could have made is not used; making one says so.
    trust::check(&folder(cache)).ok()?;
    fs::read_dir(folder(cache)).ok()?.flatten().find_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let digest = name.strip_prefix(&beginning).filter(|digest| is_digest(digest))?.to_owned();
        Some(Template { path: entry.path(), digest })
    })
}

/// Makes a template. It has its name when it is whole and on the disk.
pub(super) fn make(cache: &Path, size: Size, journal: Journal) -> Result<Template, DiskError> {
    let folder = folder(cache);
    let failed = |error| super::failed(&folder)(error);
    // Others do not write to it, whatever the umask is.
    DirBuilder::new().recursive(true).mode(0o755).create(&folder).map_err(failed)?;
    trust::check(&folder).map_err(|error| failed(io::Error::other(error)))?;
    let beginning = beginning(size, journal);
    let fresh = folder.join(format!(".{beginning}{}-{}", std::process::id(), unix_ns()));
    let made = make_fresh(&fresh, size, journal).and_then(|digest| {
        let path = folder.join(format!("{beginning}{digest}"));
        fs::rename(&fresh, &path).and_then(|()| sync_folder(&folder)).map_err(failed)?;
        make_room(&folder, SystemTime::now());
        Ok(Template { path, digest })
    });
    if made.is_err() {
        // Already failing; a left-over is only untidy.
        let _ = fs::remove_file(&fresh);
    }
    made
}

/// Removes the templates that were not used for longest. One that is being copied meanwhile stays whole until it is closed; who
/// has found one and not opened it yet makes it again.
fn make_room(folder: &Path, now: SystemTime) {
    let mut templates = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let used = entry.metadata().and_then(|data| data.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
        let is_fresh = entry.file_name().as_encoded_bytes().starts_with(b".");
        let age = now.duration_since(used).unwrap_or_default();
        if !is_fresh {
            templates.push((used, entry.path()));
        } else if age > LEFT_OVER {
            let _ = fs::remove_file(entry.path());
        }
    }
    templates.sort_unstable_by(|one, other| other.cmp(one));
    for (_, path) in templates.into_iter().skip(KEPT) {
        // What cannot be removed takes space, no more.
        let _ = fs::remove_file(path);
    }
}

fn make_fresh(path: &Path, size: Size, journal: Journal) -> Result<String, DiskError> {
    let failed = |error| super::failed(path)(error);
    // A new file, or none: nothing that was put at its place is written to.
    let file = File::options().read(true).write(true).create_new(true).open(path).map_err(failed)?;
    file.set_len(size.0).map_err(failed)?;
    format(path, size, journal)?;
    file.sync_all().map_err(failed)?;
    read_data(&file, |_, _| Ok(())).map_err(failed)
}

/// Removes a template that is damaged. Another process may have been faster.
pub(super) fn discard(template: &Template) {
    let _ = fs::remove_file(&template.path);
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::super::{make as make_disk, make_kept};
    use super::*;

    const SIZE: Size = Size(64 << 20);

    fn home() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let home = tempfile::tempdir().unwrap();
        let (cache, state) = (home.path().join("cache"), home.path().join("state"));
        fs::create_dir(&state).unwrap();
        (home, cache, state)
    }

    /// The digest of a disk, which has to have the form of an ext4 file system.
    fn digest(disk: &File) -> String {
        let mut magic = [0; 2];
        disk.read_exact_at(&mut magic, 1024 + 56).unwrap();
        assert_eq!(magic, [0x53, 0xef], "the superblock of ext4");
        read_data(disk, |_, _| Ok(())).unwrap()
    }

    #[test]
    fn a_disk_is_its_template_and_no_larger() {
        let (_home, cache, state) = home();
        make_kept(&cache, &state.join("one"), SIZE).unwrap();
        make_kept(&cache, &state.join("two"), SIZE).unwrap();
        let template = find(&cache, SIZE, Journal::With).unwrap();
        for name in ["one", "two"] {
            let disk = File::open(state.join(name)).unwrap();
            assert_eq!(digest(&disk), template.digest);
            let data = disk.metadata().unwrap();
            assert_eq!(data.len(), SIZE.0);
            assert!(data.blocks() * 512 < SIZE.0 / 4, "{} blocks", data.blocks());
        }
        assert_eq!(fs::read_dir(cache.join("disk")).unwrap().count(), 1, "made once");
        let nameless = make_disk(&cache, &state, SIZE).unwrap();
        assert_eq!(digest(&nameless), find(&cache, SIZE, Journal::Without).unwrap().digest);
    }

    /// What a loss of power can leave of a file that was not on the disk, and what a failing disk can.
    #[test]
    fn a_template_that_is_damaged_is_made_again() {
        type Damage = (&'static str, fn(&Path));
        let damages: [Damage; 5] = [
            ("its length and no content", |path| {
                let file = File::create(path).unwrap();
                file.set_len(SIZE.0).unwrap();
            }),
            ("nothing", |path| fs::write(path, "").unwrap()),
            ("one byte", |path| {
                let file = File::options().write(true).open(path).unwrap();
                file.write_all_at(b"x", 5000).unwrap();
            }),
            ("a hole", |path| {
                let file = File::options().write(true).open(path).unwrap();
                file.write_all_at(&[0; 4096], 4096).unwrap();
            }),
            ("a link", |path| {
                fs::remove_file(path).unwrap();
                std::os::unix::fs::symlink("/etc/passwd", path).unwrap();
            }),
        ];
        let (_home, cache, state) = home();
        make_kept(&cache, &state.join("good"), SIZE).unwrap();
        for (what, damage) in damages {
            let before = find(&cache, SIZE, Journal::With).unwrap();
            damage(&before.path);
            let path = state.join(what.replace(' ', "-"));
            make_kept(&cache, &path, SIZE).unwrap();
            let after = find(&cache, SIZE, Journal::With).unwrap();
            assert_eq!(digest(&File::open(&path).unwrap()), after.digest, "{what}");
        }
    }

    #[test]
    fn c8_the_templates_that_were_used_last_are_kept() {
        let (_home, cache, state) = home();
        let size = |number: usize| Size((16 + number as u64) << 20);
        let make = |number: usize, name: &str| {
            make_kept(&cache, &state.join(format!("{name}-{number}")), size(number)).unwrap();
        };
        let left_over = cache.join("disk/.ext4-1-1");
        for number in 0..KEPT {
            make(number, "first");
        }
        fs::write(&left_over, "").unwrap();
        let long_ago = SystemTime::now() - 2 * LEFT_OVER;
        File::options().write(true).open(&left_over).unwrap().set_modified(long_ago).unwrap();
        fs::write(cache.join("disk/.ext4-2-2"), "").unwrap();
        // The oldest is used again, and one more is made: the second is the one to go, though somebody copies it.
        make(0, "again");
        let copied = find(&cache, size(1), Journal::With).unwrap();
        let open = File::open(&copied.path).unwrap();
        make(KEPT, "last");
        let is_there = |number: usize| find(&cache, size(number), Journal::With).is_some();
        assert_eq!((0..=KEPT).map(is_there).filter(|there| *there).count(), KEPT);
        assert!(is_there(0) && !is_there(1) && is_there(KEPT));
        assert_eq!(digest(&open), copied.digest);
        assert!(!left_over.exists() && cache.join("disk/.ext4-2-2").exists());
        // Found, and gone before it is opened.
        assert!(copied.open(size(1)).unwrap().is_none());
        make(1, "anew");
    }

    #[test]
    fn the_names_of_earlier_versions_and_halves_are_no_templates() {
        let (_home, cache, state) = home();
        let folder = cache.join("disk");
        fs::create_dir_all(&folder).unwrap();
        for name in [format!("journal-ext4-{SIZE}"), format!(".journal-ext4-{SIZE}-12-34")] {
            fs::write(folder.join(name), "junk").unwrap();
        }
        assert!(find(&cache, SIZE, Journal::With).is_none());
        make_kept(&cache, &state.join("disk"), SIZE).unwrap();
        digest(&File::open(state.join("disk")).unwrap());
    }
}
