//! Memory that the gateway shares with its owner.

#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::OwnedFd;
use std::ptr;
use std::slice;
use std::sync::atomic::AtomicU64;

use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap};

/// Maps a file of memory as words, for the rest of the process's life. The descriptor is closed.
///
/// # Errors
/// When the file can be made shorter or is shorter than a word, or mapping fails.
pub fn map_words(file: OwnedFd) -> io::Result<&'static [AtomicU64]> {
    if !fcntl_get_seals(&file)?.contains(SealFlags::SHRINK) {
        return Err(io::Error::other("the file can be made shorter, and a write would then be fatal"));
    }
    let length = usize::try_from(fstat(&file)?.st_size).map_err(io::Error::other)?;
    let words = length / size_of::<AtomicU64>();
    // SAFETY: a new mapping at an address that the kernel chooses; nothing that exists is replaced.
    let start = unsafe {
        mmap(ptr::null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0)?
    };
    // SAFETY: the mapping has `length` bytes, of which this uses whole words; it begins at a page, and so is aligned; it is
    // never unmapped, and the seal keeps the file as long as it is. Any bit pattern is a word. Another process that has the file may
    // change it at any time, which atomics allow.
    Ok(unsafe { slice::from_raw_parts(start.cast::<AtomicU64>(), words) })
}
