//! Files that never change once they have their name.
//!
//! Hashing a whole layer at every start would take longer than the start. So each file has a seal beside it: its digest, and
//! the metadata of its inode when the digest was verified. A write changes the inode's change time, which cannot be set back by
//! ordinary calls.

use std::fs::{self, File, Permissions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use bathy_image::Stamp;
use bathy_registry::Digest;
use bathy_registry::digest::Hasher;
use serde::{Deserialize, Serialize};

const SEAL: &str = ".seal";
const UNFINISHED: &str = ".new";
/// More than a seal has.
const MAX_SEAL: u64 = 4096;
const BUFFER: usize = 256 << 10;

/// What is known of a file.
#[derive(Debug, Serialize, Deserialize)]
struct Seal {
    digest: Digest,
    stamp: Stamp,
}

/// What is at a path.
#[derive(Debug)]
pub enum Found {
    /// A file that is what it was when it got its name.
    Whole(File),
    /// The inode has changed. The content may be the same.
    Changed,
    Absent,
}

/// Opens a regular file. A pipe in its place would be waited for, and a link may lead anywhere.
fn open_file(path: &Path) -> io::Result<File> {
    let file = File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::other("it is no regular file. Remove it: it is made anew"))
    }
}

/// Opens a file if it is certainly what it was.
pub fn open(path: &Path) -> io::Result<Found> {
    let file = match open_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Absent),
        opened => opened?,
    };
    match read_seal(path)? {
        Some(seal) if seal.stamp == Stamp::from(file.metadata()?) => Ok(Found::Whole(file)),
        _ => Ok(Found::Changed),
    }
}

/// Opens a file. One whose inode has changed is hashed, and removed if it is not what it was. For the holder of the lock.
pub fn open_or_remove(path: &Path) -> io::Result<Option<File>> {
    match open(path)? {
        Found::Whole(file) => return Ok(Some(file)),
        Found::Absent => {}
        Found::Changed => {
            let (seal, mut file) = (read_seal(path)?, File::open(path)?);
            if let Some(seal) = seal
                && digest_of(&file, &seal.digest)? == seal.digest
            {
                write_seal(path, &file, seal.digest)?;
                file.seek(SeekFrom::Start(0))?;
                return Ok(Some(file));
            }
        }
    }
    remove(path)?;
    Ok(None)
}

/// Makes a file: `write` returns its digest and whatever else there is to say. If it fails, nothing stays. For the holder of
/// the lock.
pub fn create<T, E: From<io::Error>>(
    path: &Path,
    write: impl FnOnce(&mut File) -> Result<(Digest, T), E>,
) -> Result<(File, T), E> {
    let new = with_suffix(path, UNFINISHED);
    let make = || -> Result<(File, Digest, T), E> {
        let mut options = File::options();
        let mut file = options.read(true).write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        let (digest, value) = write(&mut file)?;
        file.set_permissions(Permissions::from_mode(0o400))?;
        file.sync_all()?;
        fs::rename(&new, path)?;
        Ok((file, digest, value))
    };
    let (file, digest, value) = make().inspect_err(|_| {
        let _ = fs::remove_file(&new);
    })?;
    // Only now: the new name has changed the inode.
    let sealed = write_seal(path, &file, digest).and_then(|()| File::open(path)).inspect_err(|_| {
        let _ = remove(path);
    })?;
    Ok((sealed, value))
}

