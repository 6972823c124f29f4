//! The probe's unsafe code: system calls by number, each in a child of its own.
//!
//! A child shares no memory with the probe and does nothing after its call but end, so that no call, whatever it
//! does, can harm the probe's own memory.

use std::arch::asm;
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ptr;
use std::time::{Duration, Instant};

/// Arguments of a system call.
pub type Args = [u64; 6];

/// The exit code of a child whose call succeeded: above every error number.
const SUCCEEDED: i32 = 200;
/// The "error" of a child that could not prepare for its call.
const UNPREPARED: i32 = 199;
/// After this long a call counts as waiting for ever.
const PATIENCE: Duration = Duration::from_secs(30);

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It succeeded, or ended its process as asked.
    Done,
    /// It failed with this error.
    Error(i32),
    /// It ended its process by this signal.
    Signal(i32),
    /// It had not returned after a second.
    Hung,
    /// There was no process to try it in.
    NoChild,
}

/// Makes one system call in a child.
pub fn attempt(call: u64, args: Args) -> Fate {
    // SAFETY: made in a child, see the module's description.
    in_child(move || unsafe { raw(call, &args) })
}

/// Makes one system call in a child that has first done `prepare`, through `gate` if there is one; [`Fate::NoChild`] if
/// that failed.
pub fn attempt_after(call: u64, args: Args, gate: Option<&Gate>, prepare: impl FnOnce() -> bool) -> Fate {
    let fate = in_child(move || {
        if !prepare() {
            return -i64::from(UNPREPARED);
        }
        match gate {
            Some(gate) => gate.call(call, &args),
            // SAFETY: made in a child, see the module's description.
            None => unsafe { raw(call, &args) },
        }
    });
    if fate == Fate::Error(UNPREPARED) { Fate::NoChild } else { fate }
}

/// A system call instruction at an address of one's choice.
pub struct Gate(SystemCall);

/// Takes the number and six arguments.
type SystemCall = extern "sysv64" fn(u64, u64, u64, u64, u64, u64, u64) -> i64;

impl Gate {
    /// At the beginning of the page at `address`, where nothing is yet.
    pub fn open(address: u64) -> Result<Self, String> {
        Self::at(address, 4096, address)
    }

    /// At the end of the page before `address`, where nothing is yet; only its return is behind that.
    pub fn ending_at(address: u64) -> Result<Self, String> {
        Self::at(address - 4096, 8192, address - CALL.len() as u64)
    }

    fn at(start: u64, size: usize, code: u64) -> Result<Self, String> {
        let rights = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let whole: Vec<u8> = CALL.into_iter().chain([RETURN]).collect();
        // SAFETY: the mapping replaces nothing; what is written into it fits, and is code of this type.
        unsafe {
            if libc::mmap(start as *mut _, size, rights, flags, -1, 0) == libc::MAP_FAILED {
                return Err(format!("cannot map {start:#x}: error {}", errno()));
            }
            ptr::copy_nonoverlapping(whole.as_ptr(), code as *mut u8, whole.len());
            Ok(Self(std::mem::transmute::<*const u8, SystemCall>(code as *const u8)))
        }
    }

    fn call(&self, call: u64, args: &Args) -> i64 {
        self.0(call, args[0], args[1], args[2], args[3], args[4], args[5])
    }
}

/// Moves the arguments of a function to the registers of a system call, and makes it.
const CALL: [u8; 25] = [
    0x48, 0x89, 0xf8, // mov rax, rdi
    0x48, 0x89, 0xf7, // mov rdi, rsi
    0x48, 0x89, 0xd6, // mov rsi, rdx
    0x48, 0x89, 0xca, // mov rdx, rcx
    0x4d, 0x89, 0xc2, // mov r10, r8
    0x4d, 0x89, 0xc8, // mov r8, r9
    0x4c, 0x8b, 0x4c, 0x24, 0x08, // mov r9, [rsp + 8]
    0x0f, 0x05, // syscall
];
const RETURN: u8 = 0xc3;

/// How a child ends whose call was trapped, after [`exit_when_trapped`].
pub const TRAPPED: Fate = Fate::Error(198);

