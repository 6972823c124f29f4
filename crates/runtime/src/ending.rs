//! Describes why a sandbox or one of its processes ended.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use bathy_client::wait::is_readable_before;
use bathy_jail::Spawned;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};
use thiserror::Error;

/// How long the kernel may take to end a killed process.
const KILLED_TIMEOUT: Duration = Duration::from_secs(10);

/// A killed process has not ended.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "Process {pid} was killed and has not ended within {} s. It probably waits for a disk or a file server that does not answer; it ends when that does",
    .timeout.as_secs()
)]
pub struct NotEnded {
    pid: u32,
    timeout: Duration,
}

/// Kills one of our processes and waits for its end with a timeout: a process in uninterruptible sleep ends
/// when that is over.
///
/// # Errors
/// The process has not ended in time.
pub fn kill(process: &Spawned) -> Result<(), NotEnded> {
    // Fails only if the process has already exited.
    let _ = pidfd_send_signal(&process.pidfd, Signal::KILL);
    collect(process.pidfd.as_fd(), process.pid, KILLED_TIMEOUT)
}

/// Like [`kill`], but logs the error to standard error.
pub(crate) fn kill_or_log(process: &Spawned) {
    if let Err(error) = kill(process) {
        // Standard error may be closed.
        let _ = writeln!(io::stderr(), "bathysphere: {error}");
    }
}

fn collect(pidfd: BorrowedFd<'_>, pid: u32, timeout: Duration) -> Result<(), NotEnded> {
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let limit = Timespec::try_from(left).ok();
        // Interrupted or not, the status is checked.
        let _ = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], limit.as_ref());
        match waitid(WaitId::PidFd(pidfd), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
            Ok(None) if left.is_zero() => return Err(NotEnded { pid, timeout }),
            Ok(None) => {}
            // Also if another thread has reaped it.
            Ok(Some(_)) | Err(_) => return Ok(()),
        }
    }
}

/// The end of a process that closed its socket and still runs.
pub(crate) const HUNG_UP: &str = "hung up";
/// How long a process takes to exit after it closed its socket: the status is available a moment later.
const EXIT_STATUS_DELAY: Duration = Duration::from_millis(20);

/// Describes how a process of ours ended that has closed its socket, as a clause. None if it still runs.
pub(crate) fn of_process(pidfd: BorrowedFd<'_>) -> Option<String> {
    is_readable_before(pidfd, Instant::now() + EXIT_STATUS_DELAY);
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    let status = waitid(WaitId::PidFd(pidfd), options).ok().flatten();
    let signal = status.as_ref().and_then(|status| status.terminating_signal());
    match (signal, status.and_then(|status| status.exit_status())) {
        (Some(libc::SIGSYS), _) => Some("violated its seccomp filter and was killed".to_owned()),
        (Some(signal), _) => Some(format!("was killed by signal {signal}")),
        (None, Some(code)) => Some(format!("exited with code {code}")),
        (None, None) => None,
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
        // With a timeout this short the process is still running, like one that cannot be killed.
        let timeout = Duration::from_millis(20);
        let error = collect(pidfd.as_fd(), child.id(), timeout).unwrap_err();
        assert_eq!(error, NotEnded { pid: child.id(), timeout });
        assert!(error.to_string().contains(&format!("Process {} was killed", child.id())));
        pidfd_send_signal(&pidfd, Signal::KILL).unwrap();
        assert_eq!(collect(pidfd.as_fd(), child.id(), Duration::from_secs(60)), Ok(()));
        let status = std::fs::read_to_string(format!("/proc/{}/stat", child.id()));
        assert!(status.is_err(), "it was collected: {status:?}");
        assert_eq!(collect(pidfd.as_fd(), child.id(), timeout), Ok(()), "and need not be again");
        assert!(child.wait().is_err(), "it is reaped already");
    }
}
