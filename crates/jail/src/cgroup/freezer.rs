//! The part of a group whose processes can be made to stand still.

use std::path::PathBuf;
use std::thread;
use std::time::Instant;

use super::{CgroupError, DEADLINE, PAUSE, folder, put};

/// Stops and continues the processes of a group. It outlives the [`super::Cgroup`] it is from, and is then of no use.
#[derive(Clone, Debug)]
pub struct CgroupFreezer {
    pub(super) folder: PathBuf,
    pub(super) version: Version,
}

#[derive(Clone, Debug)]
pub(super) enum Version {
    /// Frozen processes cannot be ended before they are thawed.
    V1 {
        /// Where processes go that are not to be frozen.
        outside: PathBuf,
    },
    /// Frozen processes can be ended.
    V2,
}

impl CgroupFreezer {
    /// Stops all processes, and waits until they stand still.
    pub fn freeze(&self) -> Result<(), CgroupError> {
        let result = self.set(true);
        if result.is_err() {
            // Thawed again, so that a sandbox whose freezing failed really runs, as its owner then assumes.
            let _ = self.set(false);
        }
        result
    }

    /// Lets them go on.
    pub fn thaw(&self) -> Result<(), CgroupError> {
        self.set(false)
    }

    fn set(&self, frozen: bool) -> Result<(), CgroupError> {
        let failed = |error| CgroupError::Freezer(self.folder.clone(), error);
        let begin = Instant::now();
        while begin.elapsed() < DEADLINE {
            // Version 1 misses processes that were just being born; asking again catches them.
            self.write_state(frozen).map_err(failed)?;
            if self.is(frozen).map_err(failed)? {
                return Ok(());
            }
            thread::sleep(PAUSE);
        }
        Err(CgroupError::Slow(self.folder.clone(), if frozen { "stand still" } else { "go on" }))
    }

    fn write_state(&self, frozen: bool) -> std::io::Result<()> {
        match self.version {
            Version::V1 { .. } => folder::write(&self.folder, "freezer.state", v1_state(frozen)),
            Version::V2 => folder::write(&self.folder, "cgroup.freeze", if frozen { "1" } else { "0" }),
        }
    }

    fn is(&self, frozen: bool) -> std::io::Result<bool> {
        match self.version {
            Version::V1 { .. } => Ok(folder::read(&self.folder, "freezer.state")? == v1_state(frozen)),
            Version::V2 => {
                let now = folder::keyed_number(&self.folder, "cgroup.events", "frozen");
                Ok(now == Some(u64::from(frozen)))
            }
        }
    }

    /// Does `end` to processes that cannot fork away from it. Whatever fails shows as processes that are left.
    pub(super) fn while_frozen(&self, end: impl FnOnce()) {
        let _ = self.write_state(true);
        end();
        let _ = self.write_state(false);
    }

    /// Takes one process out.
    pub(super) fn leave(&self, pid: u32) -> Result<(), CgroupError> {
        match &self.version {
            Version::V1 { outside } => put(outside, pid),
            Version::V2 => Ok(()),
        }
    }

    /// Its folder, if the group has none else there.
    pub(super) fn own_folder(&self) -> Option<&PathBuf> {
        matches!(self.version, Version::V1 { .. }).then_some(&self.folder)
    }
}

fn v1_state(frozen: bool) -> &'static str {
    if frozen { "FROZEN" } else { "THAWED" }
}
