//! Several interpreters in one sandbox.

use bathy_client::interpreter::{ContextInfo, Language};
use bathy_protocol::cell::ContextsRequest;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::json;

use super::arguments::{ContextId, Cwd, SandboxId, languages};
use super::{ADDS, READS, SETTLES, Spec};
use crate::answer::Answer;
use crate::call::Call;
use crate::error::ToolError;
use crate::shown::object;
use crate::text;

/// The tools of the set `contexts`.
pub fn tools() -> Vec<Spec> {
    vec![context_create(), context_list(), context_restart(), context_delete()]
}

fn answer(contexts: &[ContextInfo]) -> Answer {
    let list: Vec<_> = contexts
        .iter()
        .map(|context| {
            object(json!({
                "context_id": text::line(&context.context, 80),
                "language": context.language.as_str(),
                "running": context.pid.is_some(),
                "busy": context.busy,
                "waiting": context.waiting,
                "cells": context.cells,
            }))
        })
        .collect();
    Answer::json(json!({ "contexts": list }))
}

fn context_create() -> Spec {
    Spec::new(
        "context_create",
        "Create a context",
        ADDS,
        "Starts another interpreter in a sandbox, with variables of its own; pass its context_id to run_code. Contexts of one \
         sandbox share its files, memory and processes, and run code at the same time. It lives until it is deleted or its \
         sandbox ends.",
        create,
    )
}

#[derive(Deserialize, JsonSchema)]
struct New {
    sandbox_id: SandboxId,
    context_id: ContextId,
    /// Its language
    #[schemars(schema_with = "languages")]
    language: Language,
    cwd: Option<Cwd>,
}

fn create(call: &Call, given: New) -> Result<Answer, ToolError> {
    let sandbox = call.running_sandbox(&given.sandbox_id)?;
    let cwd = given.cwd.map(|cwd| cwd.0);
    let contexts = call
        .manager(|manager| Ok(manager.make_context(&sandbox, &given.context_id.0, given.language, cwd)?))?;
    Ok(answer(&contexts))
}

fn context_list() -> Spec {
    Spec::new(
        "context_list",
        "List contexts",
        READS,
        "Lists the interpreters of a sandbox, the ones that run_code made by itself included: their languages, whether each \
         runs code, and how many calls wait for it. Changes nothing.",
        list,
    )
}

#[derive(Deserialize, JsonSchema)]
struct All {
    sandbox_id: SandboxId,
}

fn list(call: &Call, given: All) -> Result<Answer, ToolError> {
    ask(call, &given.sandbox_id, ContextsRequest::List)
}

fn context_restart() -> Spec {
    Spec::new(
        "context_restart",
        "Restart a context",
        SETTLES,
        "Ends an interpreter of a sandbox and starts it anew: its variables and imports are lost, files are kept. Code that \
         runs in it or waits for it is ended.",
        |call, given: One| {
            let context = given.context_id.0;
            ask(call, &given.sandbox_id, ContextsRequest::Restart { context, restricted: None })
        },
    )
}

fn context_delete() -> Spec {
    Spec::new(
        "context_delete",
        "Delete a context",
        SETTLES,
        "Ends an interpreter of a sandbox and forgets it: its variables are lost, files are kept. Code that runs in it or waits \
         for it is ended.",
        |call, given: One| {
            ask(call, &given.sandbox_id, ContextsRequest::Remove { context: given.context_id.0 })
        },
    )
}

#[derive(Deserialize, JsonSchema)]
struct One {
    sandbox_id: SandboxId,
    context_id: ContextId,
}

fn ask(call: &Call, sandbox: &str, request: ContextsRequest) -> Result<Answer, ToolError> {
    let sandbox = call.running_sandbox(sandbox)?;
    let contexts = call.manager(|manager| Ok(manager.contexts(&sandbox, request)?))?;
    Ok(answer(&contexts))
}
