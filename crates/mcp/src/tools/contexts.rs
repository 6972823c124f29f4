//! Several interpreters in one sandbox.

use bathy_client::interpreter::{self, ContextInfo};
use bathy_protocol::cell::ContextsRequest;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{ADDS, READS, SETTLES, Spec, sandbox_id};
use crate::answer::{Answer, arguments};
use crate::call::Call;
use crate::error::ToolError;
use crate::schema::Field;
use crate::shown::object;
use crate::text;

/// The tools of the set `contexts`.
pub fn tools() -> Vec<Spec> {
    vec![context_create(), context_list(), context_restart(), context_delete()]
}

fn context_id() -> Field {
    Field::text("context_id", "The context: letters, digits, '.', '_' and '-'")
        .required()
        .not_empty()
        .at_most(64)
}

fn returns() -> Vec<Field> {
    vec![
        Field::objects(
            "contexts",
            "The contexts that there are now",
            vec![
                Field::text("context_id", "What run_code wants to know").required(),
                Field::text("language", "What it speaks").required(),
                Field::boolean("running", "Whether its interpreter runs").required(),
                Field::boolean("busy", "Whether it runs code right now").required(),
                Field::integer("waiting", "How many calls wait for it").required().at_least(0),
                Field::integer("cells", "How many pieces of code its interpreter has run")
                    .required()
                    .at_least(0),
            ],
        )
        .required(),
    ]
}

#[derive(Deserialize)]
struct Given {
    sandbox_id: String,
    #[serde(default)]
    context_id: String,
    language: Option<String>,
    cwd: Option<String>,
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

fn ask(call: &Call, given: Value, request: fn(String) -> ContextsRequest) -> Result<Answer, ToolError> {
    let given: Given = arguments(given)?;
    let sandbox = call.running_sandbox(&given.sandbox_id)?;
    let contexts = call.manager(|manager| Ok(manager.contexts(&sandbox, request(given.context_id))?))?;
    Ok(answer(&contexts))
}

fn context_create() -> Spec {
    Spec {
        name: "context_create",
        title: "Create a context",
        description: "Starts another interpreter in a sandbox, with variables of its own; pass its context_id to run_code. Contexts \
            of one sandbox share its files, memory and processes, and run code at the same time. It lives until it is \
            deleted or its sandbox ends.",
        hints: ADDS,
        takes: || {
            vec![
                sandbox_id().required(),
                context_id(),
                Field::choice("language", "What it speaks", &["python", "javascript", "typescript", "bash"])
                    .required(),
                Field::text("cwd", "Its working directory, in the sandbox").not_empty().at_most(4095),
            ]
        },
        returns,
        run: |call, given| {
            let given: Given = arguments(given)?;
            let sandbox = call.running_sandbox(&given.sandbox_id)?;
            let language = interpreter::language(given.language.as_deref().unwrap_or_default())
                .map_err(bathy_manager::ManagerError::from)?;
            let contexts = call.manager(|manager| {
                Ok(manager.make_context(&sandbox, &given.context_id, language, given.cwd)?)
            })?;
            Ok(answer(&contexts))
        },
    }
}

fn context_list() -> Spec {
    Spec {
        name: "context_list",
        title: "List contexts",
        description: "Lists the interpreters of a sandbox, the ones that run_code made by itself included: what each speaks, whether \
            it runs code, and how many calls wait for it. Changes nothing.",
        hints: READS,
        takes: || vec![sandbox_id().required()],
        returns,
        run: |call, given| ask(call, given, |_| ContextsRequest::List),
    }
}

fn context_restart() -> Spec {
    Spec {
        name: "context_restart",
        title: "Restart a context",
        description: "Ends an interpreter of a sandbox and starts it anew: its variables and imports are gone, files are kept. Code \
            that runs in it or waits for it is ended.",
        hints: SETTLES,
        takes: || vec![sandbox_id().required(), context_id()],
        returns,
        run: |call, given| ask(call, given, |context| ContextsRequest::Restart { context, restricted: None }),
    }
}

fn context_delete() -> Spec {
    Spec {
        name: "context_delete",
        title: "Delete a context",
        description: "Ends an interpreter of a sandbox and forgets it: its variables are gone, files are kept. Code that runs in it \
            or waits for it is ended.",
        hints: SETTLES,
        takes: || vec![sandbox_id().required(), context_id()],
        returns,
        run: |call, given| ask(call, given, |context| ContextsRequest::Remove { context }),
    }
}
