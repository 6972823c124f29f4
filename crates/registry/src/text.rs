//! Text of others in messages of ours.

/// At most `most` characters of `text`, harmless for a terminal and on one line.
pub fn plain(text: &str, most: usize) -> String {
    let mut shown: String = text.chars().take(most).map(harmless).collect();
    if text.chars().nth(most).is_some() {
        shown.push('…');
    }
    shown
}

fn harmless(character: char) -> char {
    // Also what reorders text on the screen.
    let reorders = matches!(character, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}');
    if character.is_control() || reorders { '\u{fffd}' } else { character }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_and_length_are_bounded() {
        assert_eq!(plain("a\x1b[31mb\r\nc", 20), "a\u{fffd}[31mb\u{fffd}\u{fffd}c");
        assert_eq!(plain("abc\u{202e}d", 3), "abc…");
        assert_eq!(plain("abc", 3), "abc");
        assert_eq!(plain("\u{202e}", 3), "\u{fffd}");
    }
}
