//! Host names in one form only, so that equal names are equal text.

mod pattern;
#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::text::serde_as_text;

pub use pattern::{NamePattern, NamePatternError};

const MAX_NAME: usize = 253;
const MAX_LABEL: usize = 63;

/// What is wrong with a host name.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum HostNameError {
    /// Nothing.
    #[error("A host name is missing")]
    Empty,
    /// More than a DNS message can ask for.
    #[error("A host name of {0} characters is too long. The most is {MAX_NAME}")]
    Long(usize),
    /// Two dots in a row, or one at the beginning.
    #[error("A host name has nothing between two dots or before the first")]
    EmptyLabel {
        /// Where, in bytes.
        at: usize,
    },
    /// A part that is too long.
    #[error("A part of a host name has {length} characters. The most between two dots is {MAX_LABEL}")]
    LongLabel {
        /// Where it begins, in bytes.
        at: usize,
        /// Its length.
        length: usize,
    },
    /// Something that looks like a letter, or is one elsewhere.
    #[error(
        "{character:?} cannot be in a host name. Write an international name in its ASCII form, which begins with xn--"
    )]
    NotAscii {
        /// Where, in bytes.
        at: usize,
        /// The character.
        character: char,
    },
    /// Something that no host name has.
    #[error("{character:?} cannot be in a host name. It has letters, digits, hyphens, underscores and dots")]
    Character {
        /// Where, in bytes.
        at: usize,
        /// The character.
        character: char,
    },
    /// A hyphen at an end.
    #[error("A part of a host name begins or ends with a hyphen")]
    Hyphen {
        /// Where the part begins, in bytes.
        at: usize,
    },
    /// What many programs take for an address.
    #[error(
        "{0:?} is an address and not a host name: programs read a number at the end as IPv4. Write all four numbers in decimal without leading zeros, such as 192.168.1.7"
    )]
    Address(String),
}

impl HostNameError {
    /// Where it went wrong, in bytes from the beginning of the name.
    pub const fn at(&self) -> usize {
        match self {
            Self::Empty | Self::Long(_) | Self::Address(_) => 0,
            Self::EmptyLabel { at }
            | Self::LongLabel { at, .. }
            | Self::NotAscii { at, .. }
            | Self::Character { at, .. }
            | Self::Hyphen { at } => *at,
        }
    }
}

/// A host name: lower case, ASCII, no dot at the end, and nothing that anybody could take for an address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostName(String);

impl HostName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for HostName {
    type Err = HostNameError;

    fn from_str(text: &str) -> Result<Self, HostNameError> {
        let name = text.strip_suffix('.').unwrap_or(text);
        if text.is_empty() {
            return Err(HostNameError::Empty);
        }
        if let Some((at, character)) = name.char_indices().find(|(_, character)| !is_allowed(*character)) {
            return Err(if character.is_ascii() {
                HostNameError::Character { at, character }
            } else {
                HostNameError::NotAscii { at, character }
            });
        }
        if name.len() > MAX_NAME {
            return Err(HostNameError::Long(name.len()));
        }
        let mut at = 0;
        for label in name.split('.') {
            check_label(label, at)?;
            at += label.len() + 1;
        }
        let lower = name.to_ascii_lowercase();
        if lower.rsplit('.').next().is_some_and(is_number) {
            return Err(HostNameError::Address(text.to_owned()));
        }
        Ok(Self(lower))
    }
}

fn is_allowed(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '-' | '_' | '.')
}

fn check_label(label: &str, at: usize) -> Result<(), HostNameError> {
    if label.is_empty() {
        return Err(HostNameError::EmptyLabel { at });
    }
    if label.len() > MAX_LABEL {
        return Err(HostNameError::LongLabel { at, length: label.len() });
    }
    if label.starts_with('-') || label.ends_with('-') {
        return Err(HostNameError::Hyphen { at });
    }
    Ok(())
}

/// Whether a last label makes the whole an IPv4 address for browsers and the C library.
fn is_number(label: &str) -> bool {
    label.bytes().all(|byte| byte.is_ascii_digit())
        || label.strip_prefix("0x").is_some_and(|hex| hex.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

impl fmt::Display for HostName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

serde_as_text!(HostName);
