//! The files of a log, and reading them line by line.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Dir, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::holder;
use crate::line::MAX_LINE;

/// The file that is appended to.
pub(crate) const CURRENT: &str = "audit.jsonl";
/// The lock file, held by writers and by readers that need a consistent view.
const LOCK: &str = "audit.lock";
/// How long to wait for the lock. Writers hold it for a fraction of a millisecond, or for as long as the disk
/// takes for a flush.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// The timeout if the holder is stopped, and after a first timeout: a waiting monitor serves no clients.
const SHORT_LOCK_TIMEOUT: Duration = Duration::from_secs(1);
const NO_PATIENCE: Duration = Duration::from_millis(100);

/// The next file, created before it is needed.
pub(crate) const NEXT: &str = "audit.next";

/// The id of the present boot. Empty if unknown: then no line counts as lost in a power failure.
pub(crate) fn this_boot() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

/// The time since boot in nanoseconds, which is never set.
pub(crate) fn since_boot_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}

/// The name of a file after rotation, by the number of its first line.
pub(crate) fn rotated_name(first: u64) -> String {
    format!("audit-{first:012}.jsonl")
}

fn rotated_first(name: &str) -> Option<u64> {
    let first = name.strip_prefix("audit-")?.strip_suffix(".jsonl")?.parse().ok()?;
    (rotated_name(first) == name).then_some(first)
}

/// The folder of a log. Everything is opened relative to it, and only regular files.
#[derive(Debug)]
pub(crate) struct LogFolder {
    dir: OwnedFd,
    pub path: PathBuf,
    /// Whether the last attempt to take the lock timed out.
    stuck: AtomicBool,
}

impl LogFolder {
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(path, flags, Mode::empty())?;
        Ok(Self { dir, path: path.to_owned(), stuck: AtomicBool::new(false) })
    }

    /// Opens a file. None if it does not exist.
    pub fn file(&self, name: &str, flags: OFlags) -> io::Result<Option<File>> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&self.dir, name, flags, Mode::RUSR | Mode::WUSR) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if file.metadata()?.is_file() {
            Ok(Some(file))
        } else {
            Err(io::Error::other("it is not a regular file"))
        }
    }

    pub fn size(&self, name: &str) -> io::Result<Option<u64>> {
        match rustix::fs::statat(&self.dir, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW) {
            Ok(data) => Ok(u64::try_from(data.st_size).ok()),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Renames without replacing an existing file.
    pub fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(rustix::fs::renameat_with(&self.dir, from, &self.dir, to, RenameFlags::NOREPLACE)?)
    }

    pub fn replace(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(rustix::fs::renameat(&self.dir, from, &self.dir, to)?)
    }

    /// Flushes the directory entries to the disk.
    pub fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(&self.dir)?)
    }

    pub fn remove(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.dir, name, rustix::fs::AtFlags::empty())?)
    }

    /// The first line numbers of the rotated files, oldest first.
    pub fn rotated(&self) -> io::Result<Vec<u64>> {
        let mut firsts = Vec::new();
        for entry in Dir::read_from(&self.dir)? {
            firsts.extend(entry?.file_name().to_str().ok().and_then(rotated_first));
        }
        firsts.sort_unstable();
        Ok(firsts)
    }

    /// Takes the lock. A writer creates the lock file; a reader of a copied log does without.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if another process, named if known, holds it for too long.
    pub fn lock(&self, writer: bool) -> io::Result<Option<Lock>> {
        let timeout = if self.stuck.load(Ordering::Relaxed) { NO_PATIENCE } else { LOCK_TIMEOUT };
        let locked = self.lock_within(writer, timeout);
        let stuck = locked.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
        self.stuck.store(stuck, Ordering::Relaxed);
        locked
    }

    fn lock_within(&self, writer: bool, mut timeout: Duration) -> io::Result<Option<Lock>> {
        let flags = if writer { OFlags::RDWR | OFlags::CREATE } else { OFlags::RDONLY };
        let Some(file) = self.file(LOCK, flags)? else { return Ok(None) };
        let operation = if writer {
            FlockOperation::NonBlockingLockExclusive
        } else {
            FlockOperation::NonBlockingLockShared
        };
        let began = Instant::now();
        let mut pause = Duration::from_micros(50);
        let mut looked_at = false;
        loop {
            let waited = began.elapsed();
            match rustix::fs::flock(&file, operation) {
                Ok(()) => return Ok(Some(Lock(file))),
                Err(Errno::WOULDBLOCK) if waited >= timeout => return Err(held(&file)),
                Err(Errno::WOULDBLOCK) => thread::sleep(pause),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if waited >= SHORT_LOCK_TIMEOUT && !looked_at {
                looked_at = true;
                if holder::of(&file).is_some_and(|holder| holder.is_stopped) {
                    timeout = SHORT_LOCK_TIMEOUT;
                }
            }
            pause = (pause * 2).min(Duration::from_millis(2));
        }
    }
}

/// The error for a lock that could not be taken.
fn held(lock: &File) -> io::Error {
    let holder = holder::of(lock).map(|holder| holder.to_string());
    let reason =
        holder.unwrap_or_else(|| "another process holds its lock and does not release it".to_owned());
    io::Error::new(io::ErrorKind::WouldBlock, reason)
}

