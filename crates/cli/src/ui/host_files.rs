//! A hint for commands that fail because a file of theirs is here and not in the sandbox.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::ui::escape;

/// Exit codes of programs that do not find a file, and of those that are not found themselves.
const NOT_FOUND: [u8; 4] = [1, 2, 126, 127];

/// What to say about the first word of a command that is the relative path of a file here, below `folder`, if the command may have
/// failed because of that.
pub fn hint(code: u8, argv: &[Vec<u8>], folder: &Path) -> Option<String> {
    if !NOT_FOUND.contains(&code) {
        return None;
    }
    let is_here = |word: &&Vec<u8>| {
        let path = Path::new(OsStr::from_bytes(word));
        path.is_relative() && folder.join(path).is_file()
    };
    let word = escape::word(&String::from_utf8_lossy(argv.iter().find(is_here)?));
    Some(format!(
        "{word} is a file of this machine, and a sandbox has files of its own: pass it on standard input (`bathy run -- python3 - < FILE`), or copy it with `bathy cp`"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_file_of_a_command_that_is_here_is_named() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("s.py"), "").unwrap();
        std::fs::create_dir(folder.path().join("python3")).unwrap();
        let told = |words: &[&str]| {
            let argv: Vec<_> = words.iter().map(|word| word.as_bytes().to_vec()).collect();
            hint(2, &argv, folder.path())
        };
        assert!(told(&["python3", "s.py"]).unwrap().starts_with("s.py is a file of this machine"));
        assert!(told(&["./s.py"]).unwrap().starts_with("./s.py "));
        // Folders, files that are nowhere, and paths that a sandbox has as well.
        assert_eq!(told(&["python3", "x.py", "/etc/passwd", ""]), None);
        for code in [0, 3, 124, 130, 137] {
            assert_eq!(hint(code, &[b"s.py".to_vec()], folder.path()), None, "{code}");
        }
    }
}
