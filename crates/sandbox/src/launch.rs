//! From a description to a running keeper.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::time::{SystemTime, UNIX_EPOCH};

use bathy_jail::spawn::{self, Keeper};
use bathy_jail::{Identity, SpawnError, Spawned};
use bathy_protocol::launch::{self, Launch};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};
use thiserror::Error;

use crate::assets::Assets;
use crate::connection::Connection;
use crate::disk::{self, DiskError};
use crate::paths::Paths;
use crate::slot::{self, SlotError};
use crate::spec::SandboxSpec;

/// The first of the user numbers that root gives to sandboxes: above those of people, systems and usual containers.
const FIRST_SANDBOX_USER: u32 = 0x4200_0000;

/// A sandbox could not be started.
#[derive(Debug, Error)]
pub enum LaunchError {
    /// Its disk.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// Its processor.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// Its namespaces.
    #[error("Cannot start the sandbox's keeper. `bathy doctor` tells what this machine lacks")]
    Spawn(#[from] SpawnError),
    /// A socket or configuration.
    #[error("Cannot prepare the sandbox's keeper")]
    Prepare(#[source] io::Error),
}

/// A running sandbox. Dropping it ends it.
#[derive(Debug)]
pub struct Sandbox {
    /// How to speak to it.
    pub connection: Connection,
    /// When its keeper was started: wall clock, nanoseconds since 1970.
    pub spawned_unix_ns: u64,
    keeper: Spawned,
}

impl Sandbox {
    /// Starts a sandbox. `spec` has been checked.
    pub fn start(spec: &SandboxSpec, assets: &Assets, paths: &Paths) -> Result<Self, LaunchError> {
        let disk = disk::make(&paths.cache, &paths.state, spec.disk)?;
        let slot = slot::take(&paths.state)?;
        let identity = identity(slot.number);
        let config = Launch {
            memory: spec.memory.0,
            cpu: slot.cpu,
            processes: spec.processes.into(),
            mode: spec.uml_mode,
            ready_timeout_ms: spec.ready_timeout_ms,
            guest_user: matches!(identity, Identity::Pair { .. }),
        };
        let config = config_file(&config).map_err(LaunchError::Prepare)?;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|error| LaunchError::Prepare(error.into()))?;
        let descriptors: [_; launch::fd::COUNT] = [
            config.as_fd(),
            theirs.as_fd(),
            assets.kernel.as_fd(),
            assets.initramfs.as_fd(),
            assets.image.as_fd(),
            disk.as_fd(),
            slot.lock.as_fd(),
        ];
        let spawned_unix_ns = unix_ns();
        let spawned = spawn::keeper(&Keeper {
            program: assets.keeper.as_fd(),
            args: &[CString::from(c"bathy-keeper")],
            descriptors: &descriptors,
            identity,
        })?;
        drop(theirs);
        let connection = Connection::new(ours).map_err(LaunchError::Prepare)?;
        Ok(Self { connection, spawned_unix_ns, keeper: spawned })
    }

    /// Why the keeper's program did not run, if it did not. For a keeper that is gone; it waits for one that is not.
    pub fn failure(&self) -> Option<String> {
        self.keeper.failure()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // The keeper is the first process of its pid namespace: with it ends everything of the sandbox.
        let _ = pidfd_send_signal(&self.keeper.pidfd, Signal::KILL);
        let _ = waitid(WaitId::PidFd(self.keeper.pidfd.as_fd()), WaitIdOptions::EXITED);
    }
}

fn identity(slot: u32) -> Identity {
    let uid = rustix::process::geteuid();
    if uid.is_root() {
        Identity::Pair { first: FIRST_SANDBOX_USER + slot * 2 }
    } else {
        Identity::Own { uid: uid.as_raw(), gid: rustix::process::getegid().as_raw() }
    }
}

fn config_file(config: &Launch) -> io::Result<File> {
    let bytes = launch::encode(config).map_err(io::Error::other)?;
    let mut file = File::from(memfd_create("keeper-config", MemfdFlags::CLOEXEC)?);
    file.write_all(&bytes)?;
    rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(0))?;
    Ok(file)
}

/// The wall clock, as nanoseconds since 1970.
pub fn unix_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
