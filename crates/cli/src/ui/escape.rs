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

/// The longest sequence that is taken for a colour: two of 24 bits, and some attributes.
const LONGEST_SEQUENCE: usize = 64;
/// Undoes all attributes of text.
const PLAIN: &str = "\u{1b}[0m";

/// Whether an attribute leaves text visible: all but 8, which conceals it. Within a colour an 8 is a number of one.
fn is_harmless(sequence: &str) -> bool {
    let numbers = sequence.trim_start_matches("\u{1b}[");
    let is_colour = numbers.split(';').any(|number| matches!(number, "38" | "48" | "58"));
    is_colour || numbers.split(';').all(|number| number.trim_start_matches('0') != "8")
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
    /// The beginning of what may become a colour.
    sequence: String,
    /// Whether the last colour has to be undone at the end.
    is_coloured: bool,
}

impl Stream {
    /// A fresh stream.
    pub fn new(returns: Returns) -> Self {
        Self { returns, begun: Vec::new(), held_return: false, sequence: String::new(), is_coloured: false }
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
        self.end_sequence(&mut out);
        let begun = std::mem::take(&mut self.begun);
        self.strangers(&begun, &mut out);
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

    /// Takes a character that belongs to a colour or another attribute of text (SGR): the only sequence of a terminal that passes,
    /// since it changes nothing but what the guest itself writes. What turns out to be another sequence is shown.
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
                self.sequence.clear();
                true
            }
            _ => {
                self.end_sequence(out);
                // It may be the beginning of the next one.
                c == '\u{1b}' && self.takes_colour(c, out)
            }
        }
    }

    /// Shows a sequence that is no colour.
    fn end_sequence(&mut self, out: &mut String) {
        for c in std::mem::take(&mut self.sequence).chars() {
            if c.is_control() { out.extend(c.escape_unicode()) } else { out.push(c) }
        }
    }

    fn strangers(&mut self, bytes: &[u8], out: &mut String) {
        if !bytes.is_empty() {
            self.end_sequence(out);
        }
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
    fn colours_pass_however_they_are_cut_and_end_with_the_stream() {
        let coloured = "a\u{1b}[1;31mred\u{1b}[38;2;8;8;8mgrey".as_bytes();
        for size in 1..=coloured.len() {
            let shown = in_chunks(coloured, size, Returns::Pass);
            assert_eq!(shown, "a\u{1b}[1;31mred\u{1b}[38;2;8;8;8mgrey\u{1b}[0m", "in chunks of {size}");
        }
        assert_eq!(in_chunks(b"\x1b[32mgreen\x1b[0m", 3, Returns::Show), "\u{1b}[32mgreen\u{1b}[0m");
    }

    #[test]
    fn c1_what_only_begins_like_a_colour_is_shown() {
        for (hostile, shown) in [
            (&b"\x1b[8mhidden"[..], "\\u{1b}[8mhidden"),
            (b"\x1b[1;08mhidden", "\\u{1b}[1;08mhidden"),
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
