//! Polling descriptors with a deadline.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Polls until a descriptor is ready or the deadline has passed; without a deadline, for ever. Returns how
/// many are ready, which is zero also after a signal.
///
/// # Errors
/// `poll` fails.
pub fn poll_until(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> Result<usize, Errno> {
    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    // A time that does not fit is none.
    let timeout = left.and_then(|left| Timespec::try_from(left).ok());
    match poll(fds, timeout.as_ref()) {
        Err(Errno::INTR) => Ok(0),
        result => result,
    }
}

/// Waits until the descriptor is readable, which includes end of file and errors. False once the deadline has
/// passed, also for a readable descriptor: a peer that sends without end cannot extend it.
pub fn is_readable_before(fd: BorrowedFd<'_>, deadline: Instant) -> bool {
    while Instant::now() < deadline {
        let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
        match poll_until(&mut fds, Some(deadline)) {
            Ok(0) => {}
            // The following read returns the error.
            Ok(_) | Err(_) => return true,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::time::Duration;

    use rustix::pipe::pipe;

    use super::*;

    #[test]
    fn a_readable_descriptor_does_not_extend_a_deadline() {
        let (read, write) = pipe().unwrap();
        rustix::io::write(&write, b"x").unwrap();
        assert!(is_readable_before(read.as_fd(), Instant::now() + Duration::from_secs(60)));
        assert!(!is_readable_before(read.as_fd(), Instant::now()));
    }
}
