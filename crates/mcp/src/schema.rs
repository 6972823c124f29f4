//! What a tool takes and returns: JSON Schema for clients, and the check of arguments with words that help to mend them.
//!
//! The schemas use only what every client understands: one type per field, no unions, no nulls; what may be left out is
//! simply not required.

use rmcp::model::JsonObject;
use serde_json::{Map, Value, json};

/// How alike two names are when one is probably meant by the other (Jaro-Winkler; 1 is equal).
const ALIKE: f64 = 0.75;
/// How much of a wrong value is repeated in a message.
const SHOWN: usize = 60;

/// One argument, or one part of an answer.
#[derive(Clone, Debug)]
pub struct Field {
    name: &'static str,
    schema: Map<String, Value>,
    required: bool,
}

impl Field {
    fn new(name: &'static str, kind: &str, description: &str) -> Self {
        let mut schema = Map::new();
        schema.insert("type".to_owned(), kind.into());
        schema.insert("description".to_owned(), description.into());
        Self { name, schema, required: false }
    }

    /// Text.
    pub fn text(name: &'static str, description: &str) -> Self {
        Self::new(name, "string", description)
    }

    /// One of a few words.
    pub fn choice(name: &'static str, description: &str, words: &[&str]) -> Self {
        Self::text(name, description).with("enum", json!(words))
    }

    /// A whole number.
    pub fn integer(name: &'static str, description: &str) -> Self {
        Self::new(name, "integer", description)
    }

    /// Yes or no.
    pub fn boolean(name: &'static str, description: &str) -> Self {
        Self::new(name, "boolean", description)
    }

    /// Several texts in their order.
    pub fn texts(name: &'static str, description: &str) -> Self {
        Self::new(name, "array", description).with("items", json!({ "type": "string" }))
    }

    /// Texts by their names.
    pub fn map(name: &'static str, description: &str) -> Self {
        Self::new(name, "object", description).with("additionalProperties", json!({ "type": "string" }))
    }

    /// Several objects of one kind.
    pub fn objects(name: &'static str, description: &str, fields: Vec<Self>) -> Self {
        Self::new(name, "array", description).with("items", Value::Object(object(fields, false)))
    }

    /// An object.
    pub fn object(name: &'static str, description: &str, fields: Vec<Self>) -> Self {
        let mut field = Self::new(name, "object", description);
        field.schema.extend(object(fields, false));
        field
    }

    /// An object of which nothing is promised.
    pub fn open(name: &'static str, description: &str) -> Self {
        Self::new(name, "object", description)
    }

    /// It must be there.
    #[must_use]
    pub fn required(mut self) -> Self {
        self.required = true;
        self
    }

    /// Bounds of a number.
    #[must_use]
    pub fn between(self, least: u64, most: u64) -> Self {
        self.with("minimum", json!(least)).with("maximum", json!(most))
    }

    /// A number that is never negative.
    #[must_use]
    pub fn at_least(self, least: u64) -> Self {
        self.with("minimum", json!(least))
    }

    /// The longest text, in characters.
    #[must_use]
    pub fn at_most(self, characters: u64) -> Self {
        self.with("maxLength", json!(characters))
    }

    /// Text, or a list, that is not empty.
    #[must_use]
    pub fn not_empty(self) -> Self {
        let word = if self.schema.get("type") == Some(&json!("array")) { "minItems" } else { "minLength" };
        self.with(word, json!(1))
    }

    /// What counts if it is left out.
    #[must_use]
    pub fn default(self, value: impl Into<Value>) -> Self {
        self.with("default", value.into())
    }

    fn with(mut self, key: &str, value: Value) -> Self {
        self.schema.insert(key.to_owned(), value);
        self
    }
}

/// The schema of an object. A `closed` one has nothing but these fields.
pub fn object(fields: Vec<Field>, closed: bool) -> JsonObject {
    let required: Vec<_> = fields.iter().filter(|field| field.required).map(|field| field.name).collect();
    let mut schema = Map::new();
    schema.insert("type".to_owned(), "object".into());
    if !required.is_empty() {
        schema.insert("required".to_owned(), json!(required));
    }
    let properties: Map<_, _> =
        fields.into_iter().map(|field| (field.name.to_owned(), Value::Object(field.schema))).collect();
    schema.insert("properties".to_owned(), Value::Object(properties));
    if closed {
        schema.insert("additionalProperties".to_owned(), false.into());
    }
    schema
}

/// Checks arguments against the schema of a tool. What is left are the arguments that were given: `null` for something
/// optional is the same as nothing. The error tells everything that is wrong, and what the tool takes.
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

fn check_value(place: &str, schema: &Value, value: &mut Value, wrong: &mut Vec<String>) {
    let kind = schema.get("type").and_then(Value::as_str).unwrap_or_default();
    // A whole number is one however it is written.
    if kind == "integer"
        && let Some(number) = value.as_f64().filter(|_| !value.is_i64() && !value.is_u64())
        && number.fract() == 0.0
        && let Ok(whole) = format!("{number:.0}").parse::<i64>()
    {
        *value = whole.into();
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
    if let Some(items) = value.as_array_mut() {
        if bound("minItems").is_some() && items.is_empty() {
            wrong.push(format!("{place} must not be empty"));
        }
        if let Some(schema) = schema.get("items") {
            for (index, item) in items.iter_mut().enumerate() {
                check_value(&format!("{place}[{index}]"), schema, item, wrong);
            }
        }
    }
    if let Some(members) = value.as_object_mut()
        && let Some(schema) = schema.get("additionalProperties").filter(|schema| schema.is_object())
    {
        for (name, member) in members {
            let name = shown(&Value::from(name.as_str()));
            check_value(&format!("{place}[{name}]"), schema, member, wrong);
        }
    }
}

/// A value, cut to what a message has room for.
fn shown(value: &Value) -> String {
    let text = crate::text::clean(&value.to_string());
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schema() -> JsonObject {
        let fields = vec![
            Field::choice("language", "", &["python", "bash"]).required(),
            Field::text("code", "").required(),
            Field::integer("timeout_seconds", "").between(1, 60),
            Field::map("env", ""),
            Field::texts("argv", "").not_empty(),
        ];
        object(fields, true)
    }

    fn refusal(arguments: Value) -> String {
        check("run_code", &schema(), arguments.as_object().unwrap().clone()).unwrap_err()
    }

    #[test]
    fn what_is_right_passes_and_null_is_nothing() {
        let given = json!({"language": "bash", "code": "", "timeout_seconds": 5.0, "env": null});
        let checked = check("run_code", &schema(), given.as_object().unwrap().clone()).unwrap();
        assert_eq!(Value::Object(checked), json!({"language": "bash", "code": "", "timeout_seconds": 5}));
    }

    #[test]
    fn everything_wrong_is_told_at_once_with_what_the_tool_takes() {
        let text = refusal(json!({"langage": "python", "timeout_seconds": "5", "env": {"A": 1}, "argv": []}));
        assert!(text.contains("there is no argument \"langage\"; did you mean `language`?"), "{text}");
        assert!(text.contains("`code` is missing") && text.contains("`language` is missing"), "{text}");
        assert!(text.contains("`timeout_seconds` must be an integer, not \"5\""), "{text}");
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
        assert!(text.contains("must be one of python, bash, not \"cobol\""), "{text}");
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
