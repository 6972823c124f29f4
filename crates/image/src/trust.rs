//! Decides whose folders are trusted. Kernels, images and build scripts are executed: from a folder that
//! another user owns or can write to, that user's code would run as the present user. `sudo` that preserves
//! HOME is enough for that.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::process::{getegid, geteuid};
use thiserror::Error;

const ROOT: u32 = 0;
const WRITTEN_BY_GROUP: u32 = 0o020;
const WRITTEN_BY_ALL: u32 = 0o002;
/// In a sticky folder users cannot remove or rename each other's files.
const STICKY: u32 = 0o1000;

/// A file or folder that is not trusted.
#[derive(Debug, Error)]
pub enum TrustError {
    #[error(
        "{path} belongs to user {owner}, who could then run programs as user {user}. Use folders of your own: `sudo -H` instead of `sudo`, or set HOME, XDG_CACHE_HOME and XDG_STATE_HOME"
    )]
    Owner { path: PathBuf, owner: u32, user: u32 },
    /// Other users can write to it.
    #[error(
        "{path} can be changed by other users (its mode is {mode:o}), who could then run programs as user {user}. If all in it is as you left it: chmod -R go-w {path}"
    )]
    Writable { path: PathBuf, mode: u32, user: u32 },
    /// Its metadata cannot be read.
    #[error("Cannot read the permissions of {0}")]
    Read(PathBuf, #[source] io::Error),
}

/// Checks a folder for our files and its parents, in which it could be replaced. It need not exist yet.
pub fn check_folder(path: &Path) -> Result<(), TrustError> {
    check(path)?;
    // Both the path as written and the path with links resolved are checked.
    let real = path.ancestors().find_map(|path| fs::canonicalize(path).ok());
    let above = path.ancestors().chain(real.iter().flat_map(|real| real.ancestors())).skip(1);
    above.filter(|folder| *folder != Path::new("")).try_for_each(check_above)
}

/// Checks a single file or folder. It need not exist.
pub fn check(path: &Path) -> Result<(), TrustError> {
    let Some(found) = metadata(path)? else { return Ok(()) };
    check_owner(path, &found, found.uid() == ROOT)?;
    if found.mode() & (WRITTEN_BY_GROUP | WRITTEN_BY_ALL) != 0 {
        return Err(writable(path, &found));
    }
    Ok(())
}

fn check_above(path: &Path) -> Result<(), TrustError> {
    let Some(found) = metadata(path)? else { return Ok(()) };
    check_owner(path, &found, found.uid() == ROOT || is_outside_of_namespace(found.uid()))?;
    let mode = found.mode();
    // Many systems give each user a private group, and make files group-writable by default.
    let own_group = [ROOT, getegid().as_raw()].contains(&found.gid());
    let by_others = mode & WRITTEN_BY_ALL != 0 || (mode & WRITTEN_BY_GROUP != 0 && !own_group);
    if by_others && mode & STICKY == 0 { Err(writable(path, &found)) } else { Ok(()) }
}

fn metadata(path: &Path) -> Result<Option<Metadata>, TrustError> {
    match fs::metadata(path) {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(TrustError::Read(path.to_owned(), error)),
    }
}

fn check_owner(path: &Path, found: &Metadata, is_trusted: bool) -> Result<(), TrustError> {
    let (owner, user) = (found.uid(), geteuid().as_raw());
    if is_trusted || owner == user {
        Ok(())
    } else {
        Err(TrustError::Owner { path: path.to_owned(), owner, user })
    }
}

fn writable(path: &Path, found: &Metadata) -> TrustError {
    TrustError::Writable { path: path.to_owned(), mode: found.mode() & 0o7777, user: geteuid().as_raw() }
}

/// Whether a user id is unmapped in this user namespace. There `/` and `/home` have the overflow id, and
/// their owner is the machine's root.
fn is_outside_of_namespace(user: u32) -> bool {
    let text = |path| fs::read_to_string(path).unwrap_or_default();
    let overflow = text("/proc/sys/kernel/overflowuid").trim().parse();
    overflow == Ok(user) && !is_mapped(user, &text("/proc/self/uid_map"))
}

fn is_mapped(user: u32, map: &str) -> bool {
    map.lines().any(|line| {
        let fields: Vec<u64> = line.split_whitespace().filter_map(|field| field.parse().ok()).collect();
        matches!(fields.as_slice(), [first, _, count] if (*first..first + count).contains(&user.into()))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    fn made(path: &Path, mode: u32) {
        fs::create_dir_all(path).unwrap();
        fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }

    #[test]
    fn what_others_write_to_is_not_used() {
        let home = tempfile::tempdir().unwrap();
        let (above, folder) = (home.path().join("above"), home.path().join("above/folder"));
        made(&above, 0o755);
        check_folder(&folder).unwrap();
        made(&folder, 0o755);
        check_folder(&folder).unwrap();
        for mode in [0o775, 0o757, 0o1777] {
            made(&folder, mode);
            let error = check_folder(&folder).unwrap_err().to_string();
            assert!(
                error.contains(&format!("mode is {mode:o}")) && error.contains("chmod -R go-w"),
                "{error}"
            );
        }
        made(&folder, 0o700);
        made(&above, 0o757);
        assert!(matches!(check_folder(&folder), Err(TrustError::Writable { path, .. }) if path == above));
        made(&above, 0o1777);
        check_folder(&folder).unwrap();
    }

    #[test]
    fn what_belongs_to_another_user_is_not_used() {
        if !geteuid().is_root() {
            // Only root can change the owner of files.
            return;
        }
        let home = tempfile::tempdir().unwrap();
        let (theirs, folder) = (home.path().join("theirs"), home.path().join("theirs/folder"));
        made(&folder, 0o755);
        chown(&folder, Some(1234), None).unwrap();
        let error = check_folder(&folder).unwrap_err().to_string();
        assert!(error.contains("belongs to user 1234") && error.contains("sudo -H"), "{error}");
        // Another user can replace anything in a folder of their own.
        chown(&folder, Some(0), None).unwrap();
        chown(&theirs, Some(1234), None).unwrap();
        assert!(
            matches!(check_folder(&folder), Err(TrustError::Owner { path, owner: 1234, .. }) if path == theirs)
        );
        assert!(check_folder(&theirs.join("not yet")).is_err());
        // Nor through a symbolic link to it.
        let link = home.path().join("link");
        symlink(&folder, &link).unwrap();
        assert!(matches!(check_folder(&link), Err(TrustError::Owner { owner: 1234, .. })));
        check(&folder).unwrap();
    }

    #[test]
    fn only_a_number_without_a_user_behind_it_is_one_from_outside() {
        assert!(is_mapped(65534, "         0          0 4294967295\n"));
        assert!(!is_mapped(65534, "      1000       1000          1\n"));
        assert!(is_mapped(1000, "      1000       1000          1\n"));
        assert!(!is_outside_of_namespace(1000));
    }
}
