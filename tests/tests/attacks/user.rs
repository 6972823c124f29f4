//! An ordinary user's sandboxes: the same product, without root's users for the keeper and the guest.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use bathy_tests::{Ran, bathy};
use tempfile::TempDir;

use crate::run::{Run, probe};

/// The user that every system has and that owns nothing.
pub const NOBODY: u32 = 65534;

/// The keeper's descriptor of the root image.
const IMAGE: i32 = 7;

/// A place of its own with the product, its cache and the attacker's program.
#[derive(Clone)]
pub struct OrdinaryUser {
    number: u32,
    folder: Arc<TempDir>,
    /// Whether its programs share one processor.
    one_processor: bool,
}

/// The user, shared by the tests that run at the same time, because its image is a large copy. It goes with the last.
pub fn ordinary_user() -> Arc<OrdinaryUser> {
    static USER: Mutex<Weak<OrdinaryUser>> = Mutex::new(Weak::new());
    // A test that failed while it held this has made no user.
    let mut shared = USER.lock().unwrap_or_else(PoisonError::into_inner);
    shared.upgrade().unwrap_or_else(|| {
        let user = Arc::new(OrdinaryUser::with_number(NOBODY));
        *shared = Arc::downgrade(&user);
        user
    })
}

impl OrdinaryUser {
    /// A user of this number, which need not have a name.
    pub fn with_number(number: u32) -> Self {
        let folder = tempfile::tempdir().expect("there is room in /tmp");
        let user = Self { number, folder: Arc::new(folder), one_processor: false };
        let open = fs::Permissions::from_mode(0o755);
        fs::set_permissions(user.folder.path(), open).expect("our own folder");
        for program in ["bathy", "bathy-keeper", "bathy-gateway", "bathy-agent", "bathy-unpack"] {
            fs::copy(bathy().with_file_name(program), user.path(program)).expect("./test builds it");
        }
        fs::copy(probe(), user.path("jail-probe")).expect("the probe is built");
        for entry in used_entries() {
            let kind =
                entry.parent().and_then(Path::file_name).expect("entries lie in a folder for their kind");
            let target = user.path(".cache/bathysphere").join(kind);
            fs::create_dir_all(&target).expect("our own folder");
            run(Command::new("cp").arg("-r").arg(&entry).arg(target));
        }
        run(Command::new("chown").args(["-R", &format!("{number}:{number}")]).arg(user.folder.path()));
        user
    }

    /// A path below its home.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The same user, whose programs share one processor.
    pub fn on_one_processor(&self) -> Self {
        Self { one_processor: true, ..self.clone() }
    }

    /// Starts `bathy run` with these arguments as this user.
    pub fn start(&self, arguments: &[&str]) -> Run {
        Run::of(&mut self.run_command(arguments))
    }

    /// `bathy run` with these arguments as this user.
    pub fn run_command(&self, arguments: &[&str]) -> Command {
        self.command(&[&["run"], arguments].concat())
    }

    /// Runs `bathy` with these arguments as this user.
    pub fn bathy(&self, arguments: &[&str]) -> Ran {
        let mut command = self.command(arguments);
        let begin = Instant::now();
        let output = command.stdin(Stdio::null()).output().expect("it was copied here");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        Ran { code: output.status.code(), stdout, stderr, took: begin.elapsed() }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        // With the usual limit of descriptors, whatever that of the test is.
        let mut command = Command::new("prlimit");
        command.arg("--nofile=1024:");
        if self.one_processor {
            command.args(["taskset", "-c", &first_processor().to_string()]);
        }
        self.becomes(command.arg(self.path("bathy")).args(arguments));
        command
    }

    /// Has a command run as this user, with nothing of ours around it.
    pub fn becomes<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env_clear().env("PATH", "/usr/bin:/bin").env("HOME", self.folder.path()).current_dir("/");
        command.uid(self.number).gid(self.number)
    }
}

fn first_processor() -> usize {
    let usable = rustix::thread::sched_getaffinity(None).expect("Linux tells");
    (0..).find(|number| usable.is_set(*number)).expect("one that this runs on")
}

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?}: {status}");
}

/// The entries of the cache that a sandbox is made of: its kernel and its image.
fn used_entries() -> [PathBuf; 2] {
    let mut sandbox = Run::start(&["--", "sh", "-c", "echo up; sleep 60"]);
    let family = sandbox.when_printed("up");
    let kernel = family.guest.expect("the guest runs").link("exe");
    let image = family.keeper.expect("the keeper runs").link(&format!("fd/{IMAGE}"));
    [kernel, image].map(|file| Path::new(&file).parent().map(Path::to_owned).unwrap_or_default())
}
