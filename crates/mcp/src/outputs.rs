//! Outputs that were too long for their answers, kept in memory until newer ones need the space.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rmcp::model::Resource;

/// The most of one output, in bytes.
pub const ONE: usize = 4 << 20;
/// The most of all outputs together, in bytes. The least recently used are evicted.
const ALL: usize = 64 << 20;
/// The most that one resource has, in bytes: some clients take no answer of more than a mebibyte, escapes included.
pub const PART: usize = 384 << 10;
/// Comes before the offset of a part in an address.
const FROM: &str = "?from=";
/// The beginning of every address.
pub const SCHEME: &str = "bathysphere://output/";

#[derive(Clone, Debug)]
struct Entry {
    uri: String,
    title: String,
    text: String,
}

/// A part of an output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputPart {
    /// The text, which begins and ends with whole characters.
    pub text: String,
    /// Where it begins, in bytes.
    pub from: usize,
    /// Where the next part begins, in bytes, if there is one.
    pub next: Option<usize>,
    /// The length of the whole, in bytes.
    pub total: usize,
}

/// The outputs, the least recently used first.
#[derive(Debug, Default)]
pub struct Outputs {
    kept: Mutex<VecDeque<Entry>>,
}

impl Outputs {
    /// Keeps a text and returns its resource. `kind` is the stream, such as `stdout`.
    pub fn keep(&self, id: &str, kind: &str, tool: &str, text: String) -> Resource {
        let entry =
            Entry { uri: format!("{SCHEME}{id}/{kind}"), title: format!("{kind} of {tool} {id}"), text };
        let resource = describe(&entry);
        let mut kept = self.lock();
        kept.push_back(entry);
        let mut total: usize = kept.iter().map(|entry| entry.text.len()).sum();
        while total > ALL
            && let Some(oldest) = kept.pop_front()
        {
            total -= oldest.text.len();
        }
        resource
    }

    /// The part of an output that an address names, and the address of the next part.
    pub fn read(&self, uri: &str) -> Option<(OutputPart, Option<String>)> {
        let (output, from) = uri.split_once(FROM).unwrap_or((uri, "0"));
        let from: usize = from.parse().ok()?;
        let part = self.part(output, from, PART)?;
        // Addresses that the server gives out begin with a whole character.
        if part.from != from {
            return None;
        }
        let next = part.next.map(|next| format!("{output}{FROM}{next}"));
        Some((part, next))
    }

    /// At most `most` bytes of an output, from the character on that the byte at `from` belongs to.
    pub fn part(&self, output: &str, from: usize, most: usize) -> Option<OutputPart> {
        let mut kept = self.lock();
        let name = |uri: &str| uri == output || uri.strip_prefix(SCHEME) == Some(output);
        let place = kept.iter().position(|entry| name(&entry.uri))?;
        let entry = kept.remove(place)?;
        let whole = &entry.text;
        let from = whole.floor_char_boundary(from);
        let end = whole.floor_char_boundary(from.saturating_add(most));
        let text = whole.get(from..end).unwrap_or_default().to_owned();
        let part = OutputPart { text, from, next: (end < whole.len()).then_some(end), total: whole.len() };
        kept.push_back(entry);
        Some(part)
    }

    /// All outputs, the newest first.
    pub fn list(&self) -> Vec<Resource> {
        self.lock().iter().rev().map(describe).collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Entry>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn describe(entry: &Entry) -> Resource {
    Resource::new(entry.uri.clone(), entry.title.clone())
        .with_title(entry.title.clone())
        .with_description(
            "The whole output of a call, as far as it was stored. It is evicted when newer outputs need the space.",
        )
        .with_mime_type("text/plain")
        .with_size(u64::try_from(entry.text.len()).unwrap_or(u64::MAX))
}

/// A name for the outputs of one call that cannot be guessed.
pub fn new_id() -> std::io::Result<String> {
    let mut bytes = [0u8; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_are_read_by_their_address() {
        let outputs = Outputs::default();
        let link = outputs.keep("1f", "stdout", "run_code", "hello".into());
        assert_eq!((link.uri.as_str(), link.size), ("bathysphere://output/1f/stdout", Some(5)));
        let whole = OutputPart { text: "hello".into(), from: 0, next: None, total: 5 };
        assert_eq!(outputs.read(&link.uri), Some((whole, None)));
        assert_eq!(outputs.read("bathysphere://output/1f/stderr"), None);
        assert_eq!(outputs.list(), [link]);
    }

    #[test]
    fn a_long_output_is_read_in_parts() {
        let outputs = Outputs::default();
        let whole = "äb".repeat(PART);
        let mut uri = outputs.keep("1f", "stdout", "t", whole.clone()).uri;
        let mut read = String::new();
        loop {
            let (part, next) = outputs.read(&uri).unwrap();
            assert!(part.text.len() <= PART && !part.text.is_empty());
            read.push_str(&part.text);
            assert_eq!(part.total, whole.len());
            let Some(next) = next else { break };
            uri = next;
        }
        assert!(read == whole);
        for from in ["1", "-1", "x", "", "99999999999999999999", "9999999"] {
            assert_eq!(outputs.read(&format!("bathysphere://output/1f/stdout{FROM}{from}")), None, "{from}");
        }
    }

    #[test]
    fn a_part_has_whole_characters_from_anywhere() {
        let outputs = Outputs::default();
        outputs.keep("1f", "stdout", "t", "äöü".into());
        let part = |output: &str, from, most| {
            outputs.part(output, from, most).map(|part| (part.text, part.next, part.total))
        };
        assert_eq!(part("1f/stdout", 3, 3), Some(("ö".to_owned(), Some(4), 6)));
        assert_eq!(part("bathysphere://output/1f/stdout", 4, 100), Some(("ü".to_owned(), None, 6)));
        assert_eq!(part("1f/stdout", usize::MAX, usize::MAX), Some((String::new(), None, 6)));
        assert_eq!(part("1f/stderr", 0, 1), None);
    }

    #[test]
    fn the_least_recently_used_outputs_are_evicted() {
        let outputs = Outputs::default();
        for number in 0..16 {
            outputs.keep(&number.to_string(), "stdout", "t", "x".repeat(ONE));
        }
        assert!(outputs.read("bathysphere://output/0/stdout").is_some());
        outputs.keep("16", "stdout", "t", "x".into());
        assert!(outputs.read("bathysphere://output/0/stdout").is_some());
        assert!(outputs.read("bathysphere://output/1/stdout").is_none());
        assert_eq!(outputs.list().len(), 16);
    }
}
