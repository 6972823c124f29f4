//! Waiting for descriptors until a moment in time.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Waits until one of the descriptors is ready or the deadline has passed; for ever without one. How many are ready: none,
/// too, if a signal came first.
///
/// # Errors
/// When the kernel cannot wait for them.
pub fn poll_until(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> Result<usize, Errno> {
    let timeout = deadline.map(|deadline| timespec(deadline.saturating_duration_since(Instant::now())));
    match poll(fds, timeout.as_ref()) {
        Err(Errno::INTR) => Ok(0),
        result => result,
    }
}

/// Waits until there is something to read, also an end or an error. False if there is not in time.
pub fn is_readable_before(fd: BorrowedFd<'_>, deadline: Instant) -> bool {
    loop {
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        match poll_until(&mut fds, Some(deadline)) {
            Ok(0) if Instant::now() < deadline => {}
            Ok(ready) => return ready > 0,
            // Reading tells what is wrong.
            Err(_) => return true,
        }
    }
}

/// A duration as the kernel takes it.
pub fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}
