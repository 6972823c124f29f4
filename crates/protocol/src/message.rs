//! What the control channel of a stream carries.
//!
//! A stream belongs to one command: the host opens it with [`ToGuest::Exec`], it ends with [`ToHost::Exited`] or
//! [`ToHost::Refused`]. Stream 0 is the connection itself.

use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::cell::{Cell, ContextsRequest};
use crate::frame::{self, Channel};

/// From the host to the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToGuest {
    /// Stream 0: begins a conversation. Commands of an earlier conversation go on running; see [`Ready::running`].
    Hello(Hello),
    /// Stream 0: asks every process to end, ends those that do not within the grace, and powers off.
    PowerOff {
        /// Milliseconds between asking and ending.
        grace_ms: u32,
    },
    /// Starts a command on this stream.
    Exec(Exec),
    /// Copies files on this stream: an [`crate::archive`] travels on standard input or standard output. Otherwise the
    /// stream is like a command's, and ends with an exit code: 0 if all went well, else standard error says why not.
    Transfer(Transfer),
    /// Runs code in an interpreter: records of [`crate::cell`] travel on standard output.
    Cell(Cell),
    /// Does something with the interpreters: one record travels on standard output.
    Contexts(ContextsRequest),
    /// Takes over the stream of a command that an earlier conversation started.
    Attach,
    /// Sends a signal to the command's process group. A cell is interrupted, whatever the signal.
    Signal(i32),
    /// No more standard input will come.
    CloseStdin,
    /// The host has room for more output.
    Grant {
        /// Which output.
        channel: StdChannel,
        /// How many more bytes.
        bytes: u32,
    },
    /// The size of the command's terminal has changed.
    Resize(TerminalSize),
    /// Nobody waits for this command any more: it is ended with all of its process group, its output is dropped.
    Abandon,
    /// Stream 0: asks for [`ToHost::Pong`], at once and whatever else the agent does.
    Ping,
}

/// From the agent to the host. Hostile: never trusted further than its type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToHost {
    /// Stream 0: answers [`ToGuest::Hello`].
    Ready(Ready),
    /// The command runs.
    Started {
        /// Its process number in the guest.
        pid: u32,
    },
    /// The command could not be started.
    Refused(Refused),
    /// The command's standard input has room for more.
    Grant {
        /// How many more bytes.
        bytes: u32,
    },
    /// The command, and everybody who inherited it from the command, closed this output.
    Eof(StdChannel),
    /// The command ended; all its output was sent before.
    Exited(Exit),
    /// Stream 0: answers [`ToGuest::Ping`].
    Pong,
}

/// What a client asks of a stream, whose number it chooses.
#[expect(clippy::large_enum_variant, reason = "one is made and sent; none is kept")]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Starts something on this stream.
    Start {
        /// What.
        work: Work,
        /// The caller's own number for it, repeated in [`FromKeeper::WorkEnded`].
        tag: u64,
        /// A job outlives its client: it is logged under this number, and other clients can attach to it.
        job: Option<u32>,
    },
    /// Takes a running job's output and input over.
    Attach {
        /// The job's number.
        job: u32,
    },
    /// Sends a signal to a job's process group; the stream is not opened by it.
    SignalJob {
        /// The job's number.
        job: u32,
        /// The signal.
        signal: i32,
    },
    /// As in [`ToGuest`].
    Signal(i32),
    /// As in [`ToGuest`].
    CloseStdin,
    /// As in [`ToGuest`].
    Grant {
        /// Which output.
        channel: StdChannel,
        /// How many more bytes.
        bytes: u32,
    },
    /// As in [`ToGuest`].
    Resize(TerminalSize),
    /// Leaves a job without ending it; the stream is over.
    Detach,
}

/// Something that runs on a stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Work {
    /// A command.
    Exec(Exec),
    /// A copy of files.
    Transfer(Transfer),
    /// Code for an interpreter.
    Cell(Cell),
    /// Something about interpreters.
    Contexts(ContextsRequest),
}

/// What a client is told about a stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// It runs.
    Started {
        /// Its process number in the guest.
        pid: u32,
    },
    /// The job is this client's now.
    Attached {
        /// How many bytes of standard input the job takes at present.
        input: u32,
    },
    /// It could not be started, or there is no such job.
    Refused(Refused),
    /// Its standard input has room for more.
    Grant {
        /// How many more bytes.
        bytes: u32,
    },
    /// One of its outputs is closed.
    Eof(StdChannel),
    /// It ended.
    Exited(Exit),
    /// Another client took the job over.
    TakenOver,
}

