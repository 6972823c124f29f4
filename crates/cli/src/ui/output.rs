//! Saying things: a reader that has gone away is no reason to panic.

use std::error::Error;
use std::fmt::Display;
use std::io::{self, IsTerminal, Write};

use bathy_manager::Manager;
use serde::Serialize;

use crate::ui::escape;

/// One line of results.
pub fn line(text: impl Display) -> io::Result<()> {
    writeln!(io::stdout(), "{text}")
}

/// Results as one JSON document.
pub fn json(document: &impl Serialize) -> Result<(), Box<dyn Error>> {
    line(escape::json(&serde_json::to_string_pretty(document)?))?;
    Ok(())
}

/// One line about ourselves, for whoever still listens.
pub fn note(text: impl Display) {
    note_after("", text);
}

/// The same, after what ends a line that somebody else began.
pub fn note_after(before: &str, text: impl Display) {
    let _ = writeln!(io::stderr(), "{before}bathy: {text}");
}

/// A remark about results that are empty, for a person: programs see that there are none.
pub fn nothing(text: impl Display) {
    if io::stderr().is_terminal() {
        note(text);
    }
}

/// What a manager has to say about what it did.
pub fn warnings(manager: &mut Manager) {
    for warning in manager.take_warnings() {
        note(format_args!("warning: {}", escape::text(&warning)));
    }
}

/// A failure that others do not stop at.
pub fn failure(error: &(dyn Error + 'static)) {
    note(escape::text(&bathy_protocol::chain(error)));
}
