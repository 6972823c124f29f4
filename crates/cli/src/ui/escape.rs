//! Text from a guest, made harmless for a terminal.

use std::fmt::Write;

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

/// A JSON document with every character escaped that a terminal might obey: in JSON they stand in strings only.
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

/// Controls of terminals, line ends that only some programs know, and characters that turn or hide their neighbours.
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

/// What a carriage return does on its way to a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Returns {
    /// It passes: a program's own progress line may overwrite itself.
    Pass,
    /// It is shown, except before a line break, where it is left out: a line of a log cannot hide its beginning.
    Show,
}

/// The same for a stream of bytes that comes in chunks: characters split over chunks stay whole, bytes that are no
/// characters are shown as such.
#[derive(Debug)]
pub struct Stream {
    returns: Returns,
    /// The beginning of a character whose rest has not come yet.
    begun: Vec<u8>,
    held_return: bool,
}

impl Stream {
    /// A fresh stream.
    pub fn new(returns: Returns) -> Self {
        Self { returns, begun: Vec::new(), held_return: false }
    }

    /// What may be shown of `bytes`.
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
                    self.strangers(wrong, &mut out);
                    rest = after;
                }
            }
        }
        out
    }

    /// What was held back, at the end.
    pub fn finish(&mut self) -> String {
        let mut out = String::new();
        let begun = std::mem::take(&mut self.begun);
        self.strangers(&begun, &mut out);
        self.settle(&mut out);
        out
    }

    fn characters(&mut self, text: &str, out: &mut String) {
        for c in text.chars() {
            if c == '\n' {
                self.held_return = false;
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

    fn strangers(&mut self, bytes: &[u8], out: &mut String) {
        for byte in bytes {
            self.settle(out);
            // Writing to a string cannot fail.
            let _ = write!(out, "\\x{byte:02x}");
        }
    }

    /// Shows a carriage return that turned out not to end a line.
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
