//! The tools, one file per group.
//!
//! The arguments of a tool are declared once, as the type that its function takes. Their doc comments are the descriptions
//! that clients see.

mod arguments;
pub mod code;
pub mod command;
pub mod contexts;
pub mod files;
pub mod jobs;
pub mod network;
pub mod output;
pub mod repl;
pub mod sandbox;

use std::str::FromStr;
use std::sync::Arc;

use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::Value;
use thiserror::Error;

#[cfg(test)]
pub use self::arguments::languages;
use crate::answer::{self, Answer};
use crate::call::Call;
use crate::error::ToolError;
use crate::schema;

/// The annotations of a tool.
#[derive(Clone, Copy, Debug)]
pub struct Hints {
    /// Whether it changes nothing.
    pub read_only: bool,
    /// Whether it may change or remove something that exists.
    pub destructive: bool,
    /// Whether a second call has no further effect.
    pub idempotent: bool,
    /// Whether what it runs may reach the network.
    pub open_world: bool,
}

/// A tool that changes nothing.
const READS: Hints = Hints { read_only: true, destructive: false, idempotent: true, open_world: false };
/// A tool that adds something.
const ADDS: Hints = Hints { read_only: false, destructive: false, idempotent: false, open_world: false };
/// A tool that may change anything in a sandbox.
const CHANGES: Hints = Hints { read_only: false, destructive: true, idempotent: false, open_world: false };
/// A tool that runs code, which may do anything in a sandbox and reach the network.
const RUNS: Hints = Hints { open_world: true, ..CHANGES };
/// A tool that is destructive and idempotent.
const SETTLES: Hints = Hints { read_only: false, destructive: true, idempotent: true, open_world: false };

/// Runs a tool on arguments that its schema allows. It may block.
pub type Run = Arc<dyn Fn(&Call, Value) -> Result<Answer, ToolError> + Send + Sync>;

pub struct Spec {
    /// Its name in the protocol.
    pub name: &'static str,
    /// Its name for people.
    title: &'static str,
    hints: Hints,
    /// What it does, its side effects and limits, and how long what it makes lives.
    description: &'static str,
    /// The schema of its arguments.
    pub input: Arc<JsonObject>,
    pub run: Run,
}

impl Spec {
    /// A tool whose arguments are what `run` takes.
    fn new<A: DeserializeOwned + JsonSchema + 'static>(
        name: &'static str,
        title: &'static str,
        hints: Hints,
        description: &'static str,
        run: fn(&Call, A) -> Result<Answer, ToolError>,
    ) -> Self {
        let input = Arc::new(schema::of::<A>());
        let run: Run = Arc::new(move |call: &Call, given| run(call, answer::arguments(given)?));
        Self { name, title, hints, description, input, run }
    }

    /// The same tool without one of its optional arguments.
    fn without(mut self, argument: &str) -> Self {
        let properties = Arc::make_mut(&mut self.input).get_mut("properties");
        properties.and_then(Value::as_object_mut).map(|properties| properties.remove(argument));
        self
    }

    /// As clients see it. Structured answers have no schema: half of the list would be about what comes back anyway.
    pub fn tool(&self) -> Tool {
        let hints = ToolAnnotations::new()
            .read_only(self.hints.read_only)
            .destructive(self.hints.destructive)
            .idempotent(self.hints.idempotent)
            .open_world(self.hints.open_world);
        Tool::new(self.name, self.description, Arc::clone(&self.input))
            .with_title(self.title)
            .with_annotations(hints)
    }
}

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
    let run_code = code::run_code();
    let run_code = if sets.contexts { run_code } else { run_code.without("context_id") };
    let mut tools = vec![run_code, command::run_command()];
    tools.extend(repl::tools());
    tools.extend(sandbox::tools());
    tools.extend(files::tools());
    tools.push(output::read_output());
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
                "list_directory",
                "read_output"
            ]
        );
    }

    #[test]
    fn every_schema_has_one_type_and_no_null() {
        for spec in all(EVERYTHING) {
            let tool = serde_json::to_value(spec.tool()).unwrap();
            assert_eq!(tool["inputSchema"]["type"], "object", "{}", spec.name);
            visit(spec.name, &tool["inputSchema"], &mut |place, schema| {
                let kind = schema["type"].as_str().unwrap_or_else(|| panic!("{place} has no single type"));
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
            assert_eq!(tool["inputSchema"]["additionalProperties"], false, "{}", spec.name);
        }
    }

    /// A model reads the list before it reads its task. Four characters of JSON are about one token.
    #[test]
    fn the_list_of_tools_is_short() {
        let length = |sets| {
            let tools: Vec<_> = all(sets).iter().map(Spec::tool).collect();
            serde_json::to_string(&tools).unwrap().chars().count()
        };
        let (usual, everything) = (length(Toolsets::default()), length(EVERYTHING));
        assert!(usual <= 4 * 3_500, "the default tools take {usual} characters");
        assert!(everything <= 4 * 5_500, "all tools take {everything} characters");
    }

    #[test]
    fn only_what_a_tool_cannot_do_without_is_required() {
        let required: Vec<_> = all(Toolsets::default())
            .iter()
            .map(|spec| {
                let words = spec.input.get("required").and_then(Value::as_array).cloned().unwrap_or_default();
                words.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" ")
            })
            .collect();
        let expected = [
            "code",
            "",
            "",
            "repl_id code",
            "",
            "",
            "sandbox_id",
            "sandbox_id",
            "sandbox_id path",
            "sandbox_id path content",
            "sandbox_id path old_text new_text",
            "sandbox_id path",
            "output",
        ];
        assert_eq!(required, expected);
    }

    #[test]
    fn an_argument_of_a_set_that_is_off_is_not_offered() {
        let has_context = |sets| all(sets)[0].input["properties"].get("context_id").is_some();
        assert!(!has_context(Toolsets::default()));
        assert!(has_context(Toolsets { contexts: true, ..Toolsets::default() }));
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
    fn tools_with_the_same_purpose_say_when_each_is_used() {
        for spec in all(Toolsets::default()) {
            let alike = ["run_code", "create_python_repl", "run_python_in_repl"].contains(&spec.name);
            assert!(!alike || spec.description.starts_with("Use this"), "{}", spec.name);
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
        let text = schema::check(spec.name, &spec.input, given.as_object().unwrap().clone()).unwrap_err();
        assert!(text.contains("did you mean `language`?") && text.contains("`code` is missing"), "{text}");
    }
}