#[derive(Debug)]
pub(crate) struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // A child that is just being started may have a copy of the descriptor, so closing ours is not
        // enough.
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

/// One line, or an invalid piece in place of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Without the line break. Of a line that is too long, only a prefix.
    pub bytes: Vec<u8>,
    /// Whether a line break follows.
    pub ended: bool,
}

/// Reads lines from a position on and never buffers more than the maximum length of a line.
pub(crate) struct Lines {
    input: BufReader<io::Take<File>>,
}

impl Lines {
    /// The lines between two positions of a file.
    pub fn new(mut file: File, from: u64, until: u64) -> io::Result<Self> {
        file.seek(SeekFrom::Start(from))?;
        Ok(Self { input: BufReader::with_capacity(64 * 1024, file.take(until.saturating_sub(from))) })
    }

    pub fn next(&mut self) -> io::Result<Option<Piece>> {
        let limit = u64::try_from(MAX_LINE).unwrap_or(u64::MAX) + 1;
        let mut bytes = Vec::new();
        (&mut self.input).take(limit).read_until(b'\n', &mut bytes)?;
        let mut ended = bytes.last() == Some(&b'\n');
        if ended {
            bytes.pop();
        } else if bytes.len() > MAX_LINE {
            ended = self.skip_line()?;
        }
        Ok((ended || !bytes.is_empty()).then_some(Piece { bytes, ended }))
    }

    fn skip_line(&mut self) -> io::Result<bool> {
        loop {
            let buffer = self.input.fill_buf()?;
            let (used, ended) = match buffer.iter().position(|byte| *byte == b'\n') {
                Some(at) => (at + 1, true),
                None => (buffer.len(), false),
            };
            self.input.consume(used);
            if ended || used == 0 {
                return Ok(ended);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::io::{FdFlags, fcntl_getfd};

    use super::*;

    fn folder() -> (tempfile::TempDir, LogFolder) {
        let folder_path = tempfile::tempdir().unwrap();
        let folder = LogFolder::open(folder_path.path()).unwrap();
        (folder_path, folder)
    }

    #[test]
    fn a_boot_has_the_name_that_the_kernel_gives_it() {
        let boot = this_boot();
        assert_eq!((boot.len(), boot.matches('-').count()), (36, 4), "{boot}");
    }

    #[test]
    fn a_folder_is_a_folder_and_stays_in_this_process() {
        let (folder_path, folder) = folder();
        assert_eq!(fcntl_getfd(&folder.dir).unwrap(), FdFlags::CLOEXEC);
        let file = folder_path.path().join("file");
        fs::write(&file, "").unwrap();
        assert_eq!(LogFolder::open(&file).unwrap_err().kind(), io::ErrorKind::NotADirectory);
    }

    #[test]
    fn only_regular_files_are_opened_and_they_stay_in_this_process() {
        let (folder_path, folder) = folder();
        fs::write(folder_path.path().join("file"), "").unwrap();
        fs::create_dir(folder_path.path().join("folder")).unwrap();
        let file = folder.file("file", OFlags::RDONLY).unwrap().unwrap();
        assert_eq!(fcntl_getfd(&file).unwrap(), FdFlags::CLOEXEC);
        assert!(folder.file("none", OFlags::RDONLY).unwrap().is_none());
        assert!(folder.file("folder", OFlags::RDONLY).is_err());
        // Opening a fifo would otherwise wait for a writer.
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(&folder.dir, "pipe", rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert!(folder.file("pipe", OFlags::RDONLY).is_err());
    }

    #[test]
    fn a_lock_is_given_up_for_and_free_as_soon_as_it_is_dropped() {
        let (_folder_path, folder) = folder();
        assert!(folder.lock(false).unwrap().is_none(), "a reader makes no file");
        let lock = folder.lock(true).unwrap().unwrap();
        for writer in [false, true] {
            let timeout = Duration::from_millis(20);
            let began = Instant::now();
            let refused = folder.lock_within(writer, timeout).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
            assert!(began.elapsed() >= timeout);
        }
        // Like a child that is just being started.
        let _copy = lock.0.try_clone().unwrap();
        drop(lock);
        let readers = [(); 2].map(|()| folder.lock_within(false, Duration::ZERO).unwrap());
        assert!(folder.lock_within(true, Duration::ZERO).is_err(), "{readers:?}");
    }

    #[test]
    fn a_line_that_is_too_long_is_cut_and_the_next_one_is_found() {
        let (folder_path, folder) = folder();
        let lengths = [MAX_LINE, MAX_LINE + 1, 4 * MAX_LINE, 0, 1, 3 * MAX_LINE];
        let text = lengths.map(|length| "x".repeat(length)).join("\n");
        fs::write(folder_path.path().join("file"), text).unwrap();
        let file = folder.file("file", OFlags::RDONLY).unwrap().unwrap();
        let mut lines = Lines::new(file, 0, u64::MAX).unwrap();
        let found: Vec<(usize, bool)> = std::iter::from_fn(|| lines.next().unwrap())
            .map(|piece| (piece.bytes.len(), piece.ended))
            .collect();
        let cut = MAX_LINE + 1;
        assert_eq!(found, [(MAX_LINE, true), (cut, true), (cut, true), (0, true), (1, true), (cut, false)]);
    }
}
