//! A machine whose power is cut: its disk has what was flushed and any part of the rest, its processes are killed, and the next
//! machine starts from that disk. `tests/power/README.md` describes the test bed.

pub mod check;
pub mod journal;
mod leftovers;
pub mod workload;

use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::{Ran, bathy, patience};

/// Time limit for a command of the product; one that takes longer hangs.
const HANGS: Duration = Duration::from_secs(60);
/// Time limit for the release of mounts, loop device and processes.
const RELEASE: Duration = Duration::from_secs(30);
/// The audit log is rotated at this size, several times in each round, so that pruning is covered.
const OPERATOR: &str = "[audit]\nrotate_size = \"4K\"\nkeep = 5\n";

/// The file system that the state is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystem {
    Ext4,
    /// Without ext4's protection for programs that rename before they sync.
    Xfs,
}

impl FileSystem {
    /// Its name for `mount -t`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
        }
    }

    /// The one that `BATHY_POWER_FS` names, or ext4.
    pub fn wanted() -> Self {
        match std::env::var("BATHY_POWER_FS").as_deref() {
            Ok("xfs") => Self::Xfs,
            Ok("ext4") | Err(_) => Self::Ext4,
            Ok(other) => unreachable!("BATHY_POWER_FS is ext4 or xfs, not {other}"),
        }
    }

    /// Mount options, used in turn: short and default commit intervals, and without ext4's protection.
    pub fn options(self) -> &'static [&'static str] {
        match self {
            Self::Ext4 => &[
                "errors=remount-ro,commit=1",
                "errors=remount-ro,commit=1,noauto_da_alloc",
                "errors=remount-ro",
            ],
            Self::Xfs => &["noatime"],
        }
    }
}

/// A folder for the images of one machine, and for its mount points. It has one machine at a time.
#[derive(Debug)]
pub struct Bed {
    folder: TempDir,
    server: PathBuf,
    kind: FileSystem,
}

impl Bed {
    /// `server` is the program `power-disk`.
    pub fn new(server: impl Into<PathBuf>, kind: FileSystem) -> Self {
        let folder = tempfile::tempdir().expect("a folder for the images can be made");
        let write =
            |name: &str, text: &str| fs::write(folder.path().join(name), text).expect("it is our own folder");
        write("disk", "");
        write("operator.toml", OPERATOR);
        fs::create_dir(folder.path().join("state")).expect("it is our own folder");
        fs::create_dir_all(templates()).expect("the product's cache can be written");
        Self { folder, server: server.into(), kind }
    }

    /// The folder for images and other files, which power cuts do not affect.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// A disk with an empty file system.
    pub fn format(&self, megabytes: u64) -> PathBuf {
        let image = self.path().join("empty.img");
        File::create(&image)
            .and_then(|file| file.set_len(megabytes << 20))
            .expect("there is space for an image");
        let mut command = match self.kind {
            FileSystem::Ext4 => Command::new("mkfs.ext4"),
            FileSystem::Xfs => Command::new("mkfs.xfs"),
        };
        match self.kind {
            FileSystem::Ext4 => command.args(["-q", "-F", "-E", "lazy_itable_init=0,nodiscard"]),
            FileSystem::Xfs => command.args(["-q", "-f", "-K"]),
        };
        succeeds(command.env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin").arg(&image));
        image
    }

    /// The disk of the running machine, or of the last one.
    pub fn disk(&self) -> PathBuf {
        self.path().join("running.img")
    }

    /// Starts a machine with a copy of this disk and a new boot id.
    pub fn boot(&self, image: &Path, options: &str) -> Machine {
        self.try_boot(image, options).expect("power-disk has ended; its message is above")
    }

    /// As [`Bed::boot`]; none if the disk cannot be mounted.
    pub fn try_boot(&self, image: &Path, options: &str) -> Option<Machine> {
        let disk = self.disk();
        copy(image, &disk);
        let boot_id = fs::read("/proc/sys/kernel/random/uuid").expect("the kernel makes numbers");
        fs::write(self.path().join("boot_id"), boot_id).expect("it is our own folder");
        let mut server = Command::new(&self.server)
            .arg("serve")
            .arg(&disk)
            .arg(self.path())
            .args([self.kind.name(), options])
            .arg(templates())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("power-disk is built");
        let requests = server.stdin.take();
        let answers = BufReader::new(server.stdout.take().expect("its output is a pipe"));
        let shell = Shell { init: 0, folder: self.path().to_owned() };
        let mut machine = Machine { server, requests, answers, shell };
        let Some(line) = machine.answer() else {
            // There is nothing to switch off.
            machine.requests = None;
            let _ = machine.server.wait();
            return None;
        };
        machine.shell.init = line.parse().expect("the machine's first process tells its number");
        Some(machine)
    }
}

/// The product's folder for empty file systems of each size. Machines have theirs on their disks.
fn templates() -> PathBuf {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")));
    cache.expect("there is a home").join("bathysphere/disk")
}

/// A running machine. Dropping it removes its processes, mounts and loop device.
#[derive(Debug)]
pub struct Machine {
    server: Child,
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    shell: Shell,
}

/// The effect of a power cut on unflushed writes.
#[derive(Clone, Debug, Default)]
pub struct Cut {
    /// The kind of loss.
    pub mode: String,
    /// Writes that were not flushed.
    pub writes: u64,
    /// Unflushed writes that were lost or torn.
    pub damaged: u64,
    /// The sectors of 512 bytes that were lost.
    pub sectors: u64,
}

impl fmt::Display for Cut {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mode, writes, damaged, sectors } = self;
        if mode.is_empty() {
            return write!(out, "killed");
        }
        write!(
            out,
            "{mode}: of {writes} unflushed writes {damaged} were lost or torn, {} KiB",
            sectors.div_ceil(2)
        )
    }
}

