//! Edits JSON files of other programs, with or without comments, in one place, and preserves every other character.

use jsonc_parser::ParseOptions;
use jsonc_parser::cst::{CstInputValue, CstObject, CstObjectProp, CstRootNode};
use jsonc_parser::errors::ParseError;
use serde_json::Value;
use thiserror::Error;

const BYTE_ORDER_MARK: char = '\u{feff}';

/// A file that cannot be changed.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum JsoncError {
    /// The text is not JSON.
    #[error("line {line}, column {column}: {what}")]
    Syntax {
        line: usize,
        /// Counted from 1, in characters.
        column: usize,
        /// What is wrong there.
        what: String,
    },
    /// A value is not an object.
    #[error("{0} is not an object")]
    NotObject(String),
    /// A key occurs twice, and readers differ in which one they use.
    #[error("{0:?} occurs twice")]
    Twice(String),
    /// The changed text does not have the expected value.
    #[error("it is written in a way that cannot be changed safely")]
    Unsafe,
}

impl From<ParseError> for JsoncError {
    fn from(error: ParseError) -> Self {
        let (line, column) = (error.line_display(), error.column_display());
        Self::Syntax { line, column, what: error.kind().to_string() }
    }
}

#[derive(Debug)]
pub struct Document {
    text: String,
    value: Value,
    comments: bool,
}

impl Document {
    /// Parses a text; one without a value counts as an empty object. `comments` are accepted only for programs that allow
    /// them.
    ///
    /// # Errors
    /// When it is no JSON object.
    pub fn parse(text: &str, comments: bool) -> Result<Self, JsoncError> {
        let root = tree(text, comments)?;
        let value = match root.to_serde_value() {
            Some(value @ Value::Object(_)) => value,
            None => Value::Object(serde_json::Map::new()),
            Some(_) => return Err(JsoncError::NotObject("the file".to_owned())),
        };
        Ok(Self { text: text.to_owned(), value, comments })
    }

    /// The value of `name` in the object `section`.
    ///
    /// # Errors
    /// When one of the keys occurs twice, or a key of the value does.
    pub fn get(&self, section: &str, name: &str) -> Result<Option<&Value>, JsoncError> {
        let Some(found) = self.value.get(section).and_then(|servers| servers.get(name)) else {
            return Ok(None);
        };
        let member =
            |object: Option<CstObject>, key: &str| object.map(|object| only(&object, key)).transpose();
        let root = tree(&self.text, self.comments)?;
        let servers = member(root.object_value(), section)?.flatten().and_then(|found| found.object_value());
        let entry = member(servers, name)?.flatten().and_then(|found| found.object_value());
        if let (Some(entry), Value::Object(keys)) = (entry, found) {
            keys.keys().try_for_each(|key| only(&entry, key).map(drop))?;
        }
        Ok(Some(found))
    }

    /// The text with `name` in the object `section` set to `entry`. Missing ones are created.
    ///
    /// # Errors
    /// When the section is not an object, or one of the keys occurs twice.
    pub fn set(&self, section: &str, name: &str, entry: &[(&str, Value)]) -> Result<String, JsoncError> {
        let root = tree(&self.text, self.comments)?;
        let file = root.object_value_or_create().ok_or(JsoncError::Unsafe)?;
        let servers = match only(&file, section)? {
            None => file.object_value_or_set(section),
            Some(found) => {
                found.object_value().ok_or_else(|| JsoncError::NotObject(format!("{section:?}")))?
            }
        };
        let input = CstInputValue::Object(
            entry.iter().map(|(key, value)| ((*key).to_owned(), input_value(value))).collect(),
        );
        match only(&servers, name)? {
            None => drop(servers.append(name, input)),
            Some(old) => old.set_value(input),
        }
        let mark = if self.text.starts_with(BYTE_ORDER_MARK) { "\u{feff}" } else { "" };
        let end = if self.value.as_object().is_some_and(|members| !members.is_empty()) { "" } else { "\n" };
        let changed = format!("{mark}{}", root.to_string().trim_start_matches(BYTE_ORDER_MARK));
        let changed = if changed.ends_with('\n') { changed } else { changed + end };
        self.check(&changed, section, name, entry)?;
        Ok(changed)
    }

