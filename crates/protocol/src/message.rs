//! The messages on the control channel of a stream.
//!
//! A stream belongs to one command: the host opens it with [`ToGuest::Exec`], and it ends with
//! [`ToHost::Exited`] or [`ToHost::Refused`]. Stream 0 is the connection itself.

use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::cell::{Cell, ContextsRequest};
use crate::frame::{self, Channel};

/// Messages from the host to the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToGuest {
    /// Stream 0: begins a session. Commands of an earlier session keep running; see [`Ready::running`].
    Hello(Hello),
    /// Stream 0: asks all processes to end, kills the remaining ones after the grace period, and powers off.
    PowerOff {
        /// The grace period in milliseconds.
        grace_ms: u32,
    },
    /// Starts a command on this stream.
    Exec(Exec),
    /// Copies files on this stream: an [`crate::archive`] is sent on standard input or standard output.
    /// Otherwise the stream is like a command's. The exit code is 0 on success; on failure standard error has
    /// the reason.
    Transfer(Transfer),
    /// Runs code in an interpreter: records of [`crate::cell`] are sent on standard output.
    Cell(Cell),
    /// A request about interpreter contexts: one record is sent on standard output.
    Contexts(ContextsRequest),
    /// Takes over the stream of a command that was started in an earlier session.
    Attach,
    /// Sends a signal to the command's process group. A cell is interrupted, whatever the signal.
    Signal(i32),
    /// Closes standard input after what was sent.
    CloseStdin,
    /// Extends the window of an output.
    Grant {
        /// The output that the window is for.
        channel: StdChannel,
        /// How many more bytes may be sent.
        bytes: u32,
    },
    /// The size of the command's terminal has changed.
    Resize(TerminalSize),
    /// The command is no longer needed: it is killed with its process group, and its output is discarded.
    Abandon,
    /// Stream 0: requests [`ToHost::Pong`], which the agent sends at once.
    Ping,
}

/// Messages from the agent to the host. Hostile: only its type is trusted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToHost {
    /// Stream 0: answers [`ToGuest::Hello`].
    Ready(Ready),
    /// The command was started.
    Started {
        /// The pid of the command in the guest.
        pid: u32,
    },
    /// The command could not be started.
    Refused(Refused),
    /// Extends the window of the command's standard input.
    Grant {
        /// How many more bytes may be sent.
        bytes: u32,
    },
    /// This output was closed by the command and all processes that inherited it.
    Eof(StdChannel),
    /// The command ended; all its output was sent before this.
    Exited(Exit),
    /// Stream 0: answers [`ToGuest::Ping`].
    Pong,
}

/// A client's request about a stream, whose number it chooses.
#[expect(clippy::large_enum_variant, reason = "one is made and sent; none is kept")]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Starts work on this stream.
    Start {
        /// The work to start.
        work: Work,
        /// The client's tag for the work, repeated in [`FromKeeper::WorkEnded`].
        tag: u64,
        /// The job number. A job outlives its client: it is logged under this number, and other clients can
        /// attach to it.
        job: Option<u32>,
    },
    /// Takes over the output and input of a running job.
    Attach {
        /// The number of the job.
        job: u32,
    },
    /// Sends a signal to a job's process group, without opening the stream.
    SignalJob {
        /// The number of the job.
        job: u32,
        /// The number of the signal.
        signal: i32,
    },
    /// Sends a signal, as in [`ToGuest`].
    Signal(i32),
    /// Closes standard input, as in [`ToGuest`].
    CloseStdin,
    /// Extends a window, as in [`ToGuest`].
    Grant {
        /// The output that the window is for.
        channel: StdChannel,
        /// How many more bytes may be sent.
        bytes: u32,
    },
    /// Changes the terminal's size, as in [`ToGuest`].
    Resize(TerminalSize),
    /// Detaches from a job without ending it; the stream ends.
    Detach,
}

/// Something that runs on a stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Work {
    /// Runs a command as a process.
    Exec(Exec),
    /// Copies files or folders.
    Transfer(Transfer),
    /// Runs code in an interpreter.
    Cell(Cell),
    /// Manages the interpreter contexts.
    Contexts(ContextsRequest),
}

