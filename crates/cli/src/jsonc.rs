//! JSON files of other programs, with or without comments: changed in one place, with every other character kept.
//!
//! Comments and trailing commas are blanked in a copy of the same length. The copy is what `serde_json` checks, and what
//! positions are looked up in; the changes are made to the original.

use std::ops::Range;

use serde_json::Value;
use thiserror::Error;

/// A file that cannot be changed.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum JsoncError {
    /// It is no JSON.
    #[error("line {line}, column {column}: {what}")]
    Syntax {
        /// Where, from 1.
        line: usize,
        /// Where, from 1, in characters.
        column: usize,
        /// What is wrong there.
        what: String,
    },
    /// Something is not an object.
    #[error("{0} is not an object")]
    NotObject(String),
    /// A key that is there twice: which of them counts depends on the reader.
    #[error("{0:?} is there twice")]
    Twice(String),
    /// The change did not do what it should.
    #[error("it is written in a way that cannot be changed safely")]
    Unsafe,
}

/// A file's text, and where things are in it.
#[derive(Debug)]
pub struct Document {
    text: String,
    /// As long as the text, with comments and trailing commas blanked.
    plain: String,
    trailing_commas: Vec<usize>,
    value: Value,
    comments: bool,
}

/// A key of an object and its value.
struct Member {
    key: String,
    key_at: usize,
    value: Range<usize>,
}

struct Object {
    members: Vec<Member>,
    /// Where its bracket closes.
    close: usize,
}

impl Document {
    /// Reads a file; one without any value counts as an empty object. `comments` are only read for programs that
    /// allow them.
    pub fn parse(text: &str, comments: bool) -> Result<Self, JsoncError> {
        let blank = blank(text, comments)?;
        if blank.plain.trim_start_matches('\u{feff}').trim().is_empty() {
            let line = if text.is_empty() || text.ends_with('\n') || text == "\u{feff}" { "" } else { "\n" };
            return Self::parse(&format!("{text}{line}{{}}\n"), comments);
        }
        let json = blank.plain.replacen('\u{feff}', "   ", usize::from(blank.plain.starts_with('\u{feff}')));
        let value: Value = serde_json::from_str(&json).map_err(|error| {
            let line_text = text.lines().nth(error.line().saturating_sub(1)).unwrap_or_default();
            // It counts bytes; people count characters.
            let before = line_text.as_bytes().get(..error.column().min(line_text.len())).unwrap_or_default();
            let what = error.to_string();
            JsoncError::Syntax {
                line: error.line(),
                column: String::from_utf8_lossy(before).chars().count().max(1),
                what: what.split(" at line ").next().unwrap_or_default().to_owned(),
            }
        })?;
        if !value.is_object() {
            return Err(JsoncError::NotObject("the file".to_owned()));
        }
        let Blank { trailing_commas, .. } = blank;
        Ok(Self { text: text.to_owned(), plain: json, trailing_commas, value, comments })
    }

    /// The value of `name` in the object `section`.
    pub fn get(&self, section: &str, name: &str) -> Option<&Value> {
        self.value.get(section)?.get(name)
    }

    /// The text with `name` in the object `section` set to `entry`. Both are made if they are not there.
    pub fn set(&self, section: &str, name: &str, entry: &[(&str, Value)]) -> Result<String, JsoncError> {
        let start = self.plain.len() - self.plain.trim_start().len();
        let root = self.object(start);
        let new = match only(&root, section)? {
            None => self.insert(start, &root, section, &|unit, base| {
                let inner = format!("{base}{unit}");
                format!("{{\n{inner}{}: {}\n{base}}}", quoted(name), render(entry, unit, &inner))
            }),
            Some(found) => {
                let open = found.value.start;
                if self.plain.as_bytes().get(open) != Some(&b'{') {
                    return Err(JsoncError::NotObject(format!("{section:?}")));
                }
                let inner = self.object(open);
                match only(&inner, name)? {
                    None => self.insert(open, &inner, name, &|unit, base| render(entry, unit, base)),
                    Some(old) => {
                        let rendered =
                            self.newlines(&render(entry, &self.unit(), self.indent_at(old.key_at)));
                        splice(&self.text, old.value.clone(), &rendered)
                    }
                }
            }
        };
        self.check(&new, section, name, entry)?;
        Ok(new)
    }

