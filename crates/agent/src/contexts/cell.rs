//! One cell: from the request to its last record.

use std::time::{Duration, Instant};

use bathy_protocol::Exit;
use bathy_protocol::cell::{
    Cell, CellEnd, CellEnded, CellStarted, Interrupter, Kind, Language, MAX_RECORD, put_message,
};

use super::stream::Stream;

/// The most that a cell may display and return. What is beyond is dropped.
const MAX_SAID: usize = 32 * 1024 * 1024;

/// The most of the interpreter's own words about a cell that are passed on.
const MAX_VERDICT: usize = 4096;

/// A cell that runs or waits.
pub struct Task {
    /// What was asked. The code is taken out when it is sent.
    pub cell: Cell,
    /// Where its records go.
    pub stream: Stream,
    /// Since when its code runs.
    pub running: Option<Running>,
    queued: Instant,
    written: [u64; 2],
    said: usize,
    stray: u64,
    background: u64,
}

/// The times of a cell that runs.
pub struct Running {
    since: Instant,
    /// When it is interrupted.
    pub timeout: Option<Instant>,
    pub interrupt: Option<Interrupt>,
}

/// An interrupt that was not yet answered.
pub struct Interrupt {
    pub by: Interrupter,
    /// When it is repeated: the first may have come before the code was looked at.
    pub again: Option<Instant>,
    pub kill: Instant,
}

impl Task {
    /// A cell that came just now.
    pub fn new(cell: Cell, stream: Stream) -> Self {
        Self {
            cell,
            stream,
            running: None,
            queued: Instant::now(),
            written: [0; 2],
            said: 0,
            stray: 0,
            background: 0,
        }
    }

    /// How many bytes of the request are still kept.
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

    /// Its code is put to the interpreter now, after `background` bytes of which these are the last.
    pub fn begin(&mut self, fresh: bool, lost: Option<String>, background: (u64, &[u8])) {
        let now = Instant::now();
        let (bytes, last) = background;
        self.background = bytes;
        if !last.is_empty() {
            self.stream.put(Kind::Background, last);
        }
        let started = CellStarted { fresh, lost, waited_ms: milliseconds(now - self.queued) };
        self.stream.put_with(|records| put_message(Kind::Started, &started, records));
        let timeout = Duration::from_millis(self.cell.timeout_ms.into());
        let timeout = (!timeout.is_zero()).then(|| now + timeout);
        self.running = Some(Running { since: now, timeout, interrupt: None });
    }

    /// Whether more of this output may be read: it has somewhere to go, or is only counted.
    pub fn takes_output(&self, number: usize) -> bool {
        self.stream.has_room() || self.written.get(number).is_some_and(|count| *count >= self.cell.max_output)
    }

    /// It has written this to standard output (0) or error (1).
    pub fn output(&mut self, number: usize, bytes: &[u8]) {
        let Some(written) = self.written.get_mut(number) else { return };
        let left = usize::try_from(self.cell.max_output.saturating_sub(*written)).unwrap_or(usize::MAX);
        *written = written.saturating_add(bytes.len() as u64);
        let kind = if number == 0 { Kind::Stdout } else { Kind::Stderr };
        if let Some(part) = bytes.get(..left.min(bytes.len())).filter(|part| !part.is_empty()) {
            self.stream.put(kind, part);
        }
    }

    /// The interpreter has said something about a value or an error.
    pub fn say(&mut self, kind: u8, json: &[u8]) {
        let kind = match kind {
            b'p' => Kind::Piece,
            b'd' => Kind::Display,
            b'r' => Kind::Result,
            _ => Kind::Error,
        };
        self.said = self.said.saturating_add(json.len());
        if self.said > MAX_SAID {
            self.stray();
        } else {
            debug_assert!(json.len() <= MAX_RECORD);
            self.stream.put(kind, json);
        }
    }

    /// A packet that means nothing.
    pub fn stray(&mut self) {
        self.stray = self.stray.saturating_add(1);
    }

    /// It is over: what is left is its stream.
    pub fn end(mut self, end: CellEnd, state_lost: bool) -> Stream {
        let succeeded = matches!(&end, CellEnd::Finished(verdict) if !says_error(verdict));
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
        self.stream.put_with(|records| put_message(Kind::Ended, &ended, records));
        self.stream.end(Exit::Code(u8::from(!succeeded)));
        self.stream
    }
}

/// How many bytes a request keeps while it waits.
pub fn weight(cell: &Cell) -> usize {
    let env: usize = cell.env.iter().map(String::len).sum();
    let made: usize = cell.make.iter().flat_map(|make| &make.env).map(Vec::len).sum();
    cell.code.len().saturating_add(env).saturating_add(made)
}

/// The interpreter's words about how a cell ended, as text of bounded length.
pub fn verdict(json: &[u8]) -> CellEnd {
    let json = json.get(..json.len().min(MAX_VERDICT)).unwrap_or_default();
    CellEnd::Finished(String::from_utf8_lossy(json).into_owned())
}

/// Whether the verdict is an error. It is only searched: what it says is for the host to read.
fn says_error(verdict: &str) -> bool {
    let dense: String = verdict.chars().filter(|character| !character.is_ascii_whitespace()).collect();
    dense.contains("\"status\":\"error\"")
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