/// Has this process end with [`TRAPPED`] when a filter traps a call; a filter that kills is not asked.
pub fn exit_when_trapped() -> bool {
    extern "C" fn trapped(_: libc::c_int) {
        // SAFETY: ends the process.
        unsafe { libc::_exit(198) }
    }
    let handler = trapped as extern "C" fn(libc::c_int);
    // SAFETY: the handler makes nothing but a system call.
    unsafe { libc::signal(libc::SIGSYS, handler as libc::sighandler_t) != libc::SIG_ERR }
}

/// Does `work` in a child, which ends with its result: an error number as a negative value, or success.
pub fn in_child(work: impl FnOnce() -> i64) -> Fate {
    // SAFETY: the probe has one thread, so that its copy may do everything.
    match unsafe { libc::fork() } {
        ..=-1 => Fate::NoChild,
        0 => {
            die_of_faults();
            let result = work();
            let code = match i32::try_from(result) {
                Ok(error @ -4095..=-1) => -error,
                _ => SUCCEEDED,
            };
            // SAFETY: ends the child.
            unsafe { libc::_exit(code) }
        }
        child => fate_of(child),
    }
}

/// Without this a fault is first handled by Rust's own code, whose system calls a filter may refuse: the end would look as
/// if the filter had refused the call that faulted.
fn die_of_faults() {
    for signal in [libc::SIGSEGV, libc::SIGBUS] {
        // SAFETY: sets the default action, in a child that has one thread.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

fn fate_of(child: i32) -> Fate {
    let started = Instant::now();
    let mut status = 0;
    loop {
        // SAFETY: `status` is valid for writing.
        if unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == child {
            break;
        }
        if started.elapsed() > PATIENCE {
            end(child);
            return Fate::Hung;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    if libc::WIFSIGNALED(status) {
        return Fate::Signal(libc::WTERMSIG(status));
    }
    match libc::WEXITSTATUS(status) {
        error @ 1..SUCCEEDED => Fate::Error(error),
        _ => Fate::Done,
    }
}

/// Ends a child and waits for it.
pub fn end(child: i32) {
    // SAFETY: plain calls; the number is that of a child which has not been waited for.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, ptr::null_mut(), 0);
    }
}

/// # Safety
/// The call may do whatever its arguments say, also to this process's memory.
unsafe fn raw(call: u64, args: &Args) -> i64 {
    let result: i64;
    // SAFETY: the registers are those of the kernel's calling convention.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") call => result,
            in("rdi") args[0],
            in("rsi") args[1],
            in("rdx") args[2],
            in("r10") args[3],
            in("r8") args[4],
            in("r9") args[5],
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

/// Asks for the process number through the 32-bit entry into the kernel.
pub fn attempt_32_bit() -> Fate {
    in_child(|| {
        const GETPID_32: u64 = 20;
        let result: i64;
        // SAFETY: a call without arguments; the registers that this entry may change are named.
        unsafe {
            asm!("int 0x80", inlateout("rax") GETPID_32 => result, out("r8") _, out("r9") _, out("r10") _, out("r11") _);
        }
        result
    })
}

/// Runs the program in descriptor `fd` in a child.
pub fn execute_descriptor(fd: u64) -> Fate {
    let argv = lasting([address(c"program"), 0]);
    let empty = u64::try_from(libc::AT_EMPTY_PATH).unwrap_or_default();
    attempt(number(libc::SYS_execveat), [fd, address(c""), argv, argv + 8, empty, 0])
}

/// A call's number as the kernel takes it.
pub fn number(call: i64) -> u64 {
    call.cast_unsigned()
}

/// The address of a text.
pub fn address(text: &'static CStr) -> u64 {
    text.as_ptr().addr() as u64
}

/// The address of a value that stays for as long as the probe.
pub fn lasting<T>(value: T) -> u64 {
    ptr::from_ref(Box::leak(Box::new(value))).addr() as u64
}

pub fn own_number() -> u64 {
    std::process::id().into()
}

/// Which descriptors below `limit` are open, with their kind.
pub fn open_descriptors(limit: i32) -> Vec<(i32, &'static str)> {
    (0..limit).filter_map(|fd| kind(fd).map(|kind| (fd, kind))).collect()
}

fn kind(fd: i32) -> Option<&'static str> {
    let mut stat = MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: the buffer is valid for writing; zeroes are a valid `stat`.
    let mode = unsafe {
        if libc::fstat(fd, stat.as_mut_ptr()) < 0 {
            return None;
        }
        stat.assume_init().st_mode
    };
    Some(match mode & libc::S_IFMT {
        libc::S_IFREG => "file",
        libc::S_IFIFO => "pipe",
        libc::S_IFSOCK => "socket",
        libc::S_IFDIR => "folder",
        libc::S_IFCHR => "device",
        _ => "other",
    })
}

/// Writes bytes at the descriptor's end.
pub fn append(fd: i32, bytes: &[u8]) -> Result<usize, i32> {
    // SAFETY: the buffer is valid for its length.
    let written = unsafe {
        libc::lseek(fd, 0, libc::SEEK_END);
        libc::write(fd, bytes.as_ptr().cast(), bytes.len())
    };
    usize::try_from(written).map_err(|_| errno())
}

/// Whether `length` bytes of anonymous memory can be mapped with `flags` and the rights in `first`, and are then writable. They
/// are given back.
pub fn map_memory(length: usize, flags: i32, first: i32) -> Result<(), i32> {
    // SAFETY: the kernel chooses an unused range, which only this function knows and which it gives back untouched.
    unsafe {
        let start = libc::mmap(ptr::null_mut(), length, first, flags | libc::MAP_ANONYMOUS, -1, 0);
        if start == libc::MAP_FAILED {
            return Err(errno());
        }
        let writable = first & libc::PROT_WRITE != 0;
        let result =
            if writable { 0 } else { libc::mprotect(start, length, libc::PROT_READ | libc::PROT_WRITE) };
        let error = errno();
        libc::munmap(start, length);
        if result < 0 { Err(error) } else { Ok(()) }
    }
}

/// Creates processes that do `work`, and then wait, until it is refused or `most` exist. Returns how many there are.
pub fn fork_each(most: usize, work: impl Fn()) -> usize {
    for count in 0..most {
        // SAFETY: the probe has one thread, so that its copy may do everything.
        match unsafe { libc::fork() } {
            ..=-1 => return count,
            0 => {
                work();
                sleep_for_ever()
            }
            _ => {}
        }
    }
    most
}

/// Waits without an end.
pub fn sleep_for_ever() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(60));
    }
}

