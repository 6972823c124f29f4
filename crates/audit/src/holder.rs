//! Finds the process that holds a lock, to name it in errors and to not wait for a stopped one.

use std::fmt;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;

/// A process that holds a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LockHolder {
    pub pid: u32,
    /// Whether it is stopped by a signal or a debugger.
    pub is_stopped: bool,
}

impl fmt::Display for LockHolder {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pid = self.pid;
        if self.is_stopped {
            write!(
                out,
                "process {pid} holds its lock and is stopped; `kill -CONT {pid}` resumes it, `kill -KILL {pid}` ends it"
            )
        } else {
            write!(out, "process {pid} holds its lock and does not release it")
        }
    }
}

/// The process that holds the `flock` lock of `file`, if it is visible and of this user.
pub(crate) fn of(file: &File) -> Option<LockHolder> {
    let wanted = file.metadata().ok()?;
    let wanted = (wanted.dev(), wanted.ino());
    let pid = (0..READS).find_map(|_| pid_in_table(wanted))?;
    Some(LockHolder { pid, is_stopped: is_stopped(pid) })
}

/// How often the table is read before a lock counts as not listed. The kernel returns it page by page: when a
/// lock is released between two pages, the rest moves up and one entry is skipped.
const READS: usize = 8;

fn pid_in_table(wanted: (u64, u64)) -> Option<u32> {
    let locks = fs::read_to_string("/proc/locks").ok()?;
    locks.lines().filter_map(|line| locker(line, wanted.1)).find(|pid| has_open(*pid, wanted))
}

/// The process in a line of /proc/locks, if that is a held `flock` lock of this inode. Waiting processes are
/// ignored.
fn locker(line: &str, inode: u64) -> Option<u32> {
    let mut fields = line.split_whitespace().skip(1);
    let (kind, _, _, pid, file) =
        (fields.next()?, fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    let same = file.rsplit(':').next()?.parse() == Ok(inode);
    if kind == "FLOCK" && same { pid.parse().ok() } else { None }
}

/// Confirms the file: inode numbers are unique per file system only, and some report other devices for locks
/// than for files.
fn has_open(pid: u32, wanted: (u64, u64)) -> bool {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    open.filter_map(|fd| fs::metadata(fd.path()).ok()).any(|found| (found.dev(), found.ino()) == wanted)
}

fn is_stopped(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name before the last parenthesis is chosen by the process.
    stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['T', 't']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_kernel_is_read() {
        for (line, expected) in [
            ("1: FLOCK  ADVISORY  WRITE 1234 fd:01:5678 0 EOF", Some(1234)),
            ("1: FLOCK  ADVISORY  READ 1234 fd:01:5678 0 EOF", Some(1234)),
            ("1: POSIX  ADVISORY  WRITE 1234 fd:01:5678 0 EOF", None),
            ("1: FLOCK  ADVISORY  WRITE 1234 fd:01:567 0 EOF", None),
            ("1: -> FLOCK  ADVISORY  WRITE 1234 fd:01:5678 0 EOF", None),
            ("1: FLOCK  ADVISORY  WRITE -1 fd:01:5678 0 EOF", None),
            ("", None),
        ] {
            assert_eq!(locker(line, 5678), expected, "{line}");
        }
    }

    #[test]
    fn who_holds_a_lock_is_found() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(of(&file), None);
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
        assert_eq!(of(&file), Some(LockHolder { pid: std::process::id(), is_stopped: false }));
    }
}
