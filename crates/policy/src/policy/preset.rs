//! Presets: what decides where no rule matches.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::Target;
use crate::rule::RemoteAddress;
use crate::suggest::Hint;
use crate::text::serde_as_text;

/// What decides where no rule matches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Preset {
    /// The sandbox has no network.
    None,
    /// Public addresses, but no other resolvers than the gateway's.
    #[default]
    Public,
    /// Nothing is allowed but what rules allow.
    AllowList,
    /// Public and private addresses, other resolvers included. What must be named (the host, loopback, metadata
    /// services) and what no ordinary server has (link-local, multicast and special-purpose addresses) still needs
    /// a rule.
    Open,
}

/// A text that is not the name of a preset.
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
    /// The name of the preset in options and files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Public => "public",
            Self::AllowList => "allow-list",
            Self::Open => "open",
        }
    }

    pub(super) fn admits(self, remote: RemoteAddress) -> bool {
        match self {
            Self::None | Self::AllowList => false,
            Self::Public => Target::Public.admits(remote),
            Self::Open => Target::Public.admits(remote) || Target::Private.admits(remote),
        }
    }

    /// Whether names are resolved that no rule matches.
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
