//! The jail's unsafe code: creating processes in new namespaces, and calls that have no safe wrapper.

use std::ffi::{CStr, c_char, c_int, c_long};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

/// A new process, as its parent holds it.
pub struct Child {
    /// Its process number in the parent's pid namespace.
    pub pid: u32,
    /// A descriptor that refers to exactly this process, whatever its number is used for later.
    pub pidfd: OwnedFd,
}

/// Which side of the process creation we are.
pub enum Side {
    Parent(Child),
    Child,
}

/// Creates a process in new namespaces, like fork: the child continues on a copy of everything.
///
/// # Safety
/// In a process with several threads the child may only make system calls: other threads' locks stay locked in it
/// for ever.
pub unsafe fn fork_into(namespaces: c_int, group: Option<BorrowedFd<'_>>) -> io::Result<Side> {
    /// Into the group that `cgroup` is open at. Not in libc for all targets.
    const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
    let mut pidfd: RawFd = -1;
    let unsigned = |value: c_int| u64::from(value.cast_unsigned());
    let args = libc::clone_args {
        flags: unsigned(namespaces)
            | unsigned(libc::CLONE_PIDFD)
            | if group.is_some() { CLONE_INTO_CGROUP } else { 0 },
        pidfd: (&raw mut pidfd).addr() as u64,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: unsigned(libc::SIGCHLD),
        stack: 0,
        stack_size: 0,
        tls: 0,
        set_tid: 0,
        set_tid_size: 0,
        cgroup: group.map_or(0, |group| unsigned(group.as_raw_fd())),
    };
    // SAFETY: the arguments are a valid clone_args of the given size; without CLONE_VM the child has its own copy of
    // the stack it returns on.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>()) };
    match u32::try_from(pid) {
        Err(_) => Err(io::Error::last_os_error()),
        Ok(0) => Ok(Side::Child),
        // SAFETY: the kernel stored a new descriptor that has no other owner.
        Ok(pid) => Ok(Side::Parent(Child { pid, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } })),
    }
}

/// Puts this process, which has one thread, into the version 1 group whose `tasks` file this is. Makes nothing but a system call.
pub fn enter_group(tasks: RawFd) -> Result<(), c_int> {
    // SAFETY: a plain system call on a number, with a byte that lives long enough.
    if unsafe { libc::write(tasks, c"0".as_ptr().cast(), 1) } == 1 { Ok(()) } else { Err(errno()) }
}

/// What a child needs to become another program; all of it prepared before the process was created.
pub struct Transition<'a> {
    pub program: BorrowedFd<'a>,
    /// Its arguments, ended by a null pointer.
    pub argv: &'a [*const c_char],
    /// Its environment, ended by a null pointer.
    pub envp: &'a [*const c_char],
}

/// Gives this process `descriptors` as 0, 1, 2 …, and marks all others to be closed when it executes a program. The
/// descriptors' own numbers are above those. Makes nothing but system calls.
pub fn arrange(descriptors: &[RawFd]) -> Result<(), c_int> {
    let first = libc::c_uint::try_from(descriptors.len()).unwrap_or(libc::c_uint::MAX);
    // SAFETY: plain system calls on numbers.
    unsafe {
        for (target, source) in (0..).zip(descriptors) {
            if libc::dup2(*source, target) < 0 {
                return Err(errno());
            }
        }
        if libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) < 0 {
            return Err(errno());
        }
    }
    Ok(())
}

/// Closes every descriptor of this process. Makes nothing but a system call.
pub fn close_all() {
    // SAFETY: a plain system call, in a process that only ends itself afterwards.
    unsafe { libc::syscall(libc::SYS_close_range, 0, libc::c_uint::MAX, 0) };
}

/// Resets signals and executes. Returns only on failure. Makes nothing but system calls.
pub fn become_program(transition: &Transition<'_>) -> c_int {
    reset_signals();
    // SAFETY: the pointer arrays end with null and outlive the call.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            c_long::from(transition.program.as_raw_fd()),
            c"".as_ptr(),
            transition.argv.as_ptr(),
            transition.envp.as_ptr(),
            c_long::from(libc::AT_EMPTY_PATH),
        );
    }
    errno()
}

/// Unblocks all signals and gives SIGPIPE, which Rust programs ignore, its usual effect. Makes nothing but system calls.
pub fn reset_signals() {
    // SAFETY: the set is initialized before use.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
}

/// A system call instruction in a page of its own, at an address where a filter that looks at addresses allows calls.
pub struct Gate(SystemCall);

/// Takes the number and six arguments; returns the result, an error as a negative number.
type SystemCall = extern "sysv64" fn(c_long, c_long, c_long, c_long, c_long, c_long, c_long) -> c_long;

