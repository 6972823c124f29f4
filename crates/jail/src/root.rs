//! An empty, read-only root: nothing to find, nowhere to write.

use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, mount_remount, unmount,
};
use thiserror::Error;

/// Why the root could not be emptied.
#[derive(Debug, Error)]
#[error("Cannot {step}: {source}")]
pub struct RootError {
    step: &'static str,
    source: rustix::io::Errno,
}

/// Replaces the root of this mount namespace by an empty read-only tmpfs and lets go of everything else.
///
/// The caller must be alone in its mount namespace and hold CAP_SYS_ADMIN over it.
pub fn enter_empty_root() -> Result<(), RootError> {
    // Any existing folder does: the mount covers it in this namespace only, and goes with the old root.
    const COVERED: &str = "/tmp";
    let failed = |step| move |source| RootError { step, source };
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;

    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", private).map_err(failed("cut the mounts off from the host's"))?;
    let options = Some(c"size=4k,nr_inodes=2,mode=0555");
    mount("none", COVERED, "tmpfs", flags, options).map_err(failed("mount an empty root"))?;
    rustix::process::chdir(COVERED).map_err(failed("enter the empty root"))?;
    rustix::process::pivot_root(".", ".").map_err(failed("pivot to the empty root"))?;
    // The old root now lies on top of the new one; what is left of it goes with its last open descriptor.
    unmount(".", UnmountFlags::DETACH).map_err(failed("detach the old root"))?;
    rustix::process::chdir("/").map_err(failed("enter the empty root"))?;
    mount_remount("/", flags | MountFlags::RDONLY, c"").map_err(failed("make the empty root read-only"))
}
