//! A disk with a volatile write cache: what was written is safe only once it was flushed.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use bathy_tests::random::Random;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

/// What a disk writes whole or not at all.
pub const SECTOR: usize = 512;

type Sector = [u8; SECTOR];

/// One write that was acknowledged and not flushed yet.
struct Write {
    first: u64,
    sectors: Vec<Sector>,
}

pub struct Disk {
    /// Flushed data, which survives a power cut.
    stable: File,
    size: u64,
    /// Unflushed writes, which a power cut may lose, in the order of their acknowledgements.
    cache: Vec<Write>,
    /// What a reader sees in place of the stable sectors.
    newest: HashMap<u64, Sector>,
    /// After this many more writes the power fails.
    fails_after: Option<u64>,
    /// Then stable sectors and cache stay as they were at that moment. Writes still succeed, so that the file system can
    /// be unmounted in peace; no image ever contains them.
    has_failed: bool,
}

/// How much of the write cache a cut loses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    All,
    Nothing,
    /// All writes after one of them, which itself is torn.
    Tail,
    /// Some writes, each of them as a whole.
    Writes,
    /// Some sectors of some writes: a disk reorders as it likes, and tears what it is writing.
    Sectors,
}

/// The effect of a power cut.
#[derive(Debug, PartialEq, Eq)]
pub struct Loss {
    mode: Mode,
    /// Writes in the cache.
    pub writes: usize,
    /// Those that are lost, or torn.
    pub damaged: usize,
    pub sectors: usize,
}

impl fmt::Display for Loss {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:?} {} {} {}", self.mode, self.writes, self.damaged, self.sectors)
    }
}

impl Disk {
    /// The disk whose content is this file, which changes.
    pub fn open(path: &Path) -> io::Result<Self> {
        let stable = File::options().read(true).write(true).open(path)?;
        let size = stable.metadata()?.len();
        if !size.is_multiple_of(SECTOR as u64) {
            return Err(io::Error::other("a disk has whole sectors"));
        }
        Ok(Self {
            stable,
            size,
            cache: Vec::new(),
            newest: HashMap::new(),
            fails_after: None,
            has_failed: false,
        })
    }

    /// How large it is.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// What was written last, flushed or not.
    pub fn read(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let first = aligned(offset, length)?;
        let rest = usize::try_from(self.size.saturating_sub(offset)).unwrap_or(usize::MAX);
        let mut data = vec![0; length.min(rest)];
        self.stable.read_exact_at(&mut data, offset)?;
        for (number, sector) in (first..).zip(data.as_chunks_mut::<SECTOR>().0) {
            if let Some(newest) = self.newest.get(&number) {
                *sector = *newest;
            }
        }
        Ok(data)
    }

    /// Puts a write into the cache.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let first = aligned(offset, data.len())?;
        if offset + data.len() as u64 > self.size {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let sectors = data.as_chunks::<SECTOR>().0.to_vec();
        self.newest.extend((first..).zip(sectors.iter().copied()));
        if self.has_failed {
            return Ok(());
        }
        self.cache.push(Write { first, sectors });
        self.fails_after = self.fails_after.map(|writes| writes.saturating_sub(1));
        if self.fails_after == Some(0) {
            self.fail();
        }
        Ok(())
    }

    /// Lets the power fail after this many more writes: at a moment when the cache has something to lose.
    pub fn fail_after(&mut self, writes: u64) {
        self.fails_after = Some(writes);
        if writes == 0 {
            self.fail();
        }
    }

    /// Makes the power fail now, if it has not.
    pub fn fail(&mut self) {
        self.has_failed = true;
    }

    /// Whether the power has failed.
    pub fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Makes stable what is in the cache: everything that was acknowledged before.
    pub fn flush(&mut self) -> io::Result<()> {
        if self.has_failed {
            return Ok(());
        }
        for write in self.cache.drain(..) {
            self.stable.write_all_at(write.sectors.as_flattened(), write.first * SECTOR as u64)?;
        }
        self.newest.clear();
        Ok(())
    }

    /// Leaves in a new file what the power failure leaves. Of its one moment any number of images can be made.
    pub fn cut(&mut self, seed: u64, image: &Path) -> io::Result<Loss> {
        self.fail();
        let image = copy(&self.stable, image)?;
        let mut random = Random::new(seed);
        let mode =
            random.pick(&[Mode::All, Mode::Nothing, Mode::Tail, Mode::Writes, Mode::Sectors, Mode::Sectors]);
        let survives = survivors(mode, &self.cache, &mut random);
        let mut loss = Loss { mode, writes: self.cache.len(), damaged: 0, sectors: 0 };
        for (write, survives) in self.cache.iter().zip(survives) {
            let lost = survives.iter().filter(|survives| !**survives).count();
            loss.sectors += lost;
            loss.damaged += usize::from(lost > 0);
            // In order: of two writes of one sector that survive both, the later one is the sector's content.
            for ((number, sector), _) in
                (write.first..).zip(&write.sectors).zip(&survives).filter(|(_, survives)| **survives)
            {
                image.write_all_at(sector, number * SECTOR as u64)?;
            }
        }
        Ok(loss)
    }
}

/// Which sectors of each write in the cache have reached the disk by themselves.
fn survivors(mode: Mode, cache: &[Write], random: &mut Random) -> Vec<Vec<bool>> {
    let last = random.below(cache.len() as u64 + 1);
    let share = 1 + random.below(15);
    let mut one = |(index, write): (u64, &Write)| -> Vec<bool> {
        let count = write.sectors.len();
        match mode {
            Mode::All => vec![false; count],
            Mode::Nothing => vec![true; count],
            Mode::Tail if index == last => {
                let whole = random.index(count + 1);
                (0..count).map(|sector| sector < whole).collect()
            }
            Mode::Tail => vec![index < last; count],
            Mode::Writes => vec![random.chance(share, 16); count],
            Mode::Sectors => (0..count).map(|_| random.chance(share, 16)).collect(),
        }
    };
    (0..).zip(cache).map(&mut one).collect()
}

/// The first sector of a part of the disk that has to consist of whole ones.
fn aligned(offset: u64, length: usize) -> io::Result<u64> {
    let sector = SECTOR as u64;
    if offset.is_multiple_of(sector) && length.is_multiple_of(SECTOR) {
        Ok(offset / sector)
    } else {
        Err(io::ErrorKind::InvalidInput.into())
    }
}

/// Copies a file into a new, sparse one.
fn copy(from: &File, to: &Path) -> io::Result<File> {
    let size = from.metadata()?.len();
    let target = File::options().read(true).write(true).create(true).truncate(true).open(to)?;
    target.set_len(size)?;
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    loop {
        at = match seek(from, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(target),
            Err(error) => return Err(error.into()),
        };
        let end = seek(from, SeekFrom::Hole(at))?;
        while at < end {
            let length = usize::try_from(end - at).map_or(buffer.len(), |rest| rest.min(buffer.len()));
            let part = buffer.get_mut(..length).unwrap_or_default();
            from.read_exact_at(part, at)?;
            target.write_all_at(part, at)?;
            at += length as u64;
        }
    }
}

#[cfg(test)]
#[path = "disk_tests.rs"]
mod tests;
