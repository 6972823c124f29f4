//! Saying things: a reader that has gone away is no reason to panic.

use std::fmt::Display;
use std::io::{self, Write};

/// One line of results.
pub fn line(text: impl Display) -> io::Result<()> {
    writeln!(io::stdout(), "{text}")
}

/// One line about ourselves, for whoever still listens.
pub fn note(text: impl Display) {
    let _ = writeln!(io::stderr(), "bathy: {text}");
}
