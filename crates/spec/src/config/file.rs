//! Reads a small regular file at a path that another user may control.
//!
//! Opening a named pipe blocks, opening a device can have side effects, and reading a device may never end.
//! So the path is first resolved with O_PATH, and only a regular file is opened and read, up to a limit.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags, open};
use thiserror::Error;

/// A file is not read.
#[derive(Debug, Error)]
pub enum FileError {
    /// It cannot be opened or read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It is a pipe, a device, a socket or a folder.
    #[error("it is {0} and not a regular file")]
    Kind(&'static str),
    /// It is too long.
    #[error("it is longer than {0} bytes")]
    TooLong(u64),
}

impl From<FileError> for io::Error {
    fn from(error: FileError) -> Self {
        match error {
            FileError::Io(error) => error,
            other => Self::other(other),
        }
    }
}

/// Reads a regular file of at most `most` bytes. Links are followed.
pub fn read_regular(path: &Path, most: u64) -> Result<(Vec<u8>, Metadata), FileError> {
    let found =
        File::from(open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map_err(io::Error::from)?);
    let metadata = found.metadata()?;
    if let Some(kind) = other_kind(&metadata) {
        return Err(FileError::Kind(kind));
    }
    if metadata.len() > most {
        return Err(FileError::TooLong(most));
    }
    // Opens the same file, whatever the path leads to by now (TOCTOU).
    let same = format!("/proc/self/fd/{}", found.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(open(same, flags, Mode::empty()).map_err(io::Error::from)?);
    let mut bytes = Vec::new();
    // It can grow meanwhile, and some files do not report their size.
    file.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most { Err(FileError::TooLong(most)) } else { Ok((bytes, metadata)) }
}

fn other_kind(metadata: &Metadata) -> Option<&'static str> {
    let kind = metadata.file_type();
    match kind {
        _ if kind.is_file() => None,
        _ if kind.is_dir() => Some("a directory"),
        _ if kind.is_fifo() => Some("a named pipe"),
        _ if kind.is_socket() => Some("a socket"),
        _ => Some("a device"),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    use super::*;

    #[test]
    fn c6_only_small_regular_files_are_read_and_nothing_keeps_the_reader_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        assert!(Command::new("mkfifo").arg(at("pipe")).status().unwrap().success());
        let _socket = UnixListener::bind(at("socket")).unwrap();
        symlink("/dev/zero", at("device")).unwrap();
        symlink(at("pipe"), at("linked pipe")).unwrap();
        File::create(at("huge")).unwrap().set_len(1 << 30).unwrap();
        for (name, expected) in [
            ("pipe", "it is a named pipe and not a regular file"),
            ("linked pipe", "it is a named pipe and not a regular file"),
            ("socket", "it is a socket and not a regular file"),
            ("device", "it is a device and not a regular file"),
            (".", "it is a directory and not a regular file"),
            ("huge", "it is longer than 16 bytes"),
        ] {
            // Without the check this would block on a pipe.
            assert_eq!(read_regular(&at(name), 16).unwrap_err().to_string(), expected, "{name}");
        }
        fs::write(at("file"), "0123456789abcdef").unwrap();
        symlink(at("file"), at("link")).unwrap();
        assert_eq!(read_regular(&at("link"), 16).unwrap().0, b"0123456789abcdef");
        assert!(matches!(read_regular(&at("file"), 15), Err(FileError::TooLong(15))));
        // Its reported size is zero.
        assert!(matches!(read_regular(Path::new("/proc/self/maps"), 16), Err(FileError::TooLong(16))));
        let missing = read_regular(&at("none"), 16).unwrap_err();
        assert_eq!(io::Error::from(missing).kind(), io::ErrorKind::NotFound);
    }
}
