//! How a new process gets into a group: by itself.
//!
//! To move a process that exists, the kernel waits for an RCU grace period, some 6 ms. It does not for a process that is created in a
//! group, which version 2 can do, nor for a thread that moves itself alone, which version 1 can.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::{CgroupError, folder};

/// The groups that a process enters when it is started, as open files.
#[derive(Debug, Default)]
pub struct Entrance {
    v1: Vec<File>,
    v2: Option<(PathBuf, File)>,
}

impl Entrance {
    pub(super) fn open<'a>(
        v1: impl Iterator<Item = &'a PathBuf>,
        v2: Option<&Path>,
    ) -> Result<Self, CgroupError> {
        let failed = |folder: &Path| {
            let folder = folder.to_owned();
            |error| CgroupError::Enter(folder, error)
        };
        let tasks = |folder: &'a PathBuf| {
            OpenOptions::new().write(true).open(folder.join("tasks")).map_err(failed(folder))
        };
        let of_folder = |folder: &Path| {
            let mut options = OpenOptions::new();
            options.read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY);
            Ok((folder.to_owned(), options.open(folder).map_err(failed(folder))?))
        };
        Ok(Self { v1: v1.map(tasks).collect::<Result<_, _>>()?, v2: v2.map(of_folder).transpose()? })
    }

    /// The version 2 group, for the call that creates the process.
    pub(crate) fn v2(&self) -> Option<BorrowedFd<'_>> {
        self.v2.as_ref().map(|(_, folder)| folder.as_fd())
    }

    /// Where the process, as long as it has one thread, writes a zero to be in the version 1 groups.
    pub(crate) fn v1(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.v1.iter().map(AsFd::as_fd)
    }

    /// Moves a process that the kernel could not create in its version 2 group.
    pub(crate) fn move_v2(&self, pid: u32) -> io::Result<()> {
        self.v2.as_ref().map_or(Ok(()), |(path, _)| folder::put(path, pid))
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;

    use rustix::process::{WaitId, WaitIdOptions, waitid};

    use super::super::{Cgroup, CgroupLimits};
    use super::*;
    use crate::spawn::{self, Identity, Program};

    /// A sleeping process, in the groups of this entrance.
    fn start(entrance: &Entrance) -> crate::Spawned {
        let program = File::open("/bin/sleep").unwrap();
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let started = spawn::keeper(&Program {
            program: program.as_fd(),
            args: &[CString::from(c"sleep"), CString::from(c"100")],
            descriptors: &[],
            identity: Identity::Own { uid, gid },
            entrance: Some(entrance),
            before_start: None,
        });
        let spawned = started.unwrap();
        assert_eq!(spawned.failure(), None);
        spawned
    }

    #[test]
    fn a_process_begins_in_every_group_of_its_part() {
        let limits =
            CgroupLimits { cpu_weight: true, memory: Some(64 << 20), pids: Some(40), cpu_quota: None };
        let name = format!("enter-{}", std::process::id());
        let mut group = Cgroup::create(&name, &limits).unwrap();
        let (guest, host_side) = (group.guest_entrance().unwrap(), group.host_side_entrance().unwrap());
        assert!(guest.v1.len() >= host_side.v1.len());
        for (entrance, part) in [(&guest, "guest"), (&host_side, "keeper")] {
            let spawned = start(entrance);
            let lines = std::fs::read_to_string(format!("/proc/{}/cgroup", spawned.pid)).unwrap();
            let (v2, v1): (Vec<_>, Vec<_>) = lines
                .lines()
                .filter(|line| line.contains(&format!("bathysphere-{name}")))
                .partition(|line| line.starts_with("0::"));
            assert_eq!(v1.len(), entrance.v1.len(), "{lines}");
            assert_eq!(v2.len(), usize::from(entrance.v2.is_some()), "{lines}");
            assert!(v2.iter().all(|line| line.ends_with(&format!("/{part}"))), "{lines}");
            rustix::process::pidfd_send_signal(&spawned.pidfd, rustix::process::Signal::KILL).unwrap();
            waitid(WaitId::PidFd(spawned.pidfd.as_fd()), WaitIdOptions::EXITED).unwrap();
        }
        group.remove().unwrap();
    }

    #[test]
    fn a_process_that_cannot_enter_does_not_begin() {
        // Nothing can be written there.
        let full = Entrance { v1: vec![OpenOptions::new().write(true).open("/dev/full").unwrap()], v2: None };
        let program = File::open("/bin/true").unwrap();
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let started = spawn::gateway(&Program {
            program: program.as_fd(),
            args: &[CString::from(c"true")],
            descriptors: &[],
            identity: Identity::Own { uid, gid },
            entrance: Some(&full),
            before_start: None,
        });
        let spawned = started.unwrap();
        assert_eq!(spawned.failure().as_deref(), Some("enter its control group: error 28"));
        waitid(WaitId::PidFd(spawned.pidfd.as_fd()), WaitIdOptions::EXITED).unwrap();
    }

    /// Where version 2 is mounted.
    fn v2_mount() -> Option<PathBuf> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let line = mounts.lines().find(|line| line.contains(" - cgroup2 "))?;
        line.split(' ').nth(4).map(PathBuf::from)
    }

    /// A group that is removed again, and that this process has left by then.
    struct Left {
        folder: PathBuf,
        before: PathBuf,
    }

    impl Drop for Left {
        fn drop(&mut self) {
            let _ = folder::put(&self.before, std::process::id());
            let _ = std::fs::remove_dir(&self.folder);
        }
    }

    #[test]
    fn a_process_begins_although_the_callers_own_group_was_killed_before() {
        let Some(mount) = v2_mount().filter(|_| rustix::process::geteuid().is_root()) else {
            // No user can have such a group here.
            let group = Cgroup::create(&format!("none-{}", std::process::id()), &CgroupLimits::default());
            assert!(group.unwrap().guest_entrance().unwrap().v2.is_none());
            return;
        };
        let own = std::fs::read_to_string("/proc/self/cgroup").unwrap();
        let own = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap();
        let named = |name: &str| {
            let folder = mount.join(format!("bathysphere-{name}-{}", std::process::id()));
            std::fs::create_dir(&folder).unwrap();
            Left { folder, before: mount.join(own) }
        };
        let (killed, target) = (named("killed"), named("target"));
        std::fs::write(killed.folder.join("cgroup.kill"), "1").unwrap();
        folder::put(&killed.folder, std::process::id()).unwrap();
        let entrance = Entrance::open(std::iter::empty(), Some(&target.folder)).unwrap();
        let spawned = start(&entrance);
        let lines = std::fs::read_to_string(format!("/proc/{}/cgroup", spawned.pid)).unwrap();
        rustix::process::pidfd_send_signal(&spawned.pidfd, rustix::process::Signal::KILL).unwrap();
        waitid(WaitId::PidFd(spawned.pidfd.as_fd()), WaitIdOptions::EXITED).unwrap();
        let name = target.folder.file_name().unwrap().to_str().unwrap();
        assert!(lines.lines().any(|line| line.starts_with("0::") && line.ends_with(name)), "{lines}");
    }

    #[test]
    fn a_group_that_is_gone_cannot_be_entered() {
        let mut group =
            Cgroup::create(&format!("left-{}", std::process::id()), &CgroupLimits::default()).unwrap();
        let held = group.freezer().is_some();
        for folder in group.all_folders() {
            let _ = std::fs::remove_dir(folder);
        }
        let result = group.guest_entrance();
        assert_eq!(result.is_err(), held, "{result:?}");
        group.remove().unwrap();
    }
}
