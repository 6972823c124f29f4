//! Boots from the bare initramfs into the sandbox's root.
//!
//! The first disk is the read-only image, the second the sandbox's own writable layer. The host enforces both: the
//! image's device refuses writes, the layer's device has a fixed size.

use std::ffi::CStr;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, symlink};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use bathy_protocol::Restriction;
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, mount, mount_bind, mount_move, mount_remount};
use thiserror::Error;

use crate::network;
use crate::processes::Processes;
use crate::sys::{self, MountLimits};

/// The path of this program while the initramfs is the root.
const OWN_PROGRAM: &str = "/init";
const IMAGE_DISK: &str = "/dev/vda";
const LAYER_DISK: &str = "/dev/vdb";
/// The prefix of the control port's name; the number that follows depends on the engine's order of devices.
const CONTROL_PORT: &[u8] = b"vport";
const DEVICE_DEADLINE: Duration = Duration::from_secs(10);
const DEVICE_PAUSE: Duration = Duration::from_micros(500);

/// The root could not be set up.
#[derive(Debug, Error)]
pub enum BootError {
    #[error("Cannot mount {what} at {target}: {source}")]
    Mount { what: &'static str, target: &'static str, source: rustix::io::Errno },
    #[error("Cannot prepare {0}: {1}")]
    Prepare(&'static str, io::Error),
    #[error("The device {0} did not appear")]
    NoDevice(&'static str),
    /// The control port exists but cannot be opened.
    #[error("Cannot open the control port: {0}")]
    Port(io::Error),
}

/// The descriptors that the boot leaves open.
pub struct Booted {
    pub port: OwnedFd,
    /// This program, which no path leads to any more.
    pub own_program: OwnedFd,
    /// The root of the writable layer, which no path leads to either.
    pub layer: OwnedFd,
    pub processes: Processes,
}

/// Mounts all file systems and enters the new root.
pub fn prepare_root(restricted: Option<Restriction>, threads: Option<u32>) -> Result<Booted, BootError> {
    let plain = MountFlags::NOSUID | MountFlags::NODEV;
    rustix::process::umask(Mode::empty());
    for folder in ["/dev", "/image", "/layer", "/root"] {
        make_folder(folder, 0o755)?;
    }
    attach("devtmpfs", "devtmpfs", "/dev", MountFlags::NOSUID | MountFlags::NOEXEC, None)?;
    wait_for(IMAGE_DISK)?;
    attach(IMAGE_DISK, "erofs", "/image", plain | MountFlags::RDONLY, None)?;
    wait_for(LAYER_DISK)?;
    attach(LAYER_DISK, "ext4", "/layer", MountFlags::NOATIME, Some(c"discard,noinit_itable"))?;
    for (folder, mode) in [("/layer/upper", 0o755), ("/layer/work", 0o755), ("/layer/tmp", 0o1777)] {
        make_folder(folder, mode)?;
    }
    clear_work()?;
    attach(
        "overlay",
        "overlay",
        "/root",
        MountFlags::empty(),
        Some(c"lowerdir=/image,upperdir=/layer/upper,workdir=/layer/work"),
    )?;
    let own_program = hold(OWN_PROGRAM, OFlags::empty())?;
    let layer = hold("/layer", OFlags::DIRECTORY)?;
    for folder in ["/root/proc", "/root/sys", "/root/run", "/root/tmp", "/root/dev"] {
        make_mount_point(folder)?;
    }
    attach("proc", "proc", "/root/proc", plain | MountFlags::NOEXEC, None)?;
    attach("sysfs", "sysfs", "/root/sys", plain | MountFlags::NOEXEC, None)?;
    attach("tmpfs", "tmpfs", "/root/run", plain, Some(c"mode=755"))?;
    // On the layer and not in memory: a build's temporary files should count towards the disk.
    mount_bind("/layer/tmp", "/root/tmp").map_err(mount_error("/layer/tmp", "/root/tmp"))?;
    mount_move("/dev", "/root/dev").map_err(mount_error("/dev", "/root/dev"))?;
    make_folder("/root/dev/pts", 0o755)?;
    attach(
        "devpts",
        "devpts",
        "/root/dev/pts",
        MountFlags::NOSUID | MountFlags::NOEXEC,
        // Group 5 is the conventional group of terminals.
        Some(c"gid=5,mode=620,ptmxmode=666"),
    )?;
    make_folder("/root/dev/shm", 0o1777)?;
    attach("tmpfs", "tmpfs", "/root/dev/shm", plain, Some(c"mode=1777"))?;
    enter_root()?;
    link_standard_devices()?;
    sys::bring_loopback_up().map_err(|error| BootError::Prepare("the loopback interface", error))?;
    network::set_up().map_err(|error| BootError::Prepare("the network card", error))?;
    share_memory_freely()?;
    // The agent must get CPU time however many processes are runnable, so that it can kill them.
    sys::take_precedence().map_err(|error| BootError::Prepare("the agent's priority", error))?;
    rustix::process::umask(Mode::WGRP | Mode::WOTH);
    rustix::system::sethostname(b"sandbox")
        .map_err(|error| BootError::Prepare("the host name", error.into()))?;
    let processes = Processes::open().map_err(|error| BootError::Prepare("/proc", error))?;
    if let Some(threads) = threads {
        limit_threads(threads)?;
    }
    if let Some(restriction) = restricted {
        restrict(restriction)?;
    }
    Ok(Booted { port: open_port()?, own_program, layer, processes })
}

/// Opens a path that will no longer exist, for use by descriptor.
fn hold(path: &'static str, flags: OFlags) -> Result<OwnedFd, BootError> {
    rustix::fs::open(path, flags | OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .map_err(|error| BootError::Prepare(path, error.into()))
}

/// Allows memory overcommit. Some libraries map 128 MiB when they are loaded, and retry for ever where a
/// small guest refuses that.
fn share_memory_freely() -> Result<(), BootError> {
    fs::write("/proc/sys/vm/overcommit_memory", "1")
        .map_err(|error| BootError::Prepare("the limit of mapped memory", error))
}

/// Limits threads to this number, besides those that the kernel has started by now.
fn limit_threads(threads: u32) -> Result<(), BootError> {
    let failed = |error| BootError::Prepare("the limit of threads", error);
    // The fourth field is running threads / all threads.
    let load = fs::read_to_string("/proc/loadavg").map_err(failed)?;
    let own = load.split(['/', ' ']).nth(4).and_then(|count| count.parse().ok()).unwrap_or(0u32);
    fs::write("/proc/sys/kernel/threads-max", threads.saturating_add(own).to_string()).map_err(failed)
}

/// Restrictions that apply to all processes of a restricted sandbox.
fn restrict(restriction: Restriction) -> Result<(), BootError> {
    // In a new user namespace every user would have all capabilities.
    fs::write("/proc/sys/user/max_user_namespaces", "0")
        .map_err(|error| BootError::Prepare("the limit of user namespaces", error))?;
    sys::limit_mounts(MountLimits { read_only_root: !restriction.writable_root })
        .map_err(|error| BootError::Prepare("the restricted mounts", error))
}

/// Makes the file systems clean. A failure only costs a file system check at the next boot.
pub fn leave_root(layer: &OwnedFd) {
    rustix::fs::sync();
    // The upper file system first, because it writes to the lower one.
    let root = mount_remount("/", MountFlags::RDONLY, "");
    let disk = rustix::process::fchdir(layer).and_then(|()| mount_remount(".", MountFlags::RDONLY, ""));
    let mut clean = true;
    for (what, outcome) in [("root", root), ("disk", disk)] {
        if let Err(error) = outcome {
            clean = false;
            eprintln!("bathysphere agent: cannot make the {what} read-only: {error}");
        }
    }
    if clean {
        // Later kernel messages are about removed disks, which would look like a failure.
        sys::silence_kernel();
    }
}

/// Removes what overlayfs left in its work folder at the last boot. Overlayfs would do that itself and
/// recreate the folder; but on a full disk there is no block for the new folder until the removal is
/// committed, so the root would be read-only.
fn clear_work() -> Result<(), BootError> {
    let failed = |error| BootError::Prepare("the overlay's own folder", error);
    match fs::remove_dir_all("/layer/work/work") {
        Ok(()) => {
            let layer = fs::File::open("/layer").map_err(failed)?;
            rustix::fs::syncfs(layer).map_err(|error| failed(error.into()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(failed(error)),
    }
}

fn enter_root() -> Result<(), BootError> {
    let prepare = |what| move |error: rustix::io::Errno| BootError::Prepare(what, error.into());
    rustix::process::chdir("/root").map_err(prepare("the new root"))?;
    mount_move(".", "/").map_err(mount_error("/root", "/"))?;
    rustix::process::chroot(".").map_err(prepare("the new root"))?;
    rustix::process::chdir("/").map_err(prepare("the new root"))
}

fn link_standard_devices() -> Result<(), BootError> {
    let links = [
        ("/proc/self/fd", "/dev/fd"),
        ("/proc/self/fd/0", "/dev/stdin"),
        ("/proc/self/fd/1", "/dev/stdout"),
        ("/proc/self/fd/2", "/dev/stderr"),
    ];
    for (target, link) in links {
        match symlink(target, link) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(BootError::Prepare("the standard device links", error));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Opens the control port. Also used when the host has closed its side: only a new open starts a new session.
pub fn open_port() -> Result<OwnedFd, BootError> {
    let deadline = Instant::now() + DEVICE_DEADLINE;
    loop {
        // The name appears a moment before the port can be opened.
        match try_open_port() {
            Ok(Some(port)) => return Ok(port),
            Ok(None) if Instant::now() < deadline => sleep(DEVICE_PAUSE),
            Ok(None) => return Err(BootError::NoDevice("the control port")),
            Err(error) => return Err(BootError::Port(error)),
        }
    }
}

fn try_open_port() -> io::Result<Option<OwnedFd>> {
    let names = fs::read_dir("/dev")?.flatten().map(|entry| entry.file_name());
    let Some(name) = names.into_iter().find(|name| name.as_encoded_bytes().starts_with(CONTROL_PORT)) else {
        return Ok(None);
    };
    let flags = libc::O_NONBLOCK | libc::O_CLOEXEC;
    match OpenOptions::new().read(true).write(true).custom_flags(flags).open(Path::new("/dev").join(name)) {
        Ok(port) => Ok(Some(port.into())),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENODEV | libc::ENOENT)) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Devices appear asynchronously, usually before PID 1 starts.
fn wait_for(path: &'static str) -> Result<(), BootError> {
    let deadline = Instant::now() + DEVICE_DEADLINE;
    while !Path::new(path).exists() {
        if Instant::now() > deadline {
            return Err(BootError::NoDevice(path));
        }
        sleep(DEVICE_PAUSE);
    }
    Ok(())
}

fn make_folder(path: &'static str, mode: u32) -> Result<(), BootError> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(BootError::Prepare(path, error)),
        _ => Ok(()),
    }
}

/// Makes a folder to mount on. An image need not have it, and may have something else in its place.
fn make_mount_point(path: &'static str) -> Result<(), BootError> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => return Ok(()),
        Ok(_) => fs::remove_file(path).map_err(|error| BootError::Prepare(path, error))?,
        // Making it reports what is wrong.
        Err(_) => {}
    }
    make_folder(path, 0o755)
}

fn attach(
    what: &'static str,
    kind: &'static str,
    target: &'static str,
    flags: MountFlags,
    data: Option<&CStr>,
) -> Result<(), BootError> {
    mount(what, target, kind, flags, data).map_err(mount_error(what, target))
}

fn mount_error(what: &'static str, target: &'static str) -> impl FnOnce(rustix::io::Errno) -> BootError {
    move |source| BootError::Mount { what, target, source }
}
