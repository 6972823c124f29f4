//! Choosing the manifest for this machine.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Descriptor, Index, ManifestError, media, or_default};
use crate::text::plain;

/// How many platforms an error lists.
const SHOWN: usize = 16;

/// What an image is built for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Platform {
    pub os: String,
    pub architecture: String,
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "String::is_empty")]
    pub variant: String,
}

impl Default for Platform {
    /// The platform of guests.
    fn default() -> Self {
        Self::new("linux", "amd64", "")
    }
}

impl Platform {
    pub fn new(os: &str, architecture: &str, variant: &str) -> Self {
        Self { os: os.to_owned(), architecture: architecture.to_owned(), variant: variant.to_owned() }
    }

    /// Whether something built for `other` runs here. Variants (`v2` of amd64) differ in what the processor has to know.
    pub fn accepts(&self, other: &Self) -> bool {
        self.os == other.os && self.architecture == other.architecture
    }

    /// Attestations and other things that are no images.
    fn is_unknown(&self) -> bool {
        self.os == "unknown" || self.architecture == "unknown"
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", plain(&self.os, 20), plain(&self.architecture, 20))?;
        if self.variant.is_empty() { Ok(()) } else { write!(f, "/{}", plain(&self.variant, 20)) }
    }
}

impl Index {
    /// The manifest for a platform: of several variants the one that the oldest processor runs.
    pub fn select(&self, platform: &Platform) -> Result<&Descriptor, ManifestError> {
        let of = |found: &Descriptor| found.platform.as_ref().is_some_and(|found| platform.accepts(found));
        let variant = |found: &&Descriptor| found.platform.as_ref().map(|platform| platform.variant.clone());
        let chosen = self.manifests.iter().filter(|found| of(found)).min_by_key(variant);
        // An index of one manifest may leave the platform to the manifest's config.
        let chosen = chosen.or_else(|| match self.manifests.as_slice() {
            [only] if only.platform.is_none() => Some(only),
            _ => None,
        });
        let chosen = chosen.ok_or_else(|| self.no_platform(platform))?;
        match media::kind(&chosen.media_type) {
            media::Kind::Manifest => Ok(chosen),
            media::Kind::Index => Err(ManifestError::NestedIndex),
            media::Kind::Schema1 => Err(ManifestError::Schema1),
            media::Kind::Other => {
                Err(ManifestError::Type { what: "manifest", found: plain(&chosen.media_type, 100) })
            }
        }
    }

    fn no_platform(&self, wanted: &Platform) -> ManifestError {
        let all = self.manifests.iter().filter_map(|found| found.platform.as_ref());
        let mut found: Vec<String> =
            all.filter(|platform| !platform.is_unknown()).take(1000).map(Platform::to_string).collect();
        found.sort_unstable();
        found.dedup();
        let more = found.len().saturating_sub(SHOWN);
        found.truncate(SHOWN);
        if found.is_empty() {
            found.push("no platform at all".to_owned());
        }
        if more > 0 {
            found.push(format!("{more} more"));
        }
        ManifestError::Platform { wanted: wanted.clone(), found: found.join(", ") }
    }
}
