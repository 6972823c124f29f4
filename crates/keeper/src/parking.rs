//! A parked guest: it is paused, and its memory may be moved to a file on the host's disk to free the host's memory.
//!
//! Memory is moved only while the guest is frozen. All of it is written before any is freed, so a failure loses nothing.

use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bathy_devices::GuestRam;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;

const CHUNK: usize = 1024 * 1024;

/// What parking a guest needs.
pub struct Parking {
    ram: Arc<GuestRam>,
    /// Where the memory of a persistent sandbox is moved to.
    file: Option<File>,
    /// What is waited for while the guest is parked.
    epoll: OwnedFd,
}

impl Parking {
    /// A guest that is not parked. `epoll` watches nothing yet.
    pub fn new(ram: Arc<GuestRam>, file: Option<File>, epoll: OwnedFd) -> Self {
        Self { ram, file, epoll }
    }

    /// Waits for `fd` too while the guest is parked.
    pub fn watch(&self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(token), EventFlags::IN)?)
    }

    /// What is waited for while the guest is parked.
    pub fn epoll(&self) -> &OwnedFd {
        &self.epoll
    }

    /// How many bytes of the guest's memory are occupied.
    pub fn occupied_memory(&self) -> u64 {
        self.ram.occupied()
    }

    /// Moves the guest's memory to the file; returns how many bytes that were, or the reason why nothing was moved.
    pub fn move_out(&self) -> Result<u64, String> {
        let file = self.file.as_ref().ok_or("this sandbox is not persistent")?;
        move_out(&self.ram, file).map_err(|error| error.to_string())
    }

    /// Moves the guest's memory back from the file.
    pub fn move_back(&self) -> io::Result<u64> {
        self.file.as_ref().map_or(Ok(0), |file| move_back(&self.ram, file))
    }
}

/// Moves all of `ram` that is occupied to `file`; returns how many bytes that were.
fn move_out(ram: &GuestRam, file: &File) -> io::Result<u64> {
    let memory = ram.file();
    let moved = copy(ram.fd(), ram.size(), |at, buffer| {
        memory.read_exact_at(buffer, at)?;
        file.write_all_at(buffer, at)
    });
    match moved {
        Ok(moved) => {
            free(ram.fd(), ram.size())?;
            Ok(moved)
        }
        Err(error) => {
            // The guest's memory is untouched; half a copy of it is of no use.
            let _ = free(file, ram.size());
            Err(error)
        }
    }
}

/// Moves the content of `file` back to `ram`.
fn move_back(ram: &GuestRam, file: &File) -> io::Result<u64> {
    let memory = ram.file();
    let moved = copy(file, ram.size(), |at, buffer| {
        file.read_exact_at(buffer, at)?;
        memory.write_all_at(buffer, at)
    })?;
    free(file, ram.size())?;
    Ok(moved)
}

/// Calls `work` for every chunk of `source` that is not a hole.
fn copy(
    source: impl std::os::fd::AsFd,
    size: u64,
    mut work: impl FnMut(u64, &mut [u8]) -> io::Result<()>,
) -> io::Result<u64> {
    let mut buffer = vec![0u8; CHUNK];
    let (mut at, mut moved) = (0, 0);
    while at < size {
        at = match seek(&source, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = seek(&source, SeekFrom::Hole(at))?.min(size);
        while at < end {
            let length = usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK);
            work(at, buffer.get_mut(..length).unwrap_or_default())?;
            at += length as u64;
            moved += length as u64;
        }
    }
    Ok(moved)
}

fn free(file: impl std::os::fd::AsFd, size: u64) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(fallocate(file, flags, 0, size)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn occupied(ram: &GuestRam) -> u64 {
        u64::try_from(rustix::fs::fstat(ram.fd()).unwrap().st_blocks).unwrap() * 512
    }

    #[test]
    fn memory_goes_to_the_file_and_comes_back() {
        let ram = GuestRam::create(64 << 20).unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(64 << 20).unwrap();
        ram.file().write_all_at(&[7; 3 << 20], 5 << 20).unwrap();
        assert!(occupied(&ram) >= 3 << 20);
        let moved = move_out(&ram, &file).unwrap();
        assert!(moved >= 3 << 20);
        assert_eq!(occupied(&ram), 0);
        assert_eq!(move_back(&ram, &file).unwrap(), moved);
        let mut back = vec![0; 3 << 20];
        ram.file().read_exact_at(&mut back, 5 << 20).unwrap();
        assert!(back.iter().all(|byte| *byte == 7));
    }

    #[test]
    fn nothing_is_lost_when_the_file_takes_nothing() {
        let ram = GuestRam::create(64 << 20).unwrap();
        ram.file().write_all_at(&[9; 4096], 0).unwrap();
        let read_only = File::open("/proc/self/exe").unwrap();
        assert!(move_out(&ram, &read_only).is_err());
        let mut back = [0; 4096];
        ram.file().read_exact_at(&mut back, 0).unwrap();
        assert_eq!(back, [9; 4096]);
    }
}
