//! Reading and writing a group's files.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// Writes one of a group's files, in one piece as the kernel wants it. Never makes a file.
pub fn write(folder: &Path, file: &str, value: &str) -> io::Result<()> {
    File::options().write(true).truncate(true).open(folder.join(file))?.write_all(value.as_bytes())
}

/// As [`write`], for files that not every kernel has.
pub fn write_if_there(folder: &Path, file: &str, value: &str) -> io::Result<()> {
    match write(folder, file, value) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// One of a group's files, without the line's end.
pub fn read(folder: &Path, file: &str) -> io::Result<String> {
    Ok(fs::read_to_string(folder.join(file))?.trim_end().to_owned())
}

/// A file that is one number.
pub fn number(folder: &Path, file: &str) -> Option<u64> {
    read(folder, file).ok()?.parse().ok()
}

/// The number after `key` in a file of keys and numbers.
pub fn keyed_number(folder: &Path, file: &str, key: &str) -> Option<u64> {
    let text = read(folder, file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '))?;
    line.trim().parse().ok()
}

/// The processes in a group, not counting those of groups below.
pub fn processes(folder: &Path) -> BTreeSet<u32> {
    let text = read(folder, "cgroup.procs").unwrap_or_default();
    // Processes that this process's pid namespace does not know are listed as 0.
    text.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid != 0).collect()
}

/// Moves a process, with all its threads, into a group.
pub fn put(folder: &Path, pid: u32) -> io::Result<()> {
    write(folder, "cgroup.procs", &pid.to_string())
}

/// The groups below `parent` whose names begin with `prefix` and that were made longer ago than `age`. A group of unknown age counts as young.
pub fn older_than(parent: &Path, prefix: &str, age: Duration) -> Vec<PathBuf> {
    let is_old = |path: &Path| {
        let made = fs::metadata(path).and_then(|found| found.modified());
        made.ok().and_then(|made| made.elapsed().ok()).is_some_and(|elapsed| elapsed >= age)
    };
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().to_str().is_some_and(|name| name.starts_with(prefix)))
        .map(|entry| entry.path())
        .filter(|path| is_old(path))
        .collect()
}

/// Ends every process that is in the group at this moment, and no other: a number that is used anew between looking
/// and ending is noticed, because the list is read again once the process is held by a descriptor.
pub fn end_processes(folder: &Path) {
    let held: Vec<_> = processes(folder)
        .into_iter()
        .filter_map(|number| {
            let pid = Pid::from_raw(i32::try_from(number).ok()?)?;
            Some((number, pidfd_open(pid, PidfdFlags::empty()).ok()?))
        })
        .collect();
    let still_there = processes(folder);
    for (_, pidfd) in held.iter().filter(|(number, _)| still_there.contains(number)) {
        // One that has ended by itself is as good.
        let _ = pidfd_send_signal(pidfd, Signal::KILL);
    }
}
