//! The parts of a kernel image that are loaded, read before anything is done with them.

use std::fs::File;
use std::os::unix::fs::FileExt;

use linux_loader::loader;
use linux_loader::loader::elf::Error;

const HEADER: usize = 64;
const ENTRY: usize = 56;
/// More parts than any kernel has.
const MOST: u16 = 64;
/// The kind of a part that is loaded.
const LOAD: u32 = 1;

/// A part of the image that is loaded.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// Where it begins in the guest's memory.
    pub start: u64,
    /// How many bytes of it are in the file.
    pub in_file: u64,
    /// How many it has in memory.
    pub in_memory: u64,
}

/// All parts that are loaded. What else is wrong with the image the loader finds out.
pub fn segments(image: &File) -> Result<Vec<Segment>, loader::Error> {
    let mut header = [0; HEADER];
    image.read_exact_at(&mut header, 0).map_err(|_| Error::ReadElfHeader)?;
    let count = u16::from_le_bytes([header[56], header[57]]);
    if count > MOST {
        return Err(Error::InvalidProgramHeaderSize.into());
    }
    let table = u64_at(&header, 32);
    let mut segments = Vec::new();
    for index in 0..u64::from(count) {
        let mut entry = [0; ENTRY];
        let place = table.checked_add(index * ENTRY as u64).ok_or(Error::Overflow)?;
        image.read_exact_at(&mut entry, place).map_err(|_| Error::ReadProgramHeader)?;
        if u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]) == LOAD {
            let (start, in_file, in_memory) = (u64_at(&entry, 24), u64_at(&entry, 32), u64_at(&entry, 40));
            segments.push(Segment { start, in_file, in_memory });
        }
    }
    Ok(segments)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let field = bytes.get(at..at + 8).and_then(|field| field.try_into().ok());
    field.map_or(0, u64::from_le_bytes)
}
