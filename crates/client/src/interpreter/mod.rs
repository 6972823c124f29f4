//! Runs code in the interpreters of a sandbox and parses the results.
//!
//! All of this comes from the guest and is hostile: JSON is parsed with limits, no more is stored than the
//! caller allows, and this module prints nothing.

mod collect;
mod run;
mod values;

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use thiserror::Error;

use bathy_protocol::cell::{Cell, CellEnded, CellError, Surroundings};
pub use bathy_protocol::cell::{CellEnd, CellStarted, ContextInfo, Interrupter, Language, MAX_CODE};
use bathy_protocol::{Cause, Exit, Restriction};

use crate::connection::ConnectionError;

pub use collect::{CapturedOutput, Collected};
pub use run::{CellOptions, PreparedCell, run_cell, run_contexts};

/// The default time limit of a cell.
pub(crate) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);
/// The default time between an interrupt and killing the interpreter.
pub(crate) const DEFAULT_GRACE: Duration = Duration::from_secs(3);
/// The default limit of each output in bytes.
pub(crate) const DEFAULT_OUTPUT: u64 = 8 << 20;
/// The longest name of a context.
pub(crate) const MAX_CONTEXT_NAME: usize = 64;

/// A cell did not run, or its result is invalid.
#[derive(Debug, Error)]
pub enum InterpreterError {
    /// The language is unknown.
    #[error("There is no language {0:?}. Use python, javascript, typescript or bash")]
    Language(String),
    /// The name is not valid for a context.
    #[error(
        "{0:?} is not the name of a context. Use 1 to {MAX_CONTEXT_NAME} letters, digits, '.', '_' or '-'"
    )]
    ContextName(String),
    #[error("The code has {0} bytes; the most is {MAX_CODE}. Write it to a file in the sandbox and run that")]
    TooMuchCode(usize),
    /// The environment variable is invalid.
    #[error("{0:?} is not the name of an environment variable, or its value has a NUL character")]
    Variable(String),
    /// The agent refused the cell. Controlled by the guest: escape it before printing.
    #[error("{0}")]
    Refused(String),
    /// The sandbox ended. `console` is controlled by the guest: escape it before printing.
    #[error("The sandbox ended while the code ran: {}", .cause)]
    SandboxEnded {
        cause: Cause,
        /// The last lines of the guest kernel's console.
        console: String,
    },
    /// The guest sent an invalid record.
    #[error("The sandbox sent an invalid answer")]
    Record(#[from] CellError),
    /// The guest sent invalid JSON.
    #[error("The sandbox sent an invalid answer: {0}")]
    Json(&'static str, #[source] serde_json::Error),
    /// The guest sent too much.
    #[error("The sandbox sent a value of more than {0} bytes, or many that add up to more than twice that")]
    TooMuch(usize),
    /// The stream ended before its last record.
    #[error("The sandbox ended the cell without reporting its outcome")]
    Unfinished,
    #[error(transparent)]
    Connection(#[from] ConnectionError),
}

/// A cell to run.
#[derive(Clone, Debug)]
pub struct CellRequest {
    pub language: Language,
    /// An existing context; by default the language's default context, which is created on demand.
    pub context: Option<String>,
    pub code: String,
    /// Environment variables of this cell only.
    pub env: BTreeMap<String, String>,
    /// The working directory of this cell only.
    pub cwd: Option<String>,
    /// The time limit, if any.
    pub timeout: Option<Duration>,
    /// The time between an interrupt and killing the interpreter.
    pub grace: Duration,
    /// The limit of each output in bytes; the rest is only counted.
    pub max_output: u64,
    /// Whether the context's interpreter is started anew first, so that its state is lost.
    pub restart: bool,
}

impl CellRequest {
    /// A cell with the default limits.
    pub fn new(language: Language, code: impl Into<String>) -> Self {
        Self {
            language,
            context: None,
            code: code.into(),
            env: BTreeMap::new(),
            cwd: None,
            timeout: Some(DEFAULT_TIMEOUT),
            grace: DEFAULT_GRACE,
            max_output: DEFAULT_OUTPUT,
            restart: false,
        }
    }

    pub fn context_name(&self) -> &str {
        self.context.as_deref().unwrap_or_else(|| self.language.default_context())
    }

    /// The agent's request. `make` describes how to create the default context if necessary.
    pub fn cell(&self, make: Option<Surroundings>, restricted: Option<Restriction>) -> Cell {
        let milliseconds = |time: Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        Cell {
            context: self.context_name().to_owned(),
            language: self.language,
            make,
            restricted,
            code: self.code.clone(),
            env: self.env.iter().map(|(name, value)| format!("{name}={value}")).collect(),
            cwd: self.cwd.clone(),
            timeout_ms: self.timeout.map_or(0, |timeout| milliseconds(timeout).max(1)),
            grace_ms: milliseconds(self.grace),
            max_output: self.max_output,
        }
    }

    /// Checks what the agent would refuse.
    pub fn check(&self) -> Result<(), InterpreterError> {
        check_context_name(self.context_name())?;
        if self.code.len() > MAX_CODE {
            return Err(InterpreterError::TooMuchCode(self.code.len()));
        }
        let impossible = |(name, value): &(&String, &String)| {
            name.is_empty() || name.contains(['=', '\0']) || value.contains('\0')
        };
        match self.env.iter().find(impossible) {
            Some((name, _)) => Err(InterpreterError::Variable(name.clone())),
            None => Ok(()),
        }
    }
}

/// Checks that a name is valid for a context.
pub fn check_context_name(name: &str) -> Result<(), InterpreterError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if (1..=MAX_CONTEXT_NAME).contains(&name.len()) && name.chars().all(fits) {
        Ok(())
    } else {
        Err(InterpreterError::ContextName(name.to_owned()))
    }
}

/// The language with this name or common alias.
pub fn language(name: &str) -> Result<Language, InterpreterError> {
    match name.to_ascii_lowercase().as_str() {
        "python" | "python3" | "py" => Ok(Language::Python),
        "javascript" | "js" | "node" | "nodejs" => Ok(Language::JavaScript),
        "typescript" | "ts" => Ok(Language::TypeScript),
        "bash" | "sh" | "shell" => Ok(Language::Bash),
        _ => Err(InterpreterError::Language(name.to_owned())),
    }
}

/// A value in one or more representations, as in Jupyter. Controlled by the guest: escape it before printing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Bundle {
    /// Representations by MIME type: text as text, images other than SVG in base64, `application/json` as
    /// JSON.
    pub data: BTreeMap<String, Value>,
    /// The value's metadata about its representations.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub metadata: Map<String, Value>,
    /// Representations that were left out or cut.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub omitted: Vec<Omitted>,
}