/// The keeper's messages to a client about a stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// The work was started.
    Started {
        /// The pid of the process in the guest.
        pid: u32,
    },
    /// The client is now attached to the job.
    Attached {
        /// The present window of the job's standard input in bytes.
        input: u32,
    },
    /// The work could not be started, or there is no such job.
    Refused(Refused),
    /// Extends the window of standard input.
    Grant {
        /// How many more bytes may be sent.
        bytes: u32,
    },
    /// This output was closed.
    Eof(StdChannel),
    /// The work has ended.
    Exited(Exit),
    /// Another client took over the job.
    TakenOver,
}

/// One of the two outputs of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StdChannel {
    /// The command's standard output.
    Stdout,
    /// The command's standard error.
    Stderr,
}

impl StdChannel {
    /// The frame channel of this output.
    pub fn channel(self) -> Channel {
        match self {
            Self::Stdout => Channel::Stdout,
            Self::Stderr => Channel::Stderr,
        }
    }
}

/// The host's greeting, which begins a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The [`crate::VERSION`] of the host.
    pub version: u16,
    /// Counts the sessions of one sandbox: a restored snapshot sees a number that it has not seen before.
    pub epoch: u64,
    /// The host's wall clock in nanoseconds since 1970. The guest's own is some milliseconds late after a
    /// boot, and stops while the guest is saved.
    pub now_unix_ns: u64,
}

/// The agent's answer to the greeting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// The [`crate::VERSION`] of the agent.
    pub version: u16,
    /// The epoch of the greeting.
    pub epoch: u64,
    /// The release of the guest's kernel.
    pub kernel: String,
    /// When the agent was started as PID 1, by the host's wall clock, in nanoseconds since 1970.
    pub pid1_unix_ns: u64,
    /// When the root was mounted, by the same clock.
    pub mounted_unix_ns: u64,
    /// Streams of commands that are still running from an earlier session.
    pub running: Vec<u32>,
}

/// A command to run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exec {
    /// The program and its arguments, as bytes: they need not be UTF-8.
    pub argv: Vec<Vec<u8>>,
    /// Environment as `NAME=value`. The agent adds HOME, USER, LOGNAME and SHELL if they are missing.
    pub env: Vec<Vec<u8>>,
    /// The working directory; the user's home if absent.
    pub cwd: Option<Vec<u8>>,
    /// The user, as `name`, `uid`, `name:group` or `uid:gid`.
    pub user: String,
    /// Whether standard input is forwarded; otherwise the command reads end of file at once.
    pub stdin: bool,
    /// The size of its terminal, if it gets one. All output is then standard output.
    pub terminal: Option<TerminalSize>,
    /// The restriction of the command, if any.
    pub restricted: Option<Restriction>,
}

/// The size of a terminal, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    /// The number of lines.
    pub rows: u16,
    /// The number of characters in a line.
    pub columns: u16,
}

/// The restriction of a command: it is not root, gains no privilege by executing a program, has no
/// capability, and all its mounts have nosuid and nodev.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restriction {
    /// Whether the root stays writable.
    pub writable_root: bool,
}

impl Restriction {
    /// The combination that is at least as strict as both.
    pub fn stricter(one: Option<Self>, other: Option<Self>) -> Option<Self> {
        match (one, other) {
            (Some(one), Some(other)) => {
                Some(Self { writable_root: one.writable_root && other.writable_root })
            }
            (one, other) => one.or(other),
        }
    }

    /// Whether `present` is at least as strict as `wanted`.
    pub fn covers(present: Option<Self>, wanted: Option<Self>) -> bool {
        Self::stricter(present, wanted) == present
    }
}

/// A copy of files into or out of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transfer {
    /// The direction of the copy.
    pub direction: CopyDirection,
    /// The path in the guest. For a copy into the guest: an existing folder receives the archive's item under
    /// `name`; otherwise it is the item's new path.
    pub path: Vec<u8>,
    /// For a copy into the guest: the item's name, for copying into an existing folder. If empty, `path` is
    /// that of a single file whose content is replaced; missing folders are created.
    ///
    /// For a copy out of the guest: the requested part, encoded as [`crate::archive::ItemPart`]; if empty, the
    /// whole item.
    pub name: Vec<u8>,
    /// The guest user that reads or writes, as in [`Exec::user`].
    pub user: String,
}

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CopyDirection {
    /// From the host to the guest.
    IntoGuest,
    /// From the guest to the host.
    OutOfGuest,
}

