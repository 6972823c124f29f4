//! Unsafe code of the command line: signal descriptors.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;

/// Signals that stop a program.
const STOPPING: &[i32] = &[libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

/// A descriptor that becomes readable at a signal that stops a program (Ctrl-C, termination, hang-up). The signals no longer
/// end the process, so that it can end the sandbox or restore the terminal first.
pub fn stop_signals() -> io::Result<OwnedFd> {
    signals(STOPPING)
}

/// A descriptor that becomes readable when the size of the terminal changes.
pub fn resize_signals() -> io::Result<OwnedFd> {
    signals(&[libc::SIGWINCH])
}

fn signals(wanted: &[i32]) -> io::Result<OwnedFd> {
    // SAFETY: the set is initialized by sigemptyset before use; the descriptor returned is ours alone.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in wanted {
            libc::sigaddset(&raw mut set, *signal);
        }
        if libc::sigprocmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut()) < 0 {
            return Err(io::Error::last_os_error());
        }
        match libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) {
            fd if fd < 0 => Err(io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd)),
        }
    }
}

/// Discards pending signals of [`stop_signals`], and unblocks them.
pub fn forget_stop_signals() -> io::Result<()> {
    for signal in STOPPING {
        // SAFETY: the calls take a signal's number, and a constant or the handler that was there. Ignoring a signal drops
        // a pending one.
        unsafe {
            let before = libc::signal(*signal, libc::SIG_IGN);
            libc::signal(*signal, before);
        }
    }
    unblock_signals()
}

/// Unblocks every signal: a monitor outlives the process that started it, and must not inherit its signal mask.
pub fn unblock_signals() -> io::Result<()> {
    // SAFETY: the set is initialized by sigemptyset before use.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        match libc::sigprocmask(libc::SIG_SETMASK, &raw const set, ptr::null_mut()) {
            result if result < 0 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }
}

/// Reads a signal's number from a descriptor of [`stop_signals`].
pub fn read_signal(fd: &OwnedFd) -> io::Result<u8> {
    let mut record = [0u8; size_of::<libc::signalfd_siginfo>()];
    rustix::io::read(fd, &mut record)?;
    // The record begins with the signal's number.
    let [number, ..] = record;
    Ok(number)
}
