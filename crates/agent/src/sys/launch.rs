//! Starts a process without waiting for it.
//!
//! The child shares our memory until it executes its program: copying even a small address space takes
//! milliseconds under User Mode Linux, where every mapped page is a system call on the host. We do not wait
//! for the child as `vfork` would: before it executes, it already belongs to the command's user, so other
//! processes of that user can stop it, and a program or folder of theirs can block its system calls. The
//! memory that it uses stays allocated until the kernel has closed the child's end of a pipe. That happens
//! after the child has left our memory, when it executes or exits.
//!
//! While both run, the child only makes system calls, and without the C library, which would store error
//! numbers where our thread reads them.

use std::arch::asm;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};

pub enum Executable<'a> {
    /// Paths to try, in order.
    Paths(Vec<CString>),
    /// An open file, which needs no path in the sandbox's root.
    Open(BorrowedFd<'a>),
}

/// Restrictions on a process besides its user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Confinement {
    /// It cannot gain privileges by executing a program, and has no capabilities.
    pub no_privileges: bool,
    /// It gets its own mount namespace, restricted as by [`limit_mounts`].
    pub mounts: Option<MountLimits>,
}

/// Optional restrictions of [`limit_mounts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MountLimits {
    /// Whether the root becomes read-only. Other mounts are unaffected.
    pub read_only_root: bool,
}

/// A program to start. Everything is decided: the child only makes system calls.
pub struct Program<'a> {
    pub executable: Executable<'a>,
    /// Arguments, the program's name first.
    pub argv: Vec<CString>,
    pub env: Vec<CString>,
    pub cwd: CString,
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub stdio: [BorrowedFd<'a>; 3],
    /// Additional descriptors, at 3 and above.
    pub extra: &'a [BorrowedFd<'a>],
    /// Whether standard input is a terminal that becomes the controlling terminal.
    pub terminal: bool,
    pub confinement: Confinement,
}

/// The step of the child that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Changing the working directory.
    Chdir,
    Identity,
    /// Dropping privileges, restricting mounts.
    Confinement,
    /// Standard streams, session, signals.
    Stdio,
    Exec,
}

impl Step {
    const ALL: [Self; 5] = [Self::Chdir, Self::Identity, Self::Confinement, Self::Stdio, Self::Exec];
}

/// A descriptor that the child gets besides the standard ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Placed {
    fd: c_int,
    /// Whether it is closed on exec.
    closed: bool,
}

/// What the child reads, and where it stores why it failed.
struct Launch {
    argv: Vec<*const c_char>,
    envp: Vec<*const c_char>,
    /// The strings that the pointers refer to.
    _strings: [Vec<CString>; 2],
    candidates: Vec<CString>,
    cwd: CString,
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
    terminal: bool,
    confinement: Confinement,
    stdio: [c_int; 3],
    /// The descriptors to place at 3 and above, in this order.
    placed: Vec<Placed>,
    /// The index of the open file that is executed.
    file: Option<usize>,
    /// The failed step's number plus one, and the error number.
    failed_step: AtomicU8,
    errno: AtomicI32,
}

impl Launch {
    fn outcome(&self) -> Result<(), (Step, io::Error)> {
        let step = usize::from(self.failed_step.load(Ordering::Acquire));
        match step.checked_sub(1).and_then(|number| Step::ALL.get(number)) {
            Some(step) => Err((*step, io::Error::from_raw_os_error(self.errno.load(Ordering::Acquire)))),
            None => Ok(()),
        }
    }
}

/// The child's stack: its system calls take a few hundred bytes.
#[repr(C, align(16))]
struct Stack([u8; 16 * 1024]);

/// The number of the first descriptor beyond the standard ones.
const FIRST_EXTRA: c_int = 3;

/// `libc::TIOCSCTTY` in the width of other numbers.
const TIOCSCTTY: c_int = 0x540e;

/// The memory that a child uses until it executes or exits. It is freed by [`Self::free`] and not on drop,
/// because the child may still use it.
struct Borrowed {
    /// Both came from boxes. A box would claim unique access.
    launch: NonNull<Launch>,
    stack: NonNull<Stack>,
    /// Reaches end of file when the child no longer needs the memory.
    ended: OwnedFd,
}

impl Borrowed {
    fn is_free(&self) -> bool {
        rustix::io::read(&self.ended, &mut [0u8; 1]) == Ok(0)
    }

