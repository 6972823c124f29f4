//! The tools that the suite calls.

use std::time::Duration;

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, ClientCapabilities, LoggingLevel,
    LoggingMessageNotificationParam, ProgressNotificationParam, Tool,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer};
use serde_json::{Value, json};

use crate::asking;
use crate::content::{PNG, WAV, complete, from_json, picture, text};
use crate::handler::{Change, Shared};

/// Names and descriptions of the tools without arguments; the answers are in [`call`].
const PLAIN: [(&str, &str); 26] = [
    ("test_simple_text", "Returns a text"),
    ("test_image_content", "Returns a picture"),
    ("test_audio_content", "Returns a sound"),
    ("test_embedded_resource", "Returns a resource"),
    ("test_multiple_content_types", "Returns a text, a picture and a resource"),
    ("test_error_handling", "Fails"),
    ("test_tool_with_logging", "Sends three log messages"),
    ("test_logging_tool", "Sends three log messages to who asked for them"),
    ("test_tool_with_progress", "Reports its progress"),
    ("test_missing_capability", "Needs a client that samples"),
    ("test_trigger_tool_change", "Tells that the tools have changed"),
    ("test_trigger_prompt_change", "Tells that the prompts have changed"),
    ("test_reconnection", "Takes a while"),
    ("test_elicitation_sep1034_defaults", "Asks the user, with defaults"),
    ("test_elicitation_sep1330_enums", "Asks the user to choose"),
    ("test_streaming_elicitation", "Asks for a name"),
    (asking::ELICITATION, "Asks for a name"),
    ("test_input_required_result_sampling", "Asks the model"),
    ("test_input_required_result_list_roots", "Asks for the roots"),
    ("test_input_required_result_request_state", "Asks, and remembers that it did"),
    ("test_input_required_result_multiple_inputs", "Asks three things at once"),
    ("test_input_required_result_multi_round", "Asks twice"),
    ("test_input_required_result_tampered_state", "Asks, and does not believe what it did not say"),
    ("test_input_required_result_capabilities", "Asks what the client can answer"),
    ("test_sampling", "Asks the model"),
    ("test_elicitation", "Asks the user"),
];

pub fn all() -> Vec<Tool> {
    let schema = |name: &str| match name {
        "test_sampling" => {
            json!({"type": "object", "properties": {"prompt": {"type": "string"}}, "required": ["prompt"]})
        }
        "test_elicitation" => {
            json!({"type": "object", "properties": {"message": {"type": "string"}}, "required": ["message"]})
        }
        _ => json!({"type": "object", "properties": {}}),
    };
    let plain = PLAIN.iter().map(|(name, description)| (*name, *description, schema(name)));
    let special = [
        ("json_schema_2020_12_tool", "Has a schema with much in it", rich_schema()),
        ("test_header_parameter", "Has a parameter that is also a header", header_schema()),
    ];
    let listed = plain.chain(special).map(|(name, description, schema)| {
        from_json(json!({"name": name, "description": description, "inputSchema": schema}))
    });
    listed.filter_map(Result::ok).collect()
}

/// Whether a tool is one of the fixtures.
pub fn is_one(name: &str) -> bool {
    all().iter().any(|tool| tool.name == name)
}

/// Keywords of JSON Schema 2020-12 that have to arrive as they are.
fn rich_schema() -> Value {
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": {"address": {
            "$anchor": "addressDef", "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }},
        "properties": {
            "name": {"type": "string"},
            "address": {"$ref": "#/$defs/address"},
            "contactMethod": {"type": "string", "enum": ["phone", "email"]},
            "phone": {"type": "string"},
            "email": {"type": "string"},
        },
        "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
        "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
        "then": {"required": ["phone"]},
        "else": {"required": ["email"]},
        "additionalProperties": false,
    })
}

fn header_schema() -> Value {
    json!({"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}, "required": ["region"]})
}

pub async fn call(
    shared: &Shared,
    request: CallToolRequestParams,
    context: RequestContext<RoleServer>,
) -> Result<CallToolResponse, ErrorData> {
    let embedded = |uri: &str, mime: &str, text: &str| json!({"type": "resource", "resource": {"uri": uri, "mimeType": mime, "text": text}});
    let blocks = match request.name.as_ref() {
        "test_simple_text" => json!([text("This is a simple text response for testing.")]),
        "test_image_content" => json!([{"type": "image", "data": PNG, "mimeType": "image/png"}]),
        "test_audio_content" => json!([{"type": "audio", "data": WAV, "mimeType": "audio/wav"}]),
        "test_embedded_resource" => {
            json!([embedded(
                "test://embedded-resource",
                "text/plain",
                "This is an embedded resource content."
            )])
        }
        "test_multiple_content_types" => json!([
            text("Multiple content types test:"),
            picture(),
            embedded("test://mixed-content-resource", "application/json", r#"{"test":"data","value":123}"#),
        ]),
        "test_error_handling" => {
            let said = text("This tool intentionally returns an error for testing");
            return complete(json!({"content": [said], "isError": true})).map(CallToolResponse::Complete);
        }
        "test_tool_with_logging" => {
            log(&context).await?;
            json!([text("It logged.")])
        }
        "test_logging_tool" => {
            // In this revision, only requests that name a level get log messages.
            if context.meta.log_level().is_some() {
                log(&context).await?;
            }
            json!([text("It logged what was wanted.")])
        }
        "test_tool_with_progress" => {
            report_progress(&context).await?;
            json!([text("It is done.")])
        }
        "test_missing_capability" => {
            if context.client_capabilities().is_none_or(|can| can.sampling.is_none()) {
                let needed = ClientCapabilities::builder().enable_sampling().build();
                return Err(ErrorData::missing_required_client_capability(needed));
            }
            json!([text("The client can sample.")])
        }
        name @ ("test_trigger_tool_change" | "test_trigger_prompt_change") => {
            let change = if name == "test_trigger_tool_change" { Change::Tools } else { Change::Prompts };
            // There may be no subscriber.
            let _ = shared.changes.send(change);
            json!([text("It was told.")])
        }
        "test_reconnection" => {
            tokio::time::sleep(Duration::from_millis(500)).await;
            json!([text("It took a while.")])
        }
        "json_schema_2020_12_tool" | "test_header_parameter" => json!([text("The arguments arrived.")]),
        _ => return asking::call(shared, &request, &context).await,
    };
    complete(json!({"content": blocks})).map(CallToolResponse::Complete)
}

async fn pause() {
    tokio::time::sleep(Duration::from_millis(50)).await;
}

async fn log(context: &RequestContext<RoleServer>) -> Result<(), ErrorData> {
    for message in ["Tool execution started", "Tool processing data", "Tool execution completed"] {
        let said = LoggingMessageNotificationParam::new(LoggingLevel::Info, json!(message));
        context.peer.notify_logging_message(said).await.map_err(asking::unreachable_client)?;
        pause().await;
    }
    Ok(())
}

async fn report_progress(context: &RequestContext<RoleServer>) -> Result<(), ErrorData> {
    for done in [0.0, 50.0, 100.0] {
        if let Some(token) = context.meta.get_progress_token() {
            let progress = ProgressNotificationParam::new(token, done).with_total(100.0);
            context.peer.notify_progress(progress).await.map_err(asking::unreachable_client)?;
        }
        pause().await;
    }
    Ok(())
}
