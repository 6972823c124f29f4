//! An event as one line of text.
//!
//! ```text
//! {"seq":7,"prev":"<hash of line 6>", …the event…, "hash":"<BLAKE3 of all of this line before this field's comma>"}
//! ```
//!
//! The text is safe to print: it contains no terminal controls, and nothing that makes a line look like
//! another one.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::ser::{CharEscape, CompactFormatter, Formatter};
use thiserror::Error;

use crate::event::Event;

/// The maximum length of a line. An event with a command line from [`crate::event::argv`] is always shorter.
pub const MAX_LINE: usize = 128 * 1024;
/// The maximum length of a single string, as encoded in the line.
pub const MAX_STRING: usize = 8 * 1024;

/// The `prev` hash of the first line.
pub(crate) const GENESIS: &str = "0000000000000000000000000000000000000000000000000000000000000000";

const HASH_FIELD: &str = ",\"hash\":\"";
const HASH_LENGTH: usize = 64;
const HASH_END: &str = "\"}";

/// An event cannot be encoded.
#[derive(Debug, Error)]
pub enum LineError {
    #[error("An event of {0} bytes is too long for the audit log, whose limit is {MAX_LINE}")]
    TooLong(usize),
    /// The event cannot be serialised as JSON.
    #[error("Cannot write an event as JSON")]
    Json(#[from] serde_json::Error),
}

/// The position of a line in the chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChainLink {
    pub seq: u64,
    pub prev: String,
    pub hash: String,
}

/// The classification of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// A complete line whose content matches its hash.
    Whole(ChainLink),
    /// A line with an end, whose content does not match its hash.
    Changed,
    Other,
}

/// The beginning of the line with this number after the one with this hash.
pub(crate) fn beginning(seq: u64, prev: &str) -> String {
    format!("{{\"seq\":{seq},\"prev\":\"{prev}\"")
}

/// Appends a line to `out` and returns its hash.
pub(crate) fn encode(out: &mut Vec<u8>, seq: u64, prev: &str, event: &Event) -> Result<String, LineError> {
    let begin = out.len();
    out.extend_from_slice(beginning(seq, prev).as_bytes());
    let body = out.len();
    event.serialize(&mut serde_json::Serializer::with_formatter(&mut *out, Harmless::default()))?;
    // The event is a JSON object: its fields become fields of the line.
    out[body] = b',';
    out.pop();
    let hash = blake3::hash(&out[begin..]).to_hex().to_string();
    out.extend_from_slice(HASH_FIELD.as_bytes());
    out.extend_from_slice(hash.as_bytes());
    out.extend_from_slice(HASH_END.as_bytes());
    let length = out.len() - begin;
    if length > MAX_LINE {
        out.truncate(begin);
        return Err(LineError::TooLong(length));
    }
    out.push(b'\n');
    Ok(hash)
}

/// Classifies a line, without its line break.
pub(crate) fn shape(line: &[u8]) -> Shape {
    let Some((content, hash)) = split_hash(line) else { return Shape::Other };
    if blake3::hash(content).to_hex().as_bytes() != hash.as_bytes() {
        return Shape::Changed;
    }
    let Some((seq, prev)) = split_beginning(content) else { return Shape::Other };
    Shape::Whole(ChainLink { seq, prev: prev.to_owned(), hash: hash.to_owned() })
}

fn split_hash(line: &[u8]) -> Option<(&[u8], &str)> {
    let line = line.strip_suffix(HASH_END.as_bytes())?;
    let (rest, hash) = line.split_at_checked(line.len().checked_sub(HASH_LENGTH)?)?;
    Some((rest.strip_suffix(HASH_FIELD.as_bytes())?, hex(hash)?))
}

fn split_beginning(content: &[u8]) -> Option<(u64, &str)> {
    let rest = content.strip_prefix(b"{\"seq\":")?;
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (seq, rest) = rest.split_at_checked(digits)?;
    let seq = str::from_utf8(seq).ok()?.parse().ok()?;
    let prev = rest.strip_prefix(b",\"prev\":\"")?.get(..HASH_LENGTH)?;
    Some((seq, hex(prev)?))
}

fn hex(bytes: &[u8]) -> Option<&str> {
    let lower = bytes.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if lower { str::from_utf8(bytes).ok() } else { None }
}

/// A JSON formatter that escapes text for terminals and cuts long strings.
#[derive(Default)]
struct Harmless {
    /// How much of the present string was written.
    written: usize,
    /// The length of the present string.
    length: usize,
    cut: bool,
}

impl Harmless {
    fn piece(&mut self, out: &mut (impl Write + ?Sized), piece: &str, length: usize) -> io::Result<()> {
        self.length += length;
        self.cut |= self.written + piece.len() > MAX_STRING;
        if self.cut {
            return Ok(());
        }
        self.written += piece.len();
        out.write_all(piece.as_bytes())
    }
}

impl Formatter for Harmless {
    fn begin_string<W: Write + ?Sized>(&mut self, writer: &mut W) -> io::Result<()> {
        *self = Self::default();
        CompactFormatter.begin_string(writer)
    }

