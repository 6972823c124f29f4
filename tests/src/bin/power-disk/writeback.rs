//! Writes back files at random moments, without any promise that they are safe then.
//!
//! The kernel writes dirty pages back after half a minute, or at once when memory is short. A round has no half minute, so
//! this asks for it. Only so the disk's write cache has something to lose that the product did not flush.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use bathy_tests::random::Random;
use rustix::fs::{Advice, fadvise};

/// Goes on until it is killed.
pub fn run(seed: &str, folder: &Path) -> io::Result<()> {
    let mut random = Random::new(seed.parse().map_err(|_| io::Error::other("a seed is a number"))?);
    loop {
        let mut files = Vec::new();
        list(folder, &mut files);
        for _ in 0..20.min(files.len()) {
            let index = random.index(files.len());
            if let Some(file) = files.get(index).and_then(|path| File::open(path).ok()) {
                // Files come and go, and some file systems do not take advice.
                let _ = fadvise(&file, 0, None, Advice::DontNeed);
            }
            sleep(Duration::from_millis(1 + random.below(20)));
        }
        sleep(Duration::from_millis(10));
    }
}

/// What can be found: the product changes all of it meanwhile.
fn list(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => list(&entry.path(), files),
            Ok(kind) if kind.is_file() => files.push(entry.path()),
            _ => {}
        }
    }
}
