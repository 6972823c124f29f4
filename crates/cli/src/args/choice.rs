//! Options that take one of a few names: completion offers the names, and help and errors keep their own wording.

use std::error::Error;
use std::ffi::OsStr;

use clap::builder::{PossibleValue, TypedValueParser};
use clap::{Arg, Command};

/// A parser, and the names that it accepts.
#[derive(Clone, Copy, Debug)]
pub struct Choice<T, E> {
    names: &'static [&'static str],
    parse: fn(&str) -> Result<T, E>,
}

/// Offers `names` for what `parse` reads. `parse` may accept other spellings as well.
pub const fn choice<T, E>(names: &'static [&'static str], parse: fn(&str) -> Result<T, E>) -> Choice<T, E> {
    Choice { names, parse }
}

impl<T, E> TypedValueParser for Choice<T, E>
where
    T: Clone + Send + Sync + 'static,
    E: Into<Box<dyn Error + Send + Sync + 'static>> + Clone + Send + Sync + 'static,
{
    type Value = T;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<T, clap::Error> {
        self.parse.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.names.iter().map(PossibleValue::new)))
    }
}
