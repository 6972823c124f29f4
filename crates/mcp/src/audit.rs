//! What an agent asked and got, for the audit log.

use bathy_audit::event::{argv, digest};
use bathy_audit::{Actor, Event, Log, What};
use rmcp::model::{CallToolResult, JsonObject};
use serde_json::Value;

use crate::host::PROGRAM;
use crate::text;

/// How much of a client's name is written down.
const CLIENT: usize = 80;

/// A call that has been answered.
pub struct Answered<'a> {
    /// The tool.
    pub tool: &'a str,
    /// Who says to be calling.
    pub client: Option<String>,
    /// The arguments, as they came.
    pub arguments: &'a JsonObject,
    /// `ok`, `error`, `refused` or `cancelled`.
    pub outcome: &'static str,
    /// The answer.
    pub answer: &'a CallToolResult,
    /// How long it took, in milliseconds.
    pub took_ms: u64,
    /// The sandbox that it was about: its id and name.
    pub about: Option<(String, Option<String>)>,
}

/// Writes a call down.
pub fn record(log: &Log, call: Answered<'_>) -> Result<(), bathy_audit::LogError> {
    let whole = serde_json::to_vec(call.arguments).unwrap_or_default();
    let shown = argv(&[Value::Object(redacted(call.arguments)).to_string()]);
    let answer = serde_json::to_vec(call.answer).unwrap_or_default();
    let length = |bytes: &[u8]| u64::try_from(bytes.len()).unwrap_or(u64::MAX);
    let what = What::ToolCalled {
        tool: call.tool.to_owned(),
        client: call.client.map(|client| text::line(&client, CLIENT)),
        arguments: shown.argv.into_iter().next().unwrap_or_default(),
        arguments_bytes: length(&whole),
        arguments_digest: digest(&whole),
        outcome: call.outcome.to_owned(),
        answer_bytes: length(&answer),
        answer_digest: digest(&answer),
        took_ms: call.took_ms,
    };
    let event = Event::now(Actor::this_process(PROGRAM), what);
    log.append(&[match call.about {
        Some((id, name)) => event.in_sandbox(id, name),
        None => event,
    }])
}

/// The arguments without what is content rather than intent, or may be secret: the values of variables, standard input,
/// and the contents of files. Their lengths stay, and the digest is of the whole.
fn redacted(arguments: &JsonObject) -> JsonObject {
    let mut shown = arguments.clone();
    for (name, value) in &mut shown {
        match name.as_str() {
            "env" => {
                for variable in value.as_object_mut().into_iter().flat_map(|env| env.values_mut()) {
                    hide(variable);
                }
            }
            "stdin" | "content" | "old_text" | "new_text" => hide(value),
            _ => {}
        }
    }
    shown
}

fn hide(value: &mut Value) {
    let length = value.as_str().map_or_else(|| value.to_string().len(), str::len);
    *value = format!("[{length} bytes]").into();
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    #[test]
    fn values_that_may_be_secret_are_not_written_down() {
        let arguments = json!({
            "code": "print(1)",
            "env": {"TOKEN": "hunter2", "N": 5},
            "stdin": "hunter2",
            "content": "hunter2",
        });
        let arguments = arguments.as_object().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let log = Log::open(folder.path()).unwrap();
        let answer = CallToolResult::success(Vec::new());
        let call = Answered {
            tool: "run_code",
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