    /// Checks that the result differs from the text in the requested value only.
    fn check(&self, new: &str, section: &str, name: &str, entry: &[(&str, Value)]) -> Result<(), JsoncError> {
        let mut wanted = self.value.clone();
        let entry: serde_json::Map<String, Value> =
            entry.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
        let members = wanted.as_object_mut().ok_or(JsoncError::Unsafe)?;
        let section = members.entry(section).or_insert_with(|| Value::Object(serde_json::Map::new()));
        section.as_object_mut().ok_or(JsoncError::Unsafe)?.insert(name.to_owned(), entry.into());
        match Self::parse(new, self.comments) {
            Ok(document) if document.value == wanted => Ok(()),
            _ => Err(JsoncError::Unsafe),
        }
    }
}

/// Strict JSON, or JSON with comments and trailing commas, as the editors of such files read it.
fn tree(text: &str, comments: bool) -> Result<CstRootNode, JsoncError> {
    let text = text.trim_start_matches(BYTE_ORDER_MARK);
    let options = ParseOptions {
        allow_comments: true,
        allow_trailing_commas: true,
        allow_loose_object_property_names: false,
        allow_missing_commas: false,
        allow_single_quoted_strings: false,
        allow_hexadecimal_numbers: false,
        allow_unary_plus_numbers: false,
        allow_bare_decimal_point_numbers: false,
        allow_non_finite_numbers: false,
        allow_extended_string_escapes: false,
    };
    let root = CstRootNode::parse(text, &options)?;
    if !comments && !text.trim().is_empty() {
        serde_json::from_str::<Value>(text).map_err(|error| JsoncError::Syntax {
            line: error.line(),
            column: error.column().max(1),
            what: "the program whose file this is reads no comments and no trailing commas".to_owned(),
        })?;
    }
    Ok(root)
}

/// The member of this name, which must be unique.
fn only(object: &CstObject, name: &str) -> Result<Option<CstObjectProp>, JsoncError> {
    let is_named = |member: &CstObjectProp| member.decoded_name().is_some_and(|found| found == name);
    let mut found = object.properties().into_iter().filter(is_named);
    match (found.next(), found.next()) {
        (first, None) => Ok(first),
        _ => Err(JsoncError::Twice(name.to_owned())),
    }
}

