//! What the control channel of a stream carries.
//!
//! A stream belongs to one command: the host opens it with [`ToGuest::Exec`], it ends with [`ToHost::Exited`] or
//! [`ToHost::Refused`]. Stream 0 is the connection itself.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::frame::{self, Channel};

/// From the host to the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToGuest {
    /// Stream 0: begins a conversation. Commands of an earlier conversation go on running; see [`Ready::running`].
    Hello(Hello),
    /// Stream 0: ends everything and powers off.
    PowerOff,
    /// Starts a command on this stream.
    Exec(Exec),
    /// Takes over the stream of a command that an earlier conversation started.
    Attach,
    /// Sends a signal to the command's process group.
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
}

/// From a client to the keeper, on stream 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToKeeper {
    /// End the sandbox now.
    Kill,
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
    /// The guest did not answer in time, in milliseconds.
    NotReady(u64),
    /// The guest broke the rules of a device or of this protocol.
    Violation(String),
    /// The keeper itself failed.
    Failed(String),
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
