//! Code for the guest's interpreters: requests and the records that are sent back.
//!
//! A *context* is one interpreter process with its state; a *cell* is one piece of code that runs in it. A
//! cell has a stream like a command's. Its standard output carries records: one byte of [`RecordKind`], four of
//! length, the payload. Values and errors are JSON from the interpreter that the agent forwards without
//! parsing; [`CellStarted`] and [`CellEnded`] come from the agent itself. The last record is [`RecordKind::Ended`];
//! then the stream ends like a command's.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::message::{Exit, MessageError, Restriction};

/// The longest code of one cell, in bytes.
pub const MAX_CODE: usize = 8 * 1024 * 1024;

/// The maximum payload of one record. Longer values are split into [`RecordKind::Piece`]s.
pub const MAX_RECORD: usize = 64 * 1024;

/// The length of a record's header.
pub const RECORD_HEADER: usize = 5;

/// The language of a context or cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Language {
    /// Python, run by CPython.
    Python,
    /// JavaScript, run by Node.js.
    JavaScript,
    /// TypeScript, run by Node.js with its types stripped; it shares the contexts of JavaScript.
    TypeScript,
    /// The shell language of Bash.
    Bash,
}

impl Language {
    /// All languages, in order of declaration.
    pub const ALL: [Self; 4] = [Self::Python, Self::JavaScript, Self::TypeScript, Self::Bash];

    /// The lower-case name of the language.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::JavaScript => "javascript",
            Self::TypeScript => "typescript",
            Self::Bash => "bash",
        }
    }

    /// The context for cells that name none.
    pub fn default_context(self) -> &'static str {
        match self {
            Self::TypeScript => Self::JavaScript.as_str(),
            other => other.as_str(),
        }
    }

    /// Whether code of this language can run in a context of the other.
    pub fn runs_in(self, context: Self) -> bool {
        self.default_context() == context.default_context()
    }
}

/// What an interpreter process is started with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Surroundings {
    /// Environment as `NAME=value`, as in [`crate::Exec::env`].
    pub env: Vec<Vec<u8>>,
    /// The working directory; the user's home if absent.
    pub cwd: Option<Vec<u8>>,
    /// The user, as in [`crate::Exec::user`].
    pub user: String,
    /// The restriction, as in [`crate::Exec::restricted`].
    pub restricted: Option<Restriction>,
}

/// One piece of code to run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cell {
    /// The name of the context.
    pub context: String,
    /// The language of the code.
    pub language: Language,
    /// How to create the context if it does not exist, and to start its interpreter.
    pub make: Option<Surroundings>,
    /// The minimum restriction of its interpreter, as in [`crate::Exec::restricted`]. A running interpreter
    /// with less gets no code.
    pub restricted: Option<Restriction>,
    /// The code: at most [`MAX_CODE`] bytes.
    pub code: String,
    /// Environment variables of this cell only, as `NAME=value`.
    pub env: Vec<String>,
    /// The working directory of this cell only.
    pub cwd: Option<String>,
    /// The time limit in milliseconds, after which the cell is interrupted; 0 for none.
    pub timeout_ms: u32,
    /// Milliseconds between an interrupt and killing the interpreter.
    pub grace_ms: u32,
    /// How many bytes of each output are forwarded; the rest is only counted.
    pub max_output: u64,
}

/// A request about contexts, answered with one [`RecordKind::Contexts`] record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ContextsRequest {
    /// Lists all contexts of the sandbox.
    List,
    /// Creates a context and starts its interpreter.
    Make {
        /// The name of the context, which must be free.
        context: String,
        /// The language of the context.
        language: Language,
        /// What its interpreter is started with.
        surroundings: Surroundings,
    },
    /// Ends the interpreter and starts a new one; running and queued cells end.
    Restart {
        /// The name of the context.
        context: String,
        /// The minimum restriction of the new interpreter.
        restricted: Option<Restriction>,
    },
    /// Ends the interpreter and removes the context.
    Remove {
        /// The name of the context.
        context: String,
    },
    /// Interrupts the running cell, if there is one.
    Interrupt {
        /// The name of the context.
        context: String,
    },
}

