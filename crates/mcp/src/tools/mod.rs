//! The tools, one file per group.

pub mod code;
pub mod command;
pub mod contexts;
pub mod files;
pub mod jobs;
pub mod network;
pub mod repl;
pub mod sandbox;

use std::str::FromStr;
use std::sync::Arc;

use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use serde_json::Value;
use thiserror::Error;

use crate::answer::Answer;
use crate::call::Call;
use crate::error::ToolError;
use crate::schema::{self, Field};

/// What a client may expect of a tool.
#[derive(Clone, Copy, Debug)]
pub struct Hints {
    /// It changes nothing.
    pub read_only: bool,
    /// It may change or remove what is there.
    pub destructive: bool,
    /// Doing it twice is doing it once.
    pub idempotent: bool,
    /// What runs may reach the network, so that not everything about it is in the sandbox.
    pub open_world: bool,
}

/// A tool that changes nothing.
const READS: Hints = Hints { read_only: true, destructive: false, idempotent: true, open_world: false };
/// A tool that adds something.
const ADDS: Hints = Hints { read_only: false, destructive: false, idempotent: false, open_world: false };
/// A tool that may change anything in a sandbox.
const CHANGES: Hints = Hints { read_only: false, destructive: true, idempotent: false, open_world: false };
/// A tool that runs what may do anything in a sandbox, and reach the network.
const RUNS: Hints = Hints { open_world: true, ..CHANGES };
/// A tool that brings something to a state, however often it is called.
const SETTLES: Hints = Hints { read_only: false, destructive: true, idempotent: true, open_world: false };

/// A tool.
pub struct Spec {
    /// What it is called.
    pub name: &'static str,
    /// The same for people.
    pub title: &'static str,
    /// What it does, its side effects and limits, and how long what it makes lives.
    pub description: &'static str,
    /// What a client may expect.
    pub hints: Hints,
    /// What it takes.
    pub takes: fn() -> Vec<Field>,
    /// What it returns.
    pub returns: fn() -> Vec<Field>,
    /// Does it. It may block.
    pub run: fn(&Call, Value) -> Result<Answer, ToolError>,
}

impl Spec {
    /// The schema of its arguments.
    pub fn input(&self) -> JsonObject {
        schema::object((self.takes)(), true)
    }

    /// As clients see it.
    pub fn tool(&self) -> Tool {
        let hints = ToolAnnotations::with_title(self.title)
            .read_only(self.hints.read_only)
            .destructive(self.hints.destructive)
            .idempotent(self.hints.idempotent)
            .open_world(self.hints.open_world);
        Tool::new(self.name, self.description, self.input())
            .with_title(self.title)
            .with_raw_output_schema(Arc::new(schema::object((self.returns)(), false)))
            .with_annotations(hints)
    }
}

/// Not a set of tools.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "There is no tool set {0:?}. The sets are jobs, contexts, repls and all; the default tools are always there"
)]
pub struct ToolsetError(String);

/// Sets of tools beyond the default ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Toolsets {
    /// Commands that outlive their call.
    pub jobs: bool,
    /// Several interpreters in one sandbox.
    pub contexts: bool,
    /// Lists of REPLs, and their removal.
    pub repls: bool,
}

impl FromStr for Toolsets {
    type Err = ToolsetError;

    /// Names with commas between them.
    fn from_str(text: &str) -> Result<Self, ToolsetError> {
        let mut sets = Self::default();
        for name in text.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            match name {
                "jobs" => sets.jobs = true,
                "contexts" => sets.contexts = true,
                "repls" => sets.repls = true,
                "all" => sets = Self { jobs: true, contexts: true, repls: true },
                "default" => {}
                _ => return Err(ToolsetError(name.to_owned())),
            }
        }
        Ok(sets)
    }
}

/// The default tools, and those of `sets`.
pub fn all(sets: Toolsets) -> Vec<Spec> {
    let mut tools = vec![code::run_code(), command::run_command()];
    tools.extend(repl::tools());
    tools.extend(sandbox::tools());
    tools.extend(files::tools());
    if sets.jobs {
        tools.extend(jobs::tools());
    }
    if sets.contexts {
        tools.extend(contexts::tools());
    }
    if sets.repls {
        tools.extend(repl::more_tools());
    }
    tools
}

/// The argument that names a sandbox.
fn sandbox_id() -> Field {
    Field::text("sandbox_id", "The sandbox: the sandbox_id of an earlier answer").not_empty().at_most(128)
}

/// The argument with variables.
fn env() -> Field {
    Field::map("env", "Environment variables of this call only, by name")
}

