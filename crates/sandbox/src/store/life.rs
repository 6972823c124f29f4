//! Whether a sandbox runs. Its monitor and its keeper hold one lock together, which the kernel lets go when both are
//! gone, however they went: no pid can be mistaken for another's and no record can be out of date.

use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// The lock's file in a sandbox's folder.
pub const FILE_NAME: &str = "life";
/// Those who only look hold the lock for microseconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// Whether the sandbox of this folder runs.
pub fn alive(folder: &Path) -> io::Result<bool> {
    let file = match File::options().read(true).custom_flags(libc::O_NOFOLLOW).open(folder.join(FILE_NAME)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        file => file?,
    };
    // Any number of lookers share the lock; the sandbox itself shares it with nobody.
    Ok(!lock(&file, FlockOperation::NonBlockingLockShared)?)
}

/// Makes the caller the one that the sandbox's life depends on, for as long as the returned file, or a copy of its
/// descriptor in any process, is open. None if the sandbox runs.
///
/// Whoever finds a sandbox written down as running and gets this lock knows that it is gone, and that nobody starts it
/// while the record is put right.
pub fn take_life(folder: &Path) -> io::Result<Option<File>> {
    let path = folder.join(FILE_NAME);
    let mut options = File::options();
    options.create(true).truncate(false).read(true).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    let file = options.open(&path)?;
    let deadline = Instant::now() + PATIENCE;
    while !lock(&file, FlockOperation::NonBlockingLockExclusive)? {
        // If it can be shared, only lookers have it, and they are about to let it go.
        if !lock(&file, FlockOperation::NonBlockingLockShared)? {
            return Ok(None);
        }
        flock(&file, FlockOperation::Unlock)?;
        if Instant::now() > deadline {
            return Err(io::Error::from(io::ErrorKind::TimedOut));
        }
        thread::sleep(Duration::from_millis(1));
    }
    // Between opening and locking, the sandbox may have been removed: the lock of a nameless file protects nothing.
    let (ours, named) = (file.metadata()?, path.symlink_metadata()?);
    if (ours.dev(), ours.ino()) == (named.dev(), named.ino()) {
        Ok(Some(file))
    } else {
        Err(io::Error::from(io::ErrorKind::NotFound))
    }
}

fn lock(file: &File, how: FlockOperation) -> io::Result<bool> {
    match flock(file, how) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::{Command, Stdio};
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn one_takes_the_life_and_lookers_see_it() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!alive(folder.path()).unwrap());
        let life = take_life(folder.path()).unwrap().unwrap();
        assert!(alive(folder.path()).unwrap());
        assert!(take_life(folder.path()).unwrap().is_none());
        let shared = life.try_clone().unwrap();
        drop(life);
        assert!(alive(folder.path()).unwrap(), "the other holder lives");
        drop(shared);
        assert!(!alive(folder.path()).unwrap());
        assert!(take_life(folder.path()).unwrap().is_some());
    }

    #[test]
    fn the_life_ends_with_the_process_that_holds_it() {
        let folder = tempfile::tempdir().unwrap();
        let life = take_life(folder.path()).unwrap().unwrap();
        // The child's standard input is a copy of the lock's descriptor.
        let mut child = Command::new("sleep").arg("1000").stdin(Stdio::from(life)).spawn().unwrap();
        assert!(alive(folder.path()).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!alive(folder.path()).unwrap());
    }

    #[test]
    fn lookers_are_not_taken_for_a_running_sandbox() {
        let folder = tempfile::tempdir().unwrap();
        drop(take_life(folder.path()).unwrap());
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        alive(folder.path()).unwrap();
                    }
                });
            }
            for round in 0..200 {
                assert!(take_life(folder.path()).unwrap().is_some(), "round {round}");
            }
            stop.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn a_removed_sandbox_has_no_life_to_take() {
        let folder = tempfile::tempdir().unwrap();
        let sandbox = folder.path().join("x");
        assert_eq!(take_life(&sandbox).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(!alive(&sandbox).unwrap());
        fs::create_dir(&sandbox).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", sandbox.join(FILE_NAME)).unwrap();
        assert!(take_life(&sandbox).is_err());
        assert!(alive(&sandbox).is_err());
    }
}
