//! Collects everything that one cell produced, for callers that return a single answer.

use serde::Serialize;

use super::{Bundle, CellEvent, CellOutcome, CodeError};

/// One output of a cell, up to the limit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CapturedOutput {
    bytes: Vec<u8>,
}

impl CapturedOutput {
    /// The output as text; invalid UTF-8 is replaced. Controlled by the guest: escape it before printing.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    /// How many bytes were collected.
    pub fn captured(&self) -> u64 {
        u64::try_from(self.bytes.len()).unwrap_or(u64::MAX)
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Shown {
    #[serde(flatten)]
    pub bundle: Bundle,
    /// Whether it is the value of the last expression.
    pub is_main_result: bool,
}

/// Everything that a cell produced.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Collected {
    pub stdout: CapturedOutput,
    pub stderr: CapturedOutput,
    /// Output of threads and processes that earlier cells left running.
    pub background: CapturedOutput,
    /// Displayed values in order.
    pub results: Vec<Shown>,
    /// The error that ended the cell.
    pub error: Option<CodeError>,
}

impl Collected {
    pub fn take(&mut self, event: CellEvent) {
        match event {
            CellEvent::Started(_) => {}
            CellEvent::Stdout(bytes) => self.stdout.bytes.extend(bytes),
            CellEvent::Stderr(bytes) => self.stderr.bytes.extend(bytes),
            CellEvent::Background(bytes) => self.background.bytes.extend(bytes),
            CellEvent::Display(bundle) => self.results.push(Shown { bundle, is_main_result: false }),
            CellEvent::Result(bundle) => self.results.push(Shown { bundle, is_main_result: true }),
            CellEvent::Error(error) => self.error = Some(error),
        }
    }

    /// Whether the code ran to its end without an error.
    pub fn ok(&self, outcome: &CellOutcome) -> bool {
        outcome.ok && self.error.is_none() && outcome.trouble().is_none()
    }
}
