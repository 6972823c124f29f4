//! Code that runs in the interpreters of a sandbox, and what comes back of it.
//!
//! Everything here comes from the guest and is hostile: JSON is parsed with limits, nothing is kept beyond what the
//! caller allows, and no text is shown by this module.

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

pub use collect::{Collected, Output};
pub use run::{CellOptions, run_cell, run_contexts};

/// How long a cell may run if the caller does not say.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);
/// How long after an interrupt an interpreter is killed.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(3);
/// How many bytes of each output are passed on if the caller does not say.
pub const DEFAULT_OUTPUT: u64 = 8 << 20;
/// The longest name of a context.
pub const MAX_CONTEXT_NAME: usize = 64;

/// Code did not run, or what came back cannot be used.
#[derive(Debug, Error)]
pub enum InterpreterError {
    /// A language that nobody speaks.
    #[error("There is no language {0:?}. Use python, javascript, typescript or bash")]
    Language(String),
    /// A name that no context has.
    #[error(
        "{0:?} is not the name of a context. Use 1 to {MAX_CONTEXT_NAME} letters, digits, '.', '_' or '-'"
    )]
    ContextName(String),
    #[error("The code has {0} bytes; the most is {MAX_CODE}. Write it to a file in the sandbox and run that")]
    TooMuchCode(usize),
    /// A variable that cannot be one.
    #[error("{0:?} is not the name of an environment variable, or its value has a NUL character")]
    Variable(String),
    /// The agent refuses. Guest-controlled text: escape before showing.
    #[error("{0}")]
    Refused(String),
    /// The sandbox is gone. Guest-controlled text in `console`: escape before showing.
    #[error("The sandbox ended while the code ran: {}", .cause)]
    SandboxEnded {
        cause: Cause,
        /// The guest kernel's last lines.
        console: String,
    },
    /// The guest breaks the rules of the records.
    #[error("The sandbox sent something that is no answer")]
    Record(#[from] CellError),
    /// The guest's JSON is none.
    #[error("The sandbox sent something that is no answer: {0}")]
    Json(&'static str, #[source] serde_json::Error),
    /// The guest sends too much.
    #[error("The sandbox sent a value of more than {0} bytes, or many that add up to more than twice that")]
    TooMuch(usize),
    /// The stream ended before its last record.
    #[error("The sandbox ended the cell without saying how")]
    Unfinished,
    #[error(transparent)]
    Connection(#[from] ConnectionError),
}

/// One piece of code to run.
#[derive(Clone, Debug)]
pub struct CellRequest {
    pub language: Language,
    /// A context that was made before; the language's default one, made when needed, if absent.
    pub context: Option<String>,
    pub code: String,
    /// Variables of this cell only.
    pub env: BTreeMap<String, String>,
    /// Working directory of this cell only.
    pub cwd: Option<String>,
    /// How long it may run; without limit if absent.
    pub timeout: Option<Duration>,
    /// How long after an interrupt its interpreter is killed.
    pub grace: Duration,
    /// How many bytes of each output are passed on; the rest is counted.
    pub max_output: u64,
}

impl CellRequest {
    /// Code with the usual limits.
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
        }
    }

    pub fn context_name(&self) -> &str {
        self.context.as_deref().unwrap_or_else(|| self.language.default_context())
    }

    /// What the agent is asked. `make` is what the default context is made with if it is not there.
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

    /// Refuses what the agent would.
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

/// Refuses what no context can be called.
pub fn check_context_name(name: &str) -> Result<(), InterpreterError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if (1..=MAX_CONTEXT_NAME).contains(&name.len()) && name.chars().all(fits) {
        Ok(())
    } else {
        Err(InterpreterError::ContextName(name.to_owned()))
    }
}

/// The language of this name, or of a name that people use for it.
pub fn language(name: &str) -> Result<Language, InterpreterError> {
    match name.to_ascii_lowercase().as_str() {
        "python" | "python3" | "py" => Ok(Language::Python),
        "javascript" | "js" | "node" | "nodejs" => Ok(Language::JavaScript),
        "typescript" | "ts" => Ok(Language::TypeScript),
        "bash" | "sh" | "shell" => Ok(Language::Bash),
        _ => Err(InterpreterError::Language(name.to_owned())),
    }
}

/// A value in one or more forms, as Jupyter has them. Guest-controlled: escape before showing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Bundle {
    /// Forms by their MIME type: text as text, images other than SVG in base64, `application/json` as it is.
    pub data: BTreeMap<String, Value>,
    /// What the value says about its forms.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub metadata: Map<String, Value>,
    /// What was too large, or cut.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub omitted: Vec<Omitted>,
}

impl Bundle {
    /// One of its forms as text.
    pub fn text(&self, mime: &str) -> Option<&str> {
        self.data.get(mime).and_then(Value::as_str)
    }
}

/// A form that is not there, or not whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Omitted {
    #[serde(default)]
    pub mime: String,
    /// How large it is.
    #[serde(default)]
    pub bytes: u64,
    #[serde(default)]
    pub reason: String,
}

/// An error that the code did not catch. Guest-controlled: escape before showing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodeError {
    pub name: String,
    pub value: String,
    /// Where it came from, line by line.
    #[serde(default)]
    pub traceback: Vec<String>,
}

/// Something that a cell does while it runs.
#[derive(Clone, Debug, PartialEq)]
pub enum CellEvent {
    /// Its code is about to run.
    Started(CellStarted),
    Stdout(Vec<u8>),
    Stderr(Vec<u8>),
    /// What something left over from earlier cells has written since.
    Background(Vec<u8>),
    /// A value was displayed.
    Display(Bundle),
    /// The value of the last expression.
    Result(Bundle),
    /// An error ended it.
    Error(CodeError),
}

/// How a cell ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CellOutcome {
    pub started: CellStarted,
    pub ended: CellEnded,
    /// Whether the interpreter says that all went well.
    pub ok: bool,
    /// Which cell of its context it was, by the interpreter's count.
    pub count: Option<u64>,
}

impl CellOutcome {
    /// What happened, if it is more than an ordinary end or an error of the code: a sentence for the caller.
    pub fn trouble(&self) -> Option<String> {
        let lost = "All variables and other state of this context are gone; files are kept. The next call starts a fresh interpreter.";
        let after = |what: &str| Some(format!("{what} {lost}"));
        let ran = Duration::from_millis(self.ended.ran_ms);
        match (&self.ended.end, self.ended.interrupted) {
            (CellEnd::Finished(_), None) => None,
            (CellEnd::Finished(_), Some(Interrupter::Timeout)) => Some(format!(
                "The code was interrupted after {ran:.1?}, its time limit. The state of the context is kept."
            )),
            (CellEnd::Finished(_), Some(Interrupter::Asked)) => {
                Some("The code was interrupted. The state of the context is kept.".to_owned())
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