/// A context in the agent's list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContextInfo {
    /// The name of the context.
    pub context: String,
    /// The language of the context.
    pub language: Language,
    /// The pid of the interpreter; none if it is not running.
    pub pid: Option<u32>,
    /// Whether a cell is running.
    pub busy: bool,
    /// How many cells are queued.
    pub waiting: u32,
    /// How many cells have run in the present interpreter.
    pub cells: u64,
}

/// The type of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RecordKind {
    /// The code starts to run: [`CellStarted`].
    Started = 1,
    /// Bytes of standard output.
    Stdout = 2,
    /// Bytes of standard error.
    Stderr = 3,
    /// Bytes written between cells by threads or processes that earlier cells left running.
    Background = 4,
    /// A piece of the JSON of the next value or error.
    Piece = 5,
    /// A displayed value: the last piece of its JSON.
    Display = 6,
    /// The value of the cell's last expression, as for a displayed one.
    Result = 7,
    /// An uncaught error: the last piece of its JSON.
    Error = 8,
    /// The cell has ended: [`CellEnded`]. It is the last record.
    Ended = 9,
    /// The answer to a [`ContextsRequest`]: a list of [`ContextInfo`].
    Contexts = 10,
}

impl RecordKind {
    const ALL: [Self; 10] = [
        Self::Started,
        Self::Stdout,
        Self::Stderr,
        Self::Background,
        Self::Piece,
        Self::Display,
        Self::Result,
        Self::Error,
        Self::Ended,
        Self::Contexts,
    ];
}

/// The start of a cell.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CellStarted {
    /// The interpreter was started for this cell, so there is no earlier state.
    pub fresh: bool,
    /// Why the context's earlier state was lost, if there was any.
    pub lost: Option<String>,
    /// Milliseconds that the cell waited for other cells and for the interpreter to start.
    pub waited_ms: u64,
}

/// The end of a cell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CellEnded {
    /// How the cell ended.
    pub end: CellEnd,
    /// Why it was interrupted, if it was.
    pub interrupted: Option<Interrupter>,
    /// Whether the interpreter ended with it, and its state was lost.
    pub state_lost: bool,
    /// Bytes of standard output in total, forwarded or not.
    pub stdout_bytes: u64,
    /// Bytes of standard error in total, forwarded or not.
    pub stderr_bytes: u64,
    /// Bytes of background output since the previous cell.
    pub background_bytes: u64,
    /// How many invalid packets the code wrote to the interpreter's channel.
    pub stray_packets: u64,
    /// How long the code ran, in milliseconds.
    pub ran_ms: u64,
}

/// How a cell ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CellEnd {
    /// The interpreter has run it; this is its report as JSON.
    Finished(String),
    /// The interpreter exited while running it.
    Exited(Exit),
    /// The guest's kernel killed the interpreter because memory ran out.
    OutOfMemory,
    /// It did not react to an interrupt, and its interpreter was killed.
    Killed,
    /// It closed the interpreter's channel.
    ChannelClosed,
    /// The interpreter could not be started, with the reason.
    NotStarted(String),
    /// The context was restarted or removed before the cell ran.
    Cancelled,
}

/// Why a cell was interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Interrupter {
    /// Its time limit was reached.
    Timeout,
    /// The client requested it.
    Asked,
}

/// A violation of the record format.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum CellError {
    /// The kind is unknown.
    #[error("The guest sent a record of the unknown kind {0}")]
    UnknownKind(u8),
    /// The record exceeds the maximum length.
    #[error("The guest announced a record of {0} bytes; the most is {MAX_RECORD}")]
    TooLong(u32),
    /// The payload does not decode.
    #[error(transparent)]
    Message(#[from] MessageError),
}