    fn write_string_fragment<W: Write + ?Sized>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        if fragment.len() <= MAX_STRING - self.written
            && fragment.bytes().all(|byte| (0x20..0x7f).contains(&byte))
        {
            return self.piece(writer, fragment, fragment.len());
        }
        for c in fragment.chars() {
            if has_effect(c) {
                let mut units = [0; 2];
                let escaped: String =
                    c.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")).collect();
                self.piece(writer, &escaped, c.len_utf8())?;
            } else {
                self.piece(writer, c.encode_utf8(&mut [0; 4]), c.len_utf8())?;
            }
        }
        Ok(())
    }

    fn write_char_escape<W: Write + ?Sized>(&mut self, writer: &mut W, escape: CharEscape) -> io::Result<()> {
        let mut text = Vec::with_capacity(6);
        CompactFormatter.write_char_escape(&mut text, escape)?;
        self.piece(writer, str::from_utf8(&text).map_err(io::Error::other)?, 1)
    }

    fn end_string<W: Write + ?Sized>(&mut self, writer: &mut W) -> io::Result<()> {
        if self.cut {
            write!(writer, "… ({} bytes in total)", self.length)?;
        }
        CompactFormatter.end_string(writer)
    }
}

/// Terminal controls, unusual line separators, and characters that reorder or hide their neighbours.
fn has_effect(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{061c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Actor, What};

    fn event(cause: &str) -> Event {
        let actor = Actor { uid: 1, user: None, pid: 2, program: "bathy stop".into() };
        Event {
            time_unix_ns: 5,
            sandbox: None,
            name: None,
            actor,
            what: What::SandboxEnded { cause: cause.into() },
        }
    }

    fn encoded(cause: &str) -> String {
        let mut out = vec![];
        encode(&mut out, 1, GENESIS, &event(cause)).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_line_is_json_and_comes_back() {
        let line = encoded("done");
        assert!(line.starts_with(&beginning(1, GENESIS)));
        assert_eq!(serde_json::from_str::<Event>(&line).unwrap(), event("done"));
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!((value["seq"].as_u64(), value["event"].as_str()), (Some(1), Some("sandbox_ended")));
        let Shape::Whole(link) = shape(line.trim_end().as_bytes()) else { panic!("{line}") };
        assert_eq!((link.seq, link.prev.as_str()), (1, GENESIS));
    }

    #[test]
    fn c1_hostile_text_has_no_effect_on_who_shows_the_line() {
        let hostile = "\u{1b}[2J\u{9b}31m\u{7f}\r\n\0\"\\,\"hash\":\"\u{202e}\u{2066}\u{200b}\u{2028}\u{feff}\u{e0041}ü…";
        let line = encoded(hostile);
        let (text, end) = line.split_at(line.len() - 1);
        assert_eq!(end, "\n");
        assert!(!text.chars().any(has_effect), "{text}");
        assert!(text.contains("ü…"));
        assert_eq!(serde_json::from_str::<Event>(text).unwrap(), event(hostile));
        assert!(matches!(shape(text.as_bytes()), Shape::Whole(_)));
    }

    #[test]
    fn every_character_has_no_effect() {
        for block in (0..=0x10_ffff_u32).collect::<Vec<_>>().chunks(1000) {
            let all: String = block.iter().filter_map(|code| char::from_u32(*code)).collect();
            let line = encoded(&all);
            assert!(!line.trim_end_matches('\n').chars().any(has_effect));
            assert_eq!(serde_json::from_str::<Event>(&line).unwrap(), event(&all));
        }
    }

    #[test]
    fn long_strings_are_cut_and_say_how_long_they_were() {
        for long in [
            "x".repeat(1 << 20),
            "\u{1}".repeat(1 << 20),
            "\u{202e}".repeat(1 << 20),
            "ü\u{9b}x".repeat(1 << 18),
        ] {
            let line = encoded(&long);
            assert!(line.len() < MAX_STRING + 500, "{}", line.len());
            assert!(line.contains(&format!("… ({} bytes in total)", long.len())));
            assert!(serde_json::from_str::<Event>(&line).is_ok());
        }
    }

    #[test]
    fn the_worst_command_line_fits() {
        let arguments: Vec<Vec<u8>> = (0..5000).map(|_| vec![0x1b]).collect();
        for arguments in [arguments, vec![vec![0xff; 10_000]], vec![vec![1; 10_000]], vec![vec![]; 10_000]] {
            let crate::Argv { argv, bytes, digest } = crate::event::argv(&arguments);
            let long = || "\u{202e}".repeat(10_000);
            let what = What::ExecStarted {
                exec: long(),
                argv,
                user: long(),
                job: Some(1),
                terminal: true,
                argv_bytes: bytes,
                argv_digest: digest,
            };
            let actor = Actor { uid: 1, user: Some(long()), pid: 1, program: long() };
            let event =
                Event { time_unix_ns: u64::MAX, sandbox: Some(long()), name: Some(long()), actor, what };
            let mut out = vec![];
            encode(&mut out, u64::MAX, GENESIS, &event).unwrap();
            assert!(out.len() <= MAX_LINE);
        }
    }

    #[test]
    fn an_event_with_too_many_strings_is_refused() {
        let what = What::ExecStarted {
            exec: "1".into(),
            argv: vec!["x".into(); 100_000],
            user: "u".into(),
            job: None,
            terminal: false,
            argv_bytes: 0,
            argv_digest: None,
        };
        let mut out = b"before".to_vec();
        let refused = encode(&mut out, 1, GENESIS, &Event { what, ..event("") });
        assert!(matches!(refused, Err(LineError::TooLong(_))));
        assert_eq!(out, b"before");
    }
}
