//! The tools that request input: by a request to clients of 2025-11-25, by a result that requires input to clients of
//! 2026-07-28.

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, ElicitRequestParams, InputRequest, InputRequiredResult,
    InputResponses,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer};
use serde_json::{Value, json};

use crate::content::{complete, from_json, text};
use crate::handler::Shared;

/// The tool that most scenarios of this kind use.
pub const ELICITATION: &str = "test_input_required_result_elicitation";

/// The error for a client that disconnected, or does not support the request.
pub fn unreachable_client(error: rmcp::ServiceError) -> ErrorData {
    ErrorData::internal_error(format!("The client did not answer: {error}"), None)
}

/// The content of the client's answer, unless the user declined.
pub fn answer<'a>(given: Option<&'a InputResponses>, key: &str) -> Option<&'a Value> {
    given?
        .get(key)
        .filter(|answer| answer.is_object() && answer.get("action").is_none_or(|action| action == "accept"))
}

/// Asks for the context of the prompt.
pub fn for_context() -> Result<InputRequiredResult, ErrorData> {
    ask(&[("user_context", form("What context should the prompt use?", "context", "string"))], None)
}

/// Calls a tool that asks.
pub async fn call(
    shared: &Shared,
    request: &CallToolRequestParams,
    context: &RequestContext<RoleServer>,
) -> Result<CallToolResponse, ErrorData> {
    let asked = match request.name.as_ref() {
        "test_sampling" => return sample(request, context).await,
        "test_elicitation" => {
            let schema = json!({
                "type": "object",
                "properties": {
                    "username": {"type": "string", "description": "User's response"},
                    "email": {"type": "string", "description": "User's email address"},
                },
                "required": ["username", "email"],
            });
            return elicit(context, string_argument(request, "message")?, schema, "User response:").await;
        }
        "test_elicitation_sep1034_defaults" => {
            return elicit(context, "Please look at the defaults", defaults(), "Elicitation completed:")
                .await;
        }
        "test_elicitation_sep1330_enums" => {
            return elicit(context, "Please choose", choices(), "Elicitation completed:").await;
        }
        "test_input_required_result_capabilities" => return ask_what_can_be_answered(context),
        _ => Rounds { shared, request }.next()?,
    };
    Ok(asked)
}

fn string_argument<'a>(request: &'a CallToolRequestParams, name: &str) -> Result<&'a str, ErrorData> {
    let value = request.arguments.as_ref().and_then(|all| all.get(name)).and_then(Value::as_str);
    value.ok_or_else(|| ErrorData::invalid_params(format!("the tool needs the argument {name}"), None))
}

fn said(words: &str) -> Result<CallToolResponse, ErrorData> {
    complete(json!({"content": [text(words)]})).map(CallToolResponse::Complete)
}

async fn sample(
    request: &CallToolRequestParams,
    context: &RequestContext<RoleServer>,
) -> Result<CallToolResponse, ErrorData> {
    let message = json!({"role": "user", "content": text(string_argument(request, "prompt")?)});
    let asked = from_json(json!({"messages": [message], "maxTokens": 100}))?;
    let answer = context.peer.create_message(asked).await.map_err(unreachable_client)?;
    let answer = serde_json::to_value(answer).unwrap_or_default();
    said(&format!("LLM response: {}", answer["content"]["text"].as_str().unwrap_or_default()))
}

async fn elicit(
    context: &RequestContext<RoleServer>,
    message: &str,
    schema: Value,
    prefix: &str,
) -> Result<CallToolResponse, ErrorData> {
    let asked: ElicitRequestParams =
        from_json(json!({"mode": "form", "message": message, "requestedSchema": schema}))?;
    let answer = context.peer.create_elicitation(asked).await.map_err(unreachable_client)?;
    let answer = serde_json::to_value(answer).unwrap_or_default();
    said(&format!(
        "{prefix} action={}, content={}",
        answer["action"].as_str().unwrap_or_default(),
        answer["content"]
    ))
}

