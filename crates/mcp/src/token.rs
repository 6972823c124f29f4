//! The bearer token of HTTP clients.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use bathy_spec::config::{self, FileError};
use thiserror::Error;

/// The file of a generated token, in the state folder.
const FILE: &str = "mcp-token";
/// The shortest token, in bytes.
const MIN: usize = 16;
/// The longest token, in bytes.
const MAX: usize = 4096;
/// Random bytes of a generated token.
const RANDOM: usize = 32;

#[derive(Debug, Error)]
pub enum TokenError {
    #[error("Cannot use the token file {0}")]
    File(PathBuf, #[source] io::Error),
    #[error("The token file {0} can be read by other users. Run `chmod 600 {0}`")]
    Open(PathBuf),
    #[error("The token file {0} holds no token: one line of {MIN} to {MAX} visible ASCII characters")]
    Form(PathBuf),
}

/// The hash of a token.
#[derive(Clone, Debug)]
pub struct Token(blake3::Hash);

impl Token {
    pub fn new(text: &str) -> Self {
        Self(blake3::hash(text.as_bytes()))
    }

    /// Reads the token from a file that only its owner may read.
    pub fn from_file(path: &Path) -> Result<Self, TokenError> {
        let failed = |error| TokenError::File(path.to_owned(), error);
        let (bytes, metadata) = match config::read_regular(path, 2 * MAX as u64) {
            Err(FileError::TooLong(_)) => return Err(TokenError::Form(path.to_owned())),
            read => read.map_err(|error| failed(error.into()))?,
        };
        if metadata.mode() & 0o077 != 0 {
            return Err(TokenError::Open(path.to_owned()));
        }
        let text = std::str::from_utf8(&bytes).unwrap_or_default().trim();
        if !(MIN..=MAX).contains(&text.len()) || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(TokenError::Form(path.to_owned()));
        }
        Ok(Self::new(text))
    }

    /// The token in the state folder, generated if there is none, and its file.
    pub fn of_folder(state: &Path) -> Result<(Self, PathBuf), TokenError> {
        let path = state.join(FILE);
        if !path.exists() {
            make(state, &path).map_err(|error| TokenError::File(path.clone(), error))?;
        }
        Ok((Self::from_file(&path)?, path))
    }

    /// Whether `shown` is this token, in constant time.
    pub fn is(&self, shown: &str) -> bool {
        self.0 == blake3::hash(shown.as_bytes())
    }
}

/// Writes a new token atomically. The first of several writers wins.
fn make(state: &Path, path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(state)?;
    let mut random = [0u8; RANDOM];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    let text: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let draft = state.join(format!("{FILE}.{}", std::process::id()));
    let mut options = File::options();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
    writeln!(file, "{text}")?;
    let linked = fs::hard_link(&draft, path);
    fs::remove_file(&draft)?;
    match linked {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_token_is_made_once_and_is_its_owners_alone() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let (token, path) = Token::of_folder(&state).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!((text.len(), fs::metadata(&path).unwrap().mode() & 0o777), (65, 0o600));
        assert!(token.is(text.trim()) && !token.is("") && !token.is(&text));
        let (again, _) = Token::of_folder(&state).unwrap();
        assert!(again.is(text.trim()));
        assert_eq!(fs::read_dir(&state).unwrap().count(), 1);
    }

    #[test]
    fn a_token_file_that_others_read_or_that_holds_none_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let refusal = |text: &str, mode: u32| {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            Token::from_file(&path).map(drop).unwrap_err().to_string()
        };
        assert!(refusal("0123456789abcdef", 0o644).contains("chmod 600"));
        for text in ["", "short", "0123456789 abcdef", "0123456789abcdef\nsecond", &"x".repeat(5000)] {
            assert!(refusal(text, 0o600).contains("holds no token"), "{text}");
        }
        assert!(Token::from_file(&folder.path().join("none")).is_err());
    }
}
