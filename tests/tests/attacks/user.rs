//! An ordinary user's sandboxes: the same product, without root's users for the keeper and the guest.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use bathy_tests::bathy;
use tempfile::TempDir;

use crate::run::{Run, probe};

/// The user that every system has and that owns nothing.
pub const NOBODY: u32 = 65534;

/// The keeper's descriptor of the root image.
const IMAGE: i32 = 7;

/// A place of its own with the product, its cache and the attacker's program.
pub struct OrdinaryUser {
    folder: TempDir,
}

/// The user, shared by the tests that run at the same time, because its image is a large copy. It goes with the last.
pub fn ordinary_user() -> Arc<OrdinaryUser> {
    static USER: Mutex<Weak<OrdinaryUser>> = Mutex::new(Weak::new());
    // A test that failed while it held this has made no user.
    let mut shared = USER.lock().unwrap_or_else(PoisonError::into_inner);
    shared.upgrade().unwrap_or_else(|| {
        let user = Arc::new(OrdinaryUser::create());
        *shared = Arc::downgrade(&user);
        user
    })
}

impl OrdinaryUser {
    fn create() -> Self {
        let user = Self { folder: tempfile::tempdir().expect("there is room in /tmp") };
        let open = fs::Permissions::from_mode(0o755);
        fs::set_permissions(user.folder.path(), open).expect("our own folder");
        for program in ["bathy", "bathy-keeper", "bathy-gateway", "bathy-agent"] {
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
        run(Command::new("chown").args(["-R", &format!("{NOBODY}:{NOBODY}")]).arg(user.folder.path()));
        user
    }

    /// A path below its home.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts `bathy run` with these arguments as this user.
    pub fn start(&self, arguments: &[&str]) -> Run {
        let mut command = Command::new(self.path("bathy"));
        command.arg("run").args(arguments).env_clear().env("HOME", self.folder.path()).current_dir("/");
        Run::of(command.uid(NOBODY).gid(NOBODY))
    }
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
