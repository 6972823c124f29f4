//! The schema of a tool's arguments, derived from the type that they are deserialized into, and the check of arguments
//! with errors that explain how to fix them.
//!
//! The schemas use only what every client understands: one type per property, no references, no unions, no nulls. An
//! `Option` is a property that may be absent.

use bathy_client::interpreter;
use rmcp::model::JsonObject;
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value};

/// The least similarity (Jaro-Winkler; 1 is equal) at which an unknown name is answered with a known one.
const ALIKE: f64 = 0.75;
/// The longest part of a wrong value that a message repeats, in characters.
const SHOWN: usize = 60;

/// The schema of the arguments that `A` is made of. Others are refused.
pub fn of<A: JsonSchema>() -> JsonObject {
    let mut settings = SchemaSettings::draft2020_12().for_deserialize();
    (settings.inline_subschemas, settings.meta_schema) = (true, None);
    let mut schema = settings.into_generator().into_root_schema_for::<A>().to_value();
    flatten(&mut schema);
    let Value::Object(mut schema) = schema else { return JsonObject::new() };
    schema.remove("description");
    schema.entry("properties").or_insert_with(|| Map::new().into());
    schema.insert("additionalProperties".to_owned(), false.into());
    schema
}

/// Takes out what clients have no use for, and the `null` that stands for an absent property.
fn flatten(schema: &mut Value) {
    let Value::Object(members) = schema else { return };
    for noise in ["title", "format"] {
        if members.get(noise).is_some_and(Value::is_string) {
            members.remove(noise);
        }
    }
    let empty = [Value::Null, Value::Bool(false), Value::Array(Vec::new()), Value::Object(Map::new())];
    members.retain(|name, value| name != "default" || !empty.contains(value));
    if let Some(Value::String(text)) = members.get_mut("description") {
        *text = text.replace('\n', " ");
    }
    for list in ["type", "enum"] {
        if let Some(Value::Array(items)) = members.get_mut(list) {
            items.retain(|item| !item.is_null() && item != "null");
        }
    }
    if let Some(Value::Array(kinds)) = members.get("type")
        && let [kind] = kinds.as_slice()
    {
        let kind = kind.clone();
        members.insert("type".to_owned(), kind);
    }
    for part in ["items", "additionalProperties"] {
        members.get_mut(part).into_iter().for_each(flatten);
    }
    if let Some(Value::Object(properties)) = members.get_mut("properties") {
        properties.values_mut().for_each(flatten);
    }
}

/// Checks arguments against the schema of a tool and returns them in the form that it wants. `null` for something
/// optional is the same as nothing. The error lists everything that is wrong, and what the tool takes.
pub fn check(tool: &str, schema: &JsonObject, mut arguments: JsonObject) -> Result<JsonObject, String> {
    let empty = Map::new();
    let properties = schema.get("properties").and_then(Value::as_object).unwrap_or(&empty);
    let is_required = |name: &str| {
        let list = schema.get("required").and_then(Value::as_array);
        list.is_some_and(|list| list.iter().any(|word| word == name))
    };
    arguments.retain(|name, value| !(value.is_null() && properties.contains_key(name) && !is_required(name)));
    let mut wrong = Vec::new();
    for (name, value) in &mut arguments {
        match properties.get(name) {
            Some(property) => check_value(&format!("`{name}`"), property, value, &mut wrong),
            None => wrong.push(unknown(name, properties)),
        }
    }
    for name in properties.keys().filter(|name| is_required(name) && !arguments.contains_key(*name)) {
        wrong.push(format!("`{name}` is missing"));
    }
    if wrong.is_empty() {
        return Ok(arguments);
    }
    let takes: Vec<_> = properties
        .iter()
        .map(|(name, property)| {
            let kind = property.get("type").and_then(Value::as_str).unwrap_or("any");
            let need = if is_required(name) { "required" } else { "optional" };
            format!("{name} ({kind}, {need})")
        })
        .collect();
    let takes = if takes.is_empty() { "no arguments".to_owned() } else { takes.join(", ") };
    Err(format!(
        "The arguments of {tool} are not right, and nothing was done: {}.\n{tool} takes: {takes}.",
        wrong.join("; ")
    ))
}

fn unknown(name: &str, properties: &Map<String, Value>) -> String {
    let alike = |known: &&String| strsim::jaro_winkler(name, known) >= ALIKE;
    let nearest = properties
        .keys()
        .filter(alike)
        .max_by(|one, other| strsim::jaro_winkler(name, one).total_cmp(&strsim::jaro_winkler(name, other)));
    let name = shown(&Value::from(name));
    match nearest {
        Some(nearest) => format!("there is no argument {name}; did you mean `{nearest}`?"),
        None => format!("there is no argument {name}"),
    }
}