impl Machine {
    /// How programs are started on it.
    pub fn shell(&self) -> &Shell {
        &self.shell
    }

    /// Makes the power fail after this many more writes, or after this time at the latest, and waits for it.
    pub fn fail_after(&mut self, writes: u64, limit: Duration) {
        self.request(&format!("fail {writes} {}", limit.as_millis()));
    }

    /// Saves the disk of the power failure to a new file; the power fails now if it has not before. The machine continues, but
    /// later writes are in no image.
    pub fn cut(&mut self, seed: u64, image: &Path) -> Cut {
        let line = self.request(&format!("cut {seed} {}", image.display()));
        let mut parts = line.split(' ');
        let mode = parts.next().unwrap_or_default().to_owned();
        let mut number =
            || parts.next().and_then(|part| part.parse().ok()).expect("power-disk answers with numbers");
        Cut { mode, writes: number(), damaged: number(), sectors: number() }
    }

    /// Kills all processes of the machine and waits until everything is released. Without a power failure before, the
    /// disk then has everything that was written: [`Bed::disk`].
    pub fn off(mut self) {
        if let Err(problem) = self.release() {
            unreachable!("{problem}");
        }
    }

    fn request(&mut self, line: &str) -> String {
        let requests = self.requests.as_mut().expect("the machine is on");
        writeln!(requests, "{line}").expect("power-disk runs");
        self.answer().expect("power-disk has ended; its message is above")
    }

    /// The server's next line; none if it has ended.
    fn answer(&mut self) -> Option<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("power-disk's output can be read");
        line.strip_suffix('\n').map(str::to_owned)
    }

    fn release(&mut self) -> Result<(), String> {
        let Some(requests) = self.requests.take() else { return Ok(()) };
        let folders = leftovers::folders(&self.shell.outside("bathysphere/sandboxes"));
        drop(requests);
        let deadline = Instant::now() + patience(RELEASE);
        let status = loop {
            match self.server.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if Instant::now() < deadline => sleep(Duration::from_millis(2)),
                result => {
                    // Its end aborts the FUSE connection, so that nothing waits for it any more.
                    let _ = self.server.kill();
                    let _ = self.server.wait();
                    return Err(format!("the machine's mounts are not released: {result:?}"));
                }
            }
        };
        leftovers::remove_groups(&folders)?;
        leftovers::check_released(&self.shell.folder)?;
        if status.success() { Ok(()) } else { Err(format!("power-disk failed: {status}")) }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Err(problem) = self.release() {
            eprintln!("{problem}");
            assert!(std::thread::panicking(), "{problem}");
        }
    }
}

/// How programs are started on a machine.
#[derive(Clone, Debug)]
pub struct Shell {
    init: u32,
    folder: PathBuf,
}

impl Shell {
    /// The root of the machine's disk, for programs on it: `XDG_STATE_HOME`.
    pub fn state(&self) -> PathBuf {
        self.folder.join("state")
    }

    /// The path of a file on the machine's disk, for this process.
    fn outside(&self, path: &str) -> PathBuf {
        let inside = self.state().join(path);
        Path::new("/proc")
            .join(self.init.to_string())
            .join("root")
            .join(inside.strip_prefix("/").unwrap_or(&inside))
    }

    /// A command that runs on the machine.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--mount", "--pid", "--target", &self.init.to_string(), "--"]).arg(program);
        command
    }

    /// Runs `bathy` on the machine to its end. One that hangs has no exit code.
    pub fn bathy(&self, arguments: &[&str]) -> Ran {
        let mut command = self.command(bathy());
        command
            .args(arguments)
            .env("XDG_STATE_HOME", self.state())
            .env("BATHYSPHERE_CONFIG", self.folder.join("operator.toml"))
            .env("BATHY_ENGINE", "uml");
        run(&mut command)
    }

    /// Runs a shell script in the state folder to its end.
    pub fn sh(&self, script: &str) -> Ran {
        let script = format!("cd '{}' && {script}", self.state().display());
        run(self.command("bash").args(["-c", &script]))
    }
}

/// Runs a command to its end or to its time limit. Its output goes to files: processes that outlive it would keep a pipe open.
fn run(command: &mut Command) -> Ran {
    let file = || tempfile::tempfile().expect("a file for output can be made");
    let (mut stdout, mut stderr) = (file(), file());
    let copy = |file: &File| Stdio::from(file.try_clone().expect("a descriptor can be copied"));
    let began = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(copy(&stdout))
        .stderr(copy(&stderr))
        .spawn()
        .expect("nsenter is part of every Debian");
    let limit = patience(HANGS);
    let code = loop {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            break status.code();
        }
        if began.elapsed() > limit {
            // What it started on the machine ends with the machine.
            let _ = child.kill();
            let _ = child.wait();
            writeln!(stderr, "It hangs: no end within {limit:?}").expect("a file can be written");
            break None;
        }
        sleep(Duration::from_millis(1));
    };
    Ran { code, stdout: content(&mut stdout), stderr: content(&mut stderr), took: began.elapsed() }
}

fn content(file: &mut File) -> String {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0)).and_then(|_| file.read_to_end(&mut bytes)).expect("a file can be read");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Copies an image as a sparse file.
#[track_caller]
pub fn copy(from: &Path, to: &Path) {
    succeeds(Command::new("cp").args(["--sparse=always", "--reflink=auto"]).arg(from).arg(to));
}

#[track_caller]
fn succeeds(command: &mut Command) {
    let output = command.output().expect("the program is there");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}