/// One of the two outputs of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StdChannel {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

impl StdChannel {
    /// The frame channel that carries its bytes.
    pub fn channel(self) -> Channel {
        match self {
            Self::Stdout => Channel::Stdout,
            Self::Stderr => Channel::Stderr,
        }
    }
}

/// The host's greeting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`crate::VERSION`] of the host.
    pub version: u16,
    /// Counts the conversations of one sandbox: a restored snapshot sees a number it has not seen before.
    pub epoch: u64,
    /// The host's wall clock, nanoseconds since 1970: the guest's own is some milliseconds late after a boot, and
    /// stands still while a guest is saved.
    pub now_unix_ns: u64,
}

/// The agent's answer to the greeting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// [`crate::VERSION`] of the agent.
    pub version: u16,
    /// The greeting's epoch.
    pub epoch: u64,
    /// Release of the guest's kernel.
    pub kernel: String,
    /// When the agent was started as PID 1, by the host's wall clock, nanoseconds since 1970.
    pub pid1_unix_ns: u64,
    /// When the root was mounted.
    pub mounted_unix_ns: u64,
    /// Streams whose commands still run from an earlier conversation.
    pub running: Vec<u32>,
}

/// A command to run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exec {
    /// The program and its arguments, as bytes: they need not be UTF-8.
    pub argv: Vec<Vec<u8>>,
    /// Environment as `NAME=value`. The agent adds HOME, USER, LOGNAME and SHELL where they are missing.
    pub env: Vec<Vec<u8>>,
    /// Working directory; the user's home if absent.
    pub cwd: Option<Vec<u8>>,
    /// `name`, `uid`, `name:group` or `uid:gid`.
    pub user: String,
    /// Whether standard input is a stream; otherwise the command reads end-of-file at once.
    pub stdin: bool,
    /// A terminal of this size; all output then comes as standard output.
    pub terminal: Option<TerminalSize>,
    /// The command is held back further than its user is.
    pub restricted: Option<Restriction>,
}

/// The size of a terminal, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    /// Lines.
    pub rows: u16,
    /// Characters per line.
    pub columns: u16,
}

/// How a restricted command is held back: it is not root, gains no privilege by executing anything, has no capability,
/// and sees every mount with nosuid and nodev.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restriction {
    /// Whether the root stays writable.
    pub writable_root: bool,
}

impl Restriction {
    /// What is held back by both of them.
    pub fn stricter(one: Option<Self>, other: Option<Self>) -> Option<Self> {
        match (one, other) {
            (Some(one), Some(other)) => {
                Some(Self { writable_root: one.writable_root && other.writable_root })
            }
            (one, other) => one.or(other),
        }
    }

    /// Whether what is held back by `present` is held back as far as `wanted` asks for.
    pub fn covers(present: Option<Self>, wanted: Option<Self>) -> bool {
        Self::stricter(present, wanted) == present
    }
}

/// A copy of files into or out of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transfer {
    /// Which way.
    pub direction: Direction,
    /// The path in the guest. Into the guest: an existing folder receives the archive's one item under
    /// `name`, anything else is the item's new path.
    pub path: Vec<u8>,
    /// Into the guest: the item's name, for a copy into an existing folder. Without a name, `path` is that of one file,
    /// which replaces the content of a file that is there; missing folders on the way are made.
    ///
    /// Out of the guest: what is wanted, as [`crate::archive::Part`] is written; without it, all of the item.
    pub name: Vec<u8>,
    /// Who reads or writes in the guest, as in [`Exec::user`].
    pub user: String,
}

/// Which way files go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Direction {
    /// From the host into the guest.
    IntoGuest,
    /// Out of the guest to the host.
    OutOfGuest,
}

/// Why a command was not started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// Kind of the refusal.
    pub kind: RefusalKind,
    /// What the agent says about it. Guest-controlled text: escape before showing.
    pub message: String,
}

/// Kinds of [`Refused`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RefusalKind {
    /// There is no such program.
    NotFound,
    /// The program is there and cannot be executed.
    NotExecutable,
    /// The request itself cannot be met: unknown user, missing directory, too many commands.
    BadRequest,
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exit {
    /// It returned this code.
    Code(u8),
    /// It was ended by this signal.
    Signal(u8),
}

impl Exit {
    /// The code that a shell would report.
    pub fn shell_code(self) -> u8 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128u8.saturating_add(signal),
        }
    }
}

