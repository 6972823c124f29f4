//! Which process holds a lock, so that it can be named, and is not waited for if it stands still.

use std::fmt;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;

/// A process that holds a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    pub pid: u32,
    /// Whether a signal or a debugger has stopped it.
    pub is_stopped: bool,
}

impl fmt::Display for Holder {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pid = self.pid;
        if self.is_stopped {
            write!(
                out,
                "process {pid} holds its lock and is stopped; `kill -CONT {pid}` lets it go on, `kill -KILL {pid}` ends it"
            )
        } else {
            write!(out, "process {pid} holds its lock and does not let go")
        }
    }
}

/// The process that holds the lock of `file` by flock, if it can be known: it is one of this user's, and in sight.
pub(crate) fn of(file: &File) -> Option<Holder> {
    let wanted = file.metadata().ok()?;
    let wanted = (wanted.dev(), wanted.ino());
    let pid = (0..LOOKS).find_map(|_| pid_in_table(wanted))?;
    Some(Holder { pid, is_stopped: is_stopped(pid) })
}

/// How often the table is read before a lock counts as not listed. The kernel hands it out a page at a time: a lock that is
/// released between two pages moves the rest up, and one entry is skipped.
const LOOKS: usize = 8;

fn pid_in_table(wanted: (u64, u64)) -> Option<u32> {
    let locks = fs::read_to_string("/proc/locks").ok()?;
    locks.lines().filter_map(|line| locker(line, wanted.1)).find(|pid| has_open(*pid, wanted))
}

/// The process of a line of /proc/locks, if that is about a lock by flock of the file with this number. One that waits is none.
fn locker(line: &str, inode: u64) -> Option<u32> {
    let mut fields = line.split_whitespace().skip(1);
    let (kind, _, _, pid, file) =
        (fields.next()?, fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    let same = file.rsplit(':').next()?.parse() == Ok(inode);
    if kind == "FLOCK" && same { pid.parse().ok() } else { None }
}

/// Numbers of files are one file system's own, and some report other devices for locks than for files.
fn has_open(pid: u32, wanted: (u64, u64)) -> bool {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    open.filter_map(|fd| fs::metadata(fd.path()).ok()).any(|found| (found.dev(), found.ino()) == wanted)
}

fn is_stopped(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name before the last parenthesis is the process's own choice.
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
        assert_eq!(of(&file), Some(Holder { pid: std::process::id(), is_stopped: false }));
    }
}
