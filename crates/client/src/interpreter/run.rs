//! The stream of one cell, from the request to its last record.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use bathy_protocol::cell::{self, CellEnd, CellEnded, CellStarted, ContextInfo, RecordKind, Records};
use bathy_protocol::{Request, StdChannel, Work};
use rustix::event::PollFlags;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::values::{self, JsonBudget};
use super::{Bundle, CellEvent, CellOutcome, InterpreterError};
use crate::connection::{Connection, ConnectionError};
use crate::stream::{Fired, Stream, StreamEvent};

/// The most JSON of one cell, in bytes.
const MAX_VALUES: usize = 34 << 20;
/// The most JSON of one value, in bytes.
const MAX_VALUE: usize = 17 << 20;
/// The longest description of damage to an interpreter, in characters.
const MAX_DAMAGE: usize = 500;
/// How long a guest may take to accept a cell or to list contexts.
const ACCEPT: Duration = Duration::from_secs(30);
/// How far a cell may exceed its time limit and grace period.
const SLACK: Duration = Duration::from_secs(30);

/// The client's side of a cell.
#[derive(Default)]
pub struct CellOptions<'a> {
    /// Becomes readable when the code should be interrupted. The cell then ends or is killed; its end is
    /// still awaited.
    pub interrupt: Option<BorrowedFd<'a>>,
}

/// A recorded cell that is ready to be sent.
#[derive(Debug)]
pub struct PreparedCell {
    /// The request for the agent.
    pub cell: cell::Cell,
    /// The cell's tag in the audit log.
    pub tag: u64,
}

/// Runs a cell on an unused stream of `connection` and passes on its events.
pub fn run_cell(
    connection: &mut Connection,
    stream: u32,
    cell: PreparedCell,
    options: &CellOptions<'_>,
    on_event: &mut dyn FnMut(CellEvent),
) -> Result<CellOutcome, InterpreterError> {
    let PreparedCell { cell: request, tag } = cell;
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
    let report = match &ended.end {
        CellEnd::Finished(json) => parse::<DriverReport>(json.as_bytes(), "the cell's end")?,
        _ => DriverReport::default(),
    };
    let DriverReport { status, count, damage } = report;
    let damage = damage.map(|damage| damage.chars().take(MAX_DAMAGE).collect());
    Ok(CellOutcome { started: running.started, ok: status == "ok", count, damage, ended })
}

/// Sends a request about contexts. Returns the list of contexts.
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
        if kind == RecordKind::Contexts {
            list = Some(cell::take_message(&payload)?);
        }
    }
    list.ok_or(InterpreterError::Unfinished)
}

/// The driver's report on a finished cell.
#[derive(Debug, Default, Deserialize)]
struct DriverReport {
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

/// A cell stream and the state of parsing it.
struct Running<'c, 'a> {
    stream: Stream<'c>,
    limits: Limits,
    interrupt: Option<BorrowedFd<'a>>,
    records: Records,
    started: CellStarted,
    ended: Option<CellEnded>,
    pieces: Vec<u8>,
    values: usize,
    built: JsonBudget,
    /// The remaining limit of standard output, standard error and background output.
    limits_left: [u64; 3],
    /// The deadline for the guest's next record.
    deadline: Option<Instant>,
    over: bool,
}

impl<'c, 'a> Running<'c, 'a> {
    fn new(stream: Stream<'c>, limits: Limits, interrupt: Option<BorrowedFd<'a>>) -> Self {
        let limits_left = [limits.output; 3];
        Self {
            stream,
            limits,
            interrupt,
            records: Records::default(),
            started: CellStarted::default(),
            ended: None,
            pieces: Vec::new(),
            values: 0,
            built: JsonBudget::default(),
            limits_left,
            deadline: Instant::now().checked_add(ACCEPT),
            over: false,
        }
    }

    /// The next record, or none at the end of the stream.
    fn next(&mut self) -> Result<Option<(RecordKind, Vec<u8>)>, InterpreterError> {
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
            // Only once: the guest kills what does not react.
            self.interrupt = None;
            self.stream.queue(&Request::Signal(libc::SIGINT))?;
            self.deadline = Instant::now().checked_add(self.limits.grace + SLACK);
        }
        if arrived {
            for event in self.stream.receive()? {
                // The first end counts: a sandbox that ends after its cell does not undo the cell.
                if !self.over {
                    self.on_event(event)?;
                }
            }
        }
        Ok(())
    }

    fn on_event(&mut self, event: StreamEvent) -> Result<(), InterpreterError> {
        match event {
            // The cell may be queued behind others with their own time limits; each shows progress.
            StreamEvent::Started => self.deadline = None,
            StreamEvent::Refused(refused) => return Err(InterpreterError::Refused(refused.message)),
            StreamEvent::Exited(_) => self.over = true,
            StreamEvent::SandboxEnded { cause, console } => {
                return Err(InterpreterError::SandboxEnded { cause, console });
            }
            StreamEvent::Output(StdChannel::Stdout, bytes) => {
                self.records.push(&bytes);
                self.stream.consumed(StdChannel::Stdout, bytes.len())?;
            }
            // Only cells and contexts are requested, which do not produce these.
            StreamEvent::Output(StdChannel::Stderr, _)
            | StreamEvent::Ready(_)
            | StreamEvent::Warning(_)
            | StreamEvent::Attached
            | StreamEvent::Granted(_)
            | StreamEvent::TakenOver => {}
        }
        Ok(())
    }

    fn take(
        &mut self,
        kind: RecordKind,
        payload: Vec<u8>,
        on_event: &mut dyn FnMut(CellEvent),
    ) -> Result<(), InterpreterError> {
        match kind {
            RecordKind::Started => {
                self.started = cell::take_message(&payload)?;
                // From here on the guest enforces the time limit; this covers a guest that does not.
                let timeout = self.limits.timeout.map(|timeout| timeout + self.limits.grace + SLACK);
                self.deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
                on_event(CellEvent::Started(self.started.clone()));
            }
            RecordKind::Stdout => self.output(0, payload, CellEvent::Stdout, on_event),
            RecordKind::Stderr => self.output(1, payload, CellEvent::Stderr, on_event),
            RecordKind::Background => self.output(2, payload, CellEvent::Background, on_event),
            RecordKind::Piece => self.piece(&payload)?,
            RecordKind::Display => on_event(CellEvent::Display(self.bundle(&payload)?)),
            RecordKind::Result => on_event(CellEvent::Result(self.bundle(&payload)?)),
            RecordKind::Error => {
                let json = self.whole(&payload)?;
                let error =
                    values::error(&json).map_err(|error| InterpreterError::Json("an error", error))?;
                on_event(CellEvent::Error(error));
            }
            RecordKind::Ended => self.ended = Some(cell::take_message(&payload)?),
            RecordKind::Contexts => {}
        }
        Ok(())
    }

    /// Passes output on up to its limit, which a hostile guest may ignore.
    fn output(
        &mut self,
        which: usize,
        mut bytes: Vec<u8>,
        event: fn(Vec<u8>) -> CellEvent,
        on_event: &mut dyn FnMut(CellEvent),
    ) {
        let Some(left) = self.limits_left.get_mut(which) else { return };
        bytes.truncate(usize::try_from(*left).unwrap_or(usize::MAX));
        *left -= u64::try_from(bytes.len()).unwrap_or(*left);
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

    /// The complete JSON of a value or error, of which this is the last piece.
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
