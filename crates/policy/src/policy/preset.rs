//! What holds where no rule does.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::Target;
use crate::rule::Location;
use crate::suggest::Hint;
use crate::text::serde_as_text;

/// What holds where no rule does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Preset {
    /// No network at all.
    None,
    /// Public addresses, but no other resolvers than the gateway's.
    #[default]
    Public,
    /// Nothing.
    AllowList,
    /// Public and private addresses, other resolvers included. What must be named (the host, loopback, metadata services)
    /// and what no ordinary server has (link-local, multicast and special-purpose addresses) still needs a rule.
    Open,
}

/// Not a preset.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{0:?} is not a preset. There are none, public, allow-list and open{1}")]
pub struct PresetError(String, Hint);

const PRESETS: [(&str, Preset); 4] = [
    ("none", Preset::None),
    ("public", Preset::Public),
    ("allow-list", Preset::AllowList),
    ("open", Preset::Open),
];

impl Preset {
    /// As it is written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Public => "public",
            Self::AllowList => "allow-list",
            Self::Open => "open",
        }
    }

    pub(super) fn admits(self, location: Location) -> bool {
        match self {
            Self::None | Self::AllowList => false,
            Self::Public => Target::Public.admits(location),
            Self::Open => Target::Public.admits(location) || Target::Private.admits(location),
        }
    }

    /// Whether names are asked for that no rule is about.
    pub(super) const fn resolves(self) -> bool {
        matches!(self, Self::Public | Self::Open)
    }
}

impl FromStr for Preset {
    type Err = PresetError;

    fn from_str(text: &str) -> Result<Self, PresetError> {
        let found = PRESETS.iter().find(|(name, _)| *name == text).map(|(_, preset)| *preset);
        found.ok_or_else(|| PresetError(text.to_owned(), Hint::of(text, &PRESETS.map(|(name, _)| name))))
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

serde_as_text!(Preset);
