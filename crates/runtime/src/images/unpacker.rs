//! The process that unpacks a layer: how it is started, and how little of what it says is believed.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use bathy_client::wait::is_readable_before;
use bathy_jail::spawn::{self, Program};
use bathy_jail::{SpawnError, Spawned};
use bathy_registry::Digest;
use bathy_registry::digest::{Algorithm, Hasher};
use bathy_unpack::{LayerTree, Limits, TreeError, process};
use thiserror::Error;

use crate::assets::{self, AssetsError};
use crate::{ending, identity};

/// The program beside `bathy`.
pub const PROGRAM: &str = "bathy-unpack";
/// How long the process may be silent. It writes what it unpacks as it goes.
const SILENCE: Duration = Duration::from_secs(300);
/// A tree of a million names has half of it.
const MAX_TREE: u64 = 128 << 20;
/// Characters of a message that are shown.
const MAX_MESSAGE: usize = 2000;
const BUFFER: usize = 256 << 10;

/// A layer is not unpacked.
#[derive(Debug, Error)]
pub enum UnpackError {
    #[error("Cannot start the process that unpacks layers. `bathy doctor` shows what is missing")]
    Spawn(#[from] SpawnError),
    #[error("Cannot prepare the process that unpacks layers")]
    Prepare(#[source] io::Error),
    #[error("The unpacked layer cannot be written")]
    Write(#[source] io::Error),
    /// Said by the process, which read a hostile archive.
    #[error("{0}")]
    Refused(String),
    #[error("The process that unpacks the layer {0}")]
    Died(String),
    #[error("The process that unpacks the layer was silent for {} s", SILENCE.as_secs())]
    Silent,
    #[error("The layer has more than {0} bytes")]
    TooLarge(u64),
    #[error(transparent)]
    Tree(#[from] TreeError),
    #[error("Its content has the digest {found}, and the image's config names {expected}")]
    Content { expected: Digest, found: Digest },
}

impl From<io::Error> for UnpackError {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}

impl UnpackError {
    /// Whether the layer is to blame, and not this machine.
    pub fn is_of_the_layer(&self) -> bool {
        match self {
            Self::Spawn(_) | Self::Prepare(_) | Self::Write(_) => false,
            Self::Refused(_)
            | Self::Died(_)
            | Self::Silent
            | Self::TooLarge(_)
            | Self::Tree(_)
            | Self::Content { .. } => true,
        }
    }
}

/// A layer that was unpacked.
#[derive(Debug)]
pub struct Unpacked {
    /// The digest of the plain archive, computed here.
    pub digest: Digest,
    pub tree: LayerTree,
    /// The same as bytes.
    pub encoded: Vec<u8>,
}

/// The program that unpacks layers.
#[derive(Debug)]
pub struct Unpacker {
    program: File,
}

/// A process that unpacks a layer, and the ends of its pipes. Dropping it kills it.
#[derive(Debug)]
pub struct Unpacking {
    process: Spawned,
    archive: OwnedFd,
    answer: OwnedFd,
}

impl Unpacker {
    /// Opens the program.
    pub fn find() -> Result<Self, AssetsError> {
        let path = assets::program(PROGRAM)?;
        let program = File::open(&path).map_err(|error| AssetsError::Open(path, error))?;
        Ok(Self::new(program))
    }

    /// An open program.
    pub fn new(program: File) -> Self {
        Self { program }
    }

    /// Unpacks `blob`, and writes its plain archive to `output`.
    pub fn unpack(
        &self,
        blob: &File,
        output: &mut dyn Write,
        algorithm: Algorithm,
    ) -> Result<Unpacked, UnpackError> {
        self.start(blob)?.finish(output, algorithm)
    }

    /// Starts the process.
    pub fn start(&self, blob: &File) -> Result<Unpacking, UnpackError> {
        let pipe = || io::pipe().map_err(UnpackError::Prepare);
        let ((archive, its_archive), (answer, its_answer)) = (pipe()?, pipe()?);
        // In the order of their numbers, see `bathy_unpack::process`.
        let descriptors = [blob.as_fd(), its_archive.as_fd(), its_answer.as_fd()];
        let process = spawn::unpacker(&Program {
            program: self.program.as_fd(),
            args: &[CString::from(c"bathy-unpack")],
            descriptors: &descriptors,
            identity: identity::of_unpacker(),
            entrance: None,
            before_start: None,
        })?;
        Ok(Unpacking { process, archive: archive.into(), answer: answer.into() })
    }
}

impl Unpacking {
    pub fn pid(&self) -> u32 {
        self.process.pid
    }

    /// Reads all that it writes.
    pub fn finish(self, output: &mut dyn Write, algorithm: Algorithm) -> Result<Unpacked, UnpackError> {
        let mut hasher = Hasher::new(algorithm);
        let limit = Limits::default().bytes;
        read_all(&self.archive, limit, &mut |bytes| {
            hasher.update(bytes);
            output.write_all(bytes).map_err(UnpackError::Write)
        })?;
        let mut answer = Vec::new();
        read_all(&self.answer, MAX_TREE, &mut |bytes| {
            answer.extend_from_slice(bytes);
            Ok(())
        })?;
        if answer.is_empty() {
            return Err(UnpackError::Died(self.end()));
        }
        match answer.remove(0) {
            process::TREE => {
                let tree = LayerTree::decode(&answer)?;
                Ok(Unpacked { digest: hasher.finish(), tree, encoded: answer })
            }
            process::FAILURE => Err(UnpackError::Refused(message(&answer))),
            _ => Err(UnpackError::Died("answers something else".to_owned())),
        }
    }

    /// How the process ended that answered nothing.
    fn end(&self) -> String {
        match self.process.failure() {
            Some(reason) => format!("could not {reason}"),
            None => {
                ending::of_process(self.process.pidfd.as_fd()).unwrap_or_else(|| ending::HUNG_UP.to_owned())
            }
        }
    }
}

impl Drop for Unpacking {
    fn drop(&mut self) {
        // It is the first and only process of its pid namespace.
        ending::kill_or_log(&self.process);
    }
}

/// Reads to the end of a pipe.
fn read_all(
    pipe: &OwnedFd,
    limit: u64,
    take: &mut dyn FnMut(&[u8]) -> Result<(), UnpackError>,
) -> Result<(), UnpackError> {
    let mut buffer = vec![0; BUFFER];
    let mut all: u64 = 0;
    loop {
        if !is_readable_before(pipe.as_fd(), Instant::now() + SILENCE) {
            return Err(UnpackError::Silent);
        }
        let count = match rustix::io::read(pipe, &mut buffer[..]) {
            Err(rustix::io::Errno::INTR) => continue,
            read => read.map_err(|error| UnpackError::Prepare(error.into()))?,
        };
        if count == 0 {
            return Ok(());
        }
        all = all.saturating_add(u64::try_from(count).unwrap_or(u64::MAX));
        if all > limit {
            return Err(UnpackError::TooLarge(limit));
        }
        take(buffer.get(..count).unwrap_or_default())?;
    }
}

/// Text of the process that can be shown on one line.
fn message(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    text.chars().take(MAX_MESSAGE).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unpacked_by(program: &str) -> UnpackError {
        let (program, blob) = (File::open(program).unwrap(), File::open("/dev/null").unwrap());
        let unpacked = Unpacker::new(program).unpack(&blob, &mut io::sink(), Algorithm::Sha256);
        unpacked.map(|_| ()).unwrap_err()
    }

    #[test]
    fn a_process_that_answers_nothing_is_no_layer() {
        let error = unpacked_by("/bin/true");
        assert_eq!(error.to_string(), "The process that unpacks the layer exited with code 0");
        assert!(error.is_of_the_layer());
        let error = unpacked_by("/etc/passwd").to_string();
        assert!(error.contains("could not execute its program"), "{error}");
    }

    #[test]
    fn more_than_the_limit_is_refused_however_it_arrives() {
        let (read, mut write) = io::pipe().unwrap();
        write.write_all(b"12345").unwrap();
        drop(write);
        let mut taken = Vec::new();
        let mut take = |bytes: &[u8]| {
            taken.extend_from_slice(bytes);
            Ok(())
        };
        let result = read_all(&read.into(), 4, &mut take);
        assert!(matches!(result, Err(UnpackError::TooLarge(4))), "{result:?}");
        assert!(taken.is_empty());
    }

    #[test]
    fn c4_text_of_the_process_moves_no_cursor_and_has_an_end() {
        assert_eq!(message(b"a\x1b[2J\n\xff"), "a\u{fffd}[2J\u{fffd}\u{fffd}");
        assert_eq!(message(&[b'x'; 10_000]).len(), MAX_MESSAGE);
    }
}
