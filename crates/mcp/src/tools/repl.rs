//! Persistent Python REPLs.

use std::time::Duration;

use bathy_client::interpreter::{CellOptions, CellRequest, Collected, Language};
use bathy_manager::store::StoreError;
use bathy_manager::{Manager, ManagerError, NewRepl, Repl};
use bathy_runtime::images::Pull;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::json;

use super::arguments::{Code, MAX_TIMEOUT, ReplId};
use super::code::code_timeout;
use super::sandbox::Shape;
use super::{ADDS, READS, RUNS, SETTLES, Spec, code};
use crate::answer::Answer;
use crate::call::{Call, LABEL};
use crate::error::ToolError;
use crate::outputs::ONE;
use crate::{host, shown, text};

/// The default tools.
pub fn tools() -> Vec<Spec> {
    vec![create_python_repl(), run_python_in_repl()]
}

/// The tools of the set `repls`.
pub fn more_tools() -> Vec<Spec> {
    vec![repl_list(), repl_delete()]
}

fn create_python_repl() -> Spec {
    Spec::new(
        "create_python_repl",
        "Create a Python REPL",
        ADDS,
        "Use this, and not run_code, only when Python variables have to last longer than an hour. Makes a Python REPL with a \
         sandbox of its own and returns its repl_id for run_python_in_repl. It lives until sandbox_delete removes it: after a \
         minute without use it is paused, and the next call goes on where the last one ended. Its variables are lost if the \
         host restarts or the operator's time limit ends it; its files are kept. repl_id also serves as sandbox_id. Packages \
         and network are those of run_code.",
        create,
    )
}

fn create(call: &Call, given: Shape) -> Result<Answer, ToolError> {
    let (name, shape) = given.split()?;
    call.progress.step("making the REPL");
    let repl = call.manager(|manager| {
        let mut spec = manager.operator().defaults();
        shape(&mut spec);
        let (key, value) = LABEL;
        spec.labels.insert(key.to_owned(), value.to_owned());
        let mut progress = |step: &str| call.progress.step(step);
        let mut repl = manager.create_repl(NewRepl { name, spec, pull: Pull::default() }, &mut progress)?;
        repl.notes.extend(manager.take_warnings());
        Ok(repl)
    })?;
    call.state.host.made(&repl.sandbox);
    call.remember(&repl.sandbox);
    if call.cancel.is_cancelled() {
        call.discard(&repl.sandbox);
        return Err(ToolError::Cancelled);
    }
    let text = format!("repl_id: {}\nRun code in it with run_python_in_repl.", repl.name);
    let structured =
        json!({ "repl_id": repl.name, "sandbox_id": repl.sandbox.record.id, "notes": repl.notes });
    Ok(Answer::new(structured, text))
}

fn run_python_in_repl() -> Spec {
    Spec::new(
        "run_python_in_repl",
        "Run Python in a REPL",
        RUNS,
        "Use this with a repl_id of create_python_repl; use run_code with a sandbox_id. Runs Python code and returns what \
         run_code does. Variables, imports and files of earlier calls are there. One call runs at a time; others wait. If \
         earlier state is lost, the notes explain what and why.",
        run,
    )
}

#[derive(Deserialize, JsonSchema)]
struct Arguments {
    repl_id: ReplId,
    code: Code,
    /// Start the interpreter anew first: variables are lost
    #[serde(default)]
    restart: bool,
    /// Time limit
    #[serde(default = "code_timeout")]
    #[schemars(range(min = 1, max = MAX_TIMEOUT))]
    timeout_seconds: u64,
}

