//! The guest's memory: one sealed memory file, mapped once.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::io::Errno;
use thiserror::Error;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

use crate::sys::{self, Mapping};

/// Guest-physical memory as devices see it.
pub type GuestMemory = GuestMemoryMmap<()>;

/// Where no memory reaches.
const NO_HOLE: Range<u64> = u64::MAX..u64::MAX;

/// Guest memory could not be made or taken over.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// A size of zero, or one that is no multiple of a page.
    #[error("Guest memory of {0} bytes is not a positive multiple of 4096")]
    Size(u64),
    /// The memory file could not be made.
    #[error("Cannot make a memory file for the guest")]
    Create(#[source] io::Error),
    /// The memory file could be shrunk while it is mapped, which would kill this process.
    #[error("The guest's memory file is not sealed against changes of its size")]
    NotSealed,
    /// The file could not be mapped.
    #[error("Cannot map the guest's memory")]
    Map(#[source] io::Error),
}

/// The guest's whole memory, starting at guest-physical address zero, with at most one hole in its addresses.
///
/// The guest holds the same file. Its size is sealed, so that a hostile guest cannot truncate it under our mapping
/// and end this process with a bus error.
#[derive(Debug)]
pub struct GuestRam {
    file: Arc<File>,
    memory: GuestMemory,
    /// What `memory` points to, each with its first address in the guest.
    mappings: Vec<(u64, Mapping)>,
    size: u64,
    identity: (u64, u64),
}

impl GuestRam {
    const PAGE: u64 = 4096;
    const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

    /// Makes memory of `size` bytes; nothing of it is occupied until it is touched.
    ///
    /// # Errors
    /// When the size is not usable, or the host refuses.
    pub fn create(size: u64) -> Result<Self, MemoryError> {
        Self::create_around(size, NO_HOLE)
    }

    /// Makes memory of `size` bytes, none of it at the addresses of `hole`: what does not fit below is above it.
    ///
    /// # Errors
    /// As for [`create`](Self::create).
    pub fn create_around(size: u64, hole: Range<u64>) -> Result<Self, MemoryError> {
        if size == 0 || !size.is_multiple_of(Self::PAGE) {
            return Err(MemoryError::Size(size));
        }
        let fd = Self::create_file().map_err(|e| MemoryError::Create(e.into()))?;
        ftruncate(&fd, size).map_err(|e| MemoryError::Create(e.into()))?;
        fcntl_add_seals(&fd, Self::SEALS).map_err(|e| MemoryError::Create(e.into()))?;
        Self::map(fd, &hole)
    }

    /// Maps a memory file that another process made and sealed.
    ///
    /// # Errors
    /// When the file's size can still be changed, is not usable, or mapping fails.
    pub fn adopt(fd: OwnedFd) -> Result<Self, MemoryError> {
        Self::map(fd, &NO_HOLE)
    }

    fn map(fd: OwnedFd, hole: &Range<u64>) -> Result<Self, MemoryError> {
        let seals = fcntl_get_seals(&fd).map_err(|_| MemoryError::NotSealed)?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(MemoryError::NotSealed);
        }
        let stat = fstat(&fd).map_err(|e| MemoryError::Map(e.into()))?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if size == 0 || !size.is_multiple_of(Self::PAGE) {
            return Err(MemoryError::Size(size));
        }
        let file = Arc::new(File::from(fd));
        let below = size.min(hole.start);
        let mut parts = vec![(0, 0, below)];
        if below < size {
            parts.push((hole.end, below, size - below));
        }
        let (mut regions, mut mappings) = (Vec::new(), Vec::new());
        for (start, offset, size) in parts {
            let (region, mapping) = Self::map_part(&file, start, offset, size)?;
            regions.push(region);
            mappings.push((start, mapping));
        }
        let memory = GuestMemory::from_regions(regions).map_err(|e| MemoryError::Map(io::Error::other(e)))?;
        Ok(Self { file, memory, mappings, size, identity: (stat.st_dev, stat.st_ino) })
    }

    /// Maps `size` bytes of the file from `offset` on, as memory at the guest's address `start`.
    fn map_part(
        file: &Arc<File>,
        start: u64,
        offset: u64,
        size: u64,
    ) -> Result<(GuestRegionMmap<()>, Mapping), MemoryError> {
        let length = usize::try_from(size).map_err(|_| MemoryError::Size(size))?;
        let mapping = Mapping::new(file, offset, length).map_err(MemoryError::Map)?;
        let place = FileOffset::from_arc(Arc::clone(file), offset);
        let region = mapping.region(place).map_err(|e| MemoryError::Map(io::Error::other(e)))?;
        sys::exclude_from_dumps(&region).map_err(MemoryError::Map)?;
        let region = GuestRegionMmap::new(region, GuestAddress(start)).ok_or(MemoryError::Size(size))?;
        Ok((region, mapping))
    }

    fn create_file() -> rustix::io::Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Sealed against execution where the host's kernel knows how (6.3): the guest's memory is no program.
        match memfd_create("guest-ram", flags | MemfdFlags::NOEXEC_SEAL) {
            Err(Errno::INVAL) => memfd_create("guest-ram", flags),
            result => result,
        }
    }

    /// The memory as devices use it.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// The memory file, to be handed to the guest.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The memory file, to be read and written by its own offsets.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// How many bytes of the memory are occupied on the host.
    pub fn occupied(&self) -> u64 {
        fstat(&self.file).map_or(0, |stat| u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512))
    }

    /// Has the host use large pages for what lies in `range`, if it can: for memory that is about to be used, and that the
    /// guest does not have yet. The guest then finds it there, without a fault for each page.
    pub fn use_large_pages(&self, range: Range<u64>) {
        for (start, mapping) in &self.mappings {
            let place = |address: u64| usize::try_from(address.saturating_sub(*start)).unwrap_or(usize::MAX);
            mapping.use_large_pages(place(range.start)..place(range.end));
        }
    }

    /// The memory's size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether `fd` is this very memory file, however it reached us.
    pub fn is_same_file(&self, fd: impl AsFd) -> bool {
        fstat(fd).is_ok_and(|stat| (stat.st_dev, stat.st_ino) == self.identity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    use vm_memory::{Bytes, GuestMemoryBackend};

    #[test]
    fn memory_is_shared_through_the_descriptor() {
        let ram = GuestRam::create(1 << 20).unwrap();
        rustix::io::pwrite(ram.fd(), b"hello", 4096).unwrap();

        let mut seen = [0; 5];
        ram.memory().read_slice(&mut seen, GuestAddress(4096)).unwrap();

        assert_eq!(&seen, b"hello");
        assert_eq!(ram.size(), 1 << 20);
    }

    #[test]
    fn v3_guest_cannot_shrink_or_grow_its_memory_file() {
        let ram = GuestRam::create(1 << 20).unwrap();
        let guests = ram.fd().try_clone_to_owned().unwrap();

        assert_eq!(ftruncate(&guests, 0), Err(Errno::PERM));
        assert_eq!(ftruncate(&guests, 1 << 21), Err(Errno::PERM));
        assert_eq!(fcntl_add_seals(&guests, SealFlags::WRITE), Err(Errno::PERM));
    }

    #[test]
    fn memory_file_is_closed_in_programs_that_this_process_starts() {
        let ram = GuestRam::create(4096).unwrap();
        let flags = rustix::io::fcntl_getfd(ram.fd()).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC), "{flags:?}");
    }

    #[test]
    fn guest_code_can_be_mapped_for_execution() {
        let ram = GuestRam::create(1 << 20).unwrap();
        // SAFETY: a fresh mapping at an address of the kernel's choice, never dereferenced.
        let address = unsafe {
            mmap(std::ptr::null_mut(), 4096, ProtFlags::READ | ProtFlags::EXEC, MapFlags::SHARED, ram.fd(), 0)
        };

        let address = address.unwrap();
        // SAFETY: unmaps exactly what was mapped above.
        unsafe { munmap(address, 4096) }.unwrap();
    }

    #[test]
    fn memory_is_laid_out_around_a_hole() {
        let ram = GuestRam::create_around(3 << 20, 1 << 20..4 << 20).unwrap();
        rustix::io::pwrite(ram.fd(), b"above", 1 << 20).unwrap();

        let mut seen = [0; 5];
        ram.memory().read_slice(&mut seen, GuestAddress(4 << 20)).unwrap();

        assert_eq!(&seen, b"above");
        assert!(ram.memory().read_slice(&mut seen, GuestAddress(1 << 20)).is_err());
        assert!(ram.memory().read_slice(&mut seen, GuestAddress((6 << 20) - 4)).is_err());
        assert_eq!(GuestRam::create_around(1 << 20, 1 << 20..4 << 20).unwrap().memory().num_regions(), 1);
    }

    #[test]
    fn large_pages_change_no_byte_and_reach_no_further_than_asked() {
        let ram = GuestRam::create_around(64 << 20, 32 << 20..1 << 32).unwrap();
        rustix::io::pwrite(ram.fd(), b"same", 4 << 20).unwrap();
        ram.use_large_pages(3 << 20..9 << 20);
        // Two of them lie wholly in there, if the host makes any; otherwise one page of each was touched.
        let occupied = ram.occupied();
        assert!(occupied == 4 << 20 || occupied == 2 * 4096, "{occupied}");
        let mut seen = [0; 4];
        ram.memory().read_slice(&mut seen, GuestAddress(4 << 20)).unwrap();
        assert_eq!(&seen, b"same");
        ram.use_large_pages(u64::MAX - 5..u64::MAX);
        ram.use_large_pages(0..4096);
        assert_eq!(ram.occupied(), occupied);
        ram.use_large_pages(1 << 32..(1 << 32) + (2 << 20));
        assert!(ram.occupied() > occupied, "above the hole too");
    }

    #[test]
    fn large_pages_are_made_of_nothing_before_or_behind_the_range() {
        let ram = GuestRam::create(32 << 20).unwrap();
        // One page each right before and right behind what lies wholly in the range.
        rustix::io::pwrite(ram.fd(), b"before", 2 << 20).unwrap();
        rustix::io::pwrite(ram.fd(), b"behind", 8 << 20).unwrap();
        let before = ram.occupied();
        ram.use_large_pages(3 << 20..9 << 20);
        let occupied = ram.occupied() - before;
        assert!(occupied == 4 << 20 || occupied == 2 * 4096, "{occupied}");
    }

    #[test]
    fn odd_sizes_are_refused() {
        assert!(matches!(GuestRam::create(0), Err(MemoryError::Size(0))));
        assert!(matches!(GuestRam::create(4097), Err(MemoryError::Size(4097))));
    }

    #[test]
    fn adopting_an_unsealed_file_is_refused() {
        let fd = memfd_create("unsealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, 4096).unwrap();
        assert!(matches!(GuestRam::adopt(fd), Err(MemoryError::NotSealed)));
    }

    /// A memory file of `size` bytes with these seals, as another process makes it.
    fn sealed_file(size: u64, seals: SealFlags) -> OwnedFd {
        let fd = memfd_create("other", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, size).unwrap();
        fcntl_add_seals(&fd, seals).unwrap();
        fd
    }

    #[test]
    fn adopted_file_is_the_memory_whole() {
        let fd = sealed_file(8192, SealFlags::SHRINK | SealFlags::GROW);
        let theirs = fd.try_clone().unwrap();
        let ram = GuestRam::adopt(fd).unwrap();
        assert_eq!((ram.size(), ram.is_same_file(&theirs)), (8192, true));
        rustix::io::pwrite(&theirs, b"end", 8192 - 3).unwrap();
        let mut seen = [0; 3];
        ram.memory().read_slice(&mut seen, GuestAddress(8192 - 3)).unwrap();
        assert_eq!(&seen, b"end");
    }

    #[test]
    fn adopting_a_file_that_can_still_shrink_or_grow_is_refused() {
        for seals in [SealFlags::SHRINK, SealFlags::GROW] {
            let adopted = GuestRam::adopt(sealed_file(4096, seals));
            assert!(matches!(adopted, Err(MemoryError::NotSealed)), "{seals:?}");
        }
        // A file on a disk cannot be sealed at all.
        let adopted = GuestRam::adopt(tempfile::tempfile().unwrap().into());
        assert!(matches!(adopted, Err(MemoryError::NotSealed)));
    }

    #[test]
    fn adopting_a_file_of_odd_size_is_refused() {
        for size in [0, 100, 4097] {
            let adopted = GuestRam::adopt(sealed_file(size, SealFlags::SHRINK | SealFlags::GROW));
            assert!(matches!(adopted, Err(MemoryError::Size(seen)) if seen == size), "{size}");
        }
    }

    /// What the host's kernel lists about this process's mappings of a memory file, which has a number of its own.
    fn mappings_of(file: u64) -> Vec<String> {
        let listed = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut found = Vec::new();
        let mut inside = false;
        for line in listed.lines() {
            // Each mapping starts with a line of its addresses, and has the number of its file in that.
            let fields: Vec<&str> = line.split_whitespace().collect();
            if fields.first().is_some_and(|first| first.contains('-')) {
                inside = fields.get(4) == Some(&file.to_string().as_str()) && line.contains("guest-ram");
            } else if inside && line.starts_with("VmFlags:") {
                found.push(format!("{line} "));
            }
        }
        found
    }

    #[test]
    fn memory_is_left_out_of_core_dumps_and_unmapped_at_the_end() {
        let ram = GuestRam::create_around(4 << 20, 1 << 20..4 << 20).unwrap();
        let (_, file) = ram.identity;
        let flags = mappings_of(file);
        assert_eq!(flags.len(), 2, "below the hole and above it");
        assert!(flags.iter().all(|flags| flags.contains(" dd ")), "{flags:?}");
        drop(ram);
        assert_eq!(mappings_of(file), [""; 0]);
    }

    #[test]
    fn only_the_same_file_counts_as_the_same() {
        let ram = GuestRam::create(4096).unwrap();
        let other = GuestRam::create(4096).unwrap();
        assert!(ram.is_same_file(ram.fd().try_clone_to_owned().unwrap()));
        assert!(!ram.is_same_file(other.fd()));
    }
}
