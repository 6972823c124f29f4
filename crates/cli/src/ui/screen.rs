//! What `bathy top` draws: whole screens, as text.

use bathy_protocol::TerminalSize;

use crate::ui::table::cut;

/// A screen: a title, as many lines as fit, and a line about keys.
///
/// Every line is cleared to its end, and so is the rest of the screen: nothing of the previous screen remains, and the
/// terminal does not flicker.
pub fn draw(title: &str, lines: &[String], keys: &str, size: TerminalSize) -> String {
    let (rows, columns) = (usize::from(size.rows), usize::from(size.columns));
    let mut screen = String::from("\x1b[H");
    let room = rows.saturating_sub(3);
    let mut put = |line: &str, bold: bool| {
        let (on, off) = if bold { ("\x1b[1m", "\x1b[0m") } else { ("", "") };
        screen.push_str(&format!("{on}{}{off}\x1b[K\r\n", cut(line, columns)));
    };
    put(title, false);
    put("", false);
    // Headings, then as many as fit.
    for (index, line) in lines.iter().take(room).enumerate() {
        put(line, index == 0);
    }
    let hidden = lines.len().saturating_sub(room);
    let last = if hidden > 0 { format!("{keys}   ({hidden} more)") } else { keys.to_owned() };
    screen.push_str(&format!("\x1b[J\x1b[{rows};1H{}\x1b[K", cut(&last, columns)));
    screen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(count: usize) -> Vec<String> {
        (0..count).map(|number| format!("line {number}")).collect()
    }

    #[test]
    fn a_screen_fits_its_terminal() {
        let size = TerminalSize { rows: 6, columns: 10 };
        let screen = draw("a title that is too long", &lines(9), "q quits", size);
        assert_eq!(screen.matches("\r\n").count(), 5);
        assert!(screen.contains("a title t…"), "{screen:?}");
        assert!(screen.contains("line 2") && !screen.contains("line 3"), "{screen:?}");
        assert!(draw("", &lines(9), "q", TerminalSize { rows: 6, columns: 80 }).contains("(6 more)"));
    }

    #[test]
    fn a_terminal_without_room_is_no_reason_to_fail() {
        for rows in 0..4 {
            for columns in 0..3 {
                let screen = draw("title", &lines(3), "q quits", TerminalSize { rows, columns });
                assert!(screen.starts_with("\x1b[H"));
            }
        }
    }
}
