//! One cell's stream, from the request to its last record.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use bathy_protocol::cell::{self, CellEnd, CellEnded, CellStarted, ContextInfo, Kind, Records};
use bathy_protocol::{Request, StdChannel, Work};
use rustix::event::PollFlags;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::values::{self, Room};
use super::{Bundle, CellEvent, CellOutcome, InterpreterError};
use crate::connection::{Connection, ConnectionError};
use crate::stream::{Event, Fired, Stream};

/// The most JSON of one cell, in bytes.
const MAX_VALUES: usize = 34 << 20;
/// The most of one value.
const MAX_VALUE: usize = 17 << 20;
/// The longest account of what is wrong with an interpreter, in characters.
const MAX_DAMAGE: usize = 500;
/// How long a guest may take to accept a cell, or to answer about contexts.
const ACCEPT: Duration = Duration::from_secs(30);
/// How much longer than its time limit and its grace a cell may take.
const SLACK: Duration = Duration::from_secs(30);

/// The caller's side of a cell.
#[derive(Default)]
pub struct CellOptions<'a> {
    /// Becomes readable when the caller wants the code to be interrupted. The cell then ends by itself or is killed, and
    /// its end is still waited for.
    pub interrupt: Option<BorrowedFd<'a>>,
}

/// Runs a cell on a stream of `connection` that is not in use, and hands over what it does.
pub fn run_cell(
    connection: &mut Connection,
    stream: u32,
    request: cell::Cell,
    tag: u64,
    options: &CellOptions<'_>,
    on_event: &mut dyn FnMut(CellEvent),
) -> Result<CellOutcome, InterpreterError> {
    let limits = Limits {
        timeout: (request.timeout_ms > 0).then(|| Duration::from_millis(request.timeout_ms.into())),
        grace: Duration::from_millis(request.grace_ms.into()),
        output: request.max_output,
    };
    let stream =
        Stream::open(connection, stream, &Request::Start { work: Work::Cell(request), tag, job: None })?;
    let mut running = Running::new(stream, limits, options.interrupt);
    while let Some((kind, payload)) = running.next()? {
        running.take(kind, payload, on_event)?;
    }
    let ended = running.ended.ok_or(InterpreterError::Unfinished)?;
    let words = match &ended.end {
        CellEnd::Finished(words) => parse::<Words>(words.as_bytes(), "the cell's end")?,
        _ => Words::default(),
    };
    let Words { status, count, damage } = words;
    let damage = damage.map(|damage| damage.chars().take(MAX_DAMAGE).collect());
    Ok(CellOutcome { started: running.started, ok: status == "ok", count, damage, ended })
}

/// Asks something about the contexts; the answer is the list of them.
pub fn run_contexts(
    connection: &mut Connection,
    stream: u32,
    request: cell::ContextsRequest,
    tag: u64,
) -> Result<Vec<ContextInfo>, InterpreterError> {
    let request = Request::Start { work: Work::Contexts(request), tag, job: None };
    let limits = Limits { timeout: Some(ACCEPT), grace: Duration::ZERO, output: 0 };
    let mut running = Running::new(Stream::open(connection, stream, &request)?, limits, None);
    let mut list = None;
    while let Some((kind, payload)) = running.next()? {
        if kind == Kind::Contexts {
            list = Some(cell::take_message(&payload)?);
        }
    }
    list.ok_or(InterpreterError::Unfinished)
}

/// What an interpreter says about a cell that it has run.
#[derive(Debug, Default, Deserialize)]
struct Words {
    #[serde(default)]
    status: String,
    #[serde(default)]
    count: Option<u64>,
    #[serde(default)]
    damage: Option<String>,
}

struct Limits {
    timeout: Option<Duration>,
    grace: Duration,
    output: u64,
}

/// A stream whose records are read.
struct Running<'c, 'a> {
    stream: Stream<'c>,
    limits: Limits,
    interrupt: Option<BorrowedFd<'a>>,
    records: Records,
    started: CellStarted,
    ended: Option<CellEnded>,
    pieces: Vec<u8>,
    values: usize,
    built: Room,
    /// How much more of standard output, standard error and leftovers is passed on.
    room: [u64; 3],
    /// When the guest has to have said something.
    deadline: Option<Instant>,
    over: bool,
}

impl<'c, 'a> Running<'c, 'a> {
    fn new(stream: Stream<'c>, limits: Limits, interrupt: Option<BorrowedFd<'a>>) -> Self {
        let room = [limits.output; 3];
        Self {
            stream,
            limits,
            interrupt,
            records: Records::default(),
            started: CellStarted::default(),
            ended: None,
            pieces: Vec::new(),
            values: 0,
            built: Room::default(),
            room,
            deadline: Instant::now().checked_add(ACCEPT),
            over: false,
        }
    }

