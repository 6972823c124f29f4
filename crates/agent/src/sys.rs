//! The agent's unsafe code: starting a process, and two system calls that have no safe wrapper.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

/// A program to start, with everything decided: the child only makes system calls.
pub struct Program<'a> {
    /// Paths to try, in order.
    pub candidates: &'a [CString],
    /// Arguments, the program's name first.
    pub argv: &'a [CString],
    /// Environment.
    pub env: &'a [CString],
    /// Working directory.
    pub cwd: &'a CStr,
    /// User number.
    pub uid: u32,
    /// Group number.
    pub gid: u32,
    /// All groups.
    pub groups: &'a [u32],
    /// Standard input, output and error.
    pub stdio: [BorrowedFd<'a>; 3],
}

/// Which step of the child failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Changing to the working directory.
    Chdir,
    /// Becoming the user.
    Identity,
    /// Standard input, output, error, session, signals.
    Stdio,
    /// Executing the program.
    Exec,
}

/// Shared with the child, which borrows our memory until it executes the program.
struct Launch<'a> {
    program: &'a Program<'a>,
    argv: Vec<*const c_char>,
    envp: Vec<*const c_char>,
    stdio: [c_int; 3],
    failure: Option<(Step, c_int)>,
}

const CHILD_STACK: usize = 64 * 1024;

/// `libc::IFF_UP` in the width of `ifr_flags`.
const IFF_UP: i16 = 1;

/// Starts `program` as the leader of its own session and returns its process number.
///
/// The child shares our memory and we sleep until it has executed the program (vfork): copying even a small address
/// space costs milliseconds under User Mode Linux, where every mapped page is a system call on the host.
pub fn start(program: &Program<'_>) -> Result<u32, (Step, io::Error)> {
    let pointers = |list: &[CString]| list.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect();
    let mut launch = Launch {
        program,
        argv: pointers(program.argv),
        envp: pointers(program.env),
        stdio: program.stdio.map(|fd| fd.as_raw_fd()),
        failure: None,
    };
    let mut stack = vec![0u8; CHILD_STACK];
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: the stack outlives the child's use of it, because CLONE_VFORK suspends us until the child has executed
    // or exited; `launch` outlives it for the same reason and nobody else touches it meanwhile. The stack pointer is
    // the aligned end of the buffer. The child only makes system calls and writes `failure`.
    let pid = unsafe {
        let top = stack.as_mut_ptr().add(CHILD_STACK);
        let top = top.sub(top.addr() % 16);
        libc::clone(child, top.cast::<c_void>(), flags, (&raw mut launch).cast::<c_void>())
    };
    let pid = u32::try_from(pid).map_err(|_| (Step::Exec, io::Error::last_os_error()))?;
    match launch.failure {
        None => Ok(pid),
        Some((step, errno)) => Err((step, io::Error::from_raw_os_error(errno))),
    }
}

/// The child's whole life before the program: returns only if a step failed.
extern "C" fn child(argument: *mut c_void) -> c_int {
    // SAFETY: `start` passes its live `Launch` and is suspended until this function ends or the program runs.
    let launch = unsafe { &mut *argument.cast::<Launch<'_>>() };
    launch.failure = Some(become_program(launch));
    127
}

fn become_program(launch: &Launch<'_>) -> (Step, c_int) {
    let program = launch.program;
    let failed = |step| (step, io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO));
    // SAFETY: plain system calls on values that `Launch` keeps alive. Identity is changed by raw system calls because
    // glibc's wrappers would signal all threads of the memory that we only borrow.
    unsafe {
        libc::setsid();
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        for (target, source) in (0..).zip(launch.stdio) {
            // The sources are all above 2, so that no target overwrites a source.
            if libc::dup2(source, target) < 0 {
                return failed(Step::Stdio);
            }
        }
        let groups = program.groups;
        if libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) < 0
            || libc::syscall(libc::SYS_setresgid, program.gid, program.gid, program.gid) < 0
            || libc::syscall(libc::SYS_setresuid, program.uid, program.uid, program.uid) < 0
        {
            return failed(Step::Identity);
        }
        if libc::chdir(program.cwd.as_ptr()) < 0 {
            return failed(Step::Chdir);
        }
        let mut outcome = libc::ENOENT;
        for candidate in program.candidates {
            libc::execve(candidate.as_ptr(), launch.argv.as_ptr(), launch.envp.as_ptr());
            match io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) {
                libc::ENOENT | libc::ENOTDIR => {}
                // Like a shell: go on looking, but remember that something was there.
                libc::EACCES => outcome = libc::EACCES,
                other => return (Step::Exec, other),
            }
        }
        (Step::Exec, outcome)
    }
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

/// Ends every process but this one.
pub fn end_everybody() {
    // SAFETY: a plain system call; PID 1 itself is exempt from it. Fails only if nobody is left.
    unsafe { libc::kill(-1, libc::SIGKILL) };
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
