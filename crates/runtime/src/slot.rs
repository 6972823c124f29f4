//! Chooses the processor that a guest is pinned to: the one with the fewest of this user's sandboxes.
//!
//! A guest kernel and its processes switch at every system call; on one processor that is seven times faster
//! than across two. A slot is a locked byte of a file: the kernel releases the lock however a keeper ends.
//! With root, the slot number also determines user ids that no other running sandbox has. So root has one
//! slot file for the whole machine, whatever its state folders; other users have one in the state folder.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use bathy_spec::host::usable_cpus;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use thiserror::Error;

use crate::folder::make_durable_folder;
use crate::sys;

/// The most sandboxes on one processor.
const DEPTH: u64 = 4096;
/// Slots of a machine with 8192 processors.
pub(crate) const SLOTS: u32 = 1 << 25;
const FILE: &str = "slots";
/// The folder of root's file. Like the locks in it, it does not survive a reboot.
const RUN_FOLDER: &str = "/run";
const MACHINE_FOLDER: &str = "bathysphere";

/// A slot cannot be taken.
#[derive(Debug, Error)]
pub enum CpuSlotError {
    #[error("Cannot use the slot file {0}")]
    File(PathBuf, #[source] io::Error),
    /// The machine's slot file cannot be used.
    #[error(
        "Cannot use {RUN_FOLDER}/{MACHINE_FOLDER}/{FILE}, by which no two sandboxes of root get the same user id. {RUN_FOLDER} has to be a folder that root can write to, such as a tmpfs, and others cannot"
    )]
    Machine(#[source] io::Error),
    /// Every slot is in use.
    #[error("Too many sandboxes are running: all {0} slots are taken")]
    Full(u64),
    /// The allowed processors cannot be read.
    #[error("Cannot learn which processors may be used")]
    Processors(#[source] io::Error),
}

#[derive(Debug)]
pub struct CpuSlot {
    pub cpu: u32,
    /// A number that no other running sandbox of this user has.
    pub number: u32,
    /// Held open to keep the lock.
    pub lock: File,
}

impl CpuSlot {
    /// The slot's rank when slots are counted processor by processor: a small number while few sandboxes run.
    pub(crate) fn rank_among(&self, processors: u32) -> u32 {
        let depth = u32::try_from(DEPTH).unwrap_or(u32::MAX);
        (self.number % depth).saturating_mul(processors).saturating_add(self.number / depth)
    }
}

pub fn take(state: &Path) -> Result<CpuSlot, CpuSlotError> {
    let (file, path) = if rustix::process::geteuid().is_root() {
        let file = machine_file(Path::new(RUN_FOLDER)).map_err(CpuSlotError::Machine)?;
        (file, Path::new(RUN_FOLDER).join(MACHINE_FOLDER).join(FILE))
    } else {
        let path = state.join(FILE);
        (state_file(state, &path).map_err(|error| CpuSlotError::File(path.clone(), error))?, path)
    };
    take_of(file, &path)
}

fn take_of(file: File, path: &Path) -> Result<CpuSlot, CpuSlotError> {
    let mut cpus = usable_cpus().map_err(CpuSlotError::Processors)?;
    // Read once: the sort needs a consistent order.
    let usage = fs::read_to_string("/proc/stat").unwrap_or_default();
    cpus.sort_by_cached_key(|cpu| busy_time(&usage, *cpu));
    for level in 0..DEPTH {
        for &cpu in &cpus {
            let byte = u64::from(cpu) * DEPTH + level;
            let number = u32::try_from(byte).ok().filter(|number| *number < SLOTS);
            let number = number.ok_or_else(|| CpuSlotError::Full(SLOTS.into()))?;
            let failed = |error| CpuSlotError::File(path.to_owned(), error);
            if sys::lock_byte(&file, byte).map_err(failed)? {
                let lock = for_keeper(&file, byte).map_err(failed)?;
                return Ok(CpuSlot { cpu, number, lock });
            }
        }
    }
    Err(CpuSlotError::Full(DEPTH * cpus.len() as u64))
}

/// A second lock on the byte for the keeper, through a read-only descriptor. With a writable one, a keeper
/// could fill the shared file system, which is `/run` for root.
fn for_keeper(file: &File, byte: u64) -> io::Result<File> {
    let readable = File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    // There is no gap: the first lock is held until the second one is.
    let is_ours = sys::share_byte(file, byte)? && sys::share_byte(&readable, byte)?;
    if is_ours { Ok(readable) } else { Err(io::ErrorKind::WouldBlock.into()) }
}

fn state_file(state: &Path, path: &Path) -> io::Result<File> {
    make_durable_folder(state)?;
    let mut options = File::options();
    options.create(true).truncate(false).read(true).write(true).mode(0o600);
    options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)
}