impl Gate {
    /// Maps the page, where there is nothing yet.
    pub fn open(address: u32) -> io::Result<Self> {
        /// Moves its arguments to the registers of a system call, makes it, and returns.
        const CODE: [u8; 26] = [
            0x48, 0x89, 0xf8, // mov rax, rdi
            0x48, 0x89, 0xf7, // mov rdi, rsi
            0x48, 0x89, 0xd6, // mov rsi, rdx
            0x48, 0x89, 0xca, // mov rdx, rcx
            0x4d, 0x89, 0xc2, // mov r10, r8
            0x4d, 0x89, 0xc8, // mov r8, r9
            0x4c, 0x8b, 0x4c, 0x24, 0x08, // mov r9, [rsp + 8]
            0x0f, 0x05, // syscall
            0xc3, // ret
        ];
        let wanted = ptr::without_provenance_mut(usize::try_from(address).map_err(io::Error::other)?);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: the page replaces nothing; it is written while only this function knows of it, and is code from then on, of
        // the type that it is given.
        unsafe {
            let page = libc::mmap(wanted, CODE.len(), libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            if page == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            ptr::copy_nonoverlapping(CODE.as_ptr(), page.cast(), CODE.len());
            check(libc::mprotect(page, CODE.len(), libc::PROT_READ | libc::PROT_EXEC))?;
            Ok(Self(std::mem::transmute::<*mut libc::c_void, SystemCall>(page)))
        }
    }

    /// Executes. Returns only on failure, with the error's number.
    pub fn become_program(&self, transition: &Transition<'_>) -> c_long {
        let empty = c"";
        let result = self.0(
            libc::SYS_execveat,
            transition.program.as_raw_fd().into(),
            pointer(empty.as_ptr()),
            pointer(transition.argv.as_ptr()),
            pointer(transition.envp.as_ptr()),
            libc::AT_EMPTY_PATH.into(),
            0,
        );
        -result
    }

    pub fn write_report(&self, fd: RawFd, words: &[u8]) {
        let length = c_long::try_from(words.len()).unwrap_or_default();
        self.0(libc::SYS_write, fd.into(), pointer(words.as_ptr()), length, 0, 0, 0);
    }

    pub fn exit_now(&self, code: c_int) -> ! {
        loop {
            self.0(libc::SYS_exit_group, code.into(), 0, 0, 0, 0, 0);
        }
    }
}

/// A pointer as an argument of a system call.
fn pointer<T>(pointer: *const T) -> c_long {
    pointer.expose_provenance().cast_signed() as c_long
}

/// Becomes uid and gid `id` of the present user namespace, with no other groups where the kernel allows to drop them.
/// Makes nothing but system calls.
pub fn become_user(id: u32) -> Result<(), c_int> {
    // SAFETY: plain system calls. Raw ones, because glibc's wrappers would involve other threads.
    unsafe {
        // Refused where the groups are fixed (an ordinary user's namespace): then they stay, and open no file here.
        libc::syscall(libc::SYS_setgroups, 0, ptr::null::<u32>());
        if libc::syscall(libc::SYS_setresgid, id, id, id) < 0
            || libc::syscall(libc::SYS_setresuid, id, id, id) < 0
        {
            return Err(errno());
        }
    }
    Ok(())
}

/// Moves this process into new namespaces.
pub fn unshare(namespaces: c_int) -> io::Result<()> {
    // SAFETY: a plain system call.
    check(unsafe { libc::unshare(namespaces) })
}

/// Turns address space randomization off for the next program.
pub fn fix_addresses() -> io::Result<()> {
    const ADDR_NO_RANDOMIZE: libc::c_ulong = 0x0004_0000;
    // SAFETY: a plain system call.
    check(unsafe { libc::personality(ADDR_NO_RANDOMIZE) })
}

/// Ends the process without running anything of ours.
pub fn exit_now(code: c_int) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(code) }
}

/// Writes to a descriptor, ignoring failure: the report of a process that is about to exit.
pub fn write_report(fd: RawFd, words: &[u8]) {
    // SAFETY: the buffer is valid for its length.
    unsafe { libc::write(fd, words.as_ptr().cast(), words.len()) };
}

/// Waits for one byte; `false` if the writer has closed its end.
pub fn wait_for_byte(fd: RawFd) -> bool {
    let mut byte = 0u8;
    // SAFETY: one byte is valid for writing.
    unsafe { libc::read(fd, (&raw mut byte).cast(), 1) == 1 }
}

/// Pointers to strings, ended by null. They borrow from `list`.
pub fn pointers(list: &[impl AsRef<CStr>]) -> Vec<*const c_char> {
    list.iter().map(|text| text.as_ref().as_ptr()).chain([ptr::null()]).collect()
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn errno() -> c_int {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}