    /// The next record, or `None` at the stream's end.
    fn next(&mut self) -> Result<Option<(Kind, Vec<u8>)>, InterpreterError> {
        loop {
            if let Some((kind, payload)) = self.records.next_record()? {
                return Ok(Some((kind, payload.to_vec())));
            }
            if self.over {
                return Ok(None);
            }
            self.turn()?;
        }
    }

    fn turn(&mut self) -> Result<(), InterpreterError> {
        if self.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return Err(ConnectionError::NoAnswer(ACCEPT.as_secs()).into());
        }
        let interrupt = self.interrupt.map(|fd| (fd, PollFlags::IN));
        let Fired { arrived, others: [interrupted] } = self.stream.wait(true, [interrupt], self.deadline)?;
        if interrupted {
            // Once: the guest kills what does not react.
            self.interrupt = None;
            self.stream.tell(&Request::Signal(libc::SIGINT))?;
            self.deadline = Instant::now().checked_add(self.limits.grace + SLACK);
        }
        if arrived {
            for event in self.stream.receive()? {
                self.on_event(event)?;
            }
        }
        Ok(())
    }

    fn on_event(&mut self, event: Event) -> Result<(), InterpreterError> {
        match event {
            // It may have to wait for others, whose time limits are theirs; each shows signs of life.
            Event::Started => self.deadline = None,
            Event::Refused(refused) => return Err(InterpreterError::Refused(refused.message)),
            Event::Exited(_) => self.over = true,
            Event::SandboxEnded { cause, console } => {
                return Err(InterpreterError::SandboxEnded { cause, console });
            }
            Event::Output(StdChannel::Stdout, bytes) => {
                self.records.push(&bytes);
                self.stream.consumed(StdChannel::Stdout, bytes.len())?;
            }
            // Nothing else was asked for.
            Event::Output(StdChannel::Stderr, _)
            | Event::Ready(_)
            | Event::Warning(_)
            | Event::Attached
            | Event::Granted(_)
            | Event::TakenOver => {}
        }
        Ok(())
    }

    fn take(
        &mut self,
        kind: Kind,
        payload: Vec<u8>,
        on_event: &mut dyn FnMut(CellEvent),
    ) -> Result<(), InterpreterError> {
        match kind {
            Kind::Started => {
                self.started = cell::take_message(&payload)?;
                // From here on the guest keeps the time; this is for a guest that does not.
                let patience = self.limits.timeout.map(|timeout| timeout + self.limits.grace + SLACK);
                self.deadline = patience.and_then(|patience| Instant::now().checked_add(patience));
                on_event(CellEvent::Started(self.started.clone()));
            }
            Kind::Stdout => self.output(0, payload, CellEvent::Stdout, on_event),
            Kind::Stderr => self.output(1, payload, CellEvent::Stderr, on_event),
            Kind::Background => self.output(2, payload, CellEvent::Background, on_event),
            Kind::Piece => self.piece(&payload)?,
            Kind::Display => on_event(CellEvent::Display(self.bundle(&payload)?)),
            Kind::Result => on_event(CellEvent::Result(self.bundle(&payload)?)),
            Kind::Error => {
                let json = self.whole(&payload)?;
                let error =
                    values::error(&json).map_err(|error| InterpreterError::Json("an error", error))?;
                on_event(CellEvent::Error(error));
            }
            Kind::Ended => self.ended = Some(cell::take_message(&payload)?),
            Kind::Contexts => {}
        }
        Ok(())
    }

    /// Passes output on, as far as there is room: the guest was told how much, and may not care.
    fn output(
        &mut self,
        which: usize,
        mut bytes: Vec<u8>,
        event: fn(Vec<u8>) -> CellEvent,
        on_event: &mut dyn FnMut(CellEvent),
    ) {
        let Some(room) = self.room.get_mut(which) else { return };
        bytes.truncate(usize::try_from(*room).unwrap_or(usize::MAX));
        *room -= u64::try_from(bytes.len()).unwrap_or(*room);
        if !bytes.is_empty() {
            on_event(event(bytes));
        }
    }

    fn piece(&mut self, payload: &[u8]) -> Result<(), InterpreterError> {
        self.values += payload.len();
        if self.values > MAX_VALUES || self.pieces.len() + payload.len() > MAX_VALUE {
            return Err(InterpreterError::TooMuch(MAX_VALUE));
        }
        self.pieces.extend_from_slice(payload);
        Ok(())
    }

    /// All the JSON of a value or an error, of which this is the last piece.
    fn whole(&mut self, last: &[u8]) -> Result<Vec<u8>, InterpreterError> {
        self.piece(last)?;
        Ok(std::mem::take(&mut self.pieces))
    }

    fn bundle(&mut self, last: &[u8]) -> Result<Bundle, InterpreterError> {
        let json = self.whole(last)?;
        values::bundle(&json, &mut self.built).map_err(|error| InterpreterError::Json("a value", error))
    }
}

fn parse<T: DeserializeOwned>(json: &[u8], what: &'static str) -> Result<T, InterpreterError> {
    serde_json::from_slice(json).map_err(|error| InterpreterError::Json(what, error))
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;
