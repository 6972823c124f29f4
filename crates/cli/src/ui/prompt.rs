//! The prompt of `bathy repl`: reads lines until they are a complete cell.

use std::error::Error;
use std::io::{self, IsTerminal, Write};

use bathy_spec::paths::Paths;
use rustyline::config::Configurer;
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{Editor, Result as EditResult};

use crate::commands::repl::Conversation;
use crate::ui::output;

const PROMPT: &str = ">>> ";
const CONTINUATION: &str = "... ";
/// The history file, in the state folder.
const HISTORY: &str = "repl_history";
const HISTORY_SIZE: usize = 5000;
/// Words that leave the prompt, as Python's own do.
const LEAVE: [&str; 4] = ["exit", "exit()", "quit", "quit()"];

/// Refuses a prompt without a terminal.
pub fn check() -> Result<(), Box<dyn Error>> {
    if io::stdin().is_terminal() && io::stdout().is_terminal() {
        return Ok(());
    }
    Err("The prompt needs a terminal. Use `bathy repl run NAME FILE`, or - for standard input".into())
}

/// Reads cells and runs them until the caller leaves.
pub fn talk(mut conversation: Conversation) -> Result<u8, Box<dyn Error>> {
    let history = Paths::of_user()?.state.join(HISTORY);
    let mut editor = Editor::<(), FileHistory>::new()?;
    editor.set_max_history_size(HISTORY_SIZE)?;
    editor.set_history_ignore_space(true);
    // The history does not exist before the first use.
    let _ = editor.load_history(&history);
    greet(&conversation);
    loop {
        match read_cell(&mut editor) {
            Ok(cell) if LEAVE.contains(&cell.trim()) => break,
            Ok(cell) if cell.trim().is_empty() => {}
            Ok(cell) => {
                editor.add_history_entry(cell.trim_end())?;
                // Saved after each line, so that a crash loses nothing. A full disk is not a reason to stop.
                let _ = editor.append_history(&history);
                if let Err(error) = conversation.run(cell) {
                    output::failure(error.as_ref());
                    if !conversation.goes_on() {
                        return Ok(crate::OUR_FAILURE);
                    }
                }
            }
            Err(ReadlineError::Interrupted) => output::note("Ctrl-D exits"),
            Err(ReadlineError::Signal(_)) => {}
            Err(ReadlineError::Eof) => break,
            Err(error) => return Err(error.into()),
        }
    }
    let name = conversation.name();
    output::note(format_args!(
        "the REPL keeps its state. `bathy repl {name}` opens it again, `bathy repl rm {name}` removes it"
    ));
    Ok(0)
}

fn greet(conversation: &Conversation) {
    let (name, cells) = (conversation.name(), conversation.cells());
    let state = match cells {
        0 => "it is new".to_owned(),
        1 => "1 cell has run in it".to_owned(),
        cells => format!("{cells} cells have run in it"),
    };
    // Failures to show the greeting are ignored.
    let _ = writeln!(io::stderr(), "Python in the REPL {name} ({state}). Ctrl-C interrupts, Ctrl-D exits.");
}

/// Reads lines until they are a complete cell. An interrupt discards them.
fn read_cell(editor: &mut Editor<(), FileHistory>) -> EditResult<String> {
    let mut cell = editor.readline(PROMPT)?;
    while needs_more(&cell) {
        match editor.readline(CONTINUATION) {
            Ok(line) => {
                cell.push('\n');
                cell.push_str(&line);
            }
            Err(ReadlineError::Interrupted | ReadlineError::Eof) => return Ok(String::new()),
            Err(error) => return Err(error),
        }
    }
    Ok(cell)
}

/// Whether a Python cell continues on the next line: within brackets and long strings, after a backslash, and in a block,
/// which an empty line ends.
fn needs_more(cell: &str) -> bool {
    let ended = cell.rsplit('\n').next().is_some_and(|last| last.trim().is_empty());
    // Another language follows.
    if cell.starts_with("%%") {
        return !ended;
    }
    let scan = scan(cell);
    scan.open || scan.block && !ended
}

struct Scan {
    /// A bracket, a long string or a backslash is open at the end.
    open: bool,
    /// Some line begins a block, or decorates one.
    block: bool,
}

fn scan(cell: &str) -> Scan {
    let mut scan = Scan { open: false, block: false };
    let mut depth = 0usize;
    let mut quote: Option<Quote> = None;
    for line in cell.split('\n') {
        let outermost = depth == 0 && quote.is_none();
        let mut rest = line;
        let mut last = ' ';
        while let Some(c) = rest.chars().next() {
            let mut taken = c.len_utf8();
            match quote {
                Some(_) if c == '\\' => taken += rest.chars().nth(1).map_or(0, char::len_utf8),
                Some(open) if open.ends(rest) => {
                    taken = open.length();
                    quote = None;
                    last = c;
                }
                Some(_) => {}
                None if c == '#' => break,
                None if matches!(c, '"' | '\'') => {
                    let open = Quote::begin(rest, c);
                    taken = open.length();
                    quote = Some(open);
                }
                None => {
                    match c {
                        '(' | '[' | '{' => depth += 1,
                        ')' | ']' | '}' => depth = depth.saturating_sub(1),
                        _ => {}
                    }
                    if !c.is_whitespace() {
                        last = c;
                    }
                }
            }
            rest = rest.get(taken..).unwrap_or_default();
        }
        let continued = quote.is_none() && last == '\\';
        // A short string ends with its line; Python reports the error.
        quote = quote.filter(|open| open.long);
        scan.block |= depth == 0 && quote.is_none() && last == ':';
        scan.block |= outermost && line.starts_with('@');
        scan.open = depth > 0 || quote.is_some() || continued;
    }
    scan
}

/// A string that is open.
#[derive(Clone, Copy)]
struct Quote {
    mark: char,
    long: bool,
}

impl Quote {
    fn begin(text: &str, mark: char) -> Self {
        Self { mark, long: text.chars().take(3).filter(|c| *c == mark).count() == 3 }
    }

    fn length(self) -> usize {
        if self.long { 3 } else { 1 }
    }

    fn ends(self, text: &str) -> bool {
        text.chars().take(self.length()).filter(|c| *c == self.mark).count() == self.length()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_cells_run_at_once() {
        for cell in [
            "1 + 1",
            "",
            "x = {'a': 1}",
            "print('(')",
            "s = 'it is: '",
            "# a comment with ( and :",
            "x = 1  # note:",
            "a[1:2]",
            "if x: print(1)",
            "\"\"\"long\n(string\"\"\"",
            "f(\n1,\n)",
            "s = 'never closed",
            "x = '\\''",
            ")",
            "lambda: 3",
            "for i in x:\n    print(i)\n",
            "%%bash\nls )\"(\n",
            "%pip list",
            "x = '''a\\''''",
        ] {
            assert!(!needs_more(cell), "{cell:?}");
        }
    }

    #[test]
    fn what_is_begun_goes_on() {
        for cell in [
            "f(",
            "x = [1,\n2,",
            "\"\"\"long",
            "'''a\n''",
            "x = 1 + \\",
            "if x:",
            "if x:  # why",
            "def f(a: int):\n    return a",
            "@decorator",
            "class A:\n    x = {",
            "%%bash",
            "%%bash\nls",
            "try:\n    f()\nexcept E:",
            "d = {'ä': \"ö\",",
        ] {
            assert!(needs_more(cell), "{cell:?}");
        }
    }
}
