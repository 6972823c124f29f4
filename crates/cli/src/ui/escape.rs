//! Escapes text from a guest for a terminal.

use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering};

/// Replaces control characters, except line breaks and tabs, by visible escapes.
pub fn text(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if has_effect(c) && c != '\n' && c != '\t' {
            out.extend(c.escape_unicode());
        } else {
            out.push(c);
        }
    }
    out
}

/// As [`text`], on one line: for cells of tables and parts of sentences.
pub fn word(text: &str) -> String {
    self::text(text).replace('\n', "\\n").replace('\t', "\\t")
}

/// Escapes every character of a JSON document that a terminal might interpret. In JSON they occur in strings only.
pub fn json(document: &str) -> String {
    let mut out = String::with_capacity(document.len());
    for c in document.chars() {
        if has_effect(c) && c != '\n' {
            for unit in c.encode_utf16(&mut [0; 2]) {
                // Writing to a string cannot fail.
                let _ = write!(out, "\\u{unit:04x}");
            }
        } else {
            out.push(c);
        }
    }
    out
}

/// Control characters, line ends that only some programs know, and characters that reorder or hide their neighbours.
fn has_effect(c: char) -> bool {
    c.is_control()
        || is_direction(c)
        || matches!(c, '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{2029}' | '\u{2060}'..='\u{206f}')
        || matches!(c, '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Direction overrides can make a line look like another one.
fn is_direction(c: char) -> bool {
    matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// The longest sequence that is accepted as a colour: two 24-bit colours and some attributes.
const LONGEST_SEQUENCE: usize = 64;
/// Resets all attributes of text.
const PLAIN: &str = "\u{1b}[0m";

/// Whether a guest's attributes are in force on a terminal.
static COLOURED: AtomicBool = AtomicBool::new(false);

/// What has to come before text of ours, so that a guest's attributes do not hide it.
pub fn reset() -> &'static str {
    if COLOURED.swap(false, Ordering::Relaxed) { PLAIN } else { "" }
}

/// Whether all attributes change only how the guest's own text looks, and are undone by a reset: weight, style and colours.
/// Not 8, which conceals text, nor 10 to 20, which choose fonts and character sets.
fn is_harmless(sequence: &str) -> bool {
    let mut numbers = sequence.trim_start_matches("\u{1b}[").split(';');
    while let Some(text) = numbers.next() {
        let number = if text.is_empty() { Some(0) } else { text.parse::<u8>().ok() };
        match number {
            Some(0..=7 | 9 | 21..=37 | 39..=47 | 49 | 53 | 55 | 59 | 90..=97 | 100..=107) => {}
            // `38;5;n` and `38;2;r;g;b`: their numbers are colours.
            Some(38 | 48 | 58) => {
                let parts = match numbers.next() {
                    Some("5") => 1,
                    Some("2") => 3,
                    _ => return false,
                };
                let colours = numbers.by_ref().take(parts).filter(|part| part.parse::<u8>().is_ok());
                if colours.count() < parts {
                    return false;
                }
            }
            _ => return false,
        }
    }
    true
}

/// How carriage returns are written to a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Returns {
    /// Unchanged, so that a program's progress line can overwrite itself.
    Pass,
    /// Escaped, or left out before a line break, so that a line of a log cannot hide its beginning.
    Show,
}

/// Escapes a stream of bytes that arrives in chunks. Characters split over chunks are joined, invalid bytes are shown in
/// hexadecimal.
#[derive(Debug)]
pub struct Stream {
    returns: Returns,
    /// The beginning of a character that is not complete yet.
    begun: Vec<u8>,
    held_return: bool,
    /// The beginning of a sequence that may be a colour.
    sequence: String,
    /// Whether attributes have to be reset at the end.
    is_coloured: bool,
}

impl Stream {
    pub fn new(returns: Returns) -> Self {
        Self { returns, begun: Vec::new(), held_return: false, sequence: String::new(), is_coloured: false }
    }

    /// Escapes the next chunk, except for what may continue in a later one.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        let mut input = std::mem::take(&mut self.begun);
        input.extend_from_slice(bytes);
        let mut out = String::with_capacity(input.len());
        let mut rest = input.as_slice();
        while !rest.is_empty() {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    self.characters(valid, &mut out);
                    break;
                }
                Err(error) => {
                    let (valid, wrong) = rest.split_at(error.valid_up_to());
                    self.characters(std::str::from_utf8(valid).unwrap_or_default(), &mut out);
                    let Some(length) = error.error_len() else {
                        self.begun = wrong.to_vec();
                        break;
                    };
                    let (wrong, after) = wrong.split_at(length);
                    self.invalid(wrong, &mut out);
                    rest = after;
                }
            }
        }
        out
    }

    /// Ends attributes where the stream may end without notice, such as after each record of a log.
    pub fn pause(&mut self) -> &'static str {
        if std::mem::take(&mut self.is_coloured) { PLAIN } else { "" }
    }

    /// Returns what was held back, at the end of the stream.
    pub fn finish(&mut self) -> String {
        let mut out = String::new();
        self.end_sequence(&mut out);
        let begun = std::mem::take(&mut self.begun);
        self.invalid(&begun, &mut out);
        self.settle(&mut out);
        if std::mem::take(&mut self.is_coloured) {
            out.push_str(PLAIN);
        }
        out
    }

    fn characters(&mut self, text: &str, out: &mut String) {
        for c in text.chars() {
            if self.takes_colour(c, out) {
                continue;
            }
            if c == '\n' {
                self.held_return = false;
                // A line of a log does not colour what is printed between it and the next.
                if self.returns == Returns::Show && std::mem::take(&mut self.is_coloured) {
                    out.push_str(PLAIN);
                }
            } else {
                self.settle(out);
            }
            match c {
                '\n' | '\t' => out.push(c),
                '\r' if self.returns == Returns::Pass => out.push(c),
                '\r' => self.held_return = true,
                c if c.is_control() || is_direction(c) => out.extend(c.escape_unicode()),
                c => out.push(c),
            }
        }
    }

    /// Handles a character of a colour or another attribute of text (SGR). No other sequence is passed on, because only these
    /// affect nothing but the guest's own text. A sequence that turns out to be another one is escaped.
    fn takes_colour(&mut self, c: char, out: &mut String) -> bool {
        match (self.sequence.as_str(), c) {
            ("", '\u{1b}') => {
                self.settle(out);
                self.sequence.push(c);
                true
            }
            ("", _) => false,
            ("\u{1b}", '[') => {
                self.sequence.push(c);
                true
            }
            (sequence, '0'..='9' | ';') if sequence.len() > 1 && sequence.len() < LONGEST_SEQUENCE => {
                self.sequence.push(c);
                true
            }
            (sequence, 'm') if sequence.len() > 1 && is_harmless(sequence) => {
                out.push_str(sequence);
                out.push(c);
                self.is_coloured = !matches!(sequence, "\u{1b}[" | "\u{1b}[0");
                COLOURED.fetch_or(self.is_coloured, Ordering::Relaxed);
                self.sequence.clear();
                true
            }
            _ => {
                self.end_sequence(out);
                // The escape character may begin the next sequence.
                c == '\u{1b}' && self.takes_colour(c, out)
            }
        }
    }

    /// Escapes a sequence that is not a colour.
    fn end_sequence(&mut self, out: &mut String) {
        for c in std::mem::take(&mut self.sequence).chars() {
            if c.is_control() { out.extend(c.escape_unicode()) } else { out.push(c) }
        }
    }

    fn invalid(&mut self, bytes: &[u8], out: &mut String) {
        if !bytes.is_empty() {
            self.end_sequence(out);
        }
        for byte in bytes {
            self.settle(out);
            // Writing to a string cannot fail.
            let _ = write!(out, "\\x{byte:02x}");
        }
    }

    /// Escapes a carriage return that did not end a line.
    fn settle(&mut self, out: &mut String) {
        if std::mem::take(&mut self.held_return) {
            out.push_str("\\r");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_chunks(bytes: &[u8], size: usize, returns: Returns) -> String {
        let mut stream = Stream::new(returns);
        let mut out: String = bytes.chunks(size).map(|chunk| stream.push(chunk)).collect();
        out.push_str(&stream.finish());
        out
    }

    #[test]
    fn c1_terminal_escapes_do_not_get_through() {
        assert_eq!(text("a\u{1b}[2Jb\u{9b}1m\u{202e}c\n"), "a\\u{1b}[2Jb\\u{9b}1m\\u{202e}c\n");
        assert_eq!(word("a\nb\tc"), "a\\nb\\tc");
    }

    #[test]
    fn c1_json_on_a_terminal_is_harmless_and_means_the_same() {
        let hostile = "\u{1b}[2J\u{9b}1m\u{7f}\u{202e}\u{200b}\u{e0041}\n\t深";
        let document = serde_json::to_string(hostile).unwrap();
        let shown = json(&document);
        assert!(shown.chars().all(|c| !has_effect(c)), "{shown:?}");
        assert_eq!(serde_json::from_str::<String>(&shown).unwrap(), hostile);
    }

    #[test]
    fn c1_no_escape_sequence_survives_the_stream_however_it_is_cut() {
        let hostile = b"\x1b]0;title\x07 \xc2\x9b2J \x9b1m \x08\x7f plain\n";
        for size in 1..=hostile.len() {
            let shown = in_chunks(hostile, size, Returns::Pass);
            assert!(shown.chars().all(|c| c == '\n' || !c.is_control()), "{shown:?}");
            assert_eq!(
                shown, "\\u{1b}]0;title\\u{7} \\u{9b}2J \\x9b1m \\u{8}\\u{7f} plain\n",
                "in chunks of {size}"
            );
        }
    }

    #[test]
    fn colours_pass_however_they_are_cut_and_end_with_the_stream() {
        let coloured = "a\u{1b}[1;31mred\u{1b}[38;2;8;8;8mgrey".as_bytes();
        for size in 1..=coloured.len() {
            let shown = in_chunks(coloured, size, Returns::Pass);
            assert_eq!(shown, "a\u{1b}[1;31mred\u{1b}[38;2;8;8;8mgrey\u{1b}[0m", "in chunks of {size}");
        }
        assert_eq!(in_chunks(b"\x1b[32mgreen\x1b[0m", 3, Returns::Show), "\u{1b}[32mgreen\u{1b}[0m");
    }

    #[test]
    fn c1_a_colour_ends_where_the_stream_may_end_and_before_text_of_ours() {
        let mut stream = Stream::new(Returns::Show);
        assert_eq!(stream.push(b"\x1b[30;40mhidden"), "\u{1b}[30;40mhidden");
        assert_eq!(reset(), PLAIN, "before a message of ours");
        assert_eq!(stream.pause(), PLAIN);
        assert_eq!(stream.pause(), "", "once");
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn c1_a_colour_ends_with_its_line_in_a_log() {
        let colour = b"\x1b[31mred\nnext\n";
        assert_eq!(in_chunks(colour, 3, Returns::Show), "\u{1b}[31mred\u{1b}[0m\nnext\n");
        assert_eq!(in_chunks(colour, 3, Returns::Pass), "\u{1b}[31mred\nnext\n\u{1b}[0m");
    }

    #[test]
    fn c1_what_only_begins_like_a_colour_is_shown() {
        for (hostile, shown) in [
            (&b"\x1b[8mhidden"[..], "\\u{1b}[8mhidden"),
            (b"\x1b[1;08mhidden", "\\u{1b}[1;08mhidden"),
            (b"\x1b[8;38;5;1mx", "\\u{1b}[8;38;5;1mx"),
            (b"\x1b[38;5;1;8mx", "\\u{1b}[38;5;1;8mx"),
            (b"\x1b[48;2;1;2;3;08mx", "\\u{1b}[48;2;1;2;3;08mx"),
            (b"\x1b[38;8mx", "\\u{1b}[38;8mx"),
            (b"\x1b[38;5mx", "\\u{1b}[38;5mx"),
            (b"\x1b[11mx", "\\u{1b}[11mx"),
            (b"\x1b[38;5;999mx", "\\u{1b}[38;5;999mx"),
            (b"\x1b[9999999mx", "\\u{1b}[9999999mx"),
            (b"\x1b[2J", "\\u{1b}[2J"),
            (b"\x1b[31", "\\u{1b}[31"),
            (b"\x1b\x1b[2K", "\\u{1b}\\u{1b}[2K"),
            (b"\x1b[1\xffm", "\\u{1b}[1\\xffm"),
            (b"\x1b[?25l", "\\u{1b}[?25l"),
            (b"\x1b[1\nm", "\\u{1b}[1\nm"),
        ] {
            for size in 1..=hostile.len() {
                assert_eq!(in_chunks(hostile, size, Returns::Pass), shown, "in chunks of {size}");
            }
        }
        let endless = [&b"\x1b["[..], &b"1;".repeat(100_000)].concat();
        assert!(in_chunks(&endless, 7, Returns::Pass).starts_with("\\u{1b}[1;1"));
    }

    #[test]
    fn characters_stay_whole_however_they_are_cut() {
        let words = "köln 深海 🫧 \u{200d}end".as_bytes();
        for size in 1..=words.len() {
            assert_eq!(in_chunks(words, size, Returns::Pass).as_bytes(), words, "in chunks of {size}");
        }
    }

    #[test]
    fn a_character_that_never_ends_is_shown_as_bytes() {
        assert_eq!(in_chunks(b"a\xe6\xb7", 1, Returns::Pass), "a\\xe6\\xb7");
        assert_eq!(in_chunks(b"\xff\xfe ok", 2, Returns::Pass), "\\xff\\xfe ok");
    }

    #[test]
    fn carriage_returns_pass_or_are_shown() {
        let bytes = b"one\r\ntwo\rthree\r";
        for size in 1..=bytes.len() {
            assert_eq!(in_chunks(bytes, size, Returns::Pass), "one\r\ntwo\rthree\r");
            assert_eq!(in_chunks(bytes, size, Returns::Show), "one\ntwo\\rthree\\r");
        }
    }
}
