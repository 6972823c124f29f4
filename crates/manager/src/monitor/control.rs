//! How commands reach a running sandbox's monitor: one socket in the sandbox's folder, one request, one answer.
//!
//! The folder is the user's alone. A connection that asks to be connected is handed on to the keeper after the answer.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bathy_protocol::message::{decode, encode};
use bathy_protocol::{CONNECTION, Decoder, FrameError, MessageError, Usage};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The socket's name in the sandbox's folder.
pub const SOCKET: &str = "control.sock";
/// The most bytes of a request or an answer.
pub const LIMIT: u32 = 4096;

/// A monitor cannot be asked.
#[derive(Debug, Error)]
pub enum ControlError {
    /// There is no socket, or no monitor behind it. Nothing was asked.
    #[error("The sandbox does not run")]
    NotRunning,
    /// It was asked, or may have been, and closed the connection instead of answering. What was asked may have been done or not.
    #[error("The sandbox's monitor closed the connection without an answer")]
    HungUp(#[source] io::Error),
    /// There is no monitor to be reached, and yet the sandbox runs.
    #[error("The sandbox runs, but its monitor cannot be reached")]
    Unreachable,
    /// It takes too long.
    #[error("The sandbox's monitor did not answer within {0} s")]
    Slow(u64),
    /// It does not want to.
    #[error("{0}")]
    Refused(String),
    #[error("Cannot speak to the sandbox's monitor")]
    Io(#[source] io::Error),
    /// Its answer is none.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// Its answer does not decode.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// Another answer than was asked for.
    #[error("The sandbox's monitor answered something else")]
    Unexpected,
}

/// What a monitor can be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToMonitor {
    /// To speak to the keeper on this connection.
    Connect,
    /// To shut the guest down.
    Stop {
        /// Milliseconds that its processes have.
        grace_ms: u32,
    },
    /// To end the sandbox at once.
    Kill,
    Pause {
        /// Whether its memory goes to disk.
        release_memory: bool,
    },
    /// To let it go on.
    Resume,
    Usage,
    /// To read its network policy again, which was written down.
    Policy,
}

/// What a monitor answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromMonitor {
    /// The keeper listens now.
    Connected,
    /// Done, or begun in the case of [`ToMonitor::Stop`] and [`ToMonitor::Kill`].
    Done,
    /// It cannot be done.
    Refused(String),
    /// What the sandbox uses.
    Usage(Usage),
    /// The policy holds, and so many connections were closed for it.
    Changed {
        closed: u32,
    },
}

/// Asks the monitor of the sandbox in `folder`. The connection comes back for [`ToMonitor::Connect`].
///
/// # Errors
/// [`ControlError::NotRunning`] means that no monitor was reached. Any other error leaves open whether it did what it was asked.
pub fn ask(
    folder: &Path,
    question: &ToMonitor,
    patience: Duration,
) -> Result<(FromMonitor, OwnedFd), ControlError> {
    let asking = Asking { deadline: Instant::now() + patience, patience };
    let mut socket = asking.connect(folder)?;
    let mut request = Vec::new();
    encode(CONNECTION, question, &mut request)?;
    socket.write_all(&request).map_err(|error| asking.failed(error))?;
    // Exactly one frame is read: what follows it belongs to the keeper.
    let mut decoder = Decoder::new(LIMIT);
    let mut header = [0; bathy_protocol::frame::HEADER_LEN];
    asking.read(&mut socket, &mut header)?;
    decoder.push(&header);
    let [l0, l1, l2, l3, ..] = header;
    let length = u32::from_le_bytes([l0, l1, l2, l3]).min(LIMIT);
    let mut payload = vec![0; usize::try_from(length).unwrap_or(0)];
    asking.read(&mut socket, &mut payload)?;
    decoder.push(&payload);
    let frame = decoder.next_frame()?.ok_or(ControlError::Unexpected)?;
    match decode(frame.payload)? {
        FromMonitor::Refused(reason) => Err(ControlError::Refused(reason)),
        answer => Ok((answer, socket.into())),
    }
}

/// A question under way. However slowly the other side takes and answers it, it ends at the deadline.
struct Asking {
    deadline: Instant,
    patience: Duration,
}

impl Asking {
    fn connect(&self, folder: &Path) -> Result<UnixStream, ControlError> {
        let not_reached = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => ControlError::NotRunning,
            io::ErrorKind::WouldBlock => ControlError::Slow(self.patience.as_secs()),
            _ => ControlError::Io(error),
        };
        let (place, _folder) = place(folder).map_err(not_reached)?;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let socket = UnixStream::from(socket.map_err(|error| ControlError::Io(error.into()))?);
        // A monitor that takes no connections lets the queue before its socket fill up: connecting waits as well.
        socket.set_write_timeout(Some(self.patience)).map_err(ControlError::Io)?;
        let address = SocketAddrUnix::new(&place).map_err(|error| ControlError::Io(error.into()))?;
        loop {
            match connect(&socket, &address) {
                Err(Errno::INTR) => {}
                connected => break connected.map_err(|error| not_reached(error.into()))?,
            }
        }
        Ok(socket)
    }

    fn read(&self, socket: &mut UnixStream, mut into: &mut [u8]) -> Result<(), ControlError> {
        while !into.is_empty() {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ControlError::Slow(self.patience.as_secs()));
            }
            socket.set_read_timeout(Some(left)).map_err(ControlError::Io)?;
            match socket.read(into) {
                Ok(0) => return Err(ControlError::HungUp(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => into = into.get_mut(count..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(error)),
            }
        }
        Ok(())
    }

    /// What went wrong after the connection was made.
    fn failed(&self, error: io::Error) -> ControlError {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                ControlError::Slow(self.patience.as_secs())
            }
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => ControlError::HungUp(error),
            _ => ControlError::Io(error),
        }
    }
}

/// Listens in `folder`; what a killed monitor left there is replaced.
pub fn listen(folder: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(folder.join(SOCKET)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let (place, _folder) = place(folder)?;
    let listener = UnixListener::bind(place)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// A short way to the socket: the address of a socket has room for a hundred bytes, and state folders may be anywhere.
fn place(folder: &Path) -> io::Result<(PathBuf, File)> {
    let handle = File::open(folder)?;
    let number = handle.as_fd().as_raw_fd();
    Ok((PathBuf::from(format!("/proc/self/fd/{number}/{SOCKET}")), handle))
}
