//! Everything that one cell brought, for callers that answer once.

use serde::Serialize;

use super::{Bundle, CellEvent, CellOutcome, CodeError};

/// One output of a cell, as far as it was kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Output {
    bytes: Vec<u8>,
}

impl Output {
    /// As text: what is no UTF-8 is replaced. Guest-controlled: escape before showing on a terminal.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    /// How many bytes were kept.
    pub fn kept(&self) -> u64 {
        u64::try_from(self.bytes.len()).unwrap_or(u64::MAX)
    }

    /// Whether nothing was kept.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

/// A value, and whether it is the cell's own.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Shown {
    #[serde(flatten)]
    pub bundle: Bundle,
    /// Whether it is the value of the last expression, and not one that was displayed.
    pub is_main_result: bool,
}

/// What a cell brought.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Collected {
    pub stdout: Output,
    pub stderr: Output,
    /// What earlier cells' leftovers wrote.
    pub background: Output,
    /// Values, in their order.
    pub results: Vec<Shown>,
    /// The error that ended it.
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
