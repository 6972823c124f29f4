//! Whether a sandbox is running. Its monitor and keeper share one lock, which the kernel releases when both
//! have exited, for whatever reason. So a reused pid or a stale record cannot mislead.
//!
//! The lock's file also holds what the monitor knows: that the sandbox is running, or how it ended. It is
//! overwritten in place, which works on a full disk where the store may fail, and does not depend on the
//! store.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// The lock file in a sandbox's folder.
pub const FILE_NAME: &str = "life";
/// The disk is locked as well while a guest writes to it, which also covers a removed lock file.
const DISK: &str = "disk";
/// A process that only checks the lock holds it for microseconds.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The size of the file, and the most characters of a cause that always fit.
const SIZE: usize = 4096;
const MAX_CAUSE: usize = 512;

/// How a sandbox ended, as its monitor saw it. Times are nanoseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ending {
    /// The start time of the run that ended.
    pub started_ns: Option<u64>,
    pub at_ns: u64,
    pub cause: String,
    /// The exit code of its main command, if the end of that ended the sandbox.
    pub exit_code: Option<i32>,
}

/// The run of a sandbox, as recorded by its monitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    pub started_ns: u64,
    pub monitor_pid: u32,
    pub keeper_pid: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Content {
    Running(Run),
    Ended(Ending),
}

/// Clears the lock file and allocates its space for the next end.
pub(crate) fn forget_ending(life: &File) -> io::Result<()> {
    life.write_all_at(&[b' '; SIZE], 0)
}

/// Records that the sandbox is running. Called once the guest answers.
pub(crate) fn write_running(life: &File, run: Run) -> io::Result<()> {
    write(life, serde_json::to_vec(&Content::Running(run))?)
}

/// Records how the sandbox ended, in space that was allocated before.
pub(crate) fn write_ending(life: &File, ending: &Ending) -> io::Result<()> {
    let mut text = serde_json::to_vec(&Content::Ended(ending.clone()))?;
    if text.len() > SIZE {
        // A cause may hold text from the guest in which every byte needs an escape.
        let cause = ending.cause.chars().take(MAX_CAUSE).collect();
        text = serde_json::to_vec(&Content::Ended(Ending { cause, ..ending.clone() }))?;
    }
    write(life, text)
}

fn write(life: &File, mut text: Vec<u8>) -> io::Result<()> {
    text.resize(SIZE, b' ');
    life.write_all_at(&text, 0)
}

/// How the sandbox in this folder ended, if its monitor recorded that.
pub(crate) fn read_ending(folder: &Path) -> Option<Ending> {
    match read(folder)? {
        Content::Ended(ending) => Some(ending),
        Content::Running(_) => None,
    }
}

/// The run of the sandbox in this folder, if it is running and its monitor recorded it.
pub fn running(folder: &Path) -> io::Result<Option<Run>> {
    let run = match read(folder) {
        Some(Content::Running(run)) => run,
        _ => return Ok(None),
    };
    Ok(alive(folder)?.then_some(run))
}

fn read(folder: &Path) -> Option<Content> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = File::options().read(true).custom_flags(flags).open(folder.join(FILE_NAME)).ok()?;
    let mut text = [0; SIZE];
    file.read_exact_at(&mut text, 0).ok()?;
    serde_json::from_slice(&text).ok()
}

/// Whether the sandbox in this folder is running.
pub fn alive(folder: &Path) -> io::Result<bool> {
    Ok(is_held(&folder.join(FILE_NAME))? || is_held(&folder.join(DISK))?)
}

/// Whether a file is locked exclusively. Processes that only check share the lock.
fn is_held(path: &Path) -> io::Result<bool> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = match File::options().read(true).custom_flags(flags).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        file => file?,
    };
    Ok(!lock(&file, FlockOperation::NonBlockingLockShared)?)
}

/// Takes the life lock, which is held for as long as the returned file or a copy of its descriptor is open in
/// any process. None if the sandbox is running.
///
/// If the store has the sandbox as running and this lock can be taken, the sandbox has ended, and it cannot
/// be started while the lock is held and the record is corrected.
pub fn take_life(folder: &Path) -> io::Result<Option<File>> {
    let path = folder.join(FILE_NAME);
    let mut options = File::options();
    options.create(true).truncate(false).read(true).write(true).mode(0o600);
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(&path)?;
    let deadline = Instant::now() + TIMEOUT;
    while !lock(&file, FlockOperation::NonBlockingLockExclusive)? {
        // If a shared lock is possible, only checking processes hold it, and only briefly.
        if !lock(&file, FlockOperation::NonBlockingLockShared)? {
            return Ok(None);
        }
        flock(&file, FlockOperation::Unlock)?;
        if Instant::now() > deadline {
            return Err(io::Error::from(io::ErrorKind::TimedOut));
        }
        thread::sleep(Duration::from_millis(1));
    }
    // The sandbox may have been removed between open and lock: a lock on a deleted file protects nothing.
    let (ours, named) = (file.metadata()?, path.symlink_metadata()?);
    if (ours.dev(), ours.ino()) == (named.dev(), named.ino()) {
        Ok((!is_held(&folder.join(DISK))?).then_some(file))
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
        assert!(alive(folder.path()).unwrap(), "the other holder is still running");
        drop(shared);
        assert!(!alive(folder.path()).unwrap());
        assert!(take_life(folder.path()).unwrap().is_some());
    }

    #[test]
    fn an_ending_is_written_in_place_however_long_its_cause_is() {
        let folder = tempfile::tempdir().unwrap();
        let life = take_life(folder.path()).unwrap().unwrap();
        assert_eq!(read_ending(folder.path()), None);
        forget_ending(&life).unwrap();
        assert_eq!(read_ending(folder.path()), None);
        let ending = |cause: &str| Ending {
            started_ns: Some(1),
            at_ns: u64::MAX,
            cause: cause.to_owned(),
            exit_code: Some(-3),
        };
        for cause in ["it was stopped", &"\u{1}".repeat(100_000), &"\u{1f41f}".repeat(5000)] {
            write_ending(&life, &ending(cause)).unwrap();
            let found = read_ending(folder.path()).unwrap();
            assert!(cause.starts_with(&found.cause) && !found.cause.is_empty());
            assert_eq!(found, ending(&found.cause));
            assert_eq!(life.metadata().unwrap().len(), SIZE as u64);
        }
        forget_ending(&life).unwrap();
        assert_eq!(read_ending(folder.path()), None);
        let run = Run { started_ns: 1, monitor_pid: 2, keeper_pid: 3 };
        write_running(&life, run).unwrap();
        assert_eq!(running(folder.path()).unwrap(), Some(run));
        assert_eq!(read_ending(folder.path()), None);
        drop(life);
        assert_eq!(running(folder.path()).unwrap(), None, "killed before it could write its end");
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
