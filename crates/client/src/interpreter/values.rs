//! Parses a guest's JSON without letting it choose how much memory that takes.
//!
//! Parsed JSON can take a hundred times the space of its text. So representations are first separated without
//! being parsed; text is accepted, and anything else only if it is short.

use std::fmt;

use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;

use super::{Bundle, CodeError, Omitted};

/// The most representations of one value.
const MAX_FORMS: usize = 64;
/// The longest representation that is not text, in bytes of JSON.
const MAX_FORM: usize = 256 << 10;
/// The longest metadata and the longest list of omissions of a value.
const MAX_ASIDE: usize = 32 << 10;
const MAX_ERROR: usize = 512 << 10;

/// The remaining JSON, other than text, that may be parsed for one cell.
#[derive(Debug)]
pub(crate) struct JsonBudget(usize);

impl Default for JsonBudget {
    fn default() -> Self {
        Self(1 << 20)
    }
}

/// Parses a value. A representation that is too long is left out and listed as omitted.
pub fn bundle(json: &[u8], budget: &mut JsonBudget) -> Result<Bundle, serde_json::Error> {
    let raw: RawBundle<'_> = serde_json::from_slice(json)?;
    let mut bundle = Bundle {
        omitted: aside::<Vec<Omitted>>(raw.omitted)?.unwrap_or_default(),
        metadata: aside(raw.metadata)?.unwrap_or_default(),
        ..Bundle::default()
    };
    for (mime, form) in raw.data.0 {
        let length = form.get().len();
        if form.get().starts_with('"') {
            bundle.data.insert(mime, Value::String(serde_json::from_str(form.get())?));
        } else if length > MAX_FORM.min(budget.0) {
            let bytes = u64::try_from(length).unwrap_or(u64::MAX);
            let reason =
                format!("larger than the limit: {MAX_FORM} bytes for one, and 1 MiB for all of a cell");
            bundle.omitted.push(Omitted { mime, bytes, reason });
        } else {
            budget.0 -= length;
            bundle.data.insert(mime, serde_json::from_str(form.get())?);
        }
    }
    Ok(bundle)
}

pub fn error(json: &[u8]) -> Result<CodeError, serde_json::Error> {
    if json.len() > MAX_ERROR {
        return Err(serde_json::Error::custom(format_args!("an error of {} bytes", json.len())));
    }
    serde_json::from_slice(json)
}

/// Parses metadata, unless it is unreasonably long.
fn aside<'a, T: Deserialize<'a>>(raw: Option<&'a RawValue>) -> Result<Option<T>, serde_json::Error> {
    raw.filter(|raw| raw.get().len() <= MAX_ASIDE).map(|raw| serde_json::from_str(raw.get())).transpose()
}

#[derive(Deserialize)]
struct RawBundle<'a> {
    #[serde(borrow)]
    data: Forms<'a>,
    #[serde(borrow, default)]
    metadata: Option<&'a RawValue>,
    #[serde(borrow, default)]
    omitted: Option<&'a RawValue>,
}

/// Representations that are not parsed yet.
struct Forms<'a>(Vec<(String, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Forms<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Each;
        impl<'de> Visitor<'de> for Each {
            type Value = Vec<(String, &'de RawValue)>;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("forms by their MIME type")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut forms = Vec::new();
                while let Some(form) = map.next_entry()? {
                    if forms.len() >= MAX_FORMS {
                        return Err(A::Error::custom(format_args!("a value in more than {MAX_FORMS} forms")));
                    }
                    forms.push(form);
                }
                Ok(forms)
            }
        }
        deserializer.deserialize_map(Each).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_taken_as_what_they_are() {
        let json = br#"{"data":{"text/plain":"a\n\u00e4","application/json":{"a":[1,null]}},"omitted":[{"mime":"x","bytes":5}]}"#;
        let bundle = bundle(json, &mut JsonBudget::default()).unwrap();
        assert_eq!(bundle.text("text/plain"), Some("a\nä"));
        assert_eq!(bundle.data["application/json"], serde_json::json!({"a": [1, null]}));
        assert_eq!(bundle.omitted[0].bytes, 5);
    }

    #[test]
    fn c1_json_that_would_take_a_hundred_times_its_length_is_not_built() {
        let objects = format!("[{}0]", "{\"\":0},".repeat(100_000));
        let json = format!(r#"{{"data":{{"application/json":{objects},"text/plain":"x"}}}}"#);
        let long = bundle(json.as_bytes(), &mut JsonBudget::default()).unwrap();
        assert_eq!(long.data.len(), 1);
        assert_eq!(long.omitted[0].bytes, objects.len() as u64);

        let short = format!("[{}0]", "{\"\":0},".repeat(20_000));
        let json = format!(r#"{{"data":{{"application/json":{short}}}}}"#);
        let mut budget = JsonBudget::default();
        let taken =
            (0..20).filter(|_| bundle(json.as_bytes(), &mut budget).unwrap().omitted.is_empty()).count();
        assert_eq!(taken, (1 << 20) / short.len());
    }

    #[test]
    fn c1_what_stands_beside_a_value_is_bounded_too() {
        let many = format!("[{}{{}}]", "{},".repeat(50_000));
        let json = format!(r#"{{"data":{{}},"omitted":{many},"metadata":{{"a":{many}}}}}"#);
        let bundle = bundle(json.as_bytes(), &mut JsonBudget::default()).unwrap();
        assert!(bundle.omitted.is_empty() && bundle.metadata.is_empty());
        let forms: Vec<String> = (0..100).map(|number| format!(r#""{number}":0"#)).collect();
        let json = format!(r#"{{"data":{{{}}}}}"#, forms.join(","));
        assert!(super::bundle(json.as_bytes(), &mut JsonBudget::default()).is_err());
        let error = format!(r#"{{"name":"E","value":"v","traceback":[{}""]}}"#, r#""","#.repeat(300_000));
        assert!(super::error(error.as_bytes()).is_err());
    }
}
