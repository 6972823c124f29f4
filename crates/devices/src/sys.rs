//! Every `unsafe` block of this crate.

use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::os::fd::AsRawFd;

use vm_memory::{MmapRegion, VolatileSlice};

/// The most pieces of guest memory that one transfer can be spread over: the data of the longest block request, and a
/// few more for buffers that cross from one memory region into the next.
pub(crate) const MAX_PIECES: usize = 136;

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

    /// Adds a piece; `false` when there is no room for another one.
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