/// Makes a process of this name, to be seen from outside. If there is no room for another one, it is this one.
pub fn rename_child(name: &'static CStr) {
    // SAFETY: the probe has one thread; the name is a text that ends.
    unsafe {
        if libc::fork() <= 0 {
            libc::prctl(libc::PR_SET_NAME, name.as_ptr());
            sleep_for_ever();
        }
    }
}

/// Ends like a program of this name with a fault.
pub fn crash(name: &'static CStr) -> ! {
    die_of_faults();
    // SAFETY: the name is a text that ends; the fault is what is wanted.
    unsafe {
        libc::prctl(libc::PR_SET_NAME, name.as_ptr());
        libc::raise(libc::SIGSEGV);
    }
    std::process::abort()
}

/// Creates processes that wait until it is refused or `most` exist. Returns their numbers.
pub fn fork_until_refused(most: usize) -> Vec<i32> {
    let mut children = Vec::new();
    while children.len() < most {
        // SAFETY: the child does nothing but wait, and is ended by its parent.
        match unsafe { libc::fork() } {
            ..=-1 => break,
            0 => loop {
                std::thread::sleep(Duration::from_secs(60));
            },
            child => children.push(child),
        }
    }
    children
}

/// Sends a signal. Zero only asks whether the process is there.
pub fn signal(process: i32, signal: i32) -> Result<(), i32> {
    // SAFETY: a plain call.
    if unsafe { libc::kill(process, signal) } < 0 { Err(errno()) } else { Ok(()) }
}

/// Makes `process` the receiver of the descriptor's signals.
pub fn set_owner(fd: i32, process: i32) -> Result<(), i32> {
    // SAFETY: a plain call.
    if unsafe { libc::fcntl(fd, libc::F_SETOWN, process) } < 0 { Err(errno()) } else { Ok(()) }
}

/// Closes a descriptor that nothing else here uses.
pub fn close(fd: i32) {
    // SAFETY: only inherited descriptors are closed, and no value owns those.
    unsafe { libc::close(fd) };
}

/// Writes bytes to an inherited descriptor.
pub fn write(fd: i32, bytes: &[u8]) -> Result<usize, i32> {
    // SAFETY: the buffer is valid for its length.
    let written = unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) };
    usize::try_from(written).map_err(|_| errno())
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}
