//! The agent's unsafe code: starting a process, and the system calls that have no safe wrapper.

use std::ffi::{CStr, CString, c_char, c_int, c_ulong, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

/// What is executed.
#[derive(Clone, Copy)]
pub enum Executable<'a> {
    /// Paths to try, in order.
    Paths(&'a [CString]),
    /// An open file, which needs no path in the sandbox's root.
    Open(BorrowedFd<'a>),
}

/// How a process is held back beyond its user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Confinement {
    /// Nothing it executes gains a privilege, and no capability is left to gain.
    pub no_privileges: bool,
    /// It sees the mounts of its own, limited like [`limit_mounts`] does.
    pub mounts: Option<MountLimits>,
}

/// What [`limit_mounts`] does besides what it always does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MountLimits {
    /// Whether the root becomes read-only. What is mounted elsewhere stays as it is.
    pub read_only_root: bool,
}

/// A program to start, with everything decided: the child only makes system calls.
pub struct Program<'a> {
    /// The program itself.
    pub executable: Executable<'a>,
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
    /// Further descriptors, which it finds at 3 and above. An [`Executable::Open`] has none.
    pub extra: &'a [BorrowedFd<'a>],
    /// Whether standard input is a terminal that becomes the session's own.
    pub terminal: bool,
    /// What it may not do.
    pub confinement: Confinement,
}

/// Which step of the child failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Changing to the working directory.
    Chdir,
    /// Becoming the user.
    Identity,
    /// Giving up privileges, limiting mounts.
    Confinement,
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
    extra: Vec<c_int>,
    failure: Option<(Step, c_int)>,
}

const CHILD_STACK: usize = 64 * 1024;

/// Where a program finds the first descriptor beyond the standard ones.
const FIRST_EXTRA: c_int = 3;

/// `libc::IFF_UP` in the width of `ifr_flags`.
const IFF_UP: i16 = 1;

/// Starts `program` as the leader of its own session and returns its process number.
///
/// The child shares our memory and we sleep until it has executed the program (vfork): copying even a small address
/// space costs milliseconds under User Mode Linux, where every mapped page is a system call on the host.
pub fn start(program: &Program<'_>) -> Result<u32, (Step, io::Error)> {
    let pointers = |list: &[CString]| list.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect();
    let (extra, _copies) = out_of_the_way(program.extra).map_err(|error| (Step::Stdio, error))?;
    let mut launch = Launch {
        program,
        argv: pointers(program.argv),
        envp: pointers(program.env),
        stdio: program.stdio.map(|fd| fd.as_raw_fd()),
        extra,
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

/// Numbers of `extra` that no place for any of them overwrites, and the copies that this took.
fn out_of_the_way(extra: &[BorrowedFd<'_>]) -> io::Result<(Vec<c_int>, Vec<OwnedFd>)> {
    let after = FIRST_EXTRA.saturating_add(c_int::try_from(extra.len()).unwrap_or(c_int::MAX));
    let (mut numbers, mut copies) = (Vec::new(), Vec::new());
    for fd in extra {
        if fd.as_raw_fd() >= after {
            numbers.push(fd.as_raw_fd());
        } else {
            let copy = rustix::io::fcntl_dupfd_cloexec(fd, after)?;
            numbers.push(copy.as_raw_fd());
            copies.push(copy);
        }
    }
    Ok((numbers, copies))
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
        // Theirs are all above the last place, and what stood at a place before was needed only for the three above.
        for (target, source) in (FIRST_EXTRA..).zip(&launch.extra) {
            if libc::dup2(*source, target) < 0 {
                return failed(Step::Stdio);
            }
        }
        if program.terminal && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
            return failed(Step::Stdio);
        }
        if let Some(limits) = program.confinement.mounts
            && (libc::unshare(libc::CLONE_NEWNS) < 0 || limit_mounts(limits).is_err())
        {
            return failed(Step::Confinement);
        }
        // Before the identity changes: dropping capabilities for good needs one.
        if program.confinement.no_privileges && !give_up_privileges() {
            return failed(Step::Confinement);
        }
        let groups = program.groups;
        if libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) < 0
            || libc::syscall(libc::SYS_setresgid, program.gid, program.gid, program.gid) < 0
            || libc::syscall(libc::SYS_setresuid, program.uid, program.uid, program.uid) < 0
        {
            return failed(Step::Identity);
        }
        // A change of user empties the other sets and leaves this one.
        if program.confinement.no_privileges && !clear_capabilities() {
            return failed(Step::Confinement);
        }
        if libc::chdir(program.cwd.as_ptr()) < 0 {
            return failed(Step::Chdir);
        }
        let (argv, envp) = (launch.argv.as_ptr(), launch.envp.as_ptr());
        let candidates = match program.executable {
            Executable::Paths(candidates) => candidates,
            Executable::Open(file) => {
                let (file, empty) = (file.as_raw_fd(), c"".as_ptr());
                libc::syscall(libc::SYS_execveat, file, empty, argv, envp, libc::AT_EMPTY_PATH);
                return failed(Step::Exec);
            }
        };
        let mut outcome = libc::ENOENT;
        for candidate in candidates {
            libc::execve(candidate.as_ptr(), argv, envp);
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

/// Whatever is executed from here on gains nothing. Only system calls: a child that borrows our memory runs it.
fn give_up_privileges() -> bool {
    const ONE: c_ulong = 1;
    const ZERO: c_ulong = 0;
    // SAFETY: plain system calls on numbers.
    unsafe {
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, ONE, ZERO, ZERO, ZERO) < 0 {
            return false;
        }
        let clear_all = libc::PR_CAP_AMBIENT_CLEAR_ALL;
        if libc::prctl(libc::PR_CAP_AMBIENT, clear_all, ZERO, ZERO, ZERO) < 0 {
            return false;
        }
        for capability in 0..c_ulong::from(u64::BITS) {
            if libc::prctl(libc::PR_CAPBSET_DROP, capability, ZERO, ZERO, ZERO) < 0 {
                // The first number that the kernel does not know ends the list; before it, every one has to go.
                return capability > 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL);
            }
        }
    }
    true
}

/// Empties the permitted, effective and inheritable sets. Only a system call, as above.
fn clear_capabilities() -> bool {
    // Version 3 of the structure, for the calling thread; two halves of three sets.
    let header: [u32; 2] = [0x2008_0522, 0];
    let none = [0u32; 6];
    // SAFETY: both arguments have the layout that this version prescribes, and outlive the call.
    unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) == 0 }
}

