//! Tool calls in the audit log.

use bathy_audit::event::{argv, digest};
use bathy_audit::{Actor, Event, Log, What};
use rmcp::model::JsonObject;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::host::PROGRAM;
use crate::{schema, text};

/// The longest name that a client chose, in characters.
pub const NAME: usize = 80;
/// Arguments that are content rather than intent, or may be secret.
const HIDDEN: [&str; 5] = ["env", "stdin", "content", "old_text", "new_text"];

/// Tools that end something. On a full disk that is how space is freed, so it is done whether or not it can be recorded.
const ENDS: [&str; 2] = ["sandbox_delete", "repl_delete"];

/// Whether a call with this outcome has ended something.
pub fn has_ended(tool: &str, outcome: &str) -> bool {
    outcome == "ok" && ENDS.contains(&tool)
}

/// A call that has been answered.
pub struct Answered<'a, A> {
    /// The tool, or the method of another request.
    pub tool: &'a str,
    /// The schema of its arguments. Others are not shown.
    pub takes: &'a JsonObject,
    /// Name and version that the client claims.
    pub client: Option<String>,
    /// The arguments, as they came.
    pub arguments: &'a JsonObject,
    /// `ok`, `error`, `refused` or `cancelled`.
    pub outcome: &'static str,
    pub answer: &'a A,
    pub took_ms: u64,
    /// The sandbox that it was about: its id and name.
    pub about: Option<(String, Option<String>)>,
}

pub fn record<A: Serialize>(log: &Log, call: Answered<'_, A>) -> Result<(), bathy_audit::LogError> {
    let whole = serde_json::to_vec(call.arguments).unwrap_or_default();
    let shown = argv(&[Value::Object(redacted(call.takes, call.arguments)).to_string()]);
    let answer = serde_json::to_vec(call.answer).unwrap_or_default();
    let length = |bytes: &[u8]| u64::try_from(bytes.len()).unwrap_or(u64::MAX);
    let what = What::ToolCalled {
        tool: call.tool.to_owned(),
        client: call.client.map(|client| text::line(&client, NAME)),
        arguments: shown.argv.into_iter().next().unwrap_or_default(),
        arguments_bytes: length(&whole),
        arguments_digest: digest(&whole),
        outcome: call.outcome.to_owned(),
        answer_bytes: length(&answer),
        answer_digest: digest(&answer),
        took_ms: call.took_ms,
    };
    let event = Event::now(Actor::this_process(PROGRAM), what);
    let event = match call.about {
        Some((id, name)) => event.in_sandbox(id, name),
        None => event,
    };
    if has_ended(call.tool, call.outcome) { log.append_last(&[event]) } else { log.append(&[event]) }
}

/// The arguments that are known to be harmless: those of the tool's schema, of the right type, without the values of
/// variables, standard input and the contents of files. Of all others the log has name and length only, because a secret
/// under a misspelt name is still one. The digest covers the whole.
fn redacted(takes: &JsonObject, arguments: &JsonObject) -> JsonObject {
    let known = takes.get("properties").and_then(Value::as_object);
    let shown = |name: &str, value: &Value| match known.and_then(|known| known.get(name)) {
        Some(_) if name == "env" => variables(value),
        Some(schema) if !HIDDEN.contains(&name) && fits(schema, value) => value.clone(),
        _ => hidden(value),
    };
    arguments.iter().map(|(name, value)| (text::line(name, NAME), shown(name, value))).collect()
}

/// The names of variables with the lengths of their values.
fn variables(value: &Value) -> Value {
    let Some(variables) = value.as_object() else { return hidden(value) };
    let shown = variables.iter().map(|(name, value)| match name.split_once('=') {
        // The client put NAME=value where the name belongs.
        Some((name, rest)) => (text::line(name, NAME), length(rest.len())),
        None => (text::line(name, NAME), hidden(value)),
    });
    Value::Object(shown.collect::<Map<_, _>>())
}

/// Whether a value is of the type that a schema wants, with all its parts.
fn fits(schema: &Value, value: &Value) -> bool {
    if schema.get("enum").is_some() {
        return schema::meant(schema, value).is_some();
    }
    match schema.get("type").and_then(Value::as_str) {
        Some("string") => value.is_string(),
        Some("integer") => value.is_number() || schema::meant(schema, value).is_some(),
        Some("boolean") => value.is_boolean(),
        Some("array") => value
            .as_array()
            .zip(schema.get("items"))
            .is_some_and(|(values, schema)| values.iter().all(|value| fits(schema, value))),
        Some("object") => value
            .as_object()
            .zip(schema.get("additionalProperties"))
            .is_some_and(|(values, schema)| values.values().all(|value| fits(schema, value))),
        _ => false,
    }
}

fn hidden(value: &Value) -> Value {
    length(value.as_str().map_or_else(|| value.to_string().len(), str::len))
}