fn run(call: &Call, given: Arguments) -> Result<Answer, ToolError> {
    let repl = find(call, &given.repl_id)?;
    let mut request = CellRequest::new(Language::Python, given.code.0);
    request.restart = given.restart;
    request.timeout = Some(Duration::from_secs(given.timeout_seconds));
    request.max_output = u64::try_from(ONE).unwrap_or(u64::MAX);
    call.progress.step("running");
    let mut collected = Collected::default();
    let options = CellOptions { interrupt: Some(call.cancel.fd()) };
    let (done, mut notes) = call.manager(|manager| {
        let mut on_event = |event| code::take(call, &mut collected, event);
        let done = manager.run_in_repl(&repl, request, &options, &mut on_event)?;
        Ok((done, manager.take_warnings()))
    })?;
    let about = json!({ "repl_id": repl.name, "sandbox_id": repl.sandbox.record.id });
    let mut outcome = done.outcome;
    // The manager's sentence has more details.
    if done.lost.is_some() {
        outcome.started.lost = None;
    }
    notes.extend(done.lost.into_iter().map(|lost| text::clean(&lost)));
    shown::answer(call, "run_python_in_repl", (&collected, &outcome), shown::object(about), notes)
}

/// The REPL that the client names, if it may use it.
fn find(call: &Call, wanted: &str) -> Result<Repl, ToolError> {
    let unknown = || {
        let name = text::line(wanted, 80);
        ToolError::Failed(match call.sandbox(wanted) {
            Ok(_) => format!("{name:?} is a sandbox and no REPL. Use run_code with this sandbox_id."),
            Err(_) => {
                format!("There is no REPL {name:?}, or not any more. Make one with create_python_repl.")
            }
        })
    };
    let found = call.manager(|manager| match manager.find_repl(wanted) {
        Err(ManagerError::Store(StoreError::NoRepl { .. })) => Err(unknown()),
        other => Ok(other?),
    })?;
    if call.allowed(found.sandbox.clone()).is_none() {
        return Err(unknown());
    }
    if Manager::is_expired(&found) {
        call.manager(|manager| Ok(manager.remove_repl(&found)?))?;
        return Err(ToolError::Failed(format!(
            "The REPL {:?} reached the age that the operator allows (max_duration) and was removed. Make one with create_python_repl.",
            text::line(wanted, 80)
        )));
    }
    call.remember(&found.sandbox);
    Ok(found)
}

fn repl_list() -> Spec {
    Spec::new(
        "repl_list",
        "List REPLs",
        READS,
        "Lists the Python REPLs that agents have made: their ids, whether each is running, paused or stopped, and how many pieces \
         of code have run in it. Changes nothing, and resumes nothing.",
        list,
    )
}

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

fn list(call: &Call, _: Nothing) -> Result<Answer, ToolError> {
    let repls = call.manager(|manager| Ok(manager.list_repls()?))?;
    let repls: Vec<_> = repls
        .into_iter()
        .filter(|repl| call.allowed(repl.sandbox.clone()).is_some())
        .map(|repl| {
            json!({
                "repl_id": repl.name,
                "sandbox_id": repl.sandbox.record.id,
                "status": repl.status.as_str(),
                "cells": repl.cells,
            })
        })
        .collect();
    Ok(Answer::json(json!({ "repls": repls })))
}

fn repl_delete() -> Spec {
    Spec::new(
        "repl_delete",
        "Delete a REPL",
        SETTLES,
        "Deletes a Python REPL with its sandbox: its variables and files are removed at once and cannot be restored. Code \
         that runs in it is ended.",
        delete,
    )
}

#[derive(Deserialize, JsonSchema)]
struct Which {
    repl_id: ReplId,
}

fn delete(call: &Call, given: Which) -> Result<Answer, ToolError> {
    let repl = match find(call, &given.repl_id) {
        Err(_) if call.state.host.has_deleted(&given.repl_id) => {
            let id: &str = &given.repl_id;
            return Ok(Answer::new(json!({ "repl_id": id }), format!("The REPL {id} was deleted before.")));
        }
        found => found?,
    };
    call.state.host.pool.hang_up(&repl.sandbox);
    let warnings = call.manager(|manager| host::remove(manager, &repl.sandbox))?;
    call.state.host.deleted(&repl.sandbox);
    let text = host::with_warnings(format!("The REPL {} is deleted.", repl.name), &warnings);
    Ok(Answer::new(json!({ "repl_id": repl.name }), text))
}
