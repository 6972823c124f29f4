//! The control socket of a running sandbox's monitor, in the sandbox's folder: one request and one answer per
//! connection.
//!
//! Only the user can access the folder. After [`ToMonitor::Connect`] is answered, the connection is passed to
//! the keeper.

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

/// The socket's file name in the sandbox's folder.
pub const SOCKET: &str = "control.sock";
/// The maximum size of a request or an answer in bytes.
pub const LIMIT: u32 = 4096;

/// A request to a monitor failed.
#[derive(Debug, Error)]
pub enum ControlError {
    /// There is no socket, or no process listens on it. The request was not sent.
    #[error("The sandbox does not run")]
    NotRunning,
    /// The monitor closed the connection without an answer. The request may have been carried out.
    #[error("The sandbox's monitor closed the connection without an answer")]
    HungUp(#[source] io::Error),
    /// The monitor cannot be reached although the sandbox is running.
    #[error("The sandbox runs, but its monitor cannot be reached")]
    Unreachable,
    /// The monitor did not answer in time.
    #[error("The sandbox's monitor did not answer within {0} s")]
    Slow(u64),
    /// The monitor refused the request.
    #[error("{0}")]
    Refused(String),
    #[error("Cannot communicate with the sandbox's monitor")]
    Io(#[source] io::Error),
    /// The answer is not a valid frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The answer does not decode.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The answer does not fit the request.
    #[error("The sandbox's monitor sent an unexpected answer")]
    Unexpected,
}

/// A request to a monitor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToMonitor {
    /// Pass this connection to the keeper.
    Connect,
    /// Shut the guest down.
    Stop {
        /// The grace period of its processes in milliseconds.
        grace_ms: u32,
    },
    /// End the sandbox at once.
    Kill,
    Pause {
        /// Whether to move its memory to disk.
        release_memory: bool,
    },
    Resume,
    Usage,
    /// Load the stored network policy.
    Policy,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromMonitor {
    /// The keeper now serves this connection.
    Connected,
    /// Done; for [`ToMonitor::Stop`] and [`ToMonitor::Kill`], begun.
    Done,
    /// The request was refused, for this reason.
    Refused(String),
    Usage(Usage),
    /// The policy is in effect; so many connections were closed.
    Changed {
        closed: u32,
    },
}

/// Sends a request to the monitor of the sandbox in `folder`. The connection is returned as well, for
/// [`ToMonitor::Connect`].
///
/// # Errors
/// Only [`ControlError::NotRunning`] means that the request was not received. After any other error it may
/// have been carried out.
pub fn ask(
    folder: &Path,
    request: &ToMonitor,
    timeout: Duration,
) -> Result<(FromMonitor, OwnedFd), ControlError> {
    let exchange = Exchange { deadline: Instant::now() + timeout, timeout };
    let mut socket = exchange.connect(folder)?;
    let mut bytes = Vec::new();
    encode(CONNECTION, request, &mut bytes)?;
    socket.write_all(&bytes).map_err(|error| exchange.failed(error))?;
    // Exactly one frame is read: anything after it belongs to the keeper.
    let mut decoder = Decoder::new(LIMIT);
    let mut header = [0; bathy_protocol::frame::HEADER_LEN];
    exchange.read(&mut socket, &mut header)?;
    decoder.push(&header);
    let [l0, l1, l2, l3, ..] = header;
    let length = u32::from_le_bytes([l0, l1, l2, l3]).min(LIMIT);
    let mut payload = vec![0; usize::try_from(length).unwrap_or(0)];
    exchange.read(&mut socket, &mut payload)?;
    decoder.push(&payload);
    let frame = decoder.next_frame()?.ok_or(ControlError::Unexpected)?;
    match decode(frame.payload)? {
        FromMonitor::Refused(reason) => Err(ControlError::Refused(reason)),
        answer => Ok((answer, socket.into())),
    }
}

/// A request in progress. It ends at the deadline, however slowly the monitor reads and answers.
struct Exchange {
    deadline: Instant,
    timeout: Duration,
}

impl Exchange {
    fn connect(&self, folder: &Path) -> Result<UnixStream, ControlError> {
        let not_reached = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => ControlError::NotRunning,
            io::ErrorKind::WouldBlock => ControlError::Slow(self.timeout.as_secs()),
            _ => ControlError::Io(error),
        };
        let (path, _folder) = socket_path(folder).map_err(not_reached)?;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let socket = UnixStream::from(socket.map_err(|error| ControlError::Io(error.into()))?);
        // When the monitor accepts no connections, the backlog fills up and `connect` blocks.
        socket.set_write_timeout(Some(self.timeout)).map_err(ControlError::Io)?;
        let address = SocketAddrUnix::new(&path).map_err(|error| ControlError::Io(error.into()))?;
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
                return Err(ControlError::Slow(self.timeout.as_secs()));
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

    /// The error for a failure after the connection was established.
    fn failed(&self, error: io::Error) -> ControlError {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ControlError::Slow(self.timeout.as_secs()),
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => ControlError::HungUp(error),
            _ => ControlError::Io(error),
        }
    }
}

/// Listens in `folder` and replaces the socket of a killed monitor.
pub fn listen(folder: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(folder.join(SOCKET)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let (path, _folder) = socket_path(folder)?;
    let listener = UnixListener::bind(path)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// A short path to the socket: a socket address holds about a hundred bytes, and state folders may be
/// anywhere.
fn socket_path(folder: &Path) -> io::Result<(PathBuf, File)> {
    let handle = File::open(folder)?;
    let number = handle.as_fd().as_raw_fd();
    Ok((PathBuf::from(format!("/proc/self/fd/{number}/{SOCKET}")), handle))
}
