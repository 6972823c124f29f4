//! Tables of text: columns as wide as their widest cell.

use unicode::width;

use crate::ui::escape;

/// Space between columns.
const GAP: usize = 2;

/// How a column's cells stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// A table being filled.
#[derive(Debug)]
pub struct Table {
    columns: Vec<(&'static str, Side)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headings.
    pub fn new(columns: &[(&'static str, Side)]) -> Self {
        Self { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// Adds a row. Cells may come from a guest: they are escaped here.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.iter().map(|cell| escape::word(cell)).collect());
    }

    /// The lines of the table, headings first.
    pub fn lines(&self) -> Vec<String> {
        let headings: Vec<String> = self.columns.iter().map(|(heading, _)| (*heading).to_owned()).collect();
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|column| {
                let cells = std::iter::once(&headings).chain(&self.rows).filter_map(|row| row.get(column));
                cells.map(|cell| width(cell)).max().unwrap_or_default()
            })
            .collect();
        std::iter::once(&headings).chain(&self.rows).map(|row| self.line(row, &widths)).collect()
    }

    fn line(&self, row: &[String], widths: &[usize]) -> String {
        let mut line = String::new();
        for ((cell, wanted), (_, side)) in row.iter().zip(widths).zip(&self.columns) {
            if !line.is_empty() {
                line.push_str(&" ".repeat(GAP));
            }
            let padding = " ".repeat(wanted.saturating_sub(width(cell)));
            match side {
                Side::Left => line.extend([cell.as_str(), &padding]),
                Side::Right => line.extend([padding.as_str(), cell]),
            }
        }
        line.truncate(line.trim_end().len());
        line
    }
}

/// Cuts `text` to `limit` characters, with an ellipsis if something is left out.
pub fn cut(text: &str, limit: usize) -> String {
    if text.chars().nth(limit).is_none() {
        return text.to_owned();
    }
    text.chars().take(limit.saturating_sub(1)).chain(['…']).collect()
}

/// Bytes in a unit that keeps them short, such as `12.5 MiB`.
pub fn bytes(count: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    let name = units.get(unit).copied().unwrap_or_default();
    if unit == 0 { format!("{count} {name}") } else { format!("{value:.1} {name}") }
}

mod unicode {
    /// How many cells a terminal uses for `text`: wide for the scripts and pictures that are, as far as ranges tell.
    pub fn width(text: &str) -> usize {
        text.chars().map(|c| if is_wide(c) { 2 } else { usize::from(!is_combining(c)) }).sum()
    }

    fn is_combining(c: char) -> bool {
        matches!(c, '\u{300}'..='\u{36f}' | '\u{200b}'..='\u{200d}' | '\u{20d0}'..='\u{20ff}' | '\u{fe00}'..='\u{fe0f}')
    }

    fn is_wide(c: char) -> bool {
        matches!(
            c,
            '\u{1100}'..='\u{115f}'
                | '\u{2e80}'..='\u{a4cf}'
                | '\u{ac00}'..='\u{d7a3}'
                | '\u{f900}'..='\u{faff}'
                | '\u{fe30}'..='\u{fe6f}'
                | '\u{ff00}'..='\u{ff60}'
                | '\u{ffe0}'..='\u{ffe6}'
                | '\u{1f300}'..='\u{1faff}'
                | '\u{20000}'..='\u{3fffd}'
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&[("NAME", Side::Left), ("CPU", Side::Right), ("STATUS", Side::Left)]);
        table.row(["web".to_owned(), "100 %".to_owned(), "running".to_owned()]);
        table.row(["深海".to_owned(), "2 %".to_owned(), String::new()]);
        assert_eq!(table.lines(), ["NAME    CPU  STATUS", "web   100 %  running", "深海    2 %"]);
    }

    #[test]
    fn an_empty_table_is_its_headings() {
        assert_eq!(Table::new(&[("ID", Side::Left), ("N", Side::Right)]).lines(), ["ID  N"]);
    }

    #[test]
    fn c1_cells_cannot_break_out_of_their_row() {
        let mut table = Table::new(&[("COMMAND", Side::Left)]);
        table.row(["sh\n\u{1b}[2Jfake".to_owned()]);
        assert_eq!(table.lines(), ["COMMAND", "sh\\n\\u{1b}[2Jfake"]);
    }

    #[test]
    fn long_texts_are_cut() {
        assert_eq!(cut("short", 5), "short");
        assert_eq!(cut("longer", 5), "long…");
    }

    #[test]
    fn bytes_are_short() {
        for (count, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.5 KiB"),
            (1024 * 1024 - 1, "1.0 MiB"),
            (5 << 30, "5.0 GiB"),
            (u64::MAX, "16777216.0 TiB"),
        ] {
            assert_eq!(bytes(count), text);
        }
    }
}
