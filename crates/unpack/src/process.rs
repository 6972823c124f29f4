//! The process that unpacks one layer. It can read the layer and write to two pipes, and nothing else.
//!
//! The layer's plain archive goes to one pipe, the tree, or why there is none, to the other one. Whoever started the process
//! does not trust either: it hashes the archive itself, and checks the tree.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::panic;
use std::process::ExitCode;

use bathy_jail::filter::{Filter, UNPACKER};
use bathy_jail::limits::{self, COMMON, Limit};
use bathy_jail::{FilterError, LimitsError, PrivilegesError, RootError, privileges, root};
use rustix::process::Resource;
use thiserror::Error;

use crate::{Compression, LayerError, Layout, Limits, Options, TreeError, unpack_layer};

/// The layer, as the registry stores it.
pub const BLOB: i32 = 3;
/// Receives the layer's plain archive.
pub const ARCHIVE: i32 = 4;
/// Receives one of the two answers, after the archive.
pub const ANSWER: i32 = 5;

/// The first byte of an answer, before an encoded tree.
pub const TREE: u8 = 0;
/// The first byte of an answer, before the text of an error.
pub const FAILURE: u8 = 1;

/// Address space: the tree, its encoded form and a decompressor's window.
const MEMORY: u64 = 2 << 30;
/// Seconds of processor time, ten times as much as the largest layer takes.
const PROCESSOR_TIME: u64 = 3600;
const DESCRIPTORS: u64 = 16;

#[derive(Debug, Error)]
enum ProcessError {
    #[error("The unpacker's root cannot be emptied")]
    Root(#[from] RootError),
    #[error("The unpacker cannot be limited")]
    Limits(#[from] LimitsError),
    #[error("The unpacker cannot drop its privileges")]
    Privileges(#[from] PrivilegesError),
    #[error("The unpacker's system calls cannot be filtered")]
    Filter(#[from] FilterError),
    #[error("Cannot read the layer")]
    Read(#[source] io::Error),
    #[error(transparent)]
    Layer(#[from] LayerError),
    #[error(transparent)]
    Tree(#[from] TreeError),
}

/// Unpacks a layer. `inherit` takes over an inherited descriptor by its number.
pub fn run(inherit: impl Fn(i32) -> OwnedFd) -> ExitCode {
    let [blob, archive, mut answer] = [BLOB, ARCHIVE, ANSWER].map(|number| File::from(inherit(number)));
    if let Ok(answer) = answer.try_clone() {
        report_panics(answer);
    }
    let (kind, text) = match unpack(blob, archive) {
        Ok(tree) => (TREE, tree),
        Err(error) => (FAILURE, chain(&error).into_bytes()),
    };
    // A reader that has closed the pipe waits for no answer.
    match answer.write_all(&[kind]).and_then(|()| answer.write_all(&text)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Closes the jail, then reads the first byte of the layer.
fn unpack(mut blob: File, archive: File) -> Result<Vec<u8>, ProcessError> {
    confine()?;
    let (mut head, mut length) = ([0; 4], 0);
    while let Some(rest) = head.get_mut(length..).filter(|rest| !rest.is_empty()) {
        match blob.read(rest) {
            Ok(0) => break,
            Ok(count) => length += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(ProcessError::Read(error)),
        }
    }
    let head = head.get(..length).unwrap_or_default();
    let compression = Compression::detect(head);
    let options = Options { compression, layout: Layout::Tar, limits: Limits::default() };
    // The archive's pipe is closed before the answer is written.
    Ok(unpack_layer(head.chain(blob), archive, &options)?.tree.encode()?)
}

fn confine() -> Result<(), ProcessError> {
    root::enter_empty_root()?;
    limits::apply(COMMON)?;
    limits::apply(&[
        Limit { resource: Resource::Nofile, value: DESCRIPTORS },
        Limit { resource: Resource::As, value: MEMORY },
        Limit { resource: Resource::Fsize, value: 0 },
        Limit { resource: Resource::Nproc, value: 1 },
        Limit { resource: Resource::Cpu, value: PROCESSOR_TIME },
    ])?;
    privileges::drop_all()?;
    Filter::install(&UNPACKER.compile()?)?;
    Ok(())
}

/// Reports a panic in place of an answer. Writing it to the standard error would be of no use.
fn report_panics(answer: File) {
    panic::set_hook(Box::new(move |panic| {
        let message = panic.payload_as_str().unwrap_or("without a message");
        let place = panic.location().map(|place| format!("{}:{}", place.file(), place.line()));
        let place = place.unwrap_or_else(|| "an unknown place".to_owned());
        // The process ends in any case.
        let mut answer = &answer;
        let _ = answer.write_all(&[FAILURE]);
        let _ = answer.write_all(format!("the unpacker panicked at {place}: {message}").as_bytes());
    }));
}

/// An error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
