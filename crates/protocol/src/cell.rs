//! Code for the interpreters of the guest: what is asked, and the records that come back.
//!
//! A *context* is one interpreter process with its state; a *cell* is one piece of code that runs in it. A cell has a
//! stream like a command's. Its standard output carries records: one byte of [`Kind`], four of length, the payload. What
//! the interpreter says about values and errors is JSON that the agent passes on unread; [`CellStarted`] and
//! [`CellEnded`] are the agent's own words. The last record is [`Kind::Ended`]; then the stream ends like a command's.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::message::{Exit, MessageError, Restriction};

/// The longest code of one cell, in bytes.
pub const MAX_CODE: usize = 8 * 1024 * 1024;

/// The most payload of one record. What is longer comes in [`Kind::Piece`]s.
pub const MAX_RECORD: usize = 64 * 1024;

/// Bytes of a record before its payload.
pub const RECORD_HEADER: usize = 5;

/// What a context speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Language {
    /// CPython.
    Python,
    /// JavaScript on Node.js.
    JavaScript,
    /// TypeScript on Node.js, with its types stripped; its contexts are those of JavaScript.
    TypeScript,
    /// Bash.
    Bash,
}

impl Language {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Python, Self::JavaScript, Self::TypeScript, Self::Bash];

    /// As it is written.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::JavaScript => "javascript",
            Self::TypeScript => "typescript",
            Self::Bash => "bash",
        }
    }

    /// The context that code runs in when none is named.
    pub fn default_context(self) -> &'static str {
        match self {
            Self::TypeScript => Self::JavaScript.as_str(),
            other => other.as_str(),
        }
    }

    /// Whether code of this language runs in a context of the other.
    pub fn runs_in(self, context: Self) -> bool {
        self.default_context() == context.default_context()
    }
}

/// What an interpreter process is started with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Surroundings {
    /// Environment as `NAME=value`, as in [`crate::Exec::env`].
    pub env: Vec<Vec<u8>>,
    /// Working directory; the user's home if absent.
    pub cwd: Option<Vec<u8>>,
    /// As in [`crate::Exec::user`].
    pub user: String,
    /// As in [`crate::Exec::restricted`].
    pub restricted: Option<Restriction>,
}

/// One piece of code to run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cell {
    /// Which context.
    pub context: String,
    /// The code's language.
    pub language: Language,
    /// Makes the context if it is not there, and what its interpreter is started with when it has to be started.
    pub make: Option<Surroundings>,
    /// The least that its interpreter has to be held back by, as in [`crate::Exec::restricted`]. One that runs already, and is not, gets
    /// no code.
    pub restricted: Option<Restriction>,
    /// The code: at most [`MAX_CODE`] bytes.
    pub code: String,
    /// Variables of this cell only, as `NAME=value`.
    pub env: Vec<String>,
    /// Working directory of this cell only.
    pub cwd: Option<String>,
    /// How long it may run, in milliseconds, before it is interrupted; 0 for no limit.
    pub timeout_ms: u32,
    /// How long after an interrupt its interpreter is killed.
    pub grace_ms: u32,
    /// How many bytes of each output are passed on; the rest is counted only.
    pub max_output: u64,
}

/// Something to do with contexts, answered with one [`Kind::Contexts`] record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ContextsRequest {
    /// Which are there?
    List,
    /// Makes one and starts its interpreter.
    Make {
        /// Its name, which must be free.
        context: String,
        /// Its language.
        language: Language,
        /// What it is started with.
        surroundings: Surroundings,
    },
    /// Ends the interpreter and starts a new one; the cell that runs and those that wait end.
    Restart {
        /// Which.
        context: String,
        /// The least that the new one has to be held back by.
        restricted: Option<Restriction>,
    },
    /// Ends the interpreter and forgets the context.
    Remove {
        /// Which.
        context: String,
    },
    /// Interrupts the cell that runs, if one does.
    Interrupt {
        /// Which.
        context: String,
    },
}

/// A context, as the agent lists it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContextInfo {
    /// Its name.
    pub context: String,
    /// Its language.
    pub language: Language,
    /// The interpreter's process; none if it is not running.
    pub pid: Option<u32>,
    /// Whether a cell runs.
    pub busy: bool,
    /// How many cells wait.
    pub waiting: u32,
    /// How many cells have run in the present process.
    pub cells: u64,
}