/// The refusal to start a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// The kind of the refusal.
    pub kind: RefusalKind,
    /// The agent's explanation. Controlled by the guest: escape it before printing.
    pub message: String,
}

/// The kinds of [`Refused`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RefusalKind {
    /// The program does not exist.
    NotFound,
    /// The program exists but cannot be executed.
    NotExecutable,
    /// The request cannot be met: unknown user, missing directory, too many commands.
    BadRequest,
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exit {
    /// It exited with this code.
    Code(u8),
    /// It was killed by this signal.
    Signal(u8),
}

impl Exit {
    /// The exit code that a shell would report.
    pub fn shell_code(self) -> u8 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128u8.saturating_add(signal),
        }
    }
}

/// Messages from the keeper to its clients, on stream 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromKeeper {
    /// The guest has answered the greeting.
    Ready(Timeline),
    /// A warning for the user; the sandbox keeps running.
    Warning(String),
    /// The sandbox has ended; this is the last message.
    Ended {
        /// Why the sandbox ended.
        cause: Cause,
        /// The last lines of the guest kernel's console. Controlled by the guest: escape them before
        /// printing.
        console: String,
    },
    /// To the owner: work that a client started has ended.
    WorkEnded {
        /// The client's tag for the work.
        tag: u64,
        /// The job number, if it was a job.
        job: Option<u32>,
        /// How the work ended.
        end: WorkEnd,
    },
    /// To the owner: answers [`ToKeeper::Usage`].
    Usage(Usage),
    /// To the owner: [`ToKeeper::Park`] or [`ToKeeper::Unpark`] is complete.
    Parked {
        /// How many bytes were moved.
        bytes: u64,
    },
    /// To the owner: parking failed, for this reason; the guest's memory was not moved.
    NotParked(String),
    /// To the owner: the guest is now a process of its own, so the keeper can be moved to another control
    /// group without it.
    GuestStarted,
}

/// How a piece of work ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkEnd {
    /// It ran and ended.
    Exited(Exit),
    /// It was not started. Controlled by the guest: escape it before printing.
    Refused(String),
}

/// The resource usage of a sandbox, as its keeper measures it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Guest memory in use, in bytes.
    pub memory: u64,
    /// Bytes that the writable disk occupies on the host.
    pub disk: u64,
    /// Bytes read from the disks since the start.
    pub disk_read: u64,
    /// Bytes written to the writable disk since the start.
    pub disk_written: u64,
    /// Running commands and jobs.
    pub commands: u32,
    /// Connected clients, not counting the owner.
    pub clients: u32,
}

/// Messages from the owner, the process that started the keeper, on stream 0. When the owner closes the
/// connection, the sandbox ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToKeeper {
    /// Kill the sandbox at once.
    Kill,
    /// Ask the guest to shut itself down.
    PowerOff {
        /// The grace period in milliseconds, as in [`ToGuest::PowerOff`].
        grace_ms: u32,
    },
    /// A new client; its socket comes with this message.
    Client,
    /// The link to a new gateway, which replaces a failed one; it comes with this message.
    Link,
    /// Request the resource usage.
    Usage,
    /// Pause the guest, unless it is frozen from outside, and the keeper with it. Whether or not moving its
    /// memory succeeds, [`Self::Unpark`] ends the pause.
    Park {
        /// Whether to move the guest's memory to the parking file and free it.
        release_memory: bool,
    },
    /// Move the guest's memory back and resume it, unless it is resumed from outside.
    Unpark,
}

/// The timeline of a start, in nanoseconds since 1970. What the guest reports about itself is not verified.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    /// When the keeper executed its first instruction.
    pub keeper: u64,
    /// When both jails were closed and the guest kernel was released.
    pub jailed: u64,
    /// When PID 1 started, by the guest's clock.
    pub pid1: u64,
    /// When the root was mounted, by the guest's clock.
    pub mounted: u64,
    /// When the agent's answer arrived.
    pub ready: u64,
    /// The release of the guest's kernel, as the guest reports it.
    pub kernel: String,
}