    fn free(self) -> Result<(), (Step, io::Error)> {
        // SAFETY: both came from boxes in `start`, only this turns them back, and it takes `self`. It is
        // called when the child no longer uses them.
        let (launch, _stack) =
            unsafe { (Box::from_raw(self.launch.as_ptr()), Box::from_raw(self.stack.as_ptr())) };
        launch.outcome()
    }
}

thread_local! {
    /// Memory of children whose outcome is no longer needed.
    static ABANDONED: RefCell<Vec<Borrowed>> = const { RefCell::new(Vec::new()) };
}

fn free_abandoned() {
    ABANDONED.with_borrow_mut(|left| {
        for freed in left.extract_if(.., |borrowed| borrowed.is_free()) {
            // Its request was answered long ago.
            let _ = freed.free();
        }
    });
}

/// A child that may not have executed its program yet.
pub struct Child {
    pub pid: u32,
    borrowed: Option<Borrowed>,
}

impl Child {
    /// Becomes readable when [`Self::outcome`] is known.
    pub fn decided(&self) -> Option<BorrowedFd<'_>> {
        self.borrowed.as_ref().map(|borrowed| borrowed.ended.as_fd())
    }

    /// Whether the program was executed; `None` while that is unknown. A child that was killed before counts
    /// as executed and then killed.
    pub fn outcome(&mut self) -> Option<Result<(), (Step, io::Error)>> {
        self.borrowed.take_if(|borrowed| borrowed.is_free()).map(Borrowed::free)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if let Some(borrowed) = self.borrowed.take() {
            // Fails only while the thread exits; then the memory is leaked.
            let _ = ABANDONED.try_with(|left| left.borrow_mut().push(borrowed));
        }
    }
}

