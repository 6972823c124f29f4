//! Every `unsafe` block of this crate.

#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::os::fd::AsRawFd;

use vm_memory::mmap::{MmapRegionBuilder, MmapRegionError};
use vm_memory::{FileOffset, MmapRegion, VolatileSlice};

/// The most pieces of guest memory that one transfer can be spread over: the data of the longest block request, and a
/// few more for buffers that cross from one memory region into the next.
pub(crate) const MAX_PIECES: usize = 136;

/// What the host's processor can map at once, besides single pages.
pub(crate) const LARGE: usize = 2 << 20;

/// `madvise`: make large pages of what is there, and of the gaps in it (Linux 6.1).
const MADV_COLLAPSE: libc::c_int = 25;

/// A shared mapping of a part of a file, at an address where the host can use large pages for it.
#[derive(Debug)]
pub(crate) struct Mapping {
    address: *mut u8,
    length: usize,
}

// SAFETY: it only owns addresses; whatever accesses them does so as memory that is shared anyway.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes of `file` from `offset` on.
    pub(crate) fn new(file: &File, offset: u64, length: usize) -> io::Result<Self> {
        let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
        let reserved = length.checked_add(LARGE).ok_or(io::ErrorKind::OutOfMemory)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice, which nothing can be accessed through.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), reserved, libc::PROT_NONE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let before = (base as usize).next_multiple_of(LARGE) - base as usize;
        let address = base.cast::<u8>().wrapping_add(before);
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, MAPPING_FLAGS | libc::MAP_FIXED);
        // SAFETY: the range lies inside the one that was just reserved, and replaces a part of it; what is left over of
        // the reservation on both sides is given back, and nothing else has its address.
        let mapped = unsafe {
            let mapped = libc::mmap(address.cast(), length, protection, flags, file.as_raw_fd(), offset);
            if mapped == libc::MAP_FAILED {
                let error = io::Error::last_os_error();
                libc::munmap(base, reserved);
                return Err(error);
            }
            if before > 0 {
                libc::munmap(base, before);
            }
            libc::munmap(address.wrapping_add(length.next_multiple_of(PAGE)).cast(), LARGE - before);
            mapped
        };
        Ok(Self { address: mapped.cast(), length })
    }

    /// The same as a region of guest memory. The mapping has to outlive it.
    pub(crate) fn region(&self, place: FileOffset) -> Result<MmapRegion<()>, MmapRegionError> {
        let builder = MmapRegionBuilder::new(self.length)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(MAPPING_FLAGS)
            .with_file_offset(place);
        // SAFETY: the address is that of a live mapping of this length.
        unsafe { builder.with_raw_mmap_pointer(self.address) }.build()
    }

    /// Has the host use large pages for all that lies wholly in `range`, if it can. They are occupied from then on.
    pub(crate) fn use_large_pages(&self, range: std::ops::Range<usize>) {
        let end = range.end.min(self.length) / LARGE * LARGE;
        let Some(start) = range.start.checked_next_multiple_of(LARGE).filter(|start| *start < end) else {
            return;
        };
        for at in (start..end).step_by(LARGE) {
            // SAFETY: the place is inside the mapping. What is there already stays as it is: a byte is written back that
            // was just read, before this memory is shared. A page that is not there at all would not be made larger.
            unsafe {
                let place = self.address.add(at);
                place.write_volatile(place.read_volatile());
            }
        }
        // SAFETY: the range is inside the mapping, and no byte of it changes. A host that cannot do it refuses.
        unsafe { libc::madvise(self.address.add(start).cast(), end - start, MADV_COLLAPSE) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly what `new` mapped; regions that point to it have been dropped.
        unsafe { libc::munmap(self.address.cast(), self.length) };
    }
}

const MAPPING_FLAGS: libc::c_int = libc::MAP_SHARED | libc::MAP_NORESERVE;
const PAGE: usize = 4096;

/// Keeps a mapping out of core dumps: guest memory is large, and not ours to write to a disk.
pub(crate) fn exclude_from_dumps(region: &MmapRegion<()>) -> io::Result<()> {
    // SAFETY: the range is exactly one live mapping owned by `region`, and MADV_DONTDUMP changes no byte of it.
    let result = unsafe { libc::madvise(region.as_ptr().cast(), region.size(), libc::MADV_DONTDUMP) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Pieces of guest memory that one vectored system call reads into or writes from.
///
/// Raw vectors are used because the guest may write to the same bytes at any time: a Rust slice over them would claim
/// otherwise. The kernel copies to and from them as it would for any racing process.
pub(crate) struct Pieces<'mem> {
    vectors: [libc::iovec; MAX_PIECES],
    start: usize,
    end: usize,
    bytes: usize,
    memory: PhantomData<VolatileSlice<'mem>>,
}

impl<'mem> Pieces<'mem> {
    pub(crate) fn new() -> Self {
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Self { vectors: [empty; MAX_PIECES], start: 0, end: 0, bytes: 0, memory: PhantomData }
    }

    /// Adds a piece; `false` when the list is full.
    #[must_use]
    pub(crate) fn push(&mut self, slice: &VolatileSlice<'mem>) -> bool {
        let Some(vector) = self.vectors.get_mut(self.end) else { return false };
        *vector = libc::iovec { iov_base: slice.ptr_guard_mut().as_ptr().cast(), iov_len: slice.len() };
        self.end += 1;
        self.bytes = self.bytes.saturating_add(slice.len());
        true
    }

    /// How many bytes are still to be moved.
    pub(crate) fn remaining(&self) -> usize {
        self.bytes
    }

    /// Fills the pieces from the file, through interruptions and short reads.
    pub(crate) fn read_from(&mut self, file: &File, offset: u64) -> io::Result<()> {
        self.transfer(offset, |vectors, count, at| {
            // SAFETY: the first `count` vectors describe memory that was borrowed as volatile slices for 'mem, which
            // outlives this call; the kernel is the only one to write through them here.
            unsafe { libc::preadv(file.as_raw_fd(), vectors, count, at) }
        })
    }

    /// Writes the pieces to the file, through interruptions and short writes.
    pub(crate) fn write_to(&mut self, file: &File, offset: u64) -> io::Result<()> {
        self.transfer(offset, |vectors, count, at| {
            // SAFETY: as in `read_from`; the kernel only reads through the vectors.
            unsafe { libc::pwritev(file.as_raw_fd(), vectors, count, at) }
        })
    }

    fn transfer(
        &mut self,
        mut offset: u64,
        call: impl Fn(*const libc::iovec, libc::c_int, libc::off_t) -> isize,
    ) -> io::Result<()> {
        while self.bytes > 0 {
            let active = self.vectors.get(self.start..self.end).unwrap_or_default();
            let count = libc::c_int::try_from(active.len()).map_err(io::Error::other)?;
            let at = libc::off_t::try_from(offset).map_err(io::Error::other)?;
            match usize::try_from(call(active.as_ptr(), count, at)) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(moved) => {
                    self.advance(moved);
                    offset = offset.saturating_add(moved as u64);
                }
                Err(_) => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }

    fn advance(&mut self, mut moved: usize) {
        self.bytes = self.bytes.saturating_sub(moved);
        for vector in self.vectors.get_mut(self.start..self.end).unwrap_or_default() {
            if moved < vector.iov_len {
                vector.iov_base = vector.iov_base.cast::<u8>().wrapping_add(moved).cast();
                vector.iov_len -= moved;
                return;
            }
            moved -= vector.iov_len;
            self.start += 1;
        }
    }
}
