//! `run_code`: code in an interpreter that keeps its state.

use std::collections::BTreeMap;
use std::time::Duration;

use bathy_client::interpreter::{
    self, CellEvent, CellOptions, CellRequest, Collected, InterpreterError, MAX_CODE,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{RUNS, Spec, env, sandbox_id, timeout};
use crate::answer::{Answer, arguments};
use crate::call::Call;
use crate::error::ToolError;
use crate::outputs::ONE;
use crate::schema::Field;
use crate::shown;

/// How long code runs if the caller does not say, in seconds.
pub const TIMEOUT: u64 = 300;

/// The tool.
pub fn run_code() -> Spec {
    Spec {
        name: "run_code",
        title: "Run code",
        description: "Runs Python, JavaScript, TypeScript or Bash code in a sandbox and returns its output, the value \
            of its last expression, displayed values, pictures (matplotlib figures as PNG) and errors. State is kept: \
            variables, imports and files of earlier calls with the same sandbox_id and language are there. Without \
            sandbox_id a new sandbox is made and its sandbox_id returned; it lives one hour by default and is removed \
            after 15 minutes without use. Code may change anything in its sandbox and nothing outside. The default \
            image has Python 3.13 with numpy, pandas, scipy, sympy, matplotlib and requests, Node.js 20, git, and starts in \
            /home/user (in /tmp, the only place to write to, where the operator restricts it). It reaches the public internet only, unless the operator or sandbox_create allow less; what is \
            denied is refused at once. Python understands top-level await, `!command`, %cd and %%bash; input() is refused. Code \
            that reaches its time limit is interrupted and keeps its state; if it does not react it is killed and the \
            state is lost. Long output is cut in the middle and linked as a resource.",
        hints: RUNS,
        takes: || {
            vec![
                Field::choice(
                    "language",
                    "The language of the code. TypeScript shares its variables with JavaScript",
                    &["python", "javascript", "typescript", "bash"],
                )
                .required(),
                Field::text("code", "The code")
                    .required()
                    .at_most(u64::try_from(MAX_CODE).unwrap_or(u64::MAX)),
                sandbox_id(),
                Field::text("context_id", "A context with state of its own, made by the toolset `contexts`; the language's own if left out")
                    .not_empty()
                    .at_most(64),
                timeout(TIMEOUT, "the code"),
                env(),
                Field::text("cwd", "Working directory of this call only, in the sandbox")
                    .not_empty()
                    .at_most(4095),
            ]
        },
        returns: || {
            let mut fields = vec![
                Field::text("sandbox_id", "The sandbox: pass it to later calls").required(),
                Field::text("context_id", "The context that the code ran in").required(),
                Field::choice("language", "The language", &["python", "javascript", "typescript", "bash"])
                    .required(),
            ];
            fields.extend(shown::fields());
            fields
        },
        run,
    }
}

#[derive(Deserialize)]
struct Arguments {
    language: String,
    code: String,
    sandbox_id: Option<String>,
    context_id: Option<String>,
    timeout_seconds: Option<u64>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    cwd: Option<String>,
}

fn run(call: &Call, given: Value) -> Result<Answer, ToolError> {
    let given: Arguments = arguments(given)?;
    let language = interpreter::language(&given.language).map_err(refused)?;
    let mut request = CellRequest::new(language, given.code);
    request.context = given.context_id;
    request.timeout = Some(Duration::from_secs(given.timeout_seconds.unwrap_or(TIMEOUT)));
    request.env = given.env;
    request.cwd = given.cwd;
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
            // Its id is told to nobody.
            if is_new {
                call.discard(&sandbox);
            }
            return Err(error.into());
        }
    };
    // Nobody hears of the answer to a cancelled call.
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
        "language": language.as_str(),
    });
    shown::answer(call, "run_code", &collected, &outcome, shown::object(about), notes)
}

/// Takes what a cell does into account.
pub fn take(call: &Call, collected: &mut Collected, event: CellEvent) {
    if let CellEvent::Stdout(bytes) | CellEvent::Stderr(bytes) = &event {
        call.progress.output(bytes);
    }
    collected.take(event);
}

fn refused(error: InterpreterError) -> ToolError {
    ToolError::from(bathy_manager::ManagerError::from(error))
}