/// The kernel's `struct mount_attr`.
#[repr(C)]
struct MountAttributes {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

/// Puts nosuid and nodev on every mount of this mount namespace, except that device files under `/dev` stay usable.
/// Only system calls, as above.
pub fn limit_mounts(limits: MountLimits) -> io::Result<()> {
    let everything = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
    let recursive = libc::AT_RECURSIVE.cast_unsigned();
    // Private, so that what is changed here is changed nowhere else.
    let all = MountAttributes { set: everything, clear: 0, propagation: libc::MS_PRIVATE, user_namespace: 0 };
    change_mount(c"/", recursive, &all)?;
    let devices = MountAttributes {
        set: libc::MOUNT_ATTR_NOEXEC,
        clear: libc::MOUNT_ATTR_NODEV,
        propagation: 0,
        user_namespace: 0,
    };
    for folder in [c"/dev", c"/dev/pts"] {
        // If the sandbox's root has taken it away, there is nothing to be loosened.
        let _ = change_mount(folder, 0, &devices);
    }
    if limits.read_only_root {
        let root =
            MountAttributes { set: libc::MOUNT_ATTR_RDONLY, clear: 0, propagation: 0, user_namespace: 0 };
        change_mount(c"/", 0, &root)?;
    }
    Ok(())
}

fn change_mount(path: &CStr, flags: u32, attributes: &MountAttributes) -> io::Result<()> {
    // SAFETY: the path ends with a zero byte, and the structure and its size belong together.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            path.as_ptr(),
            flags,
            ptr::from_ref(attributes),
            size_of::<MountAttributes>(),
        )
    };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The other end of a pseudo-terminal, which has to be unlocked for it.
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

/// The session that a process belongs to: 0 for the kernel's own threads, `None` if there is no such process.
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

/// Sends a signal to every process but this one.
pub fn signal_everybody(signal: c_int) {
    // SAFETY: a plain system call; PID 1 itself is exempt from it. Fails only if nobody is left.
    unsafe { libc::kill(-1, signal) };
}

/// Puts this process before all others, and no child of it.
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

/// The kernel's messages do not reach the console any more.
pub fn silence_kernel() {
    const CONSOLE_OFF: c_int = 6;
    // SAFETY: this request takes no buffer. If it fails, there are a few lines more.
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn no_place_of_an_extra_descriptor_overwrites_another() {
        let (error, input, file) = (io::stderr(), io::stdin(), std::fs::File::open("/dev/null").unwrap());
        let far = rustix::io::fcntl_dupfd_cloexec(&file, 100).unwrap();
        let extra = [error.as_fd(), far.as_fd(), input.as_fd()];
        let (numbers, copies) = out_of_the_way(&extra).unwrap();
        assert_eq!(copies.len(), 2);
        assert_eq!(numbers.len(), 3);
        assert_eq!(numbers[1], far.as_raw_fd());
        assert!(numbers.iter().all(|number| *number >= 6) && numbers[0] != numbers[2]);
    }
}
