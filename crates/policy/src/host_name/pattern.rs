//! Patterns: one host name, or all names below one.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use super::{HostName, HostNameError};
use crate::text::serde_as_text;

/// Why a text is not a name pattern.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum NamePatternError {
    /// The pattern is a star and nothing else.
    #[error("A star alone is not a name. Write public or any for everything of that kind, or *.example.org")]
    Star,
    /// The star is not the whole first label.
    #[error(
        "{text:?} has a star that is not the whole first part. Write *.example.org for every name below it"
    )]
    Misplaced {
        /// The pattern as written.
        text: String,
        /// The offset of the star in bytes.
        at: usize,
    },
    /// The rest is not a host name; its offset in bytes follows.
    #[error("{0}")]
    Name(HostNameError, usize),
}

impl NamePatternError {
    /// The offset of the error in bytes, from the start of the pattern.
    pub const fn at(&self) -> usize {
        match self {
            Self::Star => 0,
            Self::Misplaced { at, .. } => *at,
            Self::Name(error, before) => error.at() + *before,
        }
    }
}

/// A name, or `*.` and a name for everything below it at any depth, without the name itself.
///
/// The suffix may be a single label, since private networks have domains such as `*.internal`. A star alone is
/// refused: the targets `public` and `any` match every name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NamePattern {
    /// Only this name, none below it.
    Exact(HostName),
    /// Every name below this one, without the name itself.
    Below(HostName),
}

impl NamePattern {
    /// Whether the pattern matches a name.
    pub fn matches(&self, name: &HostName) -> bool {
        match self {
            Self::Exact(exact) => exact == name,
            Self::Below(suffix) => {
                name.as_str().strip_suffix(suffix.as_str()).is_some_and(|rest| rest.ends_with('.'))
            }
        }
    }
}

impl FromStr for NamePattern {
    type Err = NamePatternError;

    fn from_str(text: &str) -> Result<Self, NamePatternError> {
        if matches!(text, "*" | "*.") {
            return Err(NamePatternError::Star);
        }
        let (rest, before) = text.strip_prefix("*.").map_or((text, 0), |rest| (rest, 2));
        if let Some(star) = rest.find('*') {
            return Err(NamePatternError::Misplaced { text: text.to_owned(), at: star + before });
        }
        let name = rest.parse().map_err(|error| NamePatternError::Name(error, before))?;
        Ok(if before == 0 { Self::Exact(name) } else { Self::Below(name) })
    }
}

impl fmt::Display for NamePattern {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(name) => write!(out, "{name}"),
            Self::Below(suffix) => write!(out, "*.{suffix}"),
        }
    }
}

serde_as_text!(NamePattern);
