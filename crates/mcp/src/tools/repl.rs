//! Persistent Python REPLs.

use std::time::Duration;

use bathy_client::interpreter::{CellOptions, CellRequest, Collected, Language, MAX_CODE};
use bathy_manager::store::StoreError;
use bathy_manager::{Manager, ManagerError, NewRepl, Repl};
use bathy_spec::Size;
use serde::Deserialize;
use serde_json::{Value, json};

use super::network::{self, Network};
use super::{ADDS, READS, RUNS, SETTLES, Spec, code, timeout};
use crate::answer::{Answer, arguments};
use crate::call::{Call, LABEL};
use crate::error::ToolError;
use crate::outputs::ONE;
use crate::schema::Field;
use crate::tools::sandbox::{MAX_MIB, MIB};
use crate::{host, shown};

/// The default tools.
pub fn tools() -> Vec<Spec> {
    vec![create_python_repl(), run_python_in_repl()]
}

/// The tools of the set `repls`.
pub fn more_tools() -> Vec<Spec> {
    vec![repl_list(), repl_delete()]
}

fn repl_id() -> Field {
    Field::text("repl_id", "The REPL: the repl_id of create_python_repl").required().not_empty().at_most(128)
}

fn create_python_repl() -> Spec {
    Spec {
        name: "create_python_repl",
        title: "Create a Python REPL",
        description: "Makes a Python REPL with a sandbox of its own and returns its repl_id for run_python_in_repl. It lives \
            until it is deleted with sandbox_delete: after a minute without use it is paused and uses no \
            processor time, and the next call goes on where the last one ended. Its variables are lost if the host \
            restarts or the operator's time limit ends it (the answer then says so); its files are kept. repl_id \
            also serves as sandbox_id for the file tools and run_command. The same packages as in run_code, and the \
            same network unless `network`, `allow` or `deny` narrow it.",
        hints: ADDS,
        takes: || {
            let mut fields = vec![
                Field::text(
                    "name",
                    "A name for it, to be used as repl_id; letters, digits, '_', '.' and '-'",
                )
                .not_empty()
                .at_most(63),
                Field::integer("memory_mb", "Memory in MiB").between(64, MAX_MIB),
                Field::integer("disk_mb", "Disk in MiB").between(16, MAX_MIB),
            ];
            fields.extend(network::fields());
            fields
        },
        returns: || {
            vec![
                Field::text("repl_id", "What run_python_in_repl wants to know").required(),
                Field::text("sandbox_id", "Its sandbox, for run_command and the file tools").required(),
                Field::texts("notes", "What the operator made stricter, and what else there is to know")
                    .required(),
            ]
        },
        run: create,
    }
}

#[derive(Deserialize)]
struct New {
    name: Option<String>,
    memory_mb: Option<u64>,
    disk_mb: Option<u64>,
    #[serde(flatten)]
    network: Network,
}

fn create(call: &Call, given: Value) -> Result<Answer, ToolError> {
    let given: New = arguments(given)?;
    let network = given.network.policy()?;
    call.progress.step("making the REPL");
    let repl = call.manager(|manager| {
        let mut spec = manager.operator().defaults();
        if let Some(memory) = given.memory_mb {
            spec.memory = Size(memory * MIB);
        }
        if let Some(disk) = given.disk_mb {
            spec.disk = Size(disk * MIB);
        }
        if let Some(network) = network {
            spec.network = network;
        }
        let (key, value) = LABEL;
        spec.labels.insert(key.to_owned(), value.to_owned());
        let mut progress = |step: &str| call.progress.step(step);
        let mut repl = manager.create_repl(NewRepl { name: given.name, spec }, &mut progress)?;
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
    Spec {
        name: "run_python_in_repl",
        title: "Run Python in a REPL",
        description: "Runs Python code in a REPL made by create_python_repl and returns its output, the value of its last \
            expression, displayed values, pictures and errors. Variables, imports and files of earlier calls are there. \
            One call runs at a time; others wait. A paused REPL is resumed by itself. If earlier state is lost, the \
            notes say what and why. Code that reaches its time limit is interrupted and keeps its state.",
        hints: RUNS,
        takes: || {
            vec![
                repl_id(),
                Field::text("code", "Python code")
                    .required()
                    .at_most(u64::try_from(MAX_CODE).unwrap_or(u64::MAX)),
                timeout(code::TIMEOUT, "the code"),
            ]
        },
        returns: || {
            let mut fields = vec![
                Field::text("repl_id", "The REPL").required(),
                Field::text("sandbox_id", "Its sandbox").required(),
            ];
            fields.extend(shown::fields());
            fields
        },
        run,
    }
}

#[derive(Deserialize)]
struct Code {
    repl_id: String,
    code: String,
    timeout_seconds: Option<u64>,
}

fn run(call: &Call, given: Value) -> Result<Answer, ToolError> {
    let given: Code = arguments(given)?;
    let repl = find(call, &given.repl_id)?;
    let mut request = CellRequest::new(Language::Python, given.code);
    request.timeout = Some(Duration::from_secs(given.timeout_seconds.unwrap_or(code::TIMEOUT)));
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
    // The REPL's own sentence tells more.
    if done.lost.is_some() {
        outcome.started.lost = None;
    }
    notes.extend(done.lost.into_iter().map(|lost| crate::text::clean(&lost)));
    shown::answer(call, "run_python_in_repl", &collected, &outcome, shown::object(about), notes)
}

/// The REPL that the caller means, if it may use it.
fn find(call: &Call, wanted: &str) -> Result<Repl, ToolError> {
    let unknown = || {
        ToolError::Failed(format!(
            "There is no REPL {:?}, or not any more. Make one with create_python_repl.",
            crate::text::line(wanted, 80)
        ))
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
            crate::text::line(wanted, 80)
        )));
    }
    call.remember(&found.sandbox);
    Ok(found)
}

fn repl_list() -> Spec {
    Spec {
        name: "repl_list",
        title: "List REPLs",
        description: "Lists the Python REPLs that agents have made: their ids, whether each is running, paused or stopped, and \
            how many pieces of code have run in it. Changes nothing, and resumes nothing.",
        hints: READS,
        takes: Vec::new,
        returns: || {
            vec![
                Field::objects(
                    "repls",
                    "The REPLs, the oldest first",
                    vec![
                        Field::text("repl_id", "What run_python_in_repl wants to know").required(),
                        Field::text("sandbox_id", "Its sandbox").required(),
                        Field::choice("status", "What it is right now", &["running", "paused", "stopped"])
                            .required(),
                        Field::integer("cells", "How many pieces of code have run in it")
                            .required()
                            .at_least(0),
                    ],
                )
                .required(),
            ]
        },
        run: |call, _| {
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
        },
    }
}

fn repl_delete() -> Spec {
    Spec {
        name: "repl_delete",
        title: "Delete a REPL",
        description: "Deletes a Python REPL with its sandbox: its variables and its files are gone at once and cannot be \
            brought back. Code that runs in it is ended.",
        hints: SETTLES,
        takes: || vec![repl_id()],
        returns: || vec![Field::text("repl_id", "The REPL that is gone").required()],
        run: |call, given| {
            #[derive(Deserialize)]
            struct Which {
                repl_id: String,
            }
            let given: Which = arguments(given)?;
            let repl = find(call, &given.repl_id)?;
            call.state.host.pool.hang_up(&repl.sandbox);
            let warnings = call.manager(|manager| host::remove(manager, &repl.sandbox))?;
            let told = host::told(format!("The REPL {} is deleted.", repl.name), &warnings);
            Ok(Answer::new(json!({ "repl_id": repl.name }), told))
        },
    }
}