fn defaults() -> Value {
    json!({"type": "object", "properties": {
        "name": {"type": "string", "default": "John Doe"},
        "age": {"type": "integer", "default": 30},
        "score": {"type": "number", "default": 95.5},
        "status": {"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
        "verified": {"type": "boolean", "default": true},
    }})
}

fn choices() -> Value {
    let titled = |noun: &str| -> Vec<Value> {
        let ordinal = ["First", "Second", "Third"].iter().zip(1..);
        ordinal.map(|(word, number)| json!({"const": format!("value{number}"), "title": format!("{word} {noun}")})).collect()
    };
    let plain = ["option1", "option2", "option3"];
    json!({"type": "object", "properties": {
        "untitledSingle": {"type": "string", "enum": plain},
        "titledSingle": {"type": "string", "oneOf": titled("Option")},
        "legacyEnum": {
            "type": "string", "enum": ["opt1", "opt2", "opt3"],
            "enumNames": ["Option One", "Option Two", "Option Three"],
        },
        "untitledMulti": {"type": "array", "items": {"type": "string", "enum": plain}},
        "titledMulti": {"type": "array", "items": {"anyOf": titled("Choice")}},
    }})
}

fn form(message: &str, field: &str, kind: &str) -> Value {
    let schema = json!({"type": "object", "properties": {field: {"type": kind}}, "required": [field]});
    json!({"method": "elicitation/create", "params": {"mode": "form", "message": message, "requestedSchema": schema}})
}

fn model(prompt: &str, most: u32) -> Value {
    let message = json!({"role": "user", "content": text(prompt)});
    json!({"method": "sampling/createMessage", "params": {"messages": [message], "maxTokens": most}})
}

fn roots() -> Value {
    json!({"method": "roots/list", "params": {}})
}

fn ask(questions: &[(&str, Value)], state: Option<String>) -> Result<InputRequiredResult, ErrorData> {
    let requests = questions
        .iter()
        .map(|(key, question)| Ok((key.to_string(), from_json::<InputRequest>(question.clone())?)));
    Ok(InputRequiredResult::new(Some(requests.collect::<Result<_, ErrorData>>()?), state))
}

fn ask_what_can_be_answered(context: &RequestContext<RoleServer>) -> Result<CallToolResponse, ErrorData> {
    let can = context.client_capabilities().unwrap_or_default();
    let mut questions = Vec::new();
    if can.sampling.is_some() {
        questions.push(("model", model("Say something", 50)));
    }
    if can.elicitation.is_some() {
        questions.push(("user", form("What is your name?", "name", "string")));
    }
    if can.roots.is_some() {
        questions.push(("roots", roots()));
    }
    if questions.is_empty() {
        return said("The client can answer nothing.");
    }
    ask(&questions, None).map(CallToolResponse::InputRequired)
}

/// One call of a tool that takes several rounds. What it has to remember travels with the client, sealed.
struct Rounds<'a> {
    shared: &'a Shared,
    request: &'a CallToolRequestParams,
}

impl Rounds<'_> {
    fn next(&self) -> Result<CallToolResponse, ErrorData> {
        let name = form("What is your name?", "name", "string");
        match self.request.name.as_ref() {
            ELICITATION | "test_streaming_elicitation" => match self.answer("user_name") {
                Some(answer) if answer["content"]["name"].is_string() => {
                    said(&format!("Hello, {}!", answer["content"]["name"].as_str().unwrap_or_default()))
                }
                _ => self.ask(&[("user_name", name)], None),
            },
            "test_input_required_result_sampling" => match self.answer("capital_question") {
                Some(answer) => said(&format!("The model says: {}", answer["content"]["text"])),
                None => self.ask(&[("capital_question", model("What is the capital of France?", 100))], None),
            },
            "test_input_required_result_list_roots" => match self.answer("client_roots") {
                Some(answer) => said(&format!("The roots are {}", answer["roots"])),
                None => self.ask(&[("client_roots", roots())], None),
            },
            "test_input_required_result_request_state" | "test_input_required_result_tampered_state" => {
                let state = self.opened()?;
                match (state.as_deref(), self.answer("confirm")) {
                    (Some("asked"), Some(_)) => said("It is confirmed: state-ok"),
                    _ => self.ask(&[("confirm", form("Please confirm", "ok", "boolean"))], Some("asked")),
                }
            }
            "test_input_required_result_multiple_inputs" => {
                let keys = ["user_name", "greeting", "client_roots"];
                if self.opened()?.is_some() && keys.iter().all(|key| self.answer(key).is_some()) {
                    return said("All three were answered.");
                }
                let questions = [name, model("Generate a greeting", 50), roots()];
                let questions: Vec<_> = keys.into_iter().zip(questions).collect();
                self.ask(&questions, Some("asked"))
            }
            "test_input_required_result_multi_round" => {
                match (self.opened()?.as_deref(), self.answer("step1"), self.answer("step2")) {
                    (Some("second"), _, Some(_)) => said("Both questions were answered."),
                    (Some("first"), Some(_), _) => self.ask(
                        &[("step2", form("Step 2: What is your favorite color?", "color", "string"))],
                        Some("second"),
                    ),
                    _ => self.ask(
                        &[("step1", form("Step 1: What is your name?", "name", "string"))],
                        Some("first"),
                    ),
                }
            }
            other => Err(ErrorData::invalid_params(format!("no tool {other:?}"), None)),
        }
    }

    fn answer(&self, key: &str) -> Option<&Value> {
        answer(self.request.input_responses.as_ref(), key)
    }

    fn ask(&self, questions: &[(&str, Value)], state: Option<&str>) -> Result<CallToolResponse, ErrorData> {
        ask(questions, state.map(|state| self.sealed(state))).map(CallToolResponse::InputRequired)
    }

    fn sealed(&self, state: &str) -> String {
        let bound = format!("{}\n{state}", self.request.name);
        format!("{state}.{}", blake3::keyed_hash(&self.shared.key, bound.as_bytes()))
    }

    /// The state of the previous round, if there was one and its seal is valid.
    fn opened(&self) -> Result<Option<String>, ErrorData> {
        let Some(given) = &self.request.request_state else { return Ok(None) };
        let state = given.split_once('.').map_or(given.as_str(), |(state, _)| state);
        if self.sealed(state) == *given {
            return Ok(Some(state.to_owned()));
        }
        Err(ErrorData::invalid_params("requestState is not what this server gave", None))
    }
}