/// Opens root's file below `run`. Links are not followed, and a file that another user could have created is
/// refused.
fn machine_file(run: &Path) -> io::Result<File> {
    let folder = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let run = roots_own(rustix::fs::open(run, folder, Mode::empty())?.into())?;
    match rustix::fs::mkdirat(&run, MACHINE_FOLDER, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    let ours = roots_own(rustix::fs::openat(&run, MACHINE_FOLDER, folder, Mode::empty())?.into())?;
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    roots_own(rustix::fs::openat(ours.as_fd(), FILE, flags, Mode::RUSR | Mode::WUSR)?.into())
}

fn roots_own(file: File) -> io::Result<File> {
    const WRITTEN_BY_OTHERS: u32 = 0o022;
    let found = file.metadata()?;
    if found.uid() != 0 || found.mode() & WRITTEN_BY_OTHERS != 0 {
        let text = format!(
            "it belongs to user {} with mode {:o}, and others than root could change it",
            found.uid(),
            found.mode() & 0o7777
        );
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    Ok(file)
}

/// The non-idle time of a processor since boot; used to choose between processors with equally many
/// sandboxes.
fn busy_time(usage: &str, cpu: u32) -> u64 {
    let name = format!("cpu{cpu} ");
    let line = usage.lines().find_map(|line| line.strip_prefix(&name)).unwrap_or_default();
    let fields = line.split_whitespace().map(|field| field.parse::<u64>().unwrap_or(0)).enumerate();
    // Fields 3 and 4 are idle and iowait.
    fields.filter(|(index, _)| *index != 3 && *index != 4).map(|(_, ticks)| ticks).sum()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    #[test]
    fn sandboxes_spread_over_the_processors_and_slots_come_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        let take = || take_of(state_file(folder.path(), &path).unwrap(), &path).unwrap();
        let cpus = usable_cpus().unwrap().len();
        let slots: Vec<_> = (0..cpus * 2).map(|_| take()).collect();
        for cpu in usable_cpus().unwrap() {
            assert_eq!(slots.iter().filter(|slot| slot.cpu == cpu).count(), 2, "CPU {cpu}");
        }
        let mut numbers: Vec<_> = slots.iter().map(|slot| slot.number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), slots.len());
        drop(slots);
        assert_eq!(u64::from(take().number) % DEPTH, 0);
    }

    #[test]
    fn j11_a_keepers_lock_holds_and_is_not_for_writing() {
        use std::io::Write;

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE);
        let file = || state_file(folder.path(), &path).unwrap();
        let slot = take_of(file(), &path).unwrap();
        let byte = u64::from(slot.number);
        assert!((&slot.lock).write_all(b"x").is_err() && slot.lock.set_len(1 << 30).is_err());
        assert!(!sys::lock_byte(&file(), byte).unwrap(), "it is taken");
        assert_ne!(take_of(file(), &path).unwrap().number, slot.number);
        // The keeper's copy of the descriptor outlives the starting process.
        let copy = slot.lock.try_clone().unwrap();
        drop(slot);
        assert!(!sys::lock_byte(&file(), byte).unwrap());
        drop(copy);
        assert!(sys::lock_byte(&file(), byte).unwrap());
    }

    #[test]
    fn j5_no_link_leads_to_the_slot_file() {
        let folder = tempfile::tempdir().unwrap();
        let (victim, path) = (folder.path().join("victim"), folder.path().join(FILE));
        symlink(&victim, &path).unwrap();
        assert!(state_file(folder.path(), &path).is_err());
        assert!(!victim.exists());
    }

    #[test]
    fn j10_state_folders_of_root_share_one_file_and_no_number() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let taken: Vec<_> = folders.iter().map(|folder| take(folder.path())).collect();
        if !rustix::process::geteuid().is_root() {
            assert!(folders.iter().all(|folder| folder.path().join(FILE).exists()));
            return;
        }
        let [Ok(one), Ok(two)] = taken.as_slice() else { panic!("{taken:?}") };
        assert_ne!(one.number, two.number);
        assert!(folders.iter().all(|folder| !folder.path().join(FILE).exists()));
    }

    #[test]
    fn j10_what_others_could_have_put_in_place_of_the_machines_file_is_refused() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        fs::create_dir(&run).unwrap();
        let mode = |path: &Path, mode| fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        mode(&run, 0o755);
        drop(machine_file(&run).unwrap());
        let (ours, file) = (run.join(MACHINE_FOLDER), run.join(MACHINE_FOLDER).join(FILE));
        assert_eq!(fs::metadata(&ours).unwrap().mode() & 0o777, 0o700);
        for (path, usual) in [(&run, 0o755), (&ours, 0o700), (&file, 0o600)] {
            chown(path, Some(1000), None).unwrap();
            let error = machine_file(&run).unwrap_err().to_string();
            assert!(error.contains("belongs to user 1000"), "{path:?}: {error}");
            chown(path, Some(0), None).unwrap();
            mode(path, 0o777);
            let error = machine_file(&run).unwrap_err().to_string();
            assert!(error.contains("mode 777"), "{path:?}: {error}");
            mode(path, usual);
            drop(machine_file(&run).unwrap());
        }
        let victim = folder.path().join("victim");
        fs::remove_file(&file).unwrap();
        symlink(&victim, &file).unwrap();
        assert!(machine_file(&run).is_err() && !victim.exists());
        fs::remove_dir_all(&ours).unwrap();
        symlink(folder.path(), &ours).unwrap();
        assert!(machine_file(&run).is_err());
    }
}
