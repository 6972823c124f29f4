//! Tables of text: columns as wide as their widest cell.

use std::io::{self, IsTerminal};

use unicode_width::UnicodeWidthStr;

use crate::ui::colour::Colour;
use crate::ui::{escape, terminal};

const GAP: usize = 2;

/// The alignment of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Left,
    Right,
}

/// The colour of a cell, if it has one.
pub type CellColour = fn(&str) -> Option<Colour>;

/// A table being filled.
#[derive(Debug)]
pub struct Table {
    columns: Vec<(&'static str, Side)>,
    rows: Vec<Vec<String>>,
    /// A column, and the colour of its cells.
    colours: Option<(&'static str, CellColour)>,
}

impl Table {
    /// A table with these headings.
    pub fn new(columns: &[(&'static str, Side)]) -> Self {
        Self { columns: columns.to_vec(), rows: Vec::new(), colours: None }
    }

    /// Colours the cells of a column where standard output is a terminal that wants colours.
    #[must_use]
    pub fn coloured(mut self, heading: &'static str, colour: CellColour) -> Self {
        self.colours = Some((heading, colour));
        self
    }

    /// Adds a row. Cells may come from a guest: they are escaped here.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.iter().map(|cell| escape::word(cell)).collect());
    }

    /// Leaves out these columns, the first one first, until the others fit into this many cells of a terminal. Without a width
    /// all remain.
    #[must_use]
    pub fn fit(mut self, cells: Option<usize>, least_important: &[&str]) -> Self {
        let Some(cells) = cells else { return self };
        for name in least_important {
            let needed: usize = self.widths().iter().map(|width| width + GAP).sum();
            if needed <= cells + GAP {
                break;
            }
            if let Some(index) = self.columns.iter().position(|(heading, _)| heading == name) {
                self.columns.remove(index);
                self.rows.iter_mut().for_each(|row| drop(row.remove(index)));
            }
        }
        self
    }

    /// The lines of the table, headings first.
    pub fn lines(&self) -> Vec<String> {
        let (headings, widths) = (self.headings(), self.widths());
        std::iter::once(&headings).chain(&self.rows).map(|row| self.line(row, &widths)).collect()
    }

    fn headings(&self) -> Vec<String> {
        self.columns.iter().map(|(heading, _)| (*heading).to_owned()).collect()
    }

    fn widths(&self) -> Vec<usize> {
        let headings = self.headings();
        let widest = |column: usize| {
            let cells = std::iter::once(&headings).chain(&self.rows).filter_map(|row| row.get(column));
            cells.map(|cell| cell.width()).max().unwrap_or_default()
        };
        (0..self.columns.len()).map(widest).collect()
    }

    fn line(&self, row: &[String], widths: &[usize]) -> String {
        let mut line = String::new();
        for (index, ((cell, wanted), (heading, side))) in
            row.iter().zip(widths).zip(&self.columns).enumerate()
        {
            if index > 0 {
                line.push_str(&" ".repeat(GAP));
            }
            let padding = " ".repeat(wanted.saturating_sub(cell.width()));
            let colour = self.colours.filter(|(column, _)| column == heading).and_then(|(_, of)| of(cell));
            let cell = colour.map_or_else(|| cell.clone(), |colour| colour.paint(cell).to_string());
            match side {
                Side::Left => line.extend([cell.as_str(), &padding]),
                Side::Right => line.extend([padding.as_str(), &cell]),
            }
        }
        line.truncate(line.trim_end().len());
        line
    }
}

/// The width of the terminal on standard output. Lines in files and pipes have no limit.
pub fn output_width() -> Option<usize> {
    io::stdout().is_terminal().then(|| terminal::size().columns.into())
}

/// Cuts `text` to `limit` characters, with an ellipsis if something is left out.
pub fn cut(text: &str, limit: usize) -> String {
    if text.chars().nth(limit).is_none() {
        return text.to_owned();
    }
    text.chars().take(limit.saturating_sub(1)).chain(['…']).collect()
}

/// A number of bytes with a unit, such as `12.5 MiB`.
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
    fn columns_that_do_not_fit_are_left_out_by_importance() {
        let table = || {
            let mut table =
                Table::new(&[("NAME", Side::Left), ("IMAGE", Side::Left), ("COMMAND", Side::Left)]);
            table.row(["web".to_owned(), "default".to_owned(), "sleep 100".to_owned()]);
            table
        };
        let least = ["IMAGE", "COMMAND"];
        let headings = |cells| table().fit(cells, &least).lines().remove(0);
        assert_eq!(headings(None), "NAME  IMAGE    COMMAND");
        assert_eq!(headings(Some(24)), "NAME  IMAGE    COMMAND", "4 + 2 + 7 + 2 + 9");
        assert_eq!(headings(Some(23)), "NAME  COMMAND");
        assert_eq!(headings(Some(14)), "NAME");
        assert_eq!(headings(Some(1)), "NAME", "what is important stays");
        assert_eq!(table().fit(Some(23), &least).lines(), ["NAME  COMMAND", "web   sleep 100"]);
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
