//! Checks whether the host's disk can hold what a persistent sandbox may write. Its files are sparse: they
//! occupy space only when written.

use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use bathy_spec::SandboxSpec;

use crate::folder::Folder;

/// The unit of `st_blocks`.
const BLOCK: u64 = 512;
const MIB: u64 = 1 << 20;

/// The disk has less space than the sandbox may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    folder: PathBuf,
    free: u64,
    promised: u64,
    is_parked: bool,
}

impl Shortage {
    /// The shortage of the sandbox in `folder`, if there is one.
    pub fn of(folder: &Folder, spec: &SandboxSpec) -> Option<Self> {
        let found = rustix::fs::statvfs(folder.path()).ok()?;
        let free = found.f_bavail.saturating_mul(found.f_frsize);
        let promised = promised(folder, spec);
        let is_parked = spec.pause_idle.is_some();
        (promised > free).then(|| Self { folder: folder.path().to_owned(), free, promised, is_parked })
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.is_parked { "its disk, its logs and its memory" } else { "its disk and its logs" };
        let (free, promised) = (self.free / MIB, self.promised.div_ceil(MIB));
        let folder = self.folder.display();
        write!(
            out,
            "{folder} is on a file system with {free} MiB of free space, and {what} may need {promised} MiB more: free some space, or make it with a smaller --disk, before its writes fail and its network waits"
        )
    }
}

/// How much the sandbox may still write to the host's disk.
fn promised(folder: &Folder, spec: &SandboxSpec) -> u64 {
    let disk = unused(&folder.disk(), spec.disk.0);
    let logs = [folder.output_log(), folder.console_log()].map(|ring| unused(&ring, spec.log_size.0 / 2));
    // Any sandbox can also be paused explicitly; that is refused if there is no space.
    let memory = spec.pause_idle.map_or(0, |_| unused(&folder.parking(), spec.memory.0));
    disk + logs.iter().sum::<u64>() + memory
}

/// The part of a file of this size that is not allocated yet.
fn unused(path: &Path, size: u64) -> u64 {
    let taken = path.symlink_metadata().map_or(0, |data| data.blocks().saturating_mul(BLOCK));
    size.saturating_sub(taken)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use bathy_spec::paths::Paths;
    use bathy_spec::{Seconds, Size};

    use super::*;

    #[test]
    fn what_is_not_written_yet_is_promised() {
        let home = tempfile::tempdir().unwrap();
        let paths = Paths { state: home.path().to_owned(), cache: home.path().to_owned() };
        let folder = Folder::of(&paths, "abcdefghijkl");
        let mut spec = SandboxSpec {
            disk: Size(64 * MIB),
            log_size: Size(16 * MIB),
            memory: Size(128 * MIB),
            ..SandboxSpec::default()
        };
        folder.create().unwrap();
        assert_eq!(promised(&folder, &spec), (64 + 16) * MIB);
        fs::write(folder.disk(), vec![1; usize::try_from(4 * MIB).unwrap()]).unwrap();
        assert_eq!(promised(&folder, &spec), (60 + 16) * MIB);
        spec.pause_idle = Some(Seconds::from_millis(1000));
        assert_eq!(promised(&folder, &spec), (60 + 16 + 128) * MIB);
        assert_eq!(Shortage::of(&folder, &spec), None, "the test's own machine has enough space");
        spec.disk = Size(1 << 60);
        let sentence = Shortage::of(&folder, &spec).unwrap().to_string();
        assert!(sentence.contains(&format!("need {} MiB", (1u64 << 40) - 4 + 16 + 128)), "{sentence}");
        assert!(sentence.contains("its memory") && sentence.contains("--disk"), "{sentence}");
    }
}
