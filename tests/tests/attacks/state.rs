//! J5: the folders that bathy keeps things in hold planted links, as when an administrator runs it with
//! another user's home.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use bathy_tests::{Ran, bathy, patience, promptly};
use tempfile::TempDir;

use crate::run::{Run, set_up};

const PATIENCE: Duration = Duration::from_secs(40);

/// Folders of its own for one test, with the real kernel and image.
struct Home {
    folder: TempDir,
}

impl Home {
    fn new() -> Self {
        set_up();
        let home = Self { folder: tempfile::tempdir().expect("there is room in /tmp") };
        fs::create_dir_all(home.cache().join("disk")).expect("our own folder");
        fs::create_dir_all(home.state()).expect("our own folder");
        for entry in fs::read_dir(real_cache()).expect("./test has filled the cache").flatten() {
            if entry.file_name() != "disk" {
                symlink(entry.path(), home.cache().join(entry.file_name())).expect("our own folder");
            }
        }
        home
    }

    fn cache(&self) -> PathBuf {
        self.folder.path().join("cache/bathysphere")
    }

    fn state(&self) -> PathBuf {
        self.folder.path().join("state/bathysphere")
    }

    /// The template that a sandbox was made with. Its name has the digest of its content.
    fn template(&self) -> PathBuf {
        assert_eq!(self.run(&["true"]).code, Some(0));
        let made = fs::read_dir(self.cache().join("disk")).expect("it was just made").flatten();
        let is_one = |path: &PathBuf| {
            path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"ext4-64M-"))
        };
        made.map(|entry| entry.path()).find(is_one).expect("a template")
    }

    /// A file that is none of bathy's business.
    fn victim(&self) -> PathBuf {
        self.folder.path().join("victim")
    }

    fn in_home<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        let parent = |path: PathBuf| path.parent().map(Path::to_owned).unwrap_or_default();
        command.env("XDG_CACHE_HOME", parent(self.cache())).env("XDG_STATE_HOME", parent(self.state()))
    }

    fn run(&self, guest_command: &[&str]) -> Ran {
        let mut command = Command::new(bathy());
        command.args(["run", "--disk", "64M", "--user", "root", "--"]).args(guest_command);
        Run::of(self.in_home(&mut command)).finish(patience(PATIENCE))
    }
}

/// Where the kernel and the image of the user who runs the tests are.
fn real_cache() -> PathBuf {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")));
    base.expect("HOME is set").join("bathysphere")
}

#[test]
fn j5_folders_without_links_work() {
    let home = Home::new();
    let ran = home.run(&["true"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(home.template().is_file() && home.state().join("ephemeral").is_file());
}

#[test]
fn j5_a_link_in_place_of_the_file_of_places_creates_nothing() {
    let home = Home::new();
    symlink(home.victim(), home.state().join("ephemeral")).expect("our own folder");
    let ran = home.run(&["true"]);
    assert!(!home.victim().exists(), "the link's target was created");
    assert_eq!(ran.code, Some(125), "{}", ran.stderr);
    assert!(ran.stderr.contains("ephemeral"), "{}", ran.stderr);
}

#[test]
fn j5_a_link_in_place_of_a_new_template_harms_nothing() {
    let home = Home::new();
    fs::write(home.victim(), "precious").expect("our own folder");
    // The shell's number is bathy's, once it has become bathy.
    let script = r#"ln -s "$0" "$1.$$" && exec "$2" run --disk 64M -- true"#;
    let mut command = Command::new("sh");
    command.args(["-c", script]).args([home.victim(), home.cache().join("disk/.ext4-64M"), bathy()]);
    Run::of(home.in_home(&mut command)).finish(patience(PATIENCE));
    let left = fs::read(home.victim()).expect("the victim is there");
    assert_eq!(String::from_utf8_lossy(&left), "precious", "the link's target was overwritten");
}

#[test]
fn j5_a_link_in_place_of_a_template_hands_no_host_file_to_the_guest() {
    const SECRET: &str = "canary-7f3a91";
    let home = Home::new();
    // A file that the guest can boot with, or it could not tell what it sees.
    let template = home.template();
    let mut bytes = fs::read(&template).expect("it was just made");
    let end = bytes.len() - 4096;
    bytes[end..end + SECRET.len()].copy_from_slice(SECRET.as_bytes());
    fs::write(home.victim(), bytes).expect("there is room in /tmp");
    fs::remove_file(&template).expect("our own file");
    symlink(home.victim(), &template).expect("our own folder");
    let ran = home.run(&["sh", "-c", &format!("grep -ac {SECRET} /dev/vdb")]);
    assert_ne!(ran.stdout.trim(), "1", "the guest found the host file's content on its disk: {}", ran.stderr);
}

#[test]
fn j5_a_pipe_in_place_of_a_template_does_not_hang() {
    let home = Home::new();
    let template = home.template();
    fs::remove_file(&template).expect("our own file");
    let made = Command::new("mkfifo").arg(&template).status().expect("mkfifo is there");
    assert!(made.success());
    let ran = home.run(&["true"]);
    assert_eq!(ran.code, Some(0), "it is made again: {}", ran.stderr);
    assert!(ran.took < promptly(Duration::from_secs(10)), "{:?}", ran.took);
}

#[test]
fn j5_a_pipe_or_link_in_place_of_what_is_known_about_kvm_does_not_hang_or_lead_anywhere() {
    let home = Home::new();
    let memory = home.state().join("kvm.json");
    let made = Command::new("mkfifo").arg(&memory).status().expect("mkfifo is there");
    assert!(made.success());
    let doctor = |home: &Home| {
        let mut command = Command::new(bathy());
        Run::of(home.in_home(command.arg("doctor"))).finish(patience(PATIENCE))
    };
    assert!(doctor(&home).stdout.contains("engine: "), "doctor answers");
    fs::remove_file(&memory).expect("our own file");
    fs::write(home.victim(), "precious").expect("our own folder");
    symlink(home.victim(), &memory).expect("our own folder");
    assert!(doctor(&home).stdout.contains("engine: "), "doctor answers");
    assert_eq!(fs::read_to_string(home.victim()).expect("it is there"), "precious");
}
