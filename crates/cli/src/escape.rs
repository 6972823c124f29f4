//! Text from a guest, made harmless for a terminal.

/// Replaces control characters, except line breaks and tabs, by visible escapes.
pub fn text(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        // Direction overrides and the like can make a line look like another one.
        let invisible =
            matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if (c.is_control() && c != '\n' && c != '\t') || invisible {
            out.extend(c.escape_unicode());
        } else {
            out.push(c);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c1_terminal_escapes_do_not_get_through() {
        assert_eq!(text("a\u{1b}[2Jb\u{9b}1m\u{202e}c\n"), "a\\u{1b}[2Jb\\u{9b}1m\\u{202e}c\n");
    }
}
