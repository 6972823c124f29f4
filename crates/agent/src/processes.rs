//! The other processes in the guest.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Dir, Mode, OFlags, openat};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::sys;

/// How often a session is searched for members that were started meanwhile.
const ROUNDS: usize = 8;

/// The list of processes. `/proc` is held open, so that it stays available whatever the guest's root does to
/// its mounts.
pub struct Processes {
    proc: OwnedFd,
}

impl Processes {
    /// Opens `/proc`, which must be mounted.
    pub fn open() -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { proc: rustix::fs::open("/proc", flags, Mode::empty())? })
    }

    /// Whether a process is left besides this one and the kernel's threads.
    pub fn any_left(&self) -> bool {
        self.members(|session| session != 0).next().is_some()
    }

    /// Kills a command with its process group and its session.
    pub fn end_session(&self, leader: u32) {
        let Some(group) = i32::try_from(leader).ok().and_then(Pid::from_raw) else { return };
        // Fails only if the group has exited.
        let _ = kill_process_group(group, Signal::KILL);
        let leader = group.as_raw_nonzero().get();
        for _ in 0..ROUNDS {
            let mut found = false;
            for pid in self.members(|session| session == leader) {
                // An unreaped zombie is found again, but does not require another round.
                found |= kill_process(pid, Signal::KILL).is_ok() && pid != group;
            }
            if !found {
                break;
            }
        }
    }

    /// How many processes the kernel has killed because memory ran out. Zero if unknown.
    pub fn out_of_memory_kills(&self) -> u64 {
        let mut text = String::new();
        let opened = openat(&self.proc, "vmstat", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let read =
            opened.map_err(io::Error::from).and_then(|file| File::from(file).read_to_string(&mut text));
        if read.is_err() {
            return 0;
        }
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok());
        count.unwrap_or(0)
    }

    /// Opens a file again for reading, with a separate file offset.
    pub fn reopen(&self, file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        let path = format!("self/fd/{}", file.as_raw_fd());
        Ok(openat(&self.proc, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// Other processes whose session matches. Empty if the list cannot be read.
    fn members(&self, wanted: impl Fn(i32) -> bool) -> impl Iterator<Item = Pid> {
        let entries = Dir::read_from(&self.proc).into_iter().flatten();
        entries.filter_map(move |entry| {
            let number: i32 = entry.ok()?.file_name().to_str().ok()?.parse().ok()?;
            let pid = Pid::from_raw(number).filter(|pid| *pid != Pid::INIT)?;
            sys::session_of(number).is_some_and(&wanted).then_some(pid)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::{CommandExt, ExitStatusExt};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_session_ends_with_groups_of_its_own() {
        // With job control, the shell gives the background command a process group of its own within the
        // session.
        let mut leader = Command::new("setsid");
        leader
            .args(["sh", "-c", "set -m; sleep 20 & echo $!; wait"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut leader = leader.process_group(0).spawn().unwrap();
        let mut line = String::new();
        let mut output = io::BufReader::new(leader.stdout.take().unwrap());
        io::BufRead::read_line(&mut output, &mut line).unwrap();
        let member: i32 = line.trim().parse().unwrap();
        let session = sys::session_of(member).unwrap();
        assert_ne!(session, sys::session_of(0).unwrap());

        let processes = Processes::open().unwrap();
        assert!(processes.any_left());
        processes.end_session(u32::try_from(session).unwrap());

        // `setsid` either became the leader or does not wait for it; in both cases all of them have exited
        // now.
        let ended = leader.wait().unwrap();
        assert!(ended.signal() == Some(9) || ended.success());
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while is_alive(member) {
            assert!(std::time::Instant::now() < deadline, "the member of another group is still running");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    /// A zombie without a parent to reap it is not alive.
    fn is_alive(pid: i32) -> bool {
        std::fs::read_to_string(format!("/proc/{pid}/stat"))
            .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or_default().trim_start().starts_with('Z'))
    }
}
