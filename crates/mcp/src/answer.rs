//! The answer of a tool: structured content for programs, text for models, pictures, and links to what was left out.

use rmcp::model::{CallToolResult, ContentBlock, Resource};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::ToolError;

/// The most pictures of one answer.
pub const MAX_IMAGES: usize = 8;
/// The largest picture, in bytes.
pub const MAX_IMAGE: usize = 5_000_000;

/// A picture whose type was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    mime: &'static str,
    base64: String,
}

impl Image {
    /// A picture from a guest's base64, if it is of its type and clients show that type.
    pub fn from_base64(mime: &str, base64: &str) -> Result<Self, &'static str> {
        let (mime, beginning) = match mime {
            "image/png" => ("image/png", "iVBORw0KGgo"),
            "image/jpeg" => ("image/jpeg", "/9j/"),
            _ => return Err("not a PNG or JPEG"),
        };
        if base64.len() / 4 * 3 > MAX_IMAGE + MAX_IMAGE / 20 {
            return Err("too large");
        }
        let base64: String = base64.split_ascii_whitespace().collect();
        if base64.len() / 4 * 3 > MAX_IMAGE {
            return Err("too large");
        }
        let (body, padding) = base64.split_at(base64.trim_end_matches('=').len());
        let letters = body.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/'));
        if !base64.len().is_multiple_of(4) || padding.len() > 2 || !letters || !body.starts_with(beginning) {
            return Err("not what it says it is");
        }
        Ok(Self { mime, base64 })
    }

    /// The length of the data in base64.
    pub fn length(&self) -> usize {
        self.base64.len()
    }

    /// Its type and its size in bytes.
    pub fn describe(&self) -> (&'static str, usize) {
        (self.mime, self.base64.len() / 4 * 3)
    }
}

#[derive(Clone, Debug, Default)]
pub struct Answer {
    pub structured: Value,
    pub text: String,
    pub images: Vec<Image>,
    /// Where the whole of a cut output can be read.
    pub links: Vec<Resource>,
    /// Whether the call failed.
    pub is_error: bool,
}

impl Answer {
    /// An answer whose text is its structured content.
    pub fn json(structured: Value) -> Self {
        let text = serde_json::to_string_pretty(&structured).unwrap_or_default();
        Self { structured, text, ..Self::default() }
    }

    /// An answer with a text of its own.
    pub fn new(structured: Value, text: impl Into<String>) -> Self {
        Self { structured, text: text.into(), ..Self::default() }
    }
}

impl From<Answer> for CallToolResult {
    fn from(answer: Answer) -> Self {
        let mut content = vec![ContentBlock::text(answer.text)];
        content.extend(answer.images.into_iter().map(|image| ContentBlock::image(image.base64, image.mime)));
        content.extend(answer.links.into_iter().map(ContentBlock::resource_link));
        let mut result = Self::success(content);
        result.structured_content = Some(answer.structured);
        result.is_error = Some(answer.is_error);
        result
    }
}

impl From<&ToolError> for CallToolResult {
    fn from(error: &ToolError) -> Self {
        Self::error(vec![ContentBlock::text(error.message())])
    }
}

/// Arguments as a tool's own type. They have passed the schema, so a failure is a bug.
pub fn arguments<T: DeserializeOwned>(arguments: Value) -> Result<T, ToolError> {
    serde_json::from_value(arguments)
        .map_err(|error| ToolError::Failed(format!("The arguments cannot be used: {error}")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_pictures_pass_for_pictures() {
        assert!(Image::from_base64("image/png", "iVBORw0KGgoAAAAN\nSUhE\n").is_ok());
        assert!(Image::from_base64("image/jpeg", "/9j/4AA=").is_ok());
        for (mime, data) in [
            ("image/png", "/9j/4AAQ"),
            ("image/png", "iVBORw0KGgo<script>"),
            ("image/png", "iVBORw0KGgoAA"),
            ("image/png", "iVBORw0KGgo====="),
            ("image/svg+xml", "PHN2Zz48L3N2Zz4="),
            ("image/png", ""),
        ] {
            assert!(Image::from_base64(mime, data).is_err(), "{mime} {data}");
        }
        let large = format!("iVBORw0KGgo{}", "A".repeat(8_000_001));
        assert_eq!(Image::from_base64("image/png", &large), Err("too large"));
    }

    #[test]
    fn an_answer_has_all_its_parts() {
        let answer = Answer {
            structured: json!({"a": 1}),
            text: "text".into(),
            images: vec![Image::from_base64("image/jpeg", "/9j/4AA=").unwrap()],
            links: vec![Resource::new("bathysphere://output/1/stdout", "stdout")],
            is_error: true,
        };
        let result = serde_json::to_value(CallToolResult::from(answer)).unwrap();
        let kinds: Vec<_> =
            result["content"].as_array().unwrap().iter().map(|block| &block["type"]).collect();
        assert_eq!(kinds, ["text", "image", "resource_link"]);
        assert_eq!((&result["isError"], &result["structuredContent"]), (&json!(true), &json!({"a": 1})));
    }
}
