//! Hints for commands that fail because a sandbox is not what its user expects.

use std::error::Error;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use bathy_manager::{ManagerError, Sandboxed};

use crate::ui::escape;

/// Exit codes of programs that miss a file, and of missing programs.
const NOT_FOUND: [u8; 4] = [1, 2, 126, 127];
/// The exit code of a program that does not exist.
const NO_PROGRAM: u8 = 127;
/// Images that users of other tools name before the command, and that are not programs.
const IMAGES: [&str; 12] = [
    "alpine",
    "archlinux",
    "busybox",
    "centos",
    "debian",
    "fedora",
    "golang",
    "nginx",
    "postgres",
    "redis",
    "rust",
    "ubuntu",
];

/// A hint for a command of `bathy run` that ended with `code`, run by a client in `folder`.
pub fn of_run(code: u8, argv: &[Vec<u8>], folder: &Path) -> Option<String> {
    image(code, argv).or_else(|| {
        let file = host_file(code, argv, folder)?;
        Some(format!(
            "{file} is a file of this machine, and a sandbox has files of its own: pass it on standard input (`bathy run python3 - < FILE`), or copy it into a persistent sandbox with `bathy cp`"
        ))
    })
}

/// A hint for a command of `bathy exec` in `sandbox` that ended with `code`, run by a client in `folder`.
pub fn of_exec(code: u8, argv: &[Vec<u8>], folder: &Path, sandbox: &str) -> Option<String> {
    let (file, sandbox) = (host_file(code, argv, folder)?, escape::word(sandbox));
    Some(format!(
        "{file} is a file of this machine, and a sandbox has files of its own: copy it with `bathy cp FILE {sandbox}:FILE`, or pass it on standard input (`bathy exec -i {sandbox} python3 - < FILE`)"
    ))
}

/// The command begins with the name of an image.
fn image(code: u8, argv: &[Vec<u8>]) -> Option<String> {
    let word = std::str::from_utf8(argv.first()?).ok()?;
    let (name, tag) = word.split_once(':').unwrap_or((word, ""));
    let is_image = IMAGES.contains(&name) || !tag.is_empty() && !name.is_empty();
    (code == NO_PROGRAM && is_image).then(|| {
        let word = escape::word(word);
        format!(
            "{word} was taken for the command. To run in the image of that name: bathy run --image {word}"
        )
    })
}

/// The first word of a failed command that is the relative path of a file on this machine.
fn host_file(code: u8, argv: &[Vec<u8>], folder: &Path) -> Option<String> {
    if !NOT_FOUND.contains(&code) {
        return None;
    }
    let is_here = |word: &&Vec<u8>| {
        let path = Path::new(OsStr::from_bytes(word));
        path.is_relative() && folder.join(path).is_file()
    };
    Some(escape::word(&String::from_utf8_lossy(argv.iter().find(is_here)?)))
}

/// The error for a sandbox that is not running, because its main command ended: to start it again would not help.
pub fn not_running(error: ManagerError, sandbox: &Sandboxed) -> Box<dyn Error> {
    match error {
        ManagerError::NotRunning { name, status } if !sandbox.record.spec.command.is_empty() => format!(
            "The sandbox `{name}` is {status}: it runs only as long as its main command. A sandbox without one runs until it is stopped: `bathy create --start`, then `bathy cp` and `bathy exec`"
        )
        .into(),
        other => other.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<Vec<u8>> {
        words.iter().map(|word| word.as_bytes().to_vec()).collect()
    }

    #[test]
    fn the_first_file_of_a_command_that_is_here_is_named() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("s.py"), "").unwrap();
        std::fs::create_dir(folder.path().join("python3")).unwrap();
        let hint = |line: &[&str]| of_run(2, &words(line), folder.path());
        assert!(hint(&["python3", "s.py"]).unwrap().starts_with("s.py is a file of this machine"));
        assert!(hint(&["./s.py"]).unwrap().starts_with("./s.py "));
        // Folders, files that are nowhere, and paths that a sandbox has as well.
        assert_eq!(hint(&["python3", "x.py", "/etc/passwd", ""]), None);
        for code in [0, 3, 124, 130, 137] {
            assert_eq!(of_run(code, &words(&["s.py"]), folder.path()), None, "{code}");
        }
    }

    #[test]
    fn each_verb_is_answered_with_what_it_can_do() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("s.py"), "").unwrap();
        let hint = of_exec(2, &words(&["python3", "s.py"]), folder.path(), "web").unwrap();
        assert!(hint.contains("`bathy cp FILE web:FILE`") && hint.contains("`bathy exec -i web"), "{hint}");
        assert!(!hint.contains("bathy run"), "{hint}");
        // A sandbox that exists has its image.
        assert_eq!(of_exec(127, &words(&["debian"]), folder.path(), "web"), None);
    }

    #[test]
    fn an_image_in_place_of_a_command_is_recognized() {
        let hint = |code, line: &[&str]| of_run(code, &words(line), Path::new("/nowhere"));
        for image in ["debian", "python:3.12", "ghcr.io/owner/name:latest"] {
            let hint = hint(127, &[image, "echo"]).unwrap();
            assert!(hint.contains(&format!("run --image {image}")), "{hint}");
        }
        assert_eq!(hint(1, &["debian"]), None, "it ran");
        for program in ["no-such-program", ":", "name:", ":tag", ""] {
            assert_eq!(hint(127, &[program]), None, "{program}");
        }
    }
}
