//! Which processor a guest is pinned to: the one that the fewest of this user's sandboxes use.
//!
//! A guest kernel and its processes hand over to each other at every system call; on one processor that is seven times
//! faster than across two. A slot is a byte of one file, locked for as long as the keeper lives: whatever ends a
//! keeper, the kernel frees its slot. The slot's number also gives root a pair of user numbers that no other live
//! sandbox has.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::host::usable_cpus;
use crate::sys;

/// Sandboxes per processor.
const DEPTH: u64 = 4096;

/// No slot can be had.
#[derive(Debug, Error)]
pub enum SlotError {
    /// The slot file.
    #[error("Cannot use the slot file {0}")]
    File(PathBuf, #[source] io::Error),
    /// Every slot is taken.
    #[error("Too many sandboxes are running: all {0} slots are taken")]
    Full(u64),
    /// The processors cannot be asked for.
    #[error("Cannot learn which processors may be used")]
    Processors(#[source] io::Error),
}

/// A taken slot.
#[derive(Debug)]
pub struct Slot {
    /// The processor.
    pub cpu: u32,
    /// A number that no other live sandbox of this user has.
    pub number: u32,
    /// Holds the lock.
    pub lock: File,
}

/// Takes a slot.
pub fn take(state: &Path) -> Result<Slot, SlotError> {
    let path = state.join("slots");
    let open = || {
        fs::create_dir_all(state)?;
        let mut options = File::options();
        options
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW);
        options.open(&path)
    };
    let file = open().map_err(|error| SlotError::File(path.clone(), error))?;
    let mut cpus = usable_cpus().map_err(SlotError::Processors)?;
    cpus.sort_by_key(|cpu| busy_time(*cpu));
    for level in 0..DEPTH {
        for &cpu in &cpus {
            let byte = u64::from(cpu) * DEPTH + level;
            if sys::lock_byte(&file, byte).map_err(|error| SlotError::File(path.clone(), error))? {
                let number = u32::try_from(byte).map_err(|_| SlotError::Full(DEPTH))?;
                return Ok(Slot { cpu, number, lock: file });
            }
        }
    }
    Err(SlotError::Full(DEPTH * cpus.len() as u64))
}

/// Time that a processor was not idle since the machine started; decides only between equally used ones.
fn busy_time(cpu: u32) -> u64 {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let name = format!("cpu{cpu} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&name)).unwrap_or_default();
    let fields = line.split_whitespace().map(|field| field.parse::<u64>().unwrap_or(0)).enumerate();
    // Fields 3 and 4 are idle time and waiting for disks.
    fields.filter(|(index, _)| *index != 3 && *index != 4).map(|(_, ticks)| ticks).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandboxes_spread_over_the_processors_and_slots_come_back() {
        let folder = tempfile::tempdir().unwrap();
        let cpus = usable_cpus().unwrap().len();
        let slots: Vec<_> = (0..cpus * 2).map(|_| take(folder.path()).unwrap()).collect();
        for cpu in usable_cpus().unwrap() {
            assert_eq!(slots.iter().filter(|slot| slot.cpu == cpu).count(), 2, "CPU {cpu}");
        }
        let mut numbers: Vec<_> = slots.iter().map(|slot| slot.number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), slots.len());
        drop(slots);
        assert_eq!(u64::from(take(folder.path()).unwrap().number) % DEPTH, 0);
    }
}
