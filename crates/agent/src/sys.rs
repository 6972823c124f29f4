//! The unsafe code of the agent: starting processes, and system calls without a safe wrapper.

mod launch;

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

pub use self::launch::{Child, Confinement, Executable, MountLimits, Program, Step, limit_mounts, start};

/// `libc::IFF_UP` in the width of `ifr_flags`.
const IFF_UP: i16 = 1;

/// Unlocks and opens the other side of a pseudo-terminal.
pub fn terminal_peer(master: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let locked: c_int = 0;
    // SAFETY: the first call reads one live integer; the second returns a descriptor that is ours alone.
    unsafe {
        if libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &raw const locked) < 0 {
            return Err(io::Error::last_os_error());
        }
        let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
        match libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags) {
            fd if fd < 0 => Err(io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd)),
        }
    }
}

/// The session of a process: 0 for kernel threads, `None` if there is no such process.
pub fn session_of(pid: i32) -> Option<i32> {
    // SAFETY: a plain system call on a number.
    let session = unsafe { libc::getsid(pid) };
    (session >= 0).then_some(session)
}

/// A descriptor that becomes readable when a child ends.
pub fn child_signals() -> io::Result<OwnedFd> {
    // SAFETY: the set is initialized by sigemptyset before use; the descriptor returned is ours alone.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGCHLD);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut());
        match libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) {
            fd if fd < 0 => Err(io::Error::last_os_error()),
            fd => Ok(OwnedFd::from_raw_fd(fd)),
        }
    }
}

/// Sets the wall clock to nanoseconds since 1970.
pub fn set_clock(unix_ns: u64) -> io::Result<()> {
    const SECOND: u64 = 1_000_000_000;
    let time = libc::timespec {
        tv_sec: i64::try_from(unix_ns / SECOND).map_err(io::Error::other)?,
        tv_nsec: i64::try_from(unix_ns % SECOND).map_err(io::Error::other)?,
    };
    // SAFETY: the argument is a valid timespec for the duration of the call.
    match unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &raw const time) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Resets the fault handlers that Rust's runtime installs. A child that shares our memory would run them
/// there when another process sends it these signals.
pub fn leave_faults_to_the_kernel() {
    for signal in [libc::SIGSEGV, libc::SIGBUS] {
        // SAFETY: no handler is installed, one is removed. Cannot fail for these signals.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

/// Sends a signal to every process but this one.
pub fn signal_all(signal: c_int) {
    // SAFETY: a plain system call; PID 1 itself is exempt from it. Fails only if there is no other process.
    unsafe { libc::kill(-1, signal) };
}

/// Gives this process, but not its children, precedence over all others.
pub fn take_precedence() -> io::Result<()> {
    const HIGHEST: c_int = -20;
    let plain = libc::sched_param { sched_priority: 0 };
    // SAFETY: the parameter is valid for the duration of the call, the rest are numbers.
    unsafe {
        let policy = libc::SCHED_OTHER | libc::SCHED_RESET_ON_FORK;
        if libc::sched_setscheduler(0, policy, &raw const plain) < 0
            || libc::setpriority(libc::PRIO_PROCESS, 0, HIGHEST) < 0
        {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Keeps kernel messages off the console.
pub fn silence_kernel() {
    const CONSOLE_OFF: c_int = 6;
    // SAFETY: this request takes no buffer. If it fails, there are a few more lines.
    unsafe { libc::klogctl(CONSOLE_OFF, ptr::null_mut(), 0) };
}

/// Sets the loopback interface up.
pub fn bring_loopback_up() -> io::Result<()> {
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None)?;
    // SAFETY: `request` is a valid ifreq whose name is NUL-terminated, and outlives both calls.
    unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
            *to = from.cast_signed();
        }
        if libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) < 0 {
            return Err(io::Error::last_os_error());
        }
        request.ifr_ifru.ifru_flags |= IFF_UP;
        if libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
