//! Why a sandbox or one of its processes ended, in words.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use bathy_jail::Spawned;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};
use thiserror::Error;

/// How long the kernel may take to end a process that was killed.
const KILLED_PATIENCE: Duration = Duration::from_secs(10);

/// A process does not end.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "Process {pid} was killed and has not ended within {} s. It probably waits for a disk or a file server that does not answer; it ends when that does",
    .patience.as_secs()
)]
pub struct NotEnded {
    pid: u32,
    patience: Duration,
}

/// Kills a process of ours and waits for its end, but not for ever: one that waits in the kernel ends when that is done.
///
/// # Errors
/// When it has not ended in time.
pub fn kill(process: &Spawned) -> Result<(), NotEnded> {
    // Fails only if it is gone already.
    let _ = pidfd_send_signal(&process.pidfd, Signal::KILL);
    collect(process.pidfd.as_fd(), process.pid, KILLED_PATIENCE)
}

/// As [`kill`], where nobody can be given an error: it is said on standard error.
pub fn kill_or_say(process: &Spawned) {
    if let Err(error) = kill(process) {
        // Standard error may be closed.
        let _ = writeln!(io::stderr(), "bathysphere: {error}");
    }
}

fn collect(pidfd: BorrowedFd<'_>, pid: u32, patience: Duration) -> Result<(), NotEnded> {
    let deadline = Instant::now() + patience;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let limit = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        // Interrupted or not: it is looked at.
        let _ = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&limit));
        match waitid(WaitId::PidFd(pidfd), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
            Ok(None) if left.is_zero() => return Err(NotEnded { pid, patience }),
            Ok(None) => {}
            // Also if somebody else has collected it.
            Ok(Some(_)) | Err(_) => return Ok(()),
        }
    }
}

/// What a process of ours did last, as one clause. It is not waited for: one that only closed its connection is not gone.
pub fn of_process(pidfd: BorrowedFd<'_>) -> String {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    let status = waitid(WaitId::PidFd(pidfd), options).ok().flatten();
    let signal = status.as_ref().and_then(|status| status.terminating_signal());
    match (signal, status.and_then(|status| status.exit_status())) {
        (Some(libc::SIGSYS), _) => "broke its own system call filter and was ended".to_owned(),
        (Some(signal), _) => format!("was ended by signal {signal}"),
        (None, Some(code)) => format!("ended with code {code}"),
        (None, None) => "hung up".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    #[test]
    fn a_process_that_does_not_end_is_not_waited_for_for_ever() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        // As one that cannot be killed looks: it is still there when the time is up.
        let patience = Duration::from_millis(20);
        let error = collect(pidfd.as_fd(), child.id(), patience).unwrap_err();
        assert_eq!(error, NotEnded { pid: child.id(), patience });
        assert!(error.to_string().contains(&format!("Process {} was killed", child.id())));
        pidfd_send_signal(&pidfd, Signal::KILL).unwrap();
        assert_eq!(collect(pidfd.as_fd(), child.id(), Duration::from_secs(60)), Ok(()));
        let status = std::fs::read_to_string(format!("/proc/{}/stat", child.id()));
        assert!(status.is_err(), "it was collected: {status:?}");
        assert_eq!(collect(pidfd.as_fd(), child.id(), patience), Ok(()), "and need not be again");
        assert!(child.wait().is_err(), "by nobody else either");
    }
}
