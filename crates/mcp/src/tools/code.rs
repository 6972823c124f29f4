//! `run_code`: code in an interpreter that keeps its state.

use std::time::Duration;

use bathy_client::interpreter::{CellEvent, CellOptions, CellRequest, Collected, InterpreterError, Language};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::json;

use super::arguments::{Code, ContextId, Cwd, Env, MAX_TIMEOUT, SandboxId, languages};
use super::{RUNS, Spec};
use crate::answer::Answer;
use crate::call::Call;
use crate::error::ToolError;
use crate::outputs::ONE;
use crate::shown;

pub fn run_code() -> Spec {
    Spec::new(
        "run_code",
        "Run code",
        RUNS,
        "Use this to run code. Runs Python, JavaScript, TypeScript or Bash in a sandbox and returns output, the value of the \
         last expression, displayed values, pictures (matplotlib figures as PNG) and errors. Calls with the same sandbox_id \
         share variables, imports and files. Without sandbox_id a new sandbox is made and its id returned; it is removed \
         after an hour, or 15 minutes without use. Code may change anything in its sandbox and nothing outside. The default \
         image has Python 3.13 with numpy, pandas, scipy, sympy, matplotlib and requests, Node.js 20 and git; code starts in \
         /home/user (in /tmp, the only place to write to, where the operator restricts it). It reaches the public internet at \
         most. Python takes top-level await, `!command`, %pip, %cd and %%bash; input() is refused. At its time limit code is \
         interrupted and keeps its state; if it does not react it is killed and the state is lost.",
        run,
    )
}

fn python() -> Language {
    Language::Python
}

/// How long code may run, in seconds.
pub fn code_timeout() -> u64 {
    300
}

#[derive(Deserialize, JsonSchema)]
struct Arguments {
    /// TypeScript shares its variables with JavaScript
    #[serde(default = "python")]
    #[schemars(schema_with = "languages")]
    language: Language,
    code: Code,
    sandbox_id: Option<SandboxId>,
    /// From context_create; the language's own context if absent
    context_id: Option<ContextId>,
    /// Start the interpreter anew first, such as when it is stuck or broken: variables are lost, files stay
    #[serde(default)]
    restart: bool,
    /// Time limit
    #[serde(default = "code_timeout")]
    #[schemars(range(min = 1, max = MAX_TIMEOUT))]
    timeout_seconds: u64,
    #[serde(default)]
    env: Env,
    cwd: Option<Cwd>,
}

fn run(call: &Call, given: Arguments) -> Result<Answer, ToolError> {
    let mut request = CellRequest::new(given.language, given.code.0);
    request.context = given.context_id.map(|context| context.0);
    request.restart = given.restart;
    request.timeout = Some(Duration::from_secs(given.timeout_seconds));
    request.env = given.env.0;
    request.cwd = given.cwd.map(|cwd| cwd.0);
    request.max_output = u64::try_from(ONE).unwrap_or(u64::MAX);
    // What cannot run anyway needs no sandbox.
    request.check().map_err(refused)?;
    let (sandbox, is_new, mut notes) = call.sandbox_or_new(given.sandbox_id.as_deref())?;
    call.progress.step("running");
    let mut collected = Collected::default();
    let options = CellOptions { interrupt: Some(call.cancel.fd()) };
    let mut on_event = |event: CellEvent| take(call, &mut collected, event);
    let outcome = match call.state.host.pool.run_code(&sandbox, &request, &options, &mut on_event) {
        Ok(outcome) => outcome,
        Err(error) => {
            // The client never learns its id.
            if is_new {
                call.discard(&sandbox);
            }
            return Err(error.into());
        }
    };
    // The answer to a cancelled call is dropped, and the id with it.
    if is_new && call.cancel.is_cancelled() {
        call.discard(&sandbox);
        return Err(ToolError::Cancelled);
    }
    if is_new {
        notes.push(format!(
            "A new sandbox was made. Pass sandbox_id {:?} to later calls to go on in it.",
            sandbox.record.id
        ));
    }
    let about = json!({
        "sandbox_id": sandbox.record.id,
        "context_id": request.context_name(),
        "language": request.language.as_str(),
    });
    shown::answer(call, "run_code", (&collected, &outcome), shown::object(about), notes)
}

/// Reports the output of a cell as progress, and collects it.
pub fn take(call: &Call, collected: &mut Collected, event: CellEvent) {
    if let CellEvent::Stdout(bytes) | CellEvent::Stderr(bytes) = &event {
        call.progress.output(bytes);
    }
    collected.take(event);
}

fn refused(error: InterpreterError) -> ToolError {
    ToolError::from(bathy_manager::ManagerError::from(error))
}
