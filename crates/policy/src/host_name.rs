//! Host names in canonical form, so that equal names are equal strings.

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

/// Why a text is not a host name.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum HostNameError {
    /// The text is empty.
    #[error("A host name is missing")]
    Empty,
    /// The name is longer than DNS allows.
    #[error("A host name of {0} characters is too long. The most is {MAX_NAME}")]
    Long(usize),
    /// There are two dots in a row, or one at the start.
    #[error("A host name has nothing between two dots or before the first")]
    EmptyLabel {
        /// The offset in bytes.
        at: usize,
    },
    /// A label is too long.
    #[error("A part of a host name has {length} characters. The most between two dots is {MAX_LABEL}")]
    LongLabel {
        /// The offset of the label in bytes.
        at: usize,
        /// The length of the label in bytes.
        length: usize,
    },
    /// A character is not ASCII, such as a homograph or an unencoded international name.
    #[error(
        "{character:?} cannot be in a host name. Write an international name in its ASCII form, which begins with xn--"
    )]
    NotAscii {
        /// The offset in bytes.
        at: usize,
        /// The character that is not ASCII.
        character: char,
    },
    /// An ASCII character is not allowed in host names.
    #[error("{character:?} cannot be in a host name. It has letters, digits, hyphens, underscores and dots")]
    Character {
        /// The offset in bytes.
        at: usize,
        /// The character that is not allowed.
        character: char,
    },
    /// A label begins or ends with a hyphen.
    #[error("A part of a host name begins or ends with a hyphen")]
    Hyphen {
        /// The offset of the label in bytes.
        at: usize,
    },
    /// Many programs parse the text as an IPv4 address.
    #[error(
        "{0:?} is an address and not a host name: programs read a number at the end as IPv4. Write all four numbers in decimal without leading zeros, such as 192.168.1.7"
    )]
    Address(String),
}

impl HostNameError {
    /// The offset of the error in bytes, from the start of the name.
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

/// A host name: lower case, ASCII, without a trailing dot, and nothing that a program could parse as an address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostName(String);

impl HostName {
    /// The name as a string slice.
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

/// Whether a last label makes browsers and the C library parse the whole as an IPv4 address.
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
