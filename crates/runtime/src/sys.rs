//! The unsafe code of this crate: locks and system calls without a safe wrapper, and memory for the probe
//! guest.

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Locks one byte of `file` exclusively, unless it is locked. The lock belongs to the open file description
/// and is released with its last descriptor, in whatever process.
pub(crate) fn lock_byte(file: &File, byte: u64) -> io::Result<bool> {
    set_lock(file, byte, WRITE_LOCK)
}

/// Takes a shared lock, for a read-only descriptor. Several can share the byte, but not with [`lock_byte`].
/// An exclusive lock of the same open file description is downgraded.
pub(crate) fn share_byte(file: &File, byte: u64) -> io::Result<bool> {
    set_lock(file, byte, READ_LOCK)
}

fn set_lock(file: &File, byte: u64, kind: i16) -> io::Result<bool> {
    let range = lock(kind, i64::try_from(byte).map_err(io::Error::other)?, 1);
    // SAFETY: the argument is a valid `flock` for the duration of the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) } {
        0 => Ok(true),
        _ => match io::Error::last_os_error() {
            error if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
            error => Err(error),
        },
    }
}

/// How many of the first `length` bytes of `file` are locked by other open file descriptions, each by
/// [`lock_byte`].
pub(crate) fn count_locked_bytes(file: &File, length: u64) -> io::Result<u32> {
    let mut count = 0;
    // The kernel reports any one of several locks, so both sides of it are searched.
    let mut ranges = vec![(0, i64::try_from(length).map_err(io::Error::other)?)];
    while let Some((begin, end)) = ranges.pop() {
        let Some(locked) = locked_within(file, begin, end)? else { continue };
        count += 1;
        ranges.extend([(begin, locked), (locked + 1, end)]);
    }
    Ok(count)
}

/// A byte of this range that is locked by another open file description.
fn locked_within(file: &File, begin: i64, end: i64) -> io::Result<Option<i64>> {
    if begin >= end {
        return Ok(None);
    }
    let mut range = lock(WRITE_LOCK, begin, end - begin);
    // SAFETY: the argument is a valid `flock` for the duration of the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut range) } {
        0 if range.l_type == UNLOCKED => Ok(None),
        0 => Ok(Some(range.l_start.clamp(begin, end - 1))),
        _ => Err(io::Error::last_os_error()),
    }
}

fn lock(kind: i16, begin: i64, length: i64) -> libc::flock {
    // SAFETY: `flock` is plain data, for which zero is a valid value of every field.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = kind;
    range.l_whence = FROM_START;
    range.l_start = begin;
    range.l_len = length;
    range
}

/// Runs work that starts a thread, with all signals blocked: the main thread handles signals where it waits
/// for them.
pub(crate) fn apart_from_signals<R>(work: impl FnOnce() -> R) -> R {
    // SAFETY: both sets are initialized before use, by sigfillset and by the first call; masks are of this thread alone.
    unsafe {
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::sigemptyset(&raw mut before);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, &raw mut before);
        let result = work();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
        result
    }
}

/// Makes the kernel honour all fields of a routing request, such as the table.
pub(crate) fn set_strict_requests(socket: &OwnedFd) -> io::Result<()> {
    let on: c_int = 1;
    let length = libc::socklen_t::try_from(size_of::<c_int>()).map_err(io::Error::other)?;
    // SAFETY: the value is an integer of the given size for the duration of the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_NETLINK,
            STRICT_REQUESTS,
            (&raw const on).cast::<c_void>(),
            length,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The socket option `NETLINK_GET_STRICT_CHK`.
const STRICT_REQUESTS: c_int = 12;

/// `F_RDLCK`, `F_WRLCK`, `F_UNLCK` and `SEEK_SET` in the width of `flock`'s fields.
const READ_LOCK: i16 = 0;
const WRITE_LOCK: i16 = 1;
const UNLOCKED: i16 = 2;
const FROM_START: i16 = 0;

/// One page of memory for a guest.
pub(crate) struct GuestPage {
    address: *mut c_void,
}

impl GuestPage {
    pub const SIZE: u64 = 4096;
    const LENGTH: usize = 4096;

    /// A page of zeros.
    pub fn new() -> io::Result<Self> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a fresh anonymous mapping overlaps nothing.
        let address = unsafe { mmap_anonymous(ptr::null_mut(), Self::LENGTH, protection, flags)? };
        Ok(Self { address })
    }

    /// Copies `bytes`, as far as they fit, to the start of the page.
    pub fn write(&mut self, bytes: &[u8]) {
        let length = bytes.len().min(Self::LENGTH);
        // SAFETY: the page is ours, `length` bytes long at least, and no guest has it yet.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.address.cast(), length) };
    }

    pub fn address(&self) -> u64 {
        self.address.addr() as u64
    }

    /// Maps the page into a guest. It must outlive the guest, which it does as long as the caller holds both.
    pub(crate) fn give_to(
        &self,
        vm: &VmFd,
        region: kvm_userspace_memory_region,
    ) -> Result<(), kvm_ioctls::Error> {
        // SAFETY: the region describes this page, which is mapped until it is dropped.
        unsafe { vm.set_user_memory_region(region) }
    }
}

impl Drop for GuestPage {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and has no other users. Unmapping a valid mapping does not fail.
        let _ = unsafe { munmap(self.address, Self::LENGTH) };
    }
}

/// The version of Landlock that the kernel offers, if any.
pub(crate) fn landlock_version() -> Option<u32> {
    const VERSION_REQUEST: libc::c_uint = 1;
    // SAFETY: with this flag the call takes no attributes and only answers.
    let version = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, ptr::null::<c_void>(), 0, VERSION_REQUEST)
    };
    u32::try_from(version).ok()
}

/// Whether the processor supports virtualization; true if that cannot be determined.
pub(crate) fn processor_offers_virtualization() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::__cpuid;
        const VMX: u32 = 1 << 5;
        const EXTENDED: u32 = 0x8000_0000;
        const SVM: u32 = 1 << 2;
        let svm = || __cpuid(EXTENDED).eax > EXTENDED && __cpuid(EXTENDED + 1).ecx & SVM != 0;
        __cpuid(1).ecx & VMX != 0 || svm()
    }
    #[cfg(not(target_arch = "x86_64"))]
    true
}