impl Bundle {
    /// The representation of this type, if it is text.
    pub fn text(&self, mime: &str) -> Option<&str> {
        self.data.get(mime).and_then(Value::as_str)
    }
}

/// A representation that was left out or cut.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Omitted {
    #[serde(default)]
    pub mime: String,
    /// Its full size in bytes.
    #[serde(default)]
    pub bytes: u64,
    #[serde(default)]
    pub reason: String,
}

/// An uncaught error. Controlled by the guest: escape it before printing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodeError {
    pub name: String,
    pub value: String,
    /// The traceback, line by line.
    #[serde(default)]
    pub traceback: Vec<String>,
}

/// An event of a running cell.
#[derive(Clone, Debug, PartialEq)]
pub enum CellEvent {
    /// The code is about to run.
    Started(CellStarted),
    Stdout(Vec<u8>),
    Stderr(Vec<u8>),
    /// Output of threads and processes that earlier cells left running.
    Background(Vec<u8>),
    /// A value was displayed.
    Display(Bundle),
    /// The value of the last expression.
    Result(Bundle),
    /// The error that ended the cell.
    Error(CodeError),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CellOutcome {
    pub started: CellStarted,
    pub ended: CellEnded,
    /// Whether the interpreter reports success.
    pub ok: bool,
    /// The number of the cell in its context, as the interpreter counts.
    pub count: Option<u64>,
    /// What is wrong with the interpreter itself, by its own account, after code that failed. Guest-controlled.
    pub damage: Option<String>,
}

impl CellOutcome {
    /// A sentence for the user on what happened, unless the cell ended normally or with an error of the code.
    pub fn trouble(&self) -> Option<String> {
        let lost = "All variables and other state of this context are lost; files are preserved. The next call starts a fresh interpreter.";
        let after = |what: &str| Some(format!("{what} {lost}"));
        let ran = Duration::from_millis(self.ended.ran_ms);
        match (&self.ended.end, self.ended.interrupted) {
            (CellEnd::Finished(_), None) => self.damage.as_ref().map(|damage| {
                format!(
                    "The code has damaged its interpreter: {damage}. Run the next code with restart (`bathy code --restart`) to start the interpreter anew: variables are then gone, files are kept."
                )
            }),
            (CellEnd::Finished(_), Some(Interrupter::Timeout)) => Some(format!(
                "The code was interrupted after {ran:.1?}, its time limit. The state of the context is preserved."
            )),
            (CellEnd::Finished(_), Some(Interrupter::Asked)) => {
                Some("The code was interrupted. The state of the context is preserved.".to_owned())
            }
            (CellEnd::OutOfMemory, _) => {
                after("The interpreter was ended because the sandbox ran out of memory.")
            }
            (CellEnd::Exited(Exit::Code(code)), _) => {
                after(&format!("The code ended the interpreter itself, with exit code {code}."))
            }
            (CellEnd::Exited(Exit::Signal(signal)), _) => {
                after(&format!("The interpreter was ended by signal {signal}{}.", signal_name(*signal)))
            }
            (CellEnd::Killed, Some(Interrupter::Timeout)) => after(&format!(
                "The code reached its time limit, did not react to an interrupt, and was killed after {ran:.1?}."
            )),
            (CellEnd::Killed, _) => after("The code did not react to an interrupt and was killed."),
            (CellEnd::ChannelClosed, _) => {
                after("The code closed the descriptor that its interpreter answers on.")
            }
            (CellEnd::NotStarted(reason), _) => Some(format!("The interpreter did not start: {reason}")),
            (CellEnd::Cancelled, _) => Some("The cell was cancelled before it ran.".to_owned()),
        }
    }
}

fn signal_name(signal: u8) -> &'static str {
    match i32::from(signal) {
        libc::SIGSEGV => " (SIGSEGV: it crashed, often from too deep a recursion)",
        libc::SIGABRT => " (SIGABRT)",
        libc::SIGKILL => " (SIGKILL)",
        libc::SIGTERM => " (SIGTERM)",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_people_use_for_languages_are_known() {
        assert_eq!(language("Python3").unwrap(), Language::Python);
        assert_eq!(language("ts").unwrap(), Language::TypeScript);
        assert!(language("cobol").unwrap_err().to_string().contains("Use python"));
    }

    #[test]
    fn what_the_agent_would_refuse_is_refused_here() {
        let mut request = CellRequest::new(Language::Bash, "x".repeat(MAX_CODE + 1));
        assert!(matches!(request.check(), Err(InterpreterError::TooMuchCode(_))));
        request.code.pop();
        assert!(request.check().is_ok());
        request.env.insert("A=B".into(), String::new());
        assert!(matches!(request.check(), Err(InterpreterError::Variable(_))));
        request.env.clear();
        for name in ["", "a b", "../x", &"x".repeat(65)] {
            request.context = Some(name.to_owned());
            assert!(matches!(request.check(), Err(InterpreterError::ContextName(_))), "{name:?}");
        }
    }
}
