//! Template disks: empty file systems, one of each size, that are copied for every sandbox. A template's name
//! contains the digest of its content, which is verified during the copy, so that a damaged template is never
//! used.

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
/// The most templates in the cache (least recently used are evicted). Each has some hundred kilobytes, with a
/// journal up to a gigabyte.
const MAX_TEMPLATES: usize = 8;
/// The age after which an unfinished template is abandoned.
const ABANDONED_AFTER: Duration = Duration::from_secs(3600);

/// A file with an empty file system.
pub(super) struct Template {
    pub path: PathBuf,
    pub digest: String,
}

impl Template {
    /// Opens the template. Anything else at its path is neither followed, waited for nor copied. None if it
    /// cannot be the template.
    pub fn open(&self, size: Size) -> io::Result<Option<File>> {
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        match File::options().read(true).custom_flags(flags).open(&self.path) {
            Ok(file) => {
                let data = file.metadata()?;
                // Updates the time of last use for eviction only.
                let _ = file.set_modified(SystemTime::now());
                Ok((data.is_file() && data.len() == size.0).then_some(file))
            }
            // A symbolic link, or removed by another process that found it damaged.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if error.raw_os_error() == Some(libc::ELOOP) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn folder(cache: &Path) -> PathBuf {
    cache.join("disk")
}

/// The name prefix of templates of this kind.
fn beginning(size: Size, journal: Journal) -> String {
    let kind = match journal {
        Journal::With => "journal-ext4",
        Journal::Without => "ext4",
    };
    format!("{kind}-{size}-")
}

/// Finds the template of this kind.
pub(super) fn find(cache: &Path, size: Size, journal: Journal) -> Option<Template> {
    let beginning = beginning(size, journal);
    let is_digest = |text: &str| {
        text.len() == DIGEST_LENGTH && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    // A template in a folder that others can write to is not used; `make` reports that.
    trust::check(&folder(cache)).ok()?;
    fs::read_dir(folder(cache)).ok()?.flatten().find_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let digest = name.strip_prefix(&beginning).filter(|digest| is_digest(digest))?.to_owned();
        Some(Template { path: entry.path(), digest })
    })
}

/// Creates a template. It is renamed to its final name when it is complete and flushed.
pub(super) fn make(cache: &Path, size: Size, journal: Journal) -> Result<Template, DiskError> {
    let folder = folder(cache);
    let failed = |error| super::failed(&folder)(error);
    // Others cannot write to it, whatever the umask is.
    DirBuilder::new().recursive(true).mode(0o755).create(&folder).map_err(failed)?;
    trust::check(&folder).map_err(|error| failed(io::Error::other(error)))?;
    let beginning = beginning(size, journal);
    let fresh = folder.join(format!(".{beginning}{}-{}", std::process::id(), unix_ns()));
    let made = make_fresh(&fresh, size, journal).and_then(|digest| {
        let path = folder.join(format!("{beginning}{digest}"));
        fs::rename(&fresh, &path).and_then(|()| sync_folder(&folder)).map_err(failed)?;
        evict(&folder, SystemTime::now());
        Ok(Template { path, digest })
    });
    if made.is_err() {
        // Already failing; a leftover is only untidy.
        let _ = fs::remove_file(&fresh);
    }
    made
}

/// Evicts the least recently used templates. One that is being copied stays readable until it is closed; a
/// process that has found one but not opened it yet creates it again.
fn evict(folder: &Path, now: SystemTime) {
    let mut templates = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let used = entry.metadata().and_then(|data| data.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
        let is_fresh = entry.file_name().as_encoded_bytes().starts_with(b".");
        let age = now.duration_since(used).unwrap_or_default();
        if !is_fresh {
            templates.push((used, entry.path()));
        } else if age > ABANDONED_AFTER {
            let _ = fs::remove_file(entry.path());
        }
    }
    templates.sort_unstable_by(|one, other| other.cmp(one));
    for (_, path) in templates.into_iter().skip(MAX_TEMPLATES) {
        // A template that cannot be removed only takes space.
        let _ = fs::remove_file(path);
    }
}

fn make_fresh(path: &Path, size: Size, journal: Journal) -> Result<String, DiskError> {
    let failed = |error| super::failed(path)(error);
    // Only a new file: an existing one is not written to.
    let file = File::options().read(true).write(true).create_new(true).open(path).map_err(failed)?;
    file.set_len(size.0).map_err(failed)?;
    format(path, size, journal)?;
    file.sync_all().map_err(failed)?;
    read_data(&file, |_, _| Ok(())).map_err(failed)
}

/// Removes a damaged template. Another process may have done so already.
pub(super) fn discard(template: &Template) {
    let _ = fs::remove_file(&template.path);
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::super::{make as make_disk, make_persistent};
    use super::*;

    const SIZE: Size = Size(64 << 20);

    fn home() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let home = tempfile::tempdir().unwrap();
        let (cache, state) = (home.path().join("cache"), home.path().join("state"));
        fs::create_dir(&state).unwrap();
        (home, cache, state)
    }

