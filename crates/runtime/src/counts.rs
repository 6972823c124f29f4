//! Shared memory in which a gateway counts the bytes of its connections. It is created here, written by the
//! gateway and read here when the gateway has died. The gateway may be compromised, so this process never
//! maps it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use bathy_protocol::counts;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, memfd_create};
use rustix::io::Errno;

/// The counters of one gateway.
#[derive(Debug)]
pub struct ByteCounters {
    file: File,
    size: usize,
}

impl ByteCounters {
    /// Allocates counters for so many connections.
    ///
    /// # Errors
    /// The host has no memory for them.
    pub fn new(connections: u32) -> io::Result<Self> {
        let size = counts::size(connections);
        let file = File::from(create_file()?);
        // Allocated completely: a page fault that cannot be served would kill the gateway.
        fallocate(&file, FallocateFlags::empty(), 0, u64::try_from(size).map_err(io::Error::other)?)?;
        // Sealed so that it can neither shrink under the gateway nor be grown by it.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self { file, size })
    }

    /// The descriptor for the gateway.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// A copy of the counters.
    ///
    /// # Errors
    /// Reading fails.
    pub fn read(&self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; self.size];
        self.file.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    }
}

fn create_file() -> rustix::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Sealed against execution where the host's kernel supports that (6.3).
    match memfd_create("gateway-counts", flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => memfd_create("gateway-counts", flags),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn n9_the_memory_of_a_gateway_has_a_fixed_size_and_all_of_its_pages() {
        let counts = ByteCounters::new(1024).unwrap();
        let gateways = File::from(counts.fd().try_clone_to_owned().unwrap());
        for size in [0, 24 * 1024 - 1, 24 * 1024 + 1, 1 << 30] {
            assert!(gateways.set_len(size).is_err(), "{size}");
        }
        assert!(gateways.write_all_at(&[1; 2], 24 * 1024 - 1).is_err(), "not beyond its end");
        assert_eq!(fcntl_add_seals(&gateways, SealFlags::WRITE), Err(Errno::PERM));
        assert!(rustix::fs::fstat(&gateways).unwrap().st_blocks * 512 >= 24 * 1024);
        gateways.write_all_at(&[7; 8], 24 * 1024 - 8).unwrap();
        let bytes = counts.read().unwrap();
        assert_eq!((bytes.len(), &bytes[24 * 1024 - 9..]), (24 * 1024, &[0, 7, 7, 7, 7, 7, 7, 7, 7][..]));
    }
}