/// What a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// [`CellStarted`].
    Started = 1,
    /// Bytes of standard output.
    Stdout = 2,
    /// Bytes of standard error.
    Stderr = 3,
    /// Bytes that something left over from earlier cells has written since.
    Background = 4,
    /// A piece of the JSON of the next value or error.
    Piece = 5,
    /// A value that was displayed: the last piece of its JSON.
    Display = 6,
    /// The value of the cell's last expression.
    Result = 7,
    /// An error.
    Error = 8,
    /// [`CellEnded`]; nothing follows.
    Ended = 9,
    /// A list of [`ContextInfo`].
    Contexts = 10,
}

impl Kind {
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

/// A cell's code is about to run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CellStarted {
    /// The interpreter was started for this cell: there is no state of earlier cells.
    pub fresh: bool,
    /// Why the context's last state is gone, if there was one.
    pub lost: Option<String>,
    /// How long the cell waited for others, and for the interpreter to start, in milliseconds.
    pub waited_ms: u64,
}

/// How a cell ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CellEnded {
    /// How.
    pub end: CellEnd,
    /// Who interrupted it, if somebody did.
    pub interrupted: Option<Interrupter>,
    /// Whether the interpreter ended with it, and all state with that.
    pub state_lost: bool,
    /// How many bytes of standard output there were, passed on or not.
    pub stdout_bytes: u64,
    /// The same of standard error.
    pub stderr_bytes: u64,
    /// How many bytes earlier cells' leftovers wrote before this cell.
    pub background_bytes: u64,
    /// How many packets the code wrote to the interpreter's own channel.
    pub stray_packets: u64,
    /// How long the code ran, in milliseconds.
    pub ran_ms: u64,
}

/// Kinds of [`CellEnded`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CellEnd {
    /// The interpreter has run it; these are its own words about that, JSON.
    Finished(String),
    /// The interpreter ended under it.
    Exited(Exit),
    /// The guest's kernel ended the interpreter because memory ran out.
    OutOfMemory,
    /// It did not end when it was interrupted, and its interpreter was killed.
    Killed,
    /// It closed the interpreter's own channel.
    ChannelClosed,
    /// The interpreter could not be started or did not get ready.
    NotStarted(String),
    /// The context was restarted or removed before the cell ran.
    Cancelled,
}

/// Why a cell was interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Interrupter {
    /// Its time was up.
    Timeout,
    /// Somebody asked for it.
    Asked,
}

/// What the peer did wrong.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum CellError {
    /// A kind that means nothing.
    #[error("The guest sent a record of the unknown kind {0}")]
    UnknownKind(u8),
    /// A record that is longer than any.
    #[error("The guest announced a record of {0} bytes; the most is {MAX_RECORD}")]
    TooLong(u32),
    /// Its payload does not decode.
    #[error(transparent)]
    Message(#[from] MessageError),
}

/// Appends one record to `out`; the payload is at most [`MAX_RECORD`] bytes.
pub fn put(kind: Kind, payload: &[u8], out: &mut Vec<u8>) {
    debug_assert!(payload.len() <= MAX_RECORD);
    out.reserve(RECORD_HEADER + payload.len());
    out.push(kind as u8);
    out.extend_from_slice(&u32::try_from(payload.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend_from_slice(payload);
}

/// Appends one record of the agent's own words.
pub fn put_message<M: Serialize>(kind: Kind, message: &M, out: &mut Vec<u8>) -> Result<(), MessageError> {
    let payload = postcard::to_allocvec(message).map_err(|_| MessageError::Malformed)?;
    put(kind, &payload, out);
    Ok(())
}

/// Decodes the agent's own words.
pub fn take_message<M: DeserializeOwned>(payload: &[u8]) -> Result<M, CellError> {
    Ok(crate::message::decode(payload)?)
}

/// Cuts a stream into records. Never holds more than one record beyond what was pushed.
#[derive(Debug, Default)]
pub struct Records {
    buffer: Vec<u8>,
    start: usize,
}

impl Records {
    /// Adds bytes that arrived.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.start);
        self.start = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole record, or `None` until more bytes arrive.
    pub fn next_record(&mut self) -> Result<Option<(Kind, &[u8])>, CellError> {
        let unread = self.buffer.get(self.start..).unwrap_or_default();
        let Some((header, rest)) = unread.split_first_chunk::<RECORD_HEADER>() else { return Ok(None) };
        let [kind, l0, l1, l2, l3] = *header;
        let known = Kind::ALL.into_iter().find(|known| *known as u8 == kind);
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
        put_message(Kind::Started, &started, &mut wire).unwrap();
        put(Kind::Stdout, b"hello", &mut wire);
        put(Kind::Piece, b"", &mut wire);
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
            assert_eq!(seen[1..], [(Kind::Stdout, b"hello".to_vec()), (Kind::Piece, vec![])]);
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
