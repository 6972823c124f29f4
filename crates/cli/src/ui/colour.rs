//! Colours of our own output, on terminals that want them.

use std::env;
use std::fmt::{self, Display};
use std::io::{self, IsTerminal};

/// A colour, by its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colour {
    Good,
    Odd,
    Bad,
}

/// Text in a colour, for standard output.
pub struct Coloured<T> {
    text: T,
    code: Option<u8>,
}

impl Colour {
    /// `text` in this colour if standard output is a terminal and the caller does not refuse colours (`NO_COLOR`).
    pub fn paint<T: Display>(self, text: T) -> Coloured<T> {
        let refused = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let is_wanted = io::stdout().is_terminal() && !refused;
        Coloured { text, code: is_wanted.then(|| self.code()) }
    }

    fn code(self) -> u8 {
        match self {
            Self::Good => 32,
            Self::Odd => 33,
            Self::Bad => 31,
        }
    }
}

impl<T: Display> Display for Coloured<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code {
            Some(code) => write!(out, "\u{1b}[{code}m{}\u{1b}[0m", self.text),
            None => self.text.fmt(out),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_undone_and_absent_where_they_are_not_wanted() {
        assert_eq!(
            Coloured { text: "ok", code: Some(Colour::Good.code()) }.to_string(),
            "\u{1b}[32mok\u{1b}[0m"
        );
        assert_eq!(Coloured { text: "ok", code: None }.to_string(), "ok");
    }
}