/// The argument with a time limit.
fn timeout(default: u64, what: &str) -> Field {
    Field::integer("timeout_seconds", &format!("How long {what} may run, in seconds"))
        .between(1, MAX_TIMEOUT)
        .default(default)
}

/// The longest time limit of one call, in seconds.
const MAX_TIMEOUT: u64 = 3600;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const EVERYTHING: Toolsets = Toolsets { jobs: true, contexts: true, repls: true };

    /// Every schema in `value`: itself and those of its parts.
    fn visit(place: &str, value: &Value, see: &mut impl FnMut(&str, &Value)) {
        see(place, value);
        for (name, part) in value["properties"].as_object().into_iter().flatten() {
            visit(&format!("{place}.{name}"), part, see);
        }
        for part in ["items", "additionalProperties"] {
            if value[part].is_object() {
                visit(&format!("{place}.{part}"), &value[part], see);
            }
        }
    }

    #[test]
    fn the_default_tools_are_the_ones_that_models_know() {
        let names: Vec<_> = all(Toolsets::default()).iter().map(|spec| spec.name).collect();
        assert_eq!(
            names,
            [
                "run_code",
                "run_command",
                "create_python_repl",
                "run_python_in_repl",
                "sandbox_create",
                "sandbox_list",
                "sandbox_info",
                "sandbox_delete",
                "read_file",
                "write_file",
                "edit_file",
                "list_directory"
            ]
        );
    }

    #[test]
    fn every_schema_has_one_type_and_no_null() {
        for spec in all(EVERYTHING) {
            let tool = serde_json::to_value(spec.tool()).unwrap();
            for side in ["inputSchema", "outputSchema"] {
                assert_eq!(tool[side]["type"], "object", "{} {side}", spec.name);
                visit(spec.name, &tool[side], &mut |place, schema| {
                    let kind =
                        schema["type"].as_str().unwrap_or_else(|| panic!("{place} has no single type"));
                    assert!(["string", "integer", "boolean", "array", "object"].contains(&kind), "{place}");
                    assert!(kind != "array" || schema["items"].is_object(), "{place} has no items");
                    for word in schema["required"].as_array().into_iter().flatten() {
                        assert!(schema["properties"].get(word.as_str().unwrap()).is_some(), "{place} {word}");
                    }
                    let known = [
                        "type",
                        "description",
                        "enum",
                        "minimum",
                        "maximum",
                        "minLength",
                        "maxLength",
                        "minItems",
                        "items",
                        "properties",
                        "required",
                        "additionalProperties",
                        "default",
                    ];
                    for key in schema.as_object().unwrap().keys() {
                        assert!(known.contains(&key.as_str()), "{place} has {key}");
                    }
                });
            }
            assert_eq!(tool["inputSchema"]["additionalProperties"], false, "{}", spec.name);
        }
    }

    #[test]
    fn every_tool_says_what_it_is() {
        for spec in all(EVERYTHING) {
            let tool = serde_json::to_value(spec.tool()).unwrap();
            assert!(tool["title"].as_str().is_some_and(|title| title.len() > 3), "{}", spec.name);
            assert!(tool["description"].as_str().is_some_and(|text| text.len() > 60), "{}", spec.name);
            for hint in ["readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint"] {
                assert!(tool["annotations"][hint].is_boolean(), "{} {hint}", spec.name);
            }
            for (name, property) in tool["inputSchema"]["properties"].as_object().unwrap() {
                let described = property["description"].as_str().is_some_and(|text| text.len() > 5);
                assert!(described, "{} {name}", spec.name);
            }
        }
    }

    #[test]
    fn names_are_used_once() {
        let mut names: Vec<_> = all(EVERYTHING).iter().map(|spec| spec.name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn toolsets_are_read_from_their_names() {
        assert_eq!("all".parse(), Ok(EVERYTHING));
        assert_eq!("jobs, repls".parse(), Ok(Toolsets { contexts: false, ..EVERYTHING }));
        assert_eq!("".parse(), Ok(Toolsets::default()));
        let error = "jobs,snapshots".parse::<Toolsets>().unwrap_err().to_string();
        assert!(
            error.contains("\"snapshots\"") && error.contains("jobs, contexts, repls and all"),
            "{error}"
        );
    }

    #[test]
    fn arguments_of_the_wrong_kind_are_explained() {
        let spec = code::run_code();
        let given = json!({"lang": "python", "source": "1"});
        let text = schema::check(spec.name, &spec.input(), given.as_object().unwrap().clone()).unwrap_err();
        assert!(text.contains("did you mean `language`?") && text.contains("`code` is missing"), "{text}");
    }
}