    /// The digest of a disk, which must be an ext4 file system.
    fn digest(disk: &File) -> String {
        let mut magic = [0; 2];
        disk.read_exact_at(&mut magic, 1024 + 56).unwrap();
        assert_eq!(magic, [0x53, 0xef], "the superblock of ext4");
        read_data(disk, |_, _| Ok(())).unwrap()
    }

    #[test]
    fn a_disk_is_its_template_and_no_larger() {
        let (_home, cache, state) = home();
        make_persistent(&cache, &state.join("one"), SIZE).unwrap();
        make_persistent(&cache, &state.join("two"), SIZE).unwrap();
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

    /// The effects of a power loss on unflushed data, and of a failing disk.
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
        make_persistent(&cache, &state.join("good"), SIZE).unwrap();
        for (what, damage) in damages {
            let before = find(&cache, SIZE, Journal::With).unwrap();
            damage(&before.path);
            let path = state.join(what.replace(' ', "-"));
            make_persistent(&cache, &path, SIZE).unwrap();
            let after = find(&cache, SIZE, Journal::With).unwrap();
            assert_eq!(digest(&File::open(&path).unwrap()), after.digest, "{what}");
        }
    }

    #[test]
    fn c8_the_least_recently_used_templates_are_evicted() {
        let (_home, cache, state) = home();
        let size = |number: usize| Size((16 + number as u64) << 20);
        let make = |number: usize, name: &str| {
            make_persistent(&cache, &state.join(format!("{name}-{number}")), size(number)).unwrap();
        };
        let left_over = cache.join("disk/.ext4-1-1");
        for number in 0..MAX_TEMPLATES {
            make(number, "first");
        }
        fs::write(&left_over, "").unwrap();
        let long_ago = SystemTime::now() - 2 * ABANDONED_AFTER;
        File::options().write(true).open(&left_over).unwrap().set_modified(long_ago).unwrap();
        fs::write(cache.join("disk/.ext4-2-2"), "").unwrap();
        // The oldest is used again and one more is created: the second oldest is evicted even though it is
        // being copied.
        make(0, "again");
        let copied = find(&cache, size(1), Journal::With).unwrap();
        let open = File::open(&copied.path).unwrap();
        make(MAX_TEMPLATES, "last");
        let is_there = |number: usize| find(&cache, size(number), Journal::With).is_some();
        assert_eq!((0..=MAX_TEMPLATES).map(is_there).filter(|there| *there).count(), MAX_TEMPLATES);
        assert!(is_there(0) && !is_there(1) && is_there(MAX_TEMPLATES));
        assert_eq!(digest(&open), copied.digest);
        assert!(!left_over.exists() && cache.join("disk/.ext4-2-2").exists());
        // Found, but evicted before it was opened.
        assert!(copied.open(size(1)).unwrap().is_none());
        make(1, "anew");
    }

    #[test]
    fn old_names_and_unfinished_files_are_not_templates() {
        let (_home, cache, state) = home();
        let folder = cache.join("disk");
        fs::create_dir_all(&folder).unwrap();
        for name in [format!("journal-ext4-{SIZE}"), format!(".journal-ext4-{SIZE}-12-34")] {
            fs::write(folder.join(name), "junk").unwrap();
        }
        assert!(find(&cache, SIZE, Journal::With).is_none());
        make_persistent(&cache, &state.join("disk"), SIZE).unwrap();
        digest(&File::open(state.join("disk")).unwrap());
    }
}
