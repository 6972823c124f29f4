//! The protocols between the host and the guest, and between the host's processes.
//!
//! The byte stream to the guest is its control port (a virtio console port). The keeper and its clients
//! exchange the same frames over a Unix socket, so a client's request reaches the agent without being
//! rewritten.
//!
//! * [`frame`]: the wire format: a fixed header, a stream number, a channel, at most [`MAX_PAYLOAD`] bytes.
//! * [`report`]: errors and times as they appear in messages.
//! * [`message`]: the messages on the control channel of a stream.
//! * [`archive`]: files and folders as a byte stream, on the standard input or output of a transfer.
//! * [`cell`]: code for the guest's interpreters.
//! * [`counts`]: the byte counts of a gateway, which outlive it.
//! * [`launch`], [`descriptors`]: the inputs of a keeper and a gateway.
//! * [`network`]: the addresses of a sandbox's link, and the messages of a gateway.
//! * `window`: flow control. Every byte channel of every stream has its own window, so one slow reader does
//!   not stall the others.
//! * [`time`]: timestamps as text.
//!
//! Whatever comes from the peer is hostile input: lengths are checked before anything is stored, nothing is
//! allocated by a number that the peer chose, and a violation is an error that ends the connection.
#![deny(missing_docs)]

pub mod archive;
pub mod cell;
pub mod counts;
pub mod descriptors;
pub mod frame;
pub mod launch;
pub mod message;
pub mod network;
pub mod report;
pub mod time;
mod window;

pub use frame::{Channel, Decoder, Frame, FrameError};
pub use message::{
    Answer, Cause, CopyDirection, Exec, Exit, FromKeeper, Hello, MessageError, Ready, RefusalKind, Refused,
    Request, Restriction, StdChannel, TerminalSize, Timeline, ToGuest, ToHost, ToKeeper, Transfer, Usage,
    Work, WorkEnd,
};
pub use report::{chain, unix_ns};
pub use window::{ReceiveWindow, SendWindow, WindowError};

/// The version of the protocol. Host and agent must agree exactly: they are built from one source.
pub const VERSION: u16 = 4;

/// The most payload that one frame from a guest, or one frame of bytes, may carry.
pub const MAX_PAYLOAD: u32 = 64 * 1024;

/// The maximum payload of one control message from the host: the longest code and its parameters fit.
pub const MAX_REQUEST: u32 = 9 * 1024 * 1024;

/// The initial window: how much may be sent on a new channel before the receiver grants more.
pub const INITIAL_WINDOW: u32 = 64 * 1024;

/// How many streams one client may have open at once.
pub const MAX_STREAMS: usize = 64;

/// How many commands may run at once in one sandbox.
pub const MAX_COMMANDS: usize = 256;

/// The stream of the connection itself: greeting, power-off and the keeper's own messages.
pub const CONNECTION: u32 = 0;
