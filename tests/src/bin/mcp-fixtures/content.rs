//! The prompts and resources that the suite asks for.

use rmcp::ErrorData;
use rmcp::model::{
    GetPromptRequestParams, GetPromptResponse, Prompt, ReadResourceResponse, Resource, ResourceTemplate,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::asking;

/// A PNG with a single red pixel.
pub const PNG: &str =
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg==";
/// A WAV file without a sound.
pub const WAV: &str = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAEAfAAABAAgAZGF0YQAAAAA=";

/// The types of the protocol can be read from JSON and not all can be written in Rust: the fixtures are JSON.
pub fn from_json<T: DeserializeOwned>(value: Value) -> Result<T, ErrorData> {
    serde_json::from_value(value).map_err(|error| ErrorData::internal_error(error.to_string(), None))
}

/// A complete result; clients of the older revision do not get the field `resultType`.
pub fn complete<T: DeserializeOwned>(mut value: Value) -> Result<T, ErrorData> {
    value["resultType"] = json!("complete");
    from_json(value)
}

pub fn prompts() -> Vec<Prompt> {
    let listed = json!([
        {"name": "test_simple_prompt", "description": "Says one thing"},
        {"name": "test_prompt_with_arguments", "description": "Says its arguments", "arguments": [
            {"name": "arg1", "description": "The first", "required": true},
            {"name": "arg2", "description": "The second", "required": true},
        ]},
        {"name": "test_prompt_with_embedded_resource", "description": "Embeds a resource", "arguments": [
            {"name": "resourceUri", "description": "Which", "required": true},
        ]},
        {"name": "test_prompt_with_image", "description": "Shows a picture"},
        {"name": "test_input_required_result_prompt", "description": "Asks before it answers"},
    ]);
    from_json(listed).unwrap_or_default()
}

pub fn prompt(request: &GetPromptRequestParams) -> Result<GetPromptResponse, ErrorData> {
    let argument = |name: &str| -> Result<&str, ErrorData> {
        let value = request.arguments.as_ref().and_then(|all| all.get(name)).and_then(Value::as_str);
        value.ok_or_else(|| ErrorData::invalid_params(format!("the prompt needs the argument {name}"), None))
    };
    let contents = match request.name.as_str() {
        "test_simple_prompt" => vec![text("This is a simple prompt for testing.")],
        "test_prompt_with_arguments" => {
            let (first, second) = (argument("arg1")?, argument("arg2")?);
            vec![text(&format!("Prompt with arguments: arg1='{first}', arg2='{second}'"))]
        }
        "test_prompt_with_embedded_resource" => {
            let embedded = "Embedded resource content for testing.";
            let resource =
                json!({"uri": argument("resourceUri")?, "mimeType": "text/plain", "text": embedded});
            vec![
                json!({"type": "resource", "resource": resource}),
                text("Please process the embedded resource above."),
            ]
        }
        "test_prompt_with_image" => vec![picture(), text("Please analyze the image above.")],
        "test_input_required_result_prompt" => {
            match asking::answer(request.input_responses.as_ref(), "user_context") {
                Some(answer) => vec![text(&format!("With this context: {}", answer["content"]["context"]))],
                None => return asking::for_context().map(GetPromptResponse::InputRequired),
            }
        }
        other => return Err(ErrorData::invalid_params(format!("no prompt {other:?}"), None)),
    };
    let messages: Vec<Value> =
        contents.into_iter().map(|content| json!({"role": "user", "content": content})).collect();
    complete(json!({"messages": messages})).map(GetPromptResponse::Complete)
}

/// A block of text.
pub fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// A block with the picture.
pub fn picture() -> Value {
    json!({"type": "image", "data": PNG, "mimeType": "image/png"})
}

/// All resources that have an address of their own.
pub fn resources() -> Vec<Resource> {
    let listed = json!([
        {"uri": "test://static-text", "name": "text", "description": "A text", "mimeType": "text/plain"},
        {"uri": "test://static-binary", "name": "picture", "description": "A picture", "mimeType": "image/png"},
        {"uri": "test://watched-resource", "name": "watched", "description": "May change", "mimeType": "text/plain"},
    ]);
    from_json(listed).unwrap_or_default()
}

/// All resources whose address has a variable part.
pub fn templates() -> Vec<ResourceTemplate> {
    let template = json!([{
        "uriTemplate": "test://template/{id}/data", "name": "data", "description": "Data of an id",
        "mimeType": "application/json",
    }]);
    from_json(template).unwrap_or_default()
}

/// What a resource holds, if it is one of the fixtures.
pub fn read(uri: &str) -> Option<Result<ReadResourceResponse, ErrorData>> {
    let content = match uri {
        "test://static-text" => {
            json!({"uri": uri, "mimeType": "text/plain", "text": "This is the content of the static text resource."})
        }
        "test://static-binary" => json!({"uri": uri, "mimeType": "image/png", "blob": PNG}),
        "test://watched-resource" => {
            json!({"uri": uri, "mimeType": "text/plain", "text": "It has not changed."})
        }
        _ => {
            let id = uri.strip_prefix("test://template/")?.strip_suffix("/data")?;
            let data = json!({"id": id, "templateTest": true, "data": format!("Data for ID: {id}")});
            json!({"uri": uri, "mimeType": "application/json", "text": data.to_string()})
        }
    };
    Some(complete(json!({"contents": [content]})).map(ReadResourceResponse::Complete))
}