/// Why a sandbox ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// A client or the owner requested it.
    Killed,
    /// The guest kernel exited by itself with this wait status.
    GuestExited(i32),
    /// The guest's virtual machine ended abnormally, with this description.
    GuestCrashed(String),
    /// The guest was not ready in time, in milliseconds.
    NotReady(u64),
    /// The guest violated the rules of a device or of this protocol.
    Violation(String),
    /// The keeper itself failed.
    Failed(String),
}

/// One clause. Parts of it may come from the guest: escape it before printing.
impl fmt::Display for Cause {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Killed => write!(formatter, "the sandbox was killed"),
            Self::GuestExited(0) => write!(formatter, "the guest powered itself off"),
            Self::GuestExited(status) => write!(formatter, "the guest ended by itself (status {status})"),
            Self::GuestCrashed(how) => write!(formatter, "{how}"),
            Self::NotReady(ms) => {
                write!(formatter, "the guest was not ready after {} s", *ms as f64 / 1000.0)
            }
            Self::Violation(what) => {
                write!(formatter, "the guest violated the protocol and was killed: {what}")
            }
            Self::Failed(what) => write!(formatter, "the sandbox's keeper failed: {what}"),
        }
    }
}

/// A violation of the message format.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum MessageError {
    /// The bytes do not decode as a message.
    #[error("The peer sent a control message that does not decode")]
    Malformed,
    /// There are extra bytes after the message.
    #[error("The peer sent {0} bytes after a control message")]
    Trailing(usize),
}

/// Appends `message` as a control frame of `stream` to `out`.
pub fn encode<M: Serialize>(stream: u32, message: &M, out: &mut Vec<u8>) -> Result<(), MessageError> {
    let payload = postcard::to_allocvec(message).map_err(|_| MessageError::Malformed)?;
    frame::encode(stream, Channel::Control, &payload, out);
    Ok(())
}

/// Decodes the payload of a control frame.
pub fn decode<M: DeserializeOwned>(payload: &[u8]) -> Result<M, MessageError> {
    match postcard::take_from_bytes(payload) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(MessageError::Trailing(rest.len())),
        Err(_) => Err(MessageError::Malformed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_wire() {
        let exec = ToGuest::Exec(Exec {
            argv: vec![b"printf".to_vec(), vec![0xff, 0xfe]],
            env: vec![b"A=b".to_vec()],
            cwd: None,
            user: "user".to_owned(),
            stdin: true,
            terminal: Some(TerminalSize { rows: 24, columns: 80 }),
            restricted: Some(Restriction { writable_root: true }),
        });
        let mut wire = Vec::new();
        encode(3, &exec, &mut wire).unwrap();
        let mut decoder = frame::Decoder::new(crate::MAX_REQUEST);
        decoder.push(&wire);
        let frame = decoder.next_frame().unwrap().unwrap();
        assert_eq!(frame.stream, 3);
        assert_eq!(decode::<ToGuest>(frame.payload).unwrap(), exec);
    }

    #[test]
    fn a_message_that_claims_a_huge_list_is_malformed_and_allocates_nothing() {
        // A `ToHost::Ready` with a string length of 2^60.
        let bytes = [0, 1, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x0f];
        assert_eq!(decode::<ToHost>(&bytes), Err(MessageError::Malformed));
    }

    #[test]
    fn bytes_after_a_message_are_refused() {
        let mut payload = postcard::to_allocvec(&ToHost::Eof(StdChannel::Stdout)).unwrap();
        payload.push(0);
        assert_eq!(decode::<ToHost>(&payload), Err(MessageError::Trailing(1)));
    }

    #[test]
    fn exit_codes_follow_the_shell() {
        assert_eq!(Exit::Code(7).shell_code(), 7);
        assert_eq!(Exit::Signal(9).shell_code(), 137);
        assert_eq!(Exit::Signal(200).shell_code(), 255);
    }
}