fn length(bytes: usize) -> Value {
    format!("[{bytes} bytes]").into()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rmcp::model::CallToolResult;
    use serde_json::json;

    use super::*;
    use crate::tools::{self, Toolsets};

    fn takes(tool: &str) -> JsonObject {
        let everything = Toolsets { jobs: true, contexts: true, repls: true };
        tools::all(everything).iter().find(|spec| spec.name == tool).unwrap().input.as_ref().clone()
    }

    #[test]
    fn arguments_that_are_not_quite_right_are_not_shown() {
        for (tool, arguments) in [
            ("run_command", json!({"env": "KEY=hunter2"})),
            ("run_command", json!({"env": ["KEY=hunter2"]})),
            ("run_command", json!({"env": {"KEY=hunter2": ""}})),
            ("run_command", json!({"env": {"KEY": {"KEY": "hunter2"}}})),
            ("run_command", json!({"environment": {"KEY": "hunter2"}})),
            ("run_command", json!({"input": "hunter2"})),
            ("run_command", json!({"Stdin": "hunter2"})),
            ("run_command", json!({"stdin": ["hunter2"]})),
            ("run_command", json!({"argv": [{"KEY": "hunter2"}]})),
            ("run_command", json!({"command": {"env": "hunter2"}})),
            ("run_command", json!({"timeout_seconds": "hunter2"})),
            ("run_code", json!({"language": "hunter2"})),
            ("write_file", json!({"contents": "hunter2"})),
            ("edit_file", json!({"edits": [{"old_text": "hunter2"}]})),
            ("sandbox_create", json!({"labels": {"a": ["hunter2"]}})),
            ("sandbox_create", json!({"mounts": ["hunter2"]})),
        ] {
            let shown = redacted(&takes(tool), arguments.as_object().unwrap());
            let text = Value::Object(shown).to_string();
            assert!(!text.contains("hunter2") && text.contains(" bytes]"), "{tool} {arguments}: {text}");
            let name = arguments.as_object().unwrap().keys().next().unwrap();
            assert!(text.contains(name), "{tool} {arguments}: {text}");
        }
    }

    #[test]
    fn intent_is_shown() {
        for (tool, arguments) in [
            ("run_command", json!({"argv": ["ls", "-l"], "cwd": "/tmp", "timeout_seconds": 5})),
            ("run_code", json!({"language": "python", "code": "print(1)"})),
            ("run_code", json!({"language": "py", "code": "print(1)", "timeout_seconds": "5"})),
            ("sandbox_create", json!({"labels": {"a": "b"}, "allow": ["a.example"]})),
            ("read_output", json!({"output": "1f/stdout", "offset": 5})),
        ] {
            let shown = redacted(&takes(tool), arguments.as_object().unwrap());
            assert_eq!(Value::Object(shown), arguments, "{tool}");
        }
    }

    /// A new argument with content has to be added to `HIDDEN`, or it would be recorded.
    #[test]
    fn every_text_that_tools_take_is_known_to_be_shown_or_hidden() {
        let shown = [
            "allow",
            "argv",
            "code",
            "command",
            "context_id",
            "cwd",
            "deny",
            "encoding",
            "image",
            "labels",
            "language",
            "name",
            "network",
            "output",
            "path",
            "repl_id",
            "sandbox_id",
            "signal",
        ];
        for spec in tools::all(Toolsets { jobs: true, contexts: true, repls: true }) {
            for (name, schema) in spec.input["properties"].as_object().unwrap() {
                let harmless = ["integer", "boolean"].contains(&schema["type"].as_str().unwrap());
                let decided = shown.contains(&name.as_str()) || HIDDEN.contains(&name.as_str());
                assert!(harmless || decided, "{} {name}", spec.name);
            }
        }
    }

    #[test]
    fn values_that_may_be_secret_are_not_written_down() {
        let arguments = json!({
            "code": "print(1)",
            "env": {"TOKEN": "hunter2", "N": 5},
            "stdin": "hunter2",
            "content": "hunter2",
        });
        let takes = takes("run_code");
        let arguments = arguments.as_object().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let log = Log::open(folder.path()).unwrap();
        let answer = CallToolResult::success(Vec::new());
        let call = Answered {
            tool: "run_code",
            takes: &takes,
            client: Some("evil\n\u{1b}[2Jclient".into()),
            arguments,
            outcome: "ok",
            answer: &answer,
            took_ms: 3,
            about: Some(("abc".into(), None)),
        };
        record(&log, call).unwrap();
        let file = fs::read_dir(folder.path()).unwrap().flatten().map(|entry| entry.path());
        let text: String = file.filter_map(|path| fs::read_to_string(path).ok()).collect();
        assert!(!text.contains("hunter2"), "{text}");
        assert!(text.contains("[7 bytes]") && text.contains("print(1)") && text.contains("TOKEN"), "{text}");
        assert!(
            text.contains("\"client\":\"evil client\"") && text.contains("\"sandbox\":\"abc\""),
            "{text}"
        );
        assert!(text.contains(&digest(&serde_json::to_vec(arguments).unwrap())), "{text}");
    }
}
