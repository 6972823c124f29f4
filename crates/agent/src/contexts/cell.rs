//! One cell, from the request to its last record.

use std::time::{Duration, Instant};

use bathy_protocol::Exit;
use bathy_protocol::cell::{
    Cell, CellEnd, CellEnded, CellStarted, Interrupter, Language, MAX_RECORD, RecordKind, put_message,
};

use super::stream::AnswerStream;

/// The most bytes that a cell may display and return. The rest is dropped.
const MAX_VALUES: usize = 32 * 1024 * 1024;

/// The most bytes of the driver's report on a cell that are forwarded.
const MAX_REPORT: usize = 4096;

/// A running or queued cell.
pub struct Task {
    /// The request. The code is taken out when it is sent.
    pub cell: Cell,
    /// The stream of its records.
    pub stream: AnswerStream,
    /// Set while its code runs.
    pub running: Option<Running>,
    queued: Instant,
    written: [u64; 2],
    values: usize,
    stray: u64,
    background: u64,
}

/// The deadlines of a running cell.
pub struct Running {
    since: Instant,
    /// When it is interrupted.
    pub timeout: Option<Instant>,
    pub interrupt: Option<Interrupt>,
}

pub struct Interrupt {
    pub by: Interrupter,
    /// When it is repeated: the first may have come before the code was read.
    pub again: Option<Instant>,
    pub kill: Instant,
}

impl Task {
    /// A cell that has just arrived.
    pub fn new(cell: Cell, stream: AnswerStream) -> Self {
        Self {
            cell,
            stream,
            running: None,
            queued: Instant::now(),
            written: [0; 2],
            values: 0,
            stray: 0,
            background: 0,
        }
    }

    /// How many bytes of the request are still in memory.
    pub fn weight(&self) -> usize {
        weight(&self.cell)
    }

    /// The fields of the request for the driver.
    pub fn fields(&self) -> Vec<&[u8]> {
        let flags = if self.cell.language == Language::TypeScript { "typescript" } else { "" };
        let cwd = self.cell.cwd.as_deref().unwrap_or_default();
        let mut fields: Vec<&[u8]> =
            vec![b"execute", self.cell.code.as_bytes(), cwd.as_bytes(), flags.as_bytes()];
        fields.extend(self.cell.env.iter().map(String::as_bytes));
        fields
    }

    /// Marks the code as started, after `background` bytes of background output that end in these.
    pub fn begin(&mut self, fresh: bool, lost: Option<String>, background: (u64, &[u8])) {
        let now = Instant::now();
        let (bytes, last) = background;
        self.background = bytes;
        if !last.is_empty() {
            self.stream.put(RecordKind::Background, last);
        }
        let started = CellStarted { fresh, lost, waited_ms: milliseconds(now - self.queued) };
        self.stream.put_with(|records| put_message(RecordKind::Started, &started, records));
        let timeout = Duration::from_millis(self.cell.timeout_ms.into());
        let timeout = (!timeout.is_zero()).then(|| now + timeout);
        self.running = Some(Running { since: now, timeout, interrupt: None });
    }

    /// Whether more of this output may be read: its stream has capacity, or it is only counted.
    pub fn accepts_output(&self, number: usize) -> bool {
        self.stream.has_capacity()
            || self.written.get(number).is_some_and(|count| *count >= self.cell.max_output)
    }

    /// Forwards standard output (0) or error (1) up to the limit.
    pub fn output(&mut self, number: usize, bytes: &[u8]) {
        let Some(written) = self.written.get_mut(number) else { return };
        let left = usize::try_from(self.cell.max_output.saturating_sub(*written)).unwrap_or(usize::MAX);
        *written = written.saturating_add(bytes.len() as u64);
        let kind = if number == 0 { RecordKind::Stdout } else { RecordKind::Stderr };
        if let Some(part) = bytes.get(..left.min(bytes.len())).filter(|part| !part.is_empty()) {
            self.stream.put(kind, part);
        }
    }

    /// Forwards a value or an error.
    pub fn value(&mut self, kind: u8, json: &[u8]) {
        let kind = match kind {
            b'p' => RecordKind::Piece,
            b'd' => RecordKind::Display,
            b'r' => RecordKind::Result,
            _ => RecordKind::Error,
        };
        self.values = self.values.saturating_add(json.len());
        if self.values > MAX_VALUES {
            self.stray();
        } else {
            debug_assert!(json.len() <= MAX_RECORD);
            self.stream.put(kind, json);
        }
    }

    /// Counts an invalid packet.
    pub fn stray(&mut self) {
        self.stray = self.stray.saturating_add(1);
    }

    /// Ends the cell and returns its stream.
    pub fn end(mut self, end: CellEnd, state_lost: bool) -> AnswerStream {
        let succeeded = matches!(&end, CellEnd::Finished(report) if !is_error(report));
        let [stdout_bytes, stderr_bytes] = self.written;
        let ended = CellEnded {
            end,
            interrupted: self.running.as_ref().and_then(|run| run.interrupt.as_ref()).map(|by| by.by),
            state_lost,
            stdout_bytes,
            stderr_bytes,
            background_bytes: self.background,
            stray_packets: self.stray,
            ran_ms: self.running.as_ref().map_or(0, |run| milliseconds(run.since.elapsed())),
        };
        self.stream.put_with(|records| put_message(RecordKind::Ended, &ended, records));
        self.stream.end(Exit::Code(u8::from(!succeeded)));
        self.stream
    }
}

/// How many bytes a queued request takes.
pub fn weight(cell: &Cell) -> usize {
    let env: usize = cell.env.iter().map(String::len).sum();
    let made: usize = cell.make.iter().flat_map(|make| &make.env).map(Vec::len).sum();
    cell.code.len().saturating_add(env).saturating_add(made)
}

/// The driver's report on how a cell ended, as text of limited length.
pub fn report_of(json: &[u8]) -> CellEnd {
    let json = json.get(..json.len().min(MAX_REPORT)).unwrap_or_default();
    CellEnd::Finished(String::from_utf8_lossy(json).into_owned())
}

/// Whether the report is an error. It is only searched: the host parses it.
fn is_error(report: &str) -> bool {
    let dense: String = report.chars().filter(|character| !character.is_ascii_whitespace()).collect();
    dense.contains("\"status\":\"error\"")
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
