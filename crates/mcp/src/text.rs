//! Text of a guest, made harmless and short for a model or a person.

/// The longest text in an answer, in bytes.
pub const INLINE: usize = 16 * 1024;

/// Removes what is not meant to be read: escape sequences of terminals, control characters, and characters that turn,
/// hide or smuggle others. Line ends become `\n`.
pub fn clean(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut characters = text.chars().peekable();
    while let Some(c) = characters.next() {
        match c {
            '\n' | '\t' => out.push(c),
            '\r' => {
                // A program that overwrites its line, such as for progress, writes several lines here.
                if characters.peek() != Some(&'\n') {
                    out.push('\n');
                }
            }
            '\u{1b}' => skip_escape(&mut characters),
            '\u{9b}' => skip_parameters(&mut characters),
            _ if is_hidden(c) => {}
            _ => out.push(c),
        }
    }
    out
}

fn skip_escape(characters: &mut std::iter::Peekable<std::str::Chars<'_>>) {
    match characters.peek() {
        Some('[') => {
            characters.next();
            skip_parameters(characters);
        }
        // Strings to the terminal: up to BEL or ST, and never over the end of a line, so that one that is not ended
        // hides no more than that.
        Some(']' | 'P' | '^' | '_' | 'X') => {
            while let Some(c) = characters.next_if(|c| *c != '\n') {
                if c == '\u{7}' || c == '\u{9c}' {
                    break;
                }
                if c == '\u{1b}' {
                    characters.next_if_eq(&'\\');
                    break;
                }
            }
        }
        // Intermediate characters and a final one.
        Some(c) if c.is_ascii_graphic() || *c == ' ' => {
            while characters.next_if(|c| (' '..='/').contains(c)).is_some() {}
            characters.next_if(|c| ('0'..='~').contains(c));
        }
        _ => {}
    }
}

/// Parameters and the final character of a control sequence.
fn skip_parameters(characters: &mut std::iter::Peekable<std::str::Chars<'_>>) {
    while characters.next_if(|c| (' '..='?').contains(c)).is_some() {}
    characters.next_if(|c| ('@'..='~').contains(c));
}

/// Controls, direction changes, and characters without a look of their own.
fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{180e}' | '\u{200b}' | '\u{200e}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
        || matches!(c, '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}')
        || matches!(c, '\u{e0000}'..='\u{e007f}')
}

/// A cleaned text on one line, cut to `most` characters.
pub fn line(text: &str, most: usize) -> String {
    let one: String = clean(text).split_whitespace().collect::<Vec<_>>().join(" ");
    match one.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", one.get(..end).unwrap_or_default()),
        None => one,
    }
}

/// A text whose middle may have been left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The beginning and the end, with a line between them.
    pub text: String,
    /// The length of the beginning, in bytes.
    pub head: usize,
    /// How many bytes were left out.
    pub left_out: usize,
}

/// Keeps the beginning and the end of what is longer than `most` bytes, with a line between them that counts what is left out.
pub fn cut(text: &str, most: usize) -> Cut {
    if text.len() <= most {
        return Cut { text: text.to_owned(), head: text.len(), left_out: 0 };
    }
    let half = most / 2;
    let head = text.get(..text.floor_char_boundary(half)).unwrap_or_default();
    let tail = text.get(text.ceil_char_boundary(text.len() - half)..).unwrap_or_default();
    // Whole lines, where lines are not too long for that.
    let head = head.rfind('\n').filter(|end| *end > half / 2).and_then(|end| head.get(..end)).unwrap_or(head);
    let tail = match tail.find('\n').filter(|start| *start < half / 2) {
        Some(start) => tail.get(start + 1..).unwrap_or_default(),
        None => tail,
    };
    let left_out = text.len() - head.len() - tail.len();
    let text = format!("{head}\n[… {left_out} bytes left out …]\n{tail}");
    Cut { text, head: head.len(), left_out }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_taken_out() {
        assert_eq!(clean("\u{1b}[1;31mred\u{1b}[0m and \u{9b}2Jplain"), "red and plain");
        assert_eq!(clean("\u{1b}]0;title\u{7}a\u{1b}]8;;http://x\u{1b}\\b"), "ab");
        assert_eq!(clean("\u{1b}(Bx\u{1b}=y\u{1b}"), "xy");
        assert_eq!(clean("a\u{8}\u{0}b\u{7f}c\u{200b}\u{202e}d\u{e0041}"), "abcd");
        assert_eq!(clean("50 %\r100 %\r\ndone\n\tü"), "50 %\n100 %\ndone\n\tü");
    }

    #[test]
    fn an_unfinished_sequence_hides_its_line_only() {
        assert_eq!(clean("\u{1b}]0;never ended\nnext"), "\nnext");
        assert_eq!(clean("\u{1b}[12;3\nnext"), "\nnext");
    }

    #[test]
    fn long_text_keeps_its_beginning_and_its_end() {
        let text: String = (0..10_000).map(|number| format!("line {number}\n")).collect();
        let short = cut(&text, INLINE);
        assert!(short.text.starts_with("line 0\n") && short.text.ends_with("line 9999\n"));
        assert!(short.text.len() <= INLINE + 64, "{}", short.text.len());
        assert!(short.text.contains(&format!("[… {} bytes left out …]", short.left_out)));
        let shown = short.text.len() - format!("\n[… {} bytes left out …]\n", short.left_out).len();
        assert_eq!(shown + short.left_out, text.len());
        assert_eq!(cut("abc", 3), Cut { text: "abc".into(), head: 3, left_out: 0 });
    }

    #[test]
    fn a_cut_never_splits_a_character() {
        for length in 10..20 {
            let short = cut(&"ü".repeat(100), length);
            assert!(short.left_out > 0 && !short.text.contains('\u{fffd}'));
        }
    }

    #[test]
    fn a_line_is_one_line() {
        assert_eq!(line("a\n\n b\tc", 10), "a b c");
        assert_eq!(line("abcdef", 3), "abc…");
    }
}
