//! Every `unsafe` block of this crate.

use std::arch::x86_64::__cpuid;
use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicU8, Ordering};

use bathy_devices::GuestRam;
use kvm_bindings::{KVM_NOTIFY_CONTEXT_INVALID, kvm_run, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::bitmap::BitmapSlice;
use vm_memory::{
    Address, GuestMemoryBackend, GuestMemoryRegion, ReadVolatile, VolatileMemoryError, VolatileSlice,
};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Takes over an opened `/dev/kvm`.
pub(crate) fn kvm(device: OwnedFd) -> Kvm {
    // SAFETY: the descriptor is open, ours, and given up by this very call. Whether it is KVM is asked right afterwards;
    // another file refuses KVM's requests.
    unsafe { Kvm::from_raw_fd(device.into_raw_fd()) }
}

/// A new event counter.
pub(crate) fn event() -> io::Result<EventFd> {
    EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)
}

/// The descriptor of an event counter, to be polled.
pub(crate) fn borrow(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor is open for as long as the counter is borrowed.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

/// The details of an internal error, which KVM provides right after it has reported one.
pub(crate) fn internal_error(cpu: &mut VcpuFd) -> u32 {
    // SAFETY: every field of the union is plain numbers, any bits of which are valid.
    unsafe { cpu.get_kvm_run().__bindgen_anon_1.internal.suberror }
}

/// Whether a guest that let no interrupt in lost its state by that, right after KVM has reported it.
pub(crate) fn is_beyond_help(cpu: &mut VcpuFd) -> bool {
    // SAFETY: every field of the union is plain numbers, any bits of which are valid.
    let flags = unsafe { cpu.get_kvm_run().__bindgen_anon_1.notify.flags };
    flags & KVM_NOTIFY_CONTEXT_INVALID != 0
}

/// Makes all of `ram` the guest's memory. The caller keeps `ram` for as long as the guest runs.
pub(crate) fn give_memory(vm: &VmFd, ram: &GuestRam) -> Result<(), kvm_ioctls::Error> {
    for (slot, region) in (0..).zip(ram.memory().iter()) {
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: region.start_addr().raw_value(),
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
        };
        // SAFETY: the range is one live shared mapping of the guest's memory file, which `ram` keeps; all code on our
        // side reaches it by volatile accesses only, so that the guest may write it at any time.
        unsafe { vm.set_user_memory_region(region)? };
    }
    Ok(())
}

/// The flag by which a thread that is about to enter the guest is asked to return at once.
///
/// It lies in memory that KVM shares with us, in the run structure of one virtual processor. This is a mapping of its
/// own, apart from the one that the processor's thread uses: nothing else here ever refers to these bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExitFlag(*const AtomicU8);

// SAFETY: what it points to is a single byte of shared memory that is only ever accessed atomically through it.
unsafe impl Send for ExitFlag {}
// SAFETY: as above.
unsafe impl Sync for ExitFlag {}

impl ExitFlag {
    /// The flag of `cpu`.
    pub(crate) fn of(cpu: &VcpuFd) -> io::Result<Self> {
        let (protection, length) = (libc::PROT_READ | libc::PROT_WRITE, size_of::<kvm_run>());
        // SAFETY: a new mapping at an address of the kernel's choice. It is never unmapped, and the structure begins with
        // the descriptor's first page, as KVM has it for every processor.
        let run = unsafe {
            libc::mmap(std::ptr::null_mut(), length, protection, libc::MAP_SHARED, cpu.as_raw_fd(), 0)
        };
        if run == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the place is inside the mapping that was just made.
        Ok(Self(unsafe { run.cast::<u8>().add(offset_of!(kvm_run, immediate_exit)).cast() }))
    }

    pub(crate) fn set(self, on: bool) {
        // SAFETY: the mapping exists until the process ends (see `of`), and a byte has no alignment to violate.
        unsafe { (*self.0).store(u8::from(on), Ordering::SeqCst) };
    }
}

/// Lets `signal` interrupt whatever a thread waits for, and do nothing else.
pub(crate) fn make_harmless(signal: i32) -> io::Result<()> {
    extern "C" fn nothing(_: i32) {}
    // SAFETY: a zeroed action is a valid one; the handler does nothing, which any handler may.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(i32) as usize;
        libc::sigaction(signal, &raw const action, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sends `signal` to one thread of this process.
pub(crate) fn interrupt(thread: i32, signal: i32) {
    // SAFETY: the call has no memory arguments. It fails only if the thread has exited, which no thread of ours does before.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, signal) };
}

/// Whether this machine is itself emulated by QEMU without help of hardware. Its description of the processor's
/// extended state is then inconsistent, and a guest that believed it would damage itself.
pub(crate) fn host_is_emulated() -> bool {
    const SIGNATURE: &[u8; 12] = b"TCGTCGTCGTCG";
    let answer = __cpuid(0x4000_0000);
    let words = [answer.ebx, answer.ecx, answer.edx];
    words.iter().flat_map(|word| word.to_le_bytes()).eq(SIGNATURE.iter().copied())
}

/// A file with a read position of its own: other processes that have it open move the shared one.
pub(crate) struct FileAt<'file> {
    pub(crate) file: &'file File,
    pub(crate) at: u64,
}

impl ReadVolatile for FileAt<'_> {
    fn read_volatile<B: BitmapSlice>(
        &mut self,
        buffer: &mut VolatileSlice<'_, B>,
    ) -> Result<usize, VolatileMemoryError> {
        let guard = buffer.ptr_guard_mut();
        let at = i64::try_from(self.at)
            .map_err(|_| VolatileMemoryError::IOError(io::ErrorKind::InvalidInput.into()))?;
        // SAFETY: the slice is as long as it says and stays mapped during the call; the kernel writes to it as any
        // racing process might.
        let count = unsafe { libc::pread(self.file.as_raw_fd(), guard.as_ptr().cast(), buffer.len(), at) };
        match usize::try_from(count) {
            Ok(count) => {
                self.at += count as u64;
                Ok(count)
            }
            Err(_) => Err(VolatileMemoryError::IOError(io::Error::last_os_error())),
        }
    }
}
