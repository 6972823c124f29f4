//! The first process of a machine: mounts its disk, gives it a boot id of its own, and waits for orphans.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change};
use rustix::process::{Signal, WaitOptions, set_parent_process_death_signal, wait};
use rustix::thread::{UnshareFlags, unshare_unsafe};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// How often it looks whether there are orphans, while it has no children at all.
const PAUSE: Duration = Duration::from_millis(20);

/// Standard input is the FUSE device that the server reads. `folder` has the mount points: the files `disk` and
/// `boot_id` and the folder `state`. `templates` is the product's folder for disk templates: it is on the disk, too.
pub fn run(folder: &Path, kind: &str, options: &str, templates: &str) -> io::Result<()> {
    // Without the server there is no disk.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // SAFETY: this process has one thread, and no descriptor or memory changes.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS)? };
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    // As the outer /proc, which is still the one that is mounted, numbers processes.
    let outer_pid = fs::read_link("/proc/self")?;
    mount("proc", "/proc", "proc", MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC, None)?;
    mount_bind(folder.join("boot_id"), BOOT_ID)?;
    mount_disk(folder, kind, options)?;
    let on_disk = folder.join("state/templates");
    fs::create_dir_all(&on_disk)?;
    mount_bind(&on_disk, templates)?;
    let mut output = io::stdout();
    writeln!(output, "{}", outer_pid.display())?;
    output.flush()?;
    collect_orphans()
}

fn mount_disk(folder: &Path, kind: &str, options: &str) -> io::Result<()> {
    let disk = folder.join("disk");
    let how = c"fd=0,rootmode=100600,user_id=0,group_id=0,allow_other";
    mount("power-disk", &disk, "fuse", MountFlags::NOSUID | MountFlags::NODEV, Some(how))?;
    // With this copy of the descriptor open, the end of the server would not end the connection.
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    // The loop device is released with the mount.
    let status = Command::new("mount")
        .args(["-t", kind, "-o", &format!("loop,{options}")])
        .arg(&disk)
        .arg(folder.join("state"))
        .status()?;
    if status.success() { Ok(()) } else { Err(io::Error::other("the disk cannot be mounted")) }
}

fn collect_orphans() -> io::Result<()> {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::CHILD) => sleep(PAUSE),
            Err(error) => return Err(error.into()),
        }
    }
}