/// Starts `program` as the leader of a new session.
pub fn start(program: Program<'_>) -> Result<Child, (Step, io::Error)> {
    free_abandoned();
    let no_pipe = |error: Errno| (Step::Stdio, error.into());
    let (ended, theirs) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(no_pipe)?;
    let mut wanted: Vec<(BorrowedFd<'_>, bool)> = program.extra.iter().map(|fd| (*fd, false)).collect();
    wanted.push((theirs.as_fd(), true));
    let (candidates, file) = match program.executable {
        Executable::Paths(candidates) => (candidates, None),
        Executable::Open(file) => {
            wanted.push((file, true));
            (Vec::new(), Some(wanted.len() - 1))
        }
    };
    let (placed, _copies) = relocate(&wanted).map_err(|error| (Step::Stdio, error))?;
    let pointers = |list: &[CString]| list.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect();
    let launch = Box::new(Launch {
        argv: pointers(&program.argv),
        envp: pointers(&program.env),
        _strings: [program.argv, program.env],
        candidates,
        cwd: program.cwd,
        uid: program.uid,
        gid: program.gid,
        groups: program.groups,
        terminal: program.terminal,
        confinement: program.confinement,
        stdio: program.stdio.map(|fd| fd.as_raw_fd()),
        placed,
        file,
        failed_step: AtomicU8::new(0),
        errno: AtomicI32::new(0),
    });
    let borrowed = Borrowed {
        launch: NonNull::from(Box::leak(launch)),
        stack: NonNull::from(Box::leak(Box::new(Stack([0; _])))),
        ended,
    };
    let flags = libc::CLONE_VM | libc::SIGCHLD;
    // SAFETY: the stack and `launch` outlive the child's use of them: they are freed when `ended` has reached
    // end of file, which is after the child has executed or exited. Of `launch` only the atomic fields
    // change. The stack pointer is the aligned end of the stack. The child makes system calls and nothing
    // else.
    let pid = unsafe {
        let top = borrowed.stack.add(1).as_ptr();
        libc::clone(child, top.cast::<c_void>(), flags, borrowed.launch.as_ptr().cast::<c_void>())
    };
    let Ok(pid) = u32::try_from(pid) else {
        let error = io::Error::last_os_error();
        // There is no child that could have failed.
        let _ = borrowed.free();
        return Err((Step::Exec, error));
    };
    Ok(Child { pid, borrowed: Some(borrowed) })
}

/// Duplicates descriptors whose numbers would be overwritten by a target number. Returns the numbers and the
/// copies.
fn relocate(wanted: &[(BorrowedFd<'_>, bool)]) -> io::Result<(Vec<Placed>, Vec<OwnedFd>)> {
    let after = FIRST_EXTRA.saturating_add(c_int::try_from(wanted.len()).unwrap_or(c_int::MAX));
    let (mut numbers, mut copies) = (Vec::new(), Vec::new());
    for (fd, closed) in wanted {
        if fd.as_raw_fd() >= after {
            numbers.push(Placed { fd: fd.as_raw_fd(), closed: *closed });
        } else {
            let copy = rustix::io::fcntl_dupfd_cloexec(fd, after)?;
            numbers.push(Placed { fd: copy.as_raw_fd(), closed: *closed });
            copies.push(copy);
        }
    }
    Ok((numbers, copies))
}

/// The child's code until the program runs: returns only if a step failed.
extern "C" fn child(argument: *mut c_void) -> c_int {
    // SAFETY: `start` passes its `Launch`, which lives until this function has ended or the program runs.
    let launch = unsafe { &*argument.cast::<Launch>() };
    let (step, errno) = run_child(launch);
    let number = Step::ALL.iter().position(|known| *known == step).unwrap_or_default();
    launch.errno.store(errno, Ordering::Release);
    launch.failed_step.store(u8::try_from(number).unwrap_or_default().saturating_add(1), Ordering::Release);
    127
}

/// Runs as root until the identity changes, so that no process of the user can stop or trace the child
/// before.
fn run_child(launch: &Launch) -> (Step, c_int) {
    if let Err(errno) = arrange(launch) {
        return (Step::Stdio, errno);
    }
    if let Err(errno) = confine(launch.confinement) {
        return (Step::Confinement, errno);
    }
    if let Err(errno) = change_identity(launch) {
        return (Step::Identity, errno);
    }
    // Changing the user clears the other capability sets but not the bounding set.
    if launch.confinement.no_privileges
        && let Err(errno) = clear_capabilities()
    {
        return (Step::Confinement, errno);
    }
    // SAFETY: the path ends with a zero byte and outlives the call.
    if let Err(errno) = unsafe { call(libc::SYS_chdir, [address(launch.cwd.as_ptr()), 0, 0, 0, 0]) } {
        return (Step::Chdir, errno);
    }
    (Step::Exec, execute(launch))
}

/// Sets up session, signals and descriptors.
fn arrange(launch: &Launch) -> Result<(), c_int> {
    const SET: usize = size_of::<u64>();
    // The kernel's `sigaction`, all default, and an empty set of signals.
    let (default, none) = ([0usize; 4], 0u64);
    let (pipe, set) = (number(libc::SIGPIPE), number(libc::SIG_SETMASK));
    // SAFETY: plain system calls on numbers, and on two values that have the layout that the kernel expects.
    unsafe {
        call(libc::SYS_setsid, [0; 5])?;
        call(libc::SYS_rt_sigaction, [pipe, address(&raw const default), 0, SET, 0])?;
        call(libc::SYS_rt_sigprocmask, [set, address(&raw const none), 0, SET, 0])?;
        for (target, source) in (0..).zip(launch.stdio) {
            // The sources are all above 2, so that no target overwrites a source.
            call(libc::SYS_dup2, [number(source), target, 0, 0, 0])?;
        }
        // The sources are all above the last target, and descriptors at a target were needed only for the
        // three above.
        let mut target = number(FIRST_EXTRA);
        for source in &launch.placed {
            let flags = if source.closed { number(libc::O_CLOEXEC) } else { 0 };
            call(libc::SYS_dup3, [number(source.fd), target, flags, 0, 0])?;
            target = target.wrapping_add(1);
        }
        // A delayed child would otherwise hold open descriptors of other commands, whose input would not end.
        call(libc::SYS_close_range, [target, u32::MAX as usize, 0, 0, 0])?;
        if launch.terminal {
            call(libc::SYS_ioctl, [0, number(TIOCSCTTY), 0, 0, 0])?;
        }
    }
    Ok(())
}

fn confine(confinement: Confinement) -> Result<(), c_int> {
    if let Some(limits) = confinement.mounts {
        // SAFETY: a plain system call on a number.
        unsafe { call(libc::SYS_unshare, [number(libc::CLONE_NEWNS), 0, 0, 0, 0])? };
        set_mounts(limits)?;
    }
    // Before the identity changes, because dropping capabilities for good requires one.
    if confinement.no_privileges { give_up_privileges() } else { Ok(()) }
}

fn change_identity(launch: &Launch) -> Result<(), c_int> {
    let (uid, gid) = (launch.uid as usize, launch.gid as usize);
    // SAFETY: plain system calls on numbers, and on a list that outlives the call.
    unsafe {
        call(libc::SYS_setgroups, [launch.groups.len(), address(launch.groups.as_ptr()), 0, 0, 0])?;
        call(libc::SYS_setresgid, [gid, gid, gid, 0, 0])?;
        // This makes the shared memory undumpable: the user's processes cannot access it through the child.
        call(libc::SYS_setresuid, [uid, uid, uid, 0, 0])?;
    }
    Ok(())
}

/// Returns only if all attempts failed.
fn execute(launch: &Launch) -> c_int {
    let (argv, envp) = (address(launch.argv.as_ptr()), address(launch.envp.as_ptr()));
    if let Some(index) = launch.file {
        let (file, empty) = (index.wrapping_add(number(FIRST_EXTRA)), address(c"".as_ptr()));
        let arguments = [file, empty, argv, envp, number(libc::AT_EMPTY_PATH)];
        // SAFETY: both lists end with a null pointer, all strings with a zero byte.
        return unsafe { call(libc::SYS_execveat, arguments) }.err().unwrap_or(libc::EIO);
    }
    let mut outcome = libc::ENOENT;
    for candidate in &launch.candidates {
        // SAFETY: as above.
        match unsafe { call(libc::SYS_execve, [address(candidate.as_ptr()), argv, envp, 0, 0]) } {
            Err(libc::ENOENT | libc::ENOTDIR) => {}
            // Like a shell: continue the search, but remember that there was a candidate.
            Err(libc::EACCES) => outcome = libc::EACCES,
            Err(other) => return other,
            Ok(_) => return libc::EIO,
        }
    }
    outcome
}

/// Programs executed from here on gain no privileges.
fn give_up_privileges() -> Result<(), c_int> {
    // SAFETY: plain system calls on numbers.
    let control = |option: c_int, value: usize| unsafe {
        call(libc::SYS_prctl, [number(option), value, 0, 0, 0]).map(drop)
    };
    control(libc::PR_SET_NO_NEW_PRIVS, 1)?;
    control(libc::PR_CAP_AMBIENT, number(libc::PR_CAP_AMBIENT_CLEAR_ALL))?;
    for capability in 0..u64::BITS as usize {
        match control(libc::PR_CAPBSET_DROP, capability) {
            // The first unknown capability ends the list; before it, every one must be dropped.
            Err(libc::EINVAL) if capability > 0 => return Ok(()),
            outcome => outcome?,
        }
    }
    Ok(())
}

/// Clears the permitted, effective and inheritable sets.
fn clear_capabilities() -> Result<(), c_int> {
    // Version 3 of the structure, for the calling thread; two halves of three sets.
    let header: [u32; 2] = [0x2008_0522, 0];
    let none = [0u32; 6];
    let arguments = [address(&raw const header), address(&raw const none), 0, 0, 0];
    // SAFETY: both arguments have the layout that this version prescribes, and outlive the call.
    unsafe { call(libc::SYS_capset, arguments).map(drop) }
}

/// The kernel's `struct mount_attr`.
#[repr(C)]
struct MountAttributes {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

/// Sets nosuid and nodev on every mount of this mount namespace. Device files under `/dev` stay usable.
pub fn limit_mounts(limits: MountLimits) -> io::Result<()> {
    set_mounts(limits).map_err(io::Error::from_raw_os_error)
}

fn set_mounts(limits: MountLimits) -> Result<(), c_int> {
    let everything = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
    // Private, so that changes here do not propagate.
    let all = MountAttributes { set: everything, clear: 0, propagation: libc::MS_PRIVATE, user_namespace: 0 };
    change_mount(c"/", number(libc::AT_RECURSIVE), &all)?;
    let devices = MountAttributes {
        set: libc::MOUNT_ATTR_NOEXEC,
        clear: libc::MOUNT_ATTR_NODEV,
        propagation: 0,
        user_namespace: 0,
    };
    for folder in [c"/dev", c"/dev/pts"] {
        // If the sandbox's root has unmounted it, there is nothing to relax.
        let _ = change_mount(folder, 0, &devices);
    }
    if limits.read_only_root {
        let root =
            MountAttributes { set: libc::MOUNT_ATTR_RDONLY, clear: 0, propagation: 0, user_namespace: 0 };
        change_mount(c"/", 0, &root)?;
    }
    Ok(())
}

fn change_mount(path: &CStr, flags: usize, attributes: &MountAttributes) -> Result<(), c_int> {
    let (here, size) = (number(libc::AT_FDCWD), size_of::<MountAttributes>());
    let arguments = [here, address(path.as_ptr()), flags, address(ptr::from_ref(attributes)), size];
    // SAFETY: the path ends with a zero byte, and the structure and its size belong together.
    unsafe { call(libc::SYS_mount_setattr, arguments).map(drop) }
}

/// Converts a number for a register.
fn number(value: c_int) -> usize {
    (value as isize).cast_unsigned()
}

/// Converts an address for a register.
fn address<T>(value: *const T) -> usize {
    value.expose_provenance()
}

/// Makes a system call with at most five arguments. Returns its result or error number.
///
/// # Safety
///
/// Addresses among the arguments must be of values that the call may read as the kernel reads them, and the
/// call must write none.
unsafe fn call(which: c_long, arguments: [usize; 5]) -> Result<usize, c_int> {
    let [first, second, third, fourth, fifth] = arguments;
    let outcome: c_long;
    // SAFETY: by the kernel's convention, only these registers change.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") which => outcome,
            in("rdi") first,
            in("rsi") second,
            in("rdx") third,
            in("r10") fourth,
            in("r8") fifth,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    usize::try_from(outcome).map_err(|_| c_int::try_from(outcome.wrapping_neg()).unwrap_or(libc::EIO))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_place_of_a_descriptor_overwrites_another() {
        let (error, input, file) = (io::stderr(), io::stdin(), std::fs::File::open("/dev/null").unwrap());
        let far = rustix::io::fcntl_dupfd_cloexec(&file, 100).unwrap();
        let wanted = [(error.as_fd(), false), (far.as_fd(), true), (input.as_fd(), false)];
        let (numbers, copies) = relocate(&wanted).unwrap();
        assert_eq!(copies.len(), 2);
        assert_eq!(numbers.len(), 3);
        assert_eq!(numbers[1], Placed { fd: far.as_raw_fd(), closed: true });
        assert!(numbers.iter().all(|placed| placed.fd >= 6) && numbers[0] != numbers[2]);
    }
    fn launch(path: &CStr) -> Child {
        let null = std::fs::File::open("/dev/null").unwrap();
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        let program = Program {
            executable: Executable::Paths(vec![path.to_owned()]),
            argv: vec![path.to_owned()],
            env: Vec::new(),
            cwd: c"/".to_owned(),
            uid,
            gid,
            groups: vec![gid],
            stdio: [null.as_fd(); 3],
            extra: &[],
            terminal: false,
            confinement: Confinement::default(),
        };
        start(program).unwrap()
    }

    fn reap(child: &Child) {
        let pid = i32::try_from(child.pid).ok().and_then(rustix::process::Pid::from_raw);
        rustix::process::waitpid(pid, rustix::process::WaitOptions::empty()).unwrap();
    }

    #[test]
    fn an_outcome_is_known_when_the_child_is_gone() {
        let mut child = launch(c"/nowhere/to/be/found");
        reap(&child);
        let (step, error) = child.outcome().unwrap().unwrap_err();
        assert_eq!((step, error.raw_os_error()), (Step::Exec, Some(libc::ENOENT)));
        assert!(child.outcome().is_none() && child.decided().is_none());
        let mut child = launch(c"/bin/true");
        reap(&child);
        assert!(child.outcome().unwrap().is_ok());
    }

    #[test]
    fn memory_of_a_child_that_is_not_of_interest_is_freed_when_it_is_gone() {
        let child = launch(c"/bin/true");
        let pid = Child { pid: child.pid, borrowed: None };
        drop(child);
        assert_eq!(ABANDONED.with_borrow(Vec::len), 1);
        reap(&pid);
        free_abandoned();
        assert_eq!(ABANDONED.with_borrow(Vec::len), 0);
    }
}
