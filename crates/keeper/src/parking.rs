//! Where a paused guest's memory goes: a file on the host's disk, so that the host has the memory back.
//!
//! Only while the guest is frozen. Everything is written before anything is freed: whatever fails, nothing is lost.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use bathy_devices::GuestRam;
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;

const CHUNK: usize = 1024 * 1024;

/// Moves all of `ram` that is occupied to `file`; returns how many bytes that were.
pub fn park(ram: &GuestRam, file: &File) -> io::Result<u64> {
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

/// Brings the memory back.
pub fn unpark(ram: &GuestRam, file: &File) -> io::Result<u64> {
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
        let moved = park(&ram, &file).unwrap();
        assert!(moved >= 3 << 20);
        assert_eq!(occupied(&ram), 0);
        assert_eq!(unpark(&ram, &file).unwrap(), moved);
        let mut back = vec![0; 3 << 20];
        ram.file().read_exact_at(&mut back, 5 << 20).unwrap();
        assert!(back.iter().all(|byte| *byte == 7));
    }

    #[test]
    fn nothing_is_lost_when_the_file_takes_nothing() {
        let ram = GuestRam::create(64 << 20).unwrap();
        ram.file().write_all_at(&[9; 4096], 0).unwrap();
        let read_only = File::open("/proc/self/exe").unwrap();
        assert!(park(&ram, &read_only).is_err());
        let mut back = [0; 4096];
        ram.file().read_exact_at(&mut back, 0).unwrap();
        assert_eq!(back, [9; 4096]);
    }
}
