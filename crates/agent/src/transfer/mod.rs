//! Copies files into and out of the guest: the agent's own program, run again as the files' user.
//!
//! The files are sent as a [`bathy_protocol::archive`] on standard input or output. A separate process means
//! that the guest kernel checks this user's permissions, and that a slow disk delays nothing else.

mod get;
mod list;
mod put;
mod range;

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use bathy_protocol::archive::ItemPart;
use rustix::io::Errno;
use thiserror::Error;

use crate::users;

/// The name of this program when it copies.
pub const PROGRAM: &str = "bathysphere-transfer";
/// The first argument of a copy into the guest; the path and the item's name follow.
pub const PUT: &str = "put";
/// The first argument of a copy out of the guest; the path and an [`ItemPart`] follow.
pub const GET: &str = "get";

#[derive(Debug, Error)]
enum TransferError {
    #[error("{}: {}", show(.0), reason(*.1))]
    File(Vec<u8>, Errno),
    #[error("{}: a folder is in the way", show(.0))]
    FolderInTheWay(Vec<u8>),
    #[error("{}: something that is not a folder is in the way", show(.0))]
    NoFolder(Vec<u8>),
    #[error("{}: {} is in the way", show(.0), .1)]
    Special(Vec<u8>, &'static str),
    #[error("{}: is {}, which cannot be copied", show(.0), .1)]
    Uncopyable(Vec<u8>, &'static str),
    #[error("{}: is {}, not a file", show(.0), .1)]
    NotAFile(Vec<u8>, &'static str),
    #[error("{}: is not a folder", show(.0))]
    NotAFolder(Vec<u8>),
    #[error("the item has no name that a file can have")]
    Nameless,
    #[error("the copy broke off before its end")]
    Truncated,
    #[error("{0}")]
    Archive(#[from] bathy_protocol::archive::ArchiveError),
    #[error("the host closed the connection: {0}")]
    Stream(io::Error),
}

/// Copies according to the arguments. An error is one line on standard error.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<OsString> = arguments.collect();
    let arguments: Vec<&[u8]> = arguments.iter().map(|argument| argument.as_bytes()).collect();
    let outcome = match arguments.as_slice() {
        [program, rest @ ..] if *program == PROGRAM.as_bytes() => match rest {
            [direction, path, name] if *direction == PUT.as_bytes() => put_item(path, name),
            [direction, path, part] if *direction == GET.as_bytes() => match ItemPart::from_name(part) {
                Some(part) => get_part(path, part),
                None => return refuse_to_run(),
            },
            _ => return refuse_to_run(),
        },
        _ => return refuse_to_run(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn put_item(path: &[u8], name: &[u8]) -> Result<(), TransferError> {
    let (mut input, path) = (unbuffered(io::stdin().as_fd())?, from_home(path));
    if name.is_empty() { put::write(&mut input, &path) } else { put::put(&mut input, &path, name) }
}

fn get_part(path: &[u8], part: ItemPart) -> Result<(), TransferError> {
    let (mut output, path) = (unbuffered(io::stdout().as_fd())?, from_home(path));
    match part {
        ItemPart::Whole => get::get(&mut output, &path),
        ItemPart::Range { offset, limit } => range::range(&mut output, &path, offset, limit),
        ItemPart::Listing { limit } => list::list(&mut output, &path, limit),
    }
}

/// A relative path starts at the user's home, as it does for a command.
fn from_home(path: &[u8]) -> Vec<u8> {
    if path.starts_with(b"/") {
        return path.to_vec();
    }
    let user = users::find(&rustix::process::getuid().as_raw().to_string());
    join(user.map_or_else(|_| String::from("/"), |user| user.home).as_bytes(), path)
}

/// Both directions use large buffers of their own.
fn unbuffered(stream: BorrowedFd<'_>) -> Result<File, TransferError> {
    stream.try_clone_to_owned().map(File::from).map_err(TransferError::Stream)
}

fn refuse_to_run() -> ExitCode {
    eprintln!("this program is the first process of a sandbox, and of no use elsewhere");
    ExitCode::FAILURE
}

/// Formats a path as a single line.
fn show(path: &[u8]) -> String {
    let mut shown = String::new();
    for character in OsStr::from_bytes(path).to_string_lossy().chars() {
        if character.is_control() {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
    }
    shown
}

/// Explains an error number to the user.
fn reason(error: Errno) -> String {
    match error {
        Errno::NOSPC | Errno::DQUOT => "the sandbox's disk is full".to_owned(),
        Errno::NOENT => "No such file or directory".to_owned(),
        Errno::ACCESS => "Permission denied".to_owned(),
        other => {
            // The standard library adds the number in parentheses, which is not helpful.
            let text = io::Error::from(other).to_string();
            text.split(" (os error").next().unwrap_or_default().to_owned()
        }
    }
}

fn join(folder: &[u8], name: &[u8]) -> Vec<u8> {
    let slash: &[u8] = if folder.is_empty() || folder.ends_with(b"/") { b"" } else { b"/" };
    [folder, slash, name].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_called_by_its_name() {
        for error in [Errno::NOSPC, Errno::DQUOT] {
            let message = TransferError::File(b"/data/x".to_vec(), error).to_string();
            assert_eq!(message, "/data/x: the sandbox's disk is full");
        }
        let message = TransferError::File(b"/x".to_vec(), Errno::NOENT).to_string();
        assert_eq!(message, "/x: No such file or directory");
        assert_eq!(reason(Errno::ROFS), "Read-only file system");
    }

    #[test]
    fn an_error_is_one_line_whatever_the_name_is() {
        let message = TransferError::File(b"/a\nb\x1b[31m\xff".to_vec(), Errno::ACCESS).to_string();
        assert!(!message.chars().any(char::is_control), "{message:?}");
    }

    #[test]
    fn arguments_that_are_not_ours_do_nothing() {
        for arguments in [
            &["bathysphere-transfer"][..],
            &["init", "get", "/", ""],
            &["bathysphere-transfer", "put"],
            &["bathysphere-transfer", "get", "/", "range 1"],
            &[],
        ] {
            let outcome = main(arguments.iter().map(OsString::from));
            assert_eq!(format!("{outcome:?}"), format!("{:?}", ExitCode::FAILURE));
        }
    }
}