fn input_value(value: &Value) -> CstInputValue {
    match value {
        Value::Null => CstInputValue::Null,
        Value::Bool(value) => CstInputValue::Bool(*value),
        Value::Number(number) => CstInputValue::Number(number.to_string()),
        Value::String(text) => CstInputValue::String(text.clone()),
        Value::Array(items) => CstInputValue::Array(items.iter().map(input_value).collect()),
        Value::Object(members) => {
            let member = |(key, value): (&String, &Value)| (key.clone(), input_value(value));
            CstInputValue::Object(members.iter().map(member).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn set(text: &str) -> Result<String, JsoncError> {
        let entry = [("command", json!("/bin/bathy")), ("args", json!(["mcp", "-x"]))];
        Document::parse(text, true)?.set("servers", "b", &entry)
    }

    const FRESH: &str = "{\n  \"servers\": {\n    \"b\": {\n      \"command\": \"/bin/bathy\",\n      \"args\": [\"mcp\", \"-x\"]\n    }\n  }\n}\n";

    #[test]
    fn nothing_becomes_a_tidy_file() {
        for text in ["", "\n", "{}\n", "{ }\n"] {
            assert_eq!(set(text).unwrap().trim_start(), FRESH, "{text:?}");
        }
    }

    #[test]
    fn everything_else_is_kept() {
        let text = "// mine\n{\n\t\"a\": 1e400, // note\n\t/* b */ \"servers\": {\n\t\t\"x\": {\"command\": \"}\"}, // last\n\t},\n}\n";
        // 1e400 is out of range for serde_json, so use a number that is not.
        let text = text.replace("1e400", "1.50");
        let expected = "// mine\n{\n\t\"a\": 1.50, // note\n\t/* b */ \"servers\": {\n\t\t\"x\": {\"command\": \"}\"}, // last\n\t\t\"b\": {\n\t\t\t\"command\": \"/bin/bathy\",\n\t\t\t\"args\": [\"mcp\", \"-x\"],\n\t\t},\n\t},\n}\n";
        assert_eq!(set(&text).unwrap(), expected);
    }

    #[test]
    fn a_comma_goes_before_the_comment_of_the_last_member() {
        let text = "{\n  \"a\": \"// no comment \\\" here\" // comment\n}";
        let changed = set(text).unwrap();
        assert!(
            changed.starts_with("{\n  \"a\": \"// no comment \\\" here\", // comment\n  \"servers\": {\n"),
            "{changed}"
        );
        assert!(changed.ends_with("  }\n}"), "{changed}");
    }

    #[test]
    fn one_line_and_odd_files_work() {
        for text in [
            "{\"a\":[1,2,{\"servers\":3}]}",
            "{\"servers\":{}}",
            "{\"servers\":{\"a\":true},\"z\":null}",
            "\u{feff}{\"a\": 1}",
            "{\r\n    \"a\": 1\r\n}\r\n",
            "// only a comment",
            "{ /* empty */ }",
            "{\"servers\": {\"b\": 7}}",
            "{\"ser\\u0076ers\": {}}",
        ] {
            let changed = set(text).unwrap();
            assert!(
                Document::parse(&changed, true).unwrap().get("servers", "b").unwrap().is_some(),
                "{changed}"
            );
        }
        assert!(!set("{\r\n    \"a\": 1\r\n}\r\n").unwrap().replace("\r\n", "").contains('\n'));
    }

    #[test]
    fn an_entry_is_replaced_in_its_place() {
        let text = "{\n  \"servers\": {\n    \"b\": { \"old\": 1 }, // ours\n    \"c\": 2\n  }\n}\n";
        let changed = set(text).unwrap();
        assert!(changed.contains("    },") || changed.contains("    }, // ours"), "{changed}");
        assert!(changed.contains("// ours\n    \"c\": 2") && !changed.contains("old"), "{changed}");
    }

    #[test]
    fn what_is_wrong_is_told_with_its_place() {
        let place = |text: &str| match Document::parse(text, true) {
            Err(JsoncError::Syntax { line, column, .. }) => (line, column),
            other => panic!("{other:?}"),
        };
        assert_eq!(place("{\n  \"ä\": x\n}"), (2, 8));
        assert_eq!(place("{\n  /* open"), (2, 3));
        assert_eq!(place("{\"a\": 1"), (1, 1), "where it opens");
        let nested = "[".repeat(10_000);
        assert!(Document::parse(&nested, true).is_err());
        assert_eq!(Document::parse("[1]", true).unwrap_err(), JsoncError::NotObject("the file".to_owned()));
        assert_eq!(set("{\"servers\": []}").unwrap_err(), JsoncError::NotObject("\"servers\"".to_owned()));
        assert_eq!(
            set("{\"servers\": {}, \"servers\": {}}").unwrap_err(),
            JsoncError::Twice("servers".to_owned())
        );
    }

    #[test]
    fn comments_are_refused_where_the_program_does_not_read_them() {
        let error = Document::parse("{\n// x\n}", false).unwrap_err();
        assert!(matches!(error, JsoncError::Syntax { line: 2, column: 1, .. }), "{error}");
        assert!(Document::parse("{\"a\": 1,}", false).is_err());
        assert!(Document::parse("{\"a\": 1,}", true).is_ok());
    }
}
