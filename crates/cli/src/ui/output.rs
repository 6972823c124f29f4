//! Output of results and messages. A closed pipe is not a reason to panic.

use std::error::Error;
use std::fmt::Display;
use std::io::{self, IsTerminal, Write};

use bathy_manager::Manager;
use serde::Serialize;

use crate::ui::escape;

/// Prints one line of results.
pub fn line(text: impl Display) -> io::Result<()> {
    writeln!(io::stdout(), "{text}")
}

/// Prints results as one JSON document.
pub fn json(document: &impl Serialize) -> Result<(), Box<dyn Error>> {
    line(escape::json(&serde_json::to_string_pretty(document)?))?;
    Ok(())
}

/// Prints a message on standard error. Failures are ignored.
pub fn note(text: impl Display) {
    note_after("", text);
}

/// As [`note`], after `before`, which may end a line that something else began.
pub fn note_after(before: &str, text: impl Display) {
    let _ = writeln!(io::stderr(), "{before}{}bathy: {text}", escape::reset());
}

/// Prints a message about empty results, on a terminal only: programs need none.
pub fn nothing(text: impl Display) {
    if io::stderr().is_terminal() {
        note(text);
    }
}

/// Prints the warnings of a manager.
pub fn warnings(manager: &mut Manager) {
    for warning in manager.take_warnings() {
        note(format_args!("warning: {}", escape::text(&warning)));
    }
}

/// Prints an error with its causes.
pub fn failure(error: &(dyn Error + 'static)) {
    note(escape::text(&bathy_protocol::chain(error)));
}