/// Removes a file with its seal. Missing ones are no error.
pub fn remove(path: &Path) -> io::Result<()> {
    for path in [path, &with_suffix(path, SEAL)] {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Whether a file of this name is of a process that has not finished it.
pub fn is_unfinished(name: &str) -> bool {
    name.ends_with(UNFINISHED)
}

/// The name of the file that a seal is of, or the name itself.
pub fn sealed_name(name: &str) -> &str {
    name.strip_suffix(SEAL).unwrap_or(name)
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn read_seal(path: &Path) -> io::Result<Option<Seal>> {
    let mut text = Vec::new();
    match open_file(&with_suffix(path, SEAL)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?.take(MAX_SEAL).read_to_end(&mut text)?,
    };
    // A seal that cannot be read is none.
    Ok(serde_json::from_slice(&text).ok())
}

fn write_seal(path: &Path, file: &File, digest: Digest) -> io::Result<()> {
    let seal = serde_json::to_vec(&Seal { digest, stamp: Stamp::from(file.metadata()?) })?;
    let (target, new) = (with_suffix(path, SEAL), with_suffix(path, &format!("{SEAL}{UNFINISHED}")));
    let write = || {
        let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(&seal)?;
        file.sync_all()?;
        fs::rename(&new, &target)?;
        path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
    };
    write().inspect_err(|_| {
        let _ = fs::remove_file(&new);
    })
}

/// The sha256 of a file's content, from its beginning on.
pub fn digest_of_all(file: &mut File) -> io::Result<Digest> {
    file.seek(SeekFrom::Start(0))?;
    digest_of(file, &Digest::of(b""))
}

/// The digest of a file's content, by the algorithm of `like`.
fn digest_of(mut file: &File, like: &Digest) -> io::Result<Digest> {
    let mut hasher = Hasher::new(like.algorithm());
    let mut buffer = vec![0; BUFFER];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finish()),
            count => hasher.update(buffer.get(..count).unwrap_or_default()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, content: &'static [u8]) -> io::Result<(File, ())> {
        create(path, |file| {
            file.write_all(content)?;
            Ok((Digest::of(content), ()))
        })
    }

    /// Writes at a time of its own: the clock of a file system may stand still between two writes.
    fn overwrite(path: &Path, content: &str) {
        fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
        fs::write(path, content).unwrap();
        File::options().write(true).open(path).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    }

    fn content(file: Option<File>) -> Option<Vec<u8>> {
        file.map(|mut file| {
            let mut content = Vec::new();
            file.read_to_end(&mut content).unwrap();
            content
        })
    }

    #[test]
    fn a_file_is_whole_until_it_is_written_to() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        assert!(matches!(open(&path).unwrap(), Found::Absent));
        write(&path, b"some").unwrap();
        assert!(matches!(open(&path).unwrap(), Found::Whole(_)));
        // The same content at another time.
        overwrite(&path, "some");
        assert!(matches!(open(&path).unwrap(), Found::Changed));
        assert_eq!(content(open_or_remove(&path).unwrap()).unwrap(), b"some");
        assert!(matches!(open(&path).unwrap(), Found::Whole(_)));
        overwrite(&path, "sOme");
        assert!(open_or_remove(&path).unwrap().is_none());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_without_its_seal_or_with_another_ones_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for seal in [None, Some(""), Some("{}"), Some("[1]")] {
            write(&path, b"some").unwrap();
            let its = with_suffix(&path, SEAL);
            match seal {
                None => fs::remove_file(its).unwrap(),
                Some(text) => fs::write(its, text).unwrap(),
            }
            assert!(open_or_remove(&path).unwrap().is_none(), "{seal:?}");
            assert!(!path.exists());
        }
    }

    #[test]
    fn what_fails_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let failed = create(&path, |file| -> io::Result<(Digest, ())> {
            file.write_all(b"half")?;
            Err(io::ErrorKind::StorageFull.into())
        });
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn links_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("file"), folder.path().join("link"));
        write(&path, b"some").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(open(&link).is_err());
    }

    #[test]
    fn a_pipe_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let pipe = |path: &Path| {
            let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
            rustix::fs::mknodat(rustix::fs::CWD, path, kind, mode, 0).unwrap();
        };
        pipe(&path);
        assert!(open(&path).unwrap_err().to_string().contains("no regular file"));
        fs::remove_file(&path).unwrap();
        write(&path, b"some").unwrap();
        let seal = with_suffix(&path, SEAL);
        fs::remove_file(&seal).unwrap();
        pipe(&seal);
        assert!(open(&path).is_err());
    }

    #[test]
    fn names_tell_what_is_unfinished_and_what_a_seal_is_of() {
        assert!(is_unfinished("a.new") && is_unfinished("a.seal.new") && !is_unfinished("a"));
        assert_eq!((sealed_name("a.seal"), sealed_name("a")), ("a", "a"));
    }
}
