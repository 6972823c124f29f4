//! Reads the JSON of replies, strictly: what a driver sends must be JSON for any reader.

use std::ops::Index;

use super::Members;

/// A JSON value.
#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    /// `null`, and what an object does not have.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// Any number.
    Number(f64),
    /// A string.
    Text(String),
    /// An array.
    List(Vec<Json>),
    /// An object.
    Object(Members),
}

impl Json {
    /// The value that the whole text is.
    pub fn parse(text: &str) -> Option<Self> {
        let mut reader = Reader { rest: text };
        let value = reader.value()?;
        reader.rest.trim_start().is_empty().then_some(value)
    }

    /// The string this is.
    pub fn text(&self) -> &str {
        match self {
            Self::Text(text) => text,
            other => panic!("not a string: {other:?}"),
        }
    }

    /// The number this is.
    pub fn number(&self) -> f64 {
        match self {
            Self::Number(number) => *number,
            other => panic!("not a number: {other:?}"),
        }
    }

    /// The array this is.
    pub fn items(&self) -> &[Self] {
        match self {
            Self::List(items) => items,
            other => panic!("not an array: {other:?}"),
        }
    }

    /// The object this is.
    pub fn members(&self) -> &Members {
        match self {
            Self::Object(members) => members,
            other => panic!("not an object: {other:?}"),
        }
    }

    /// Whether an object has this member.
    pub fn has(&self, name: &str) -> bool {
        self.members().contains_key(name)
    }
}

impl Index<&str> for Json {
    type Output = Self;

    fn index(&self, name: &str) -> &Self {
        self.members().get(name).unwrap_or(&Self::Null)
    }
}

impl Index<usize> for Json {
    type Output = Self;

    fn index(&self, index: usize) -> &Self {
        &self.items()[index]
    }
}

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    /// Takes the token if it comes next.
    fn take(&mut self, token: &str) -> bool {
        self.rest = self.rest.trim_start();
        self.rest.strip_prefix(token).map(|rest| self.rest = rest).is_some()
    }

    fn value(&mut self) -> Option<Json> {
        if self.take("null") {
            Some(Json::Null)
        } else if self.take("true") {
            Some(Json::Bool(true))
        } else if self.take("false") {
            Some(Json::Bool(false))
        } else if self.take("\"") {
            self.string().map(Json::Text)
        } else if self.take("[") {
            let mut items = Vec::new();
            while !self.take("]") {
                if !items.is_empty() && !self.take(",") {
                    return None;
                }
                items.push(self.value()?);
            }
            Some(Json::List(items))
        } else if self.take("{") {
            let mut members = Members::new();
            while !self.take("}") {
                if !members.is_empty() && !self.take(",") || !self.take("\"") {
                    return None;
                }
                let name = self.string()?;
                if !self.take(":") || members.insert(name, self.value()?).is_some() {
                    return None;
                }
            }
            Some(Json::Object(members))
        } else {
            let end = self.rest.find(|c: char| !"+-.eE0123456789".contains(c)).unwrap_or(self.rest.len());
            let (number, rest) = self.rest.split_at(end);
            self.rest = rest;
            number.parse().ok().map(Json::Number)
        }
    }

    /// The rest of a string after its opening quote.
    fn string(&mut self) -> Option<String> {
        let mut text = String::new();
        loop {
            let end = self.rest.find(|c: char| c == '"' || c == '\\' || c < ' ')?;
            let (plain, rest) = self.rest.split_at(end);
            text.push_str(plain);
            self.rest = rest;
            if let Some(rest) = self.rest.strip_prefix('"') {
                self.rest = rest;
                return Some(text);
            }
            let escape = self.rest.strip_prefix('\\')?.chars().next()?;
            self.rest = &self.rest[1 + escape.len_utf8()..];
            text.push(match escape {
                '"' | '\\' | '/' => escape,
                'n' => '\n',
                't' => '\t',
                'r' => '\r',
                'b' => '\u{8}',
                'f' => '\u{c}',
                'u' => self.unicode()?,
                _ => return None,
            });
        }
    }

    /// The character of a `\u` escape; two of them for one beyond the first plane.
    fn unicode(&mut self) -> Option<char> {
        let first = self.unit()?;
        let code = if (0xd800..0xdc00).contains(&first) {
            self.rest = self.rest.strip_prefix("\\u")?;
            let second = self.unit()?;
            0x10000 + ((first - 0xd800) << 10) + second.checked_sub(0xdc00)?
        } else {
            first
        };
        char::from_u32(code)
    }

    fn unit(&mut self) -> Option<u32> {
        let digits = self.rest.get(..4)?;
        self.rest = &self.rest[4..];
        u32::from_str_radix(digits, 16).ok()
    }
}