/// From the keeper to its clients, on stream 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromKeeper {
    /// The guest answers.
    Ready(Timeline),
    /// Something the user should know; the sandbox goes on.
    Warning(String),
    /// The sandbox is gone; nothing follows.
    Ended {
        /// Why.
        cause: Cause,
        /// The last lines of the guest kernel's console. Guest-controlled text: escape before showing.
        console: String,
    },
    /// To the owner: something that a client started has ended.
    WorkEnded {
        /// The caller's number for it.
        tag: u64,
        /// The job's number, if it was one.
        job: Option<u32>,
        /// How it ended.
        end: WorkEnd,
    },
    /// To the owner: answers [`ToKeeper::Usage`].
    Usage(Usage),
    /// To the owner: [`ToKeeper::Park`] or [`ToKeeper::Unpark`] is done.
    Parked {
        /// How many bytes were moved.
        bytes: u64,
    },
    /// To the owner: parking failed; the guest's memory is where it was.
    NotParked(String),
    /// To the owner: the guest is a process of its own from here on, so that the keeper can be moved without it.
    GuestStarted,
}

/// How a piece of work ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkEnd {
    /// It ran and ended.
    Exited(Exit),
    /// It was not started. Guest-controlled text: escape before showing.
    Refused(String),
}

/// What a sandbox uses, as its keeper sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Bytes of guest memory that are occupied.
    pub memory: u64,
    /// Bytes that the writable disk occupies on the host.
    pub disk: u64,
    /// Bytes read from the disks since the start.
    pub disk_read: u64,
    /// Bytes written to the writable disk since the start.
    pub disk_written: u64,
    /// Commands and jobs that run.
    pub commands: u32,
    /// Connected clients, the owner not counted.
    pub clients: u32,
}

/// From the owner, the process that started the keeper, on stream 0. When the owner hangs up, the sandbox ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToKeeper {
    /// End the sandbox now.
    Kill,
    /// Ask the guest to shut itself down.
    PowerOff {
        /// As in [`ToGuest::PowerOff`].
        grace_ms: u32,
    },
    /// A new client; its socket comes with this message.
    Client,
    /// A new gateway, in place of one that is gone; the link to it comes with this message.
    Link,
    /// What does the sandbox use?
    Usage,
    /// Make the guest stand still, unless it is frozen from outside, and stay still with it. Whatever comes of moving
    /// its memory, [`Self::Unpark`] ends that.
    Park {
        /// Move the guest's memory to the parking file, and free it.
        release_memory: bool,
    },
    /// Bring the guest's memory back, and let it go on, unless that is done from outside.
    Unpark,
}

/// When what happened, as wall clock nanoseconds since 1970. What the guest reports about itself is only reported.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    /// The keeper's first instruction.
    pub keeper: u64,
    /// Both jails are closed; the guest kernel is let go.
    pub jailed: u64,
    /// PID 1 runs, by the guest's clock.
    pub pid1: u64,
    /// The root is mounted, by the guest's clock.
    pub mounted: u64,
    /// The agent's answer arrived.
    pub ready: u64,
    /// Release of the guest's kernel, as the guest tells it.
    pub kernel: String,
}

/// Why a sandbox ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// A client asked for it.
    Killed,
    /// The guest kernel ended by itself with this wait status.
    GuestExited(i32),
    /// The guest's virtual machine ended in a way that no guest should: how.
    GuestCrashed(String),
    /// The guest did not answer in time, in milliseconds.
    NotReady(u64),
    /// The guest broke the rules of a device or of this protocol.
    Violation(String),
    /// The keeper itself failed.
    Failed(String),
}

/// One clause. Parts of it may come from the guest: escape before showing.
impl fmt::Display for Cause {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Killed => write!(formatter, "the sandbox was ended"),
            Self::GuestExited(0) => write!(formatter, "the guest powered itself off"),
            Self::GuestExited(status) => write!(formatter, "the guest ended by itself (status {status})"),
            Self::GuestCrashed(how) => write!(formatter, "{how}"),
            Self::NotReady(ms) => {
                write!(formatter, "the guest was not ready after {} s", *ms as f64 / 1000.0)
            }
            Self::Violation(what) => write!(formatter, "the guest broke the rules and was ended: {what}"),
            Self::Failed(what) => write!(formatter, "the sandbox could not be kept: {what}"),
        }
    }
}

/// What the peer did wrong.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum MessageError {
    /// The bytes are not a message of the schema.
    #[error("The peer sent a control message that does not decode")]
    Malformed,
    /// Bytes follow the message.
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
        // ToHost::Ready with a string length of 2^60.
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