/// Appends one record to `out`; the payload is at most [`MAX_RECORD`] bytes.
pub fn put(kind: RecordKind, payload: &[u8], out: &mut Vec<u8>) {
    debug_assert!(payload.len() <= MAX_RECORD);
    out.reserve(RECORD_HEADER + payload.len());
    out.push(kind as u8);
    out.extend_from_slice(&u32::try_from(payload.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend_from_slice(payload);
}

/// Appends one record with a message of the agent.
pub fn put_message<M: Serialize>(
    kind: RecordKind,
    message: &M,
    out: &mut Vec<u8>,
) -> Result<(), MessageError> {
    let payload = postcard::to_allocvec(message).map_err(|_| MessageError::Malformed)?;
    put(kind, &payload, out);
    Ok(())
}

/// Decodes a message of the agent.
pub fn take_message<M: DeserializeOwned>(payload: &[u8]) -> Result<M, CellError> {
    Ok(crate::message::decode(payload)?)
}

/// Splits a stream into records. It buffers at most one record beyond what was pushed.
#[derive(Debug, Default)]
pub struct Records {
    buffer: Vec<u8>,
    start: usize,
}

impl Records {
    /// Adds bytes that arrived from the guest.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.start);
        self.start = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// The next complete record, or `None` until more bytes arrive.
    pub fn next_record(&mut self) -> Result<Option<(RecordKind, &[u8])>, CellError> {
        let unread = self.buffer.get(self.start..).unwrap_or_default();
        let Some((header, rest)) = unread.split_first_chunk::<RECORD_HEADER>() else { return Ok(None) };
        let [kind, l0, l1, l2, l3] = *header;
        let known = RecordKind::ALL.into_iter().find(|known| *known as u8 == kind);
        let kind = known.ok_or(CellError::UnknownKind(kind))?;
        let announced = u32::from_le_bytes([l0, l1, l2, l3]);
        let length = announced as usize;
        if length > MAX_RECORD {
            return Err(CellError::TooLong(announced));
        }
        let Some(payload) = rest.get(..length) else { return Ok(None) };
        self.start += RECORD_HEADER + length;
        Ok(Some((kind, payload)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_survive_any_split_of_the_stream() {
        let started = CellStarted { fresh: true, lost: None, waited_ms: 7 };
        let mut wire = Vec::new();
        put_message(RecordKind::Started, &started, &mut wire).unwrap();
        put(RecordKind::Stdout, b"hello", &mut wire);
        put(RecordKind::Piece, b"", &mut wire);
        for cut in 0..wire.len() {
            let mut records = Records::default();
            let mut seen = Vec::new();
            for part in [&wire[..cut], &wire[cut..]] {
                records.push(part);
                while let Some((kind, payload)) = records.next_record().unwrap() {
                    seen.push((kind, payload.to_vec()));
                }
            }
            assert_eq!(take_message::<CellStarted>(&seen[0].1).unwrap(), started);
            assert_eq!(seen[1..], [(RecordKind::Stdout, b"hello".to_vec()), (RecordKind::Piece, vec![])]);
        }
    }

    #[test]
    fn c1_lies_about_kind_and_length_are_refused_from_the_header_alone() {
        let mut records = Records::default();
        records.push(&[2, 0xff, 0xff, 0xff, 0xff]);
        assert_eq!(records.next_record(), Err(CellError::TooLong(u32::MAX)));
        let mut records = Records::default();
        records.push(&[77, 0, 0, 0, 0]);
        assert_eq!(records.next_record(), Err(CellError::UnknownKind(77)));
        assert!(take_message::<CellEnded>(&[0xff; 9]).is_err());
    }

    #[test]
    fn typescript_runs_where_javascript_does() {
        assert!(Language::TypeScript.runs_in(Language::JavaScript));
        assert!(!Language::Bash.runs_in(Language::Python));
        assert_eq!(Language::TypeScript.default_context(), "javascript");
    }
}