    /// Whatever the text looked like: the result differs from it in what was wanted, and in nothing else.
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

    /// Adds a member at the end of an object. `value` writes it, given one step of indentation and the member's own.
    fn insert(
        &self,
        open: usize,
        object: &Object,
        key: &str,
        value: &dyn Fn(&str, &str) -> String,
    ) -> String {
        let unit = self.unit();
        let base = self.indent_at(open).to_owned();
        let own_line = object.members.first().filter(|first| self.begins_line(first.key_at));
        let indent =
            own_line.map_or_else(|| format!("{base}{unit}"), |first| self.indent_at(first.key_at).to_owned());
        // Comments after the last member stay with it.
        let inside = self.text.get(..object.close).unwrap_or_default();
        let end = inside.trim_end().len();
        let rest = inside.get(end..).unwrap_or_default();
        let closing = if rest.contains('\n') { rest.to_owned() } else { self.newlines(&format!("\n{base}")) };
        let member = self.newlines(&format!("\n{indent}{}: {}", quoted(key), value(&unit, &indent)));
        let with_member = splice(&self.text, end..object.close, &format!("{member}{closing}"));
        match object.members.last() {
            Some(last) if !self.has_trailing_comma(last.value.end..object.close) => {
                splice(&with_member, last.value.end..last.value.end, ",")
            }
            _ => with_member,
        }
    }

    fn has_trailing_comma(&self, range: Range<usize>) -> bool {
        self.trailing_commas.iter().any(|at| range.contains(at))
    }

    /// Line ends as the file has them.
    fn newlines(&self, text: &str) -> String {
        if self.text.contains("\r\n") { text.replace('\n', "\r\n") } else { text.to_owned() }
    }

    /// One step of indentation, as the file's first member has it.
    fn unit(&self) -> String {
        let start = self.plain.len() - self.plain.trim_start().len();
        let first = self.object(start).members.into_iter().next();
        let indent = first.filter(|first| self.begins_line(first.key_at));
        let indent = indent.map(|first| self.indent_at(first.key_at).to_owned()).unwrap_or_default();
        if indent.is_empty() { "  ".to_owned() } else { indent }
    }

    fn line_start(&self, at: usize) -> usize {
        self.text.get(..at).and_then(|before| before.rfind('\n')).map_or(0, |newline| newline + 1)
    }

    /// Whether nothing stands before it in its line.
    fn begins_line(&self, at: usize) -> bool {
        self.text.get(self.line_start(at)..at).is_some_and(|before| before.trim().is_empty())
    }

    /// White space at the beginning of the line.
    fn indent_at(&self, at: usize) -> &str {
        let line = self.text.get(self.line_start(at)..).unwrap_or_default();
        let blank = line.len() - line.trim_start_matches([' ', '\t']).len();
        line.get(..blank).unwrap_or_default()
    }

    /// The object that opens at `open`. The text is known to be JSON.
    fn object(&self, open: usize) -> Object {
        let bytes = self.plain.as_bytes();
        let mut members = Vec::new();
        let mut at = open + 1;
        loop {
            at = skip(bytes, at, |byte| byte.is_ascii_whitespace() || byte == b',');
            if bytes.get(at) != Some(&b'"') {
                return Object { members, close: at };
            }
            let key_at = at;
            let key_end = string_end(bytes, at);
            let key =
                serde_json::from_str(self.plain.get(key_at..key_end).unwrap_or_default()).unwrap_or_default();
            let start = skip(bytes, key_end, |byte| byte.is_ascii_whitespace() || byte == b':');
            at = value_end(bytes, start);
            members.push(Member { key, key_at, value: start..at });
        }
    }
}

fn only<'a>(object: &'a Object, key: &str) -> Result<Option<&'a Member>, JsoncError> {
    let mut found = object.members.iter().filter(|member| member.key == key);
    match (found.next(), found.next()) {
        (first, None) => Ok(first),
        _ => Err(JsoncError::Twice(key.to_owned())),
    }
}

fn splice(text: &str, range: Range<usize>, new: &str) -> String {
    [text.get(..range.start).unwrap_or_default(), new, text.get(range.end..).unwrap_or_default()].concat()
}

fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// An object over several lines, whose own line is indented by `base`.
fn render(entry: &[(&str, Value)], unit: &str, base: &str) -> String {
    let line = |(key, value): &(&str, Value)| {
        let value = match value {
            Value::Array(items) => {
                let items: Vec<String> = items.iter().map(Value::to_string).collect();
                format!("[{}]", items.join(", "))
            }
            other => other.to_string(),
        };
        format!("{base}{unit}{}: {value}", quoted(key))
    };
    let lines: Vec<String> = entry.iter().map(line).collect();
    format!("{{\n{}\n{base}}}", lines.join(",\n"))
}

fn skip(bytes: &[u8], from: usize, skipped: impl Fn(u8) -> bool) -> usize {
    let rest = bytes.get(from..).unwrap_or_default();
    from + rest.iter().position(|byte| !skipped(*byte)).unwrap_or(rest.len())
}

/// Behind the string that begins at `start`.
fn string_end(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// Behind the value that begins at `start`.
fn value_end(bytes: &[u8], start: usize) -> usize {
    let mut depth = 0usize;
    let mut at = start;
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'"' => at = string_end(bytes, at),
            b'{' | b'[' => {
                depth += 1;
                at += 1;
            }
            b'}' | b']' if depth > 0 => {
                depth -= 1;
                at += 1;
            }
            b'}' | b']' | b',' if depth == 0 => return at,
            byte if depth == 0 && byte.is_ascii_whitespace() => return at,
            _ => at += 1,
        }
        let closed = matches!(byte, b'"' | b'}' | b']');
        if depth == 0 && closed {
            return at;
        }
    }
    bytes.len()
}

struct Blank {
    plain: String,
    trailing_commas: Vec<usize>,
}

/// A copy of the same length without comments and trailing commas.
fn blank(text: &str, comments: bool) -> Result<Blank, JsoncError> {
    let bytes = text.as_bytes();
    let mut plain = bytes.to_vec();
    let mut trailing_commas = Vec::new();
    let mut comma = None;
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let end = match (byte, bytes.get(at + 1)) {
            (b'"', _) => {
                comma = None;
                string_end(bytes, at)
            }
            (b'/', Some(b'/' | b'*')) if !comments => {
                return Err(syntax(text, at, "a comment, which this program does not read"));
            }
            (b'/', Some(b'/')) => blanked(&mut plain, at, skip(bytes, at, |byte| byte != b'\n')),
            (b'/', Some(b'*')) => {
                let body = text.get(at + 2..).unwrap_or_default();
                let length = body.find("*/").ok_or_else(|| syntax(text, at, "a comment that never ends"))?;
                blanked(&mut plain, at, at + 2 + length + 2)
            }
            (b',', _) => {
                comma = Some(at);
                at + 1
            }
            (b'}' | b']', _) => {
                if let Some(comma) = comma.take().filter(|_| comments) {
                    blanked(&mut plain, comma, comma + 1);
                    trailing_commas.push(comma);
                }
                at + 1
            }
            (byte, _) => {
                if !byte.is_ascii_whitespace() {
                    comma = None;
                }
                at + 1
            }
        };
        at = end;
    }
    // Only whole characters were replaced, and by spaces.
    let plain = String::from_utf8(plain).map_err(|_| JsoncError::Unsafe)?;
    Ok(Blank { plain, trailing_commas })
}

fn blanked(plain: &mut [u8], from: usize, to: usize) -> usize {
    for byte in plain.iter_mut().take(to).skip(from).filter(|byte| !matches!(byte, b'\n' | b'\r')) {
        *byte = b' ';
    }
    to
}

fn syntax(text: &str, at: usize, what: &str) -> JsoncError {
    let before = text.get(..at).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    JsoncError::Syntax { line, column, what: what.to_owned() }
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
        let expected = "// mine\n{\n\t\"a\": 1.50, // note\n\t/* b */ \"servers\": {\n\t\t\"x\": {\"command\": \"}\"}, // last\n\t\t\"b\": {\n\t\t\t\"command\": \"/bin/bathy\",\n\t\t\t\"args\": [\"mcp\", \"-x\"]\n\t\t}\n\t},\n}\n";
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
            assert!(Document::parse(&changed, true).unwrap().get("servers", "b").is_some(), "{changed}");
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
        assert_eq!(place("{\"a\": 1"), (1, 7));
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