/// A value as the schema wants it, if it plainly means that: `5.0` and `"5"` are 5, `"PY"` is `python`.
pub fn meant(schema: &Value, value: &Value) -> Option<Value> {
    if let Some(words) = schema.get("enum").and_then(Value::as_array) {
        let given = value.as_str()?;
        let same = |word: &&Value| word.as_str().is_some_and(|word| word.eq_ignore_ascii_case(given));
        let alias = || interpreter::language(given).ok().map(|language| Value::from(language.as_str()));
        return words.iter().find(same).cloned().or_else(|| alias().filter(|alias| words.contains(alias)));
    }
    if schema.get("type").is_some_and(|kind| kind == "integer") {
        let whole =
            |number: f64| format!("{number:.0}").parse::<i64>().ok().filter(|_| number.fract() == 0.0);
        return match value {
            Value::String(digits) => digits.trim().parse::<i64>().ok().map(Value::from),
            number => number.as_f64().and_then(whole).map(Value::from),
        };
    }
    None
}

fn check_value(place: &str, schema: &Value, value: &mut Value, wrong: &mut Vec<String>) {
    let kind = schema.get("type").and_then(Value::as_str).unwrap_or_default();
    if !(value.is_i64() || value.is_u64())
        && let Some(meant) = meant(schema, value)
    {
        *value = meant;
    }
    let fits = match kind {
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "boolean" => value.is_boolean(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => true,
    };
    if !fits {
        let article = if matches!(kind, "integer" | "array" | "object") { "an" } else { "a" };
        wrong.push(format!("{place} must be {article} {kind}, not {}", shown(value)));
        return;
    }
    check_limits(place, schema, value, wrong);
    check_parts(place, schema, value, wrong);
}

/// The words, bounds and lengths of a value of the right type.
fn check_limits(place: &str, schema: &Value, value: &Value, wrong: &mut Vec<String>) {
    if let Some(words) = schema.get("enum").and_then(Value::as_array)
        && !words.contains(value)
    {
        let words: Vec<_> = words.iter().filter_map(Value::as_str).collect();
        wrong.push(format!("{place} must be one of {}, not {}", words.join(", "), shown(value)));
    }
    let bound = |key: &str| schema.get(key).and_then(Value::as_i64);
    if let Some(number) = value.as_i64().or_else(|| value.as_u64().map(|_| i64::MAX)) {
        if let Some(least) = bound("minimum").filter(|least| number < *least) {
            wrong.push(format!("{place} must be at least {least}, not {}", shown(value)));
        }
        if let Some(most) = bound("maximum").filter(|most| number > *most) {
            wrong.push(format!("{place} must be at most {most}, not {}", shown(value)));
        }
    }
    if let Some(text) = value.as_str() {
        if bound("minLength").is_some() && text.is_empty() {
            wrong.push(format!("{place} must not be empty"));
        }
        let most = bound("maxLength").and_then(|most| usize::try_from(most).ok());
        if let Some(most) = most.filter(|most| text.len() > *most && text.chars().count() > *most) {
            wrong.push(format!("{place} has {} characters; the most is {most}", text.chars().count()));
        }
    }
    if bound("minItems").is_some() && value.as_array().is_some_and(Vec::is_empty) {
        wrong.push(format!("{place} must not be empty"));
    }
}

/// The items of an array and the members of an object.
fn check_parts(place: &str, schema: &Value, value: &mut Value, wrong: &mut Vec<String>) {
    match value {
        Value::Array(items) => {
            if let Some(schema) = schema.get("items") {
                for (index, item) in items.iter_mut().enumerate() {
                    check_value(&format!("{place}[{index}]"), schema, item, wrong);
                }
            }
        }
        Value::Object(members) => {
            if let Some(schema) = schema.get("additionalProperties").filter(|schema| schema.is_object()) {
                for (name, member) in members {
                    let name = shown(&Value::from(name.as_str()));
                    check_value(&format!("{place}[{name}]"), schema, member, wrong);
                }
            }
        }
        _ => {}
    }
}

/// A value, cut to `SHOWN` characters.
fn shown(value: &Value) -> String {
    let text = crate::text::clean(&value.to_string());
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use bathy_client::interpreter::Language;
    use serde::Deserialize;
    use serde_json::json;

    use super::*;
    use crate::tools::languages;

    fn sixty() -> u64 {
        60
    }

    #[derive(Deserialize, JsonSchema)]
    #[expect(dead_code, reason = "the schema is what is tested")]
    struct Flat {
        /// Words
        #[schemars(length(min = 1, max = 5))]
        argv: Option<Vec<String>>,
    }

    #[derive(Deserialize, JsonSchema)]
    #[expect(dead_code, reason = "the schema is what is tested")]
    struct Arguments {
        #[schemars(schema_with = "languages")]
        language: Language,
        code: String,
        /// A time
        #[serde(default = "sixty")]
        #[schemars(range(min = 1, max = 60))]
        timeout_seconds: u64,
        #[serde(default)]
        env: BTreeMap<String, String>,
        #[serde(flatten)]
        flat: Flat,
        #[serde(default)]
        restart: bool,
    }

    fn schema() -> JsonObject {
        of::<Arguments>()
    }

    fn checked(arguments: Value) -> Value {
        check("run_code", &schema(), arguments.as_object().unwrap().clone()).unwrap().into()
    }

    fn refusal(arguments: Value) -> String {
        check("run_code", &schema(), arguments.as_object().unwrap().clone()).unwrap_err()
    }

    #[test]
    fn a_schema_is_flat_and_says_each_thing_once() {
        let expected = json!({
            "type": "object",
            "additionalProperties": false,
            "required": ["language", "code"],
            "properties": {
                "language": {"type": "string", "enum": ["python", "javascript", "typescript", "bash"]},
                "code": {"type": "string"},
                "timeout_seconds": {
                    "type": "integer", "description": "A time", "minimum": 1, "maximum": 60, "default": 60
                },
                "env": {"type": "object", "additionalProperties": {"type": "string"}},
                "argv": {
                    "type": "array", "description": "Words", "items": {"type": "string"},
                    "minItems": 1, "maxItems": 5
                },
                "restart": {"type": "boolean"},
            },
        });
        assert_eq!(Value::Object(schema()), expected);
    }

    #[test]
    fn what_is_right_passes_and_null_is_nothing() {
        let given = json!({"language": "bash", "code": "", "timeout_seconds": 5.0, "env": null});
        assert_eq!(checked(given), json!({"language": "bash", "code": "", "timeout_seconds": 5}));
    }

    #[test]
    fn what_is_plainly_meant_is_accepted() {
        for (language, word) in [("Python", "python"), ("py", "python"), ("JS", "javascript"), ("sh", "bash")]
        {
            let given = json!({"language": language, "code": "", "timeout_seconds": "5"});
            assert_eq!(checked(given), json!({"language": word, "code": "", "timeout_seconds": 5}));
        }
        let text = refusal(json!({"language": "bash", "code": "", "timeout_seconds": "61"}));
        assert!(text.contains("must be at most 60, not 61"), "{text}");
    }

    #[test]
    fn everything_wrong_is_told_at_once_with_what_the_tool_takes() {
        let text =
            refusal(json!({"langage": "python", "timeout_seconds": "soon", "env": {"A": 1}, "argv": []}));
        assert!(text.contains("there is no argument \"langage\"; did you mean `language`?"), "{text}");
        assert!(text.contains("`code` is missing") && text.contains("`language` is missing"), "{text}");
        assert!(text.contains("`timeout_seconds` must be an integer, not \"soon\""), "{text}");
        assert!(text.contains("`env`[\"A\"] must be a string, not 1"), "{text}");
        assert!(text.contains("`argv` must not be empty"), "{text}");
        assert!(
            text.contains("code (string, required), ") || text.contains("code (string, required)."),
            "{text}"
        );
    }

    #[test]
    fn bounds_and_words_are_named() {
        let text = refusal(json!({"language": "cobol", "code": "", "timeout_seconds": 61}));
        assert!(
            text.contains("must be one of python, javascript, typescript, bash, not \"cobol\""),
            "{text}"
        );
        assert!(text.contains("must be at most 60, not 61"), "{text}");
        assert!(
            refusal(json!({"language": "bash", "code": "", "timeout_seconds": u64::MAX})).contains("at most")
        );
        assert!(
            refusal(json!({"language": "bash", "code": null})).contains("`code` must be a string, not null")
        );
    }

    #[test]
    fn a_wrong_value_is_repeated_short_and_harmless() {
        let text = refusal(json!({"language": "bash", "code": ["\u{1b}[2J".repeat(10_000)]}));
        assert!(text.len() < 600 && !text.contains('\u{1b}'), "{text}");
    }
}
