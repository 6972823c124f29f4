//! The documents that describe an image: indexes, manifests, configs. They are hostile until they are parsed here.
//!
//! These are structs of our own, about 150 lines: `oci-spec` would bring 21 more crates (regular expressions and three
//! families of procedural macros among them) for the same four documents, and none of the limits.

mod config;
pub mod media;
mod select;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Deserializer, Serialize};
use thiserror::Error;

pub use config::{History, ImageConfig, RootFs, RunConfig};
pub use media::{Compression, LayerKind};
pub use select::Platform;

use crate::digest::Digest;
use crate::text::plain;

/// The limit of most registries.
pub const MAX_MANIFEST: u64 = 4 << 20;
pub const MAX_CONFIG: u64 = 4 << 20;
/// The limit of Docker.
pub const MAX_LAYERS: usize = 128;

/// A document that is not used.
#[derive(Debug, Error)]
pub enum ManifestError {
    #[error("Its {0} cannot be read: {1}")]
    Json(&'static str, String),
    #[error(
        "Its manifest is of Docker's old schema 1, which cannot be verified. Push the image again with a newer tool"
    )]
    Schema1,
    #[error("Its manifest is of schema {0}; only 2 is known")]
    Schema(u32),
    #[error("It is not a container image: its {what} has the type {found:?}")]
    Type { what: &'static str, found: String },
    #[error("Its manifest says that it is {inside:?}, the registry says {outside:?}")]
    TypeConflict { inside: String, outside: String },
    #[error("Its manifest is ambiguous: it has both layers and other manifests")]
    Ambiguous,
    #[error("Its index names another index instead of a manifest")]
    NestedIndex,
    #[error("It is not for {wanted}. It exists for: {found}")]
    Platform { wanted: Platform, found: String },
    #[error("It has no layers, so there is nothing to run")]
    NoLayers,
    #[error("It has {0} layers; at most {MAX_LAYERS} are possible")]
    Layers(usize),
    #[error("Layer {0} is not in the registry: it would be fetched from {1:?}, which is not done")]
    Foreign(usize, String),
    #[error("Layer {0} has the type {1:?}, which cannot be unpacked")]
    LayerType(usize, String),
    #[error("Two of its parts have the digest {0} and different sizes")]
    SizeConflict(Digest),
    #[error("Its {what} has {size} bytes; at most {limit} are accepted")]
    Large { what: String, size: u64, limit: u64 },
    #[error("It has {layers} layers, and its config names {named}")]
    DiffIds { layers: usize, named: usize },
}

/// A reference to a blob by its digest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub media_type: String,
    pub digest: Digest,
    pub size: u64,
    /// Only ever named in an error.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub urls: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

impl Descriptor {
    /// The compression of a layer, if its media type names one.
    pub fn compression(&self) -> Option<Compression> {
        match media::layer_kind(&self.media_type) {
            LayerKind::Tar(compression) => Some(compression),
            LayerKind::Foreign | LayerKind::Unknown => None,
        }
    }
}

/// What an image consists of: its config, and layers from the lowest to the uppermost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    pub media_type: String,
    pub config: Descriptor,
    pub layers: Vec<Descriptor>,
    pub annotations: BTreeMap<String, String>,
}

/// The same image for several platforms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index {
    pub media_type: String,
    pub manifests: Vec<Descriptor>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Document {
    Index(Index),
    Manifest(Box<Manifest>),
}

/// Any of both, as it is written.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Raw {
    schema_version: u32,
    #[serde(default, deserialize_with = "or_default")]
    media_type: String,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
    manifests: Option<Vec<Descriptor>>,
    #[serde(default, deserialize_with = "or_default")]
    annotations: BTreeMap<String, String>,
    // Of schema 1.
    #[serde(rename = "fsLayers")]
    fs_layers: Option<serde::de::IgnoredAny>,
}

/// Docker writes `null` for what is empty.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

impl Document {
    /// Parses what a registry sent under this content type.
    pub fn parse(text: &[u8], content_type: Option<&str>) -> Result<Self, ManifestError> {
        let outside = content_type.map(|value| value.split(';').next().unwrap_or(value).trim());
        let outside = outside.filter(|value| media::kind(value) != media::Kind::Other);
        if outside.is_some_and(|value| media::kind(value) == media::Kind::Schema1) {
            return Err(ManifestError::Schema1);
        }
        check_size("manifest", text.len() as u64, MAX_MANIFEST)?;
        let raw: Raw = parsed("manifest", text)?;
        if raw.schema_version == 1 || raw.fs_layers.is_some() {
            return Err(ManifestError::Schema1);
        }
        if raw.schema_version != 2 {
            return Err(ManifestError::Schema(raw.schema_version));
        }
        let media_type = agreed_type(&raw, outside)?;
        // The same bytes must not be an index for one reader and a manifest for another.
        if raw.manifests.is_some() && (raw.layers.is_some() || raw.config.is_some()) {
            return Err(ManifestError::Ambiguous);
        }
        let other = |found: &str| ManifestError::Type { what: "manifest", found: plain(found, 100) };
        match (media::kind(&media_type), raw.manifests, raw.config) {
            (media::Kind::Index, Some(manifests), None) => Ok(Self::Index(Index { media_type, manifests })),
            (media::Kind::Manifest, None, Some(config)) => {
                let layers = raw.layers.unwrap_or_default();
                let manifest = Manifest { media_type, config, layers, annotations: raw.annotations };
                manifest.check()?;
                Ok(Self::Manifest(Box::new(manifest)))
            }
            _ => Err(other(&media_type)),
        }
    }
}

/// The parser quotes what it does not expect, however long that is.
fn parsed<T: for<'de> Deserialize<'de>>(what: &'static str, text: &[u8]) -> Result<T, ManifestError> {
    serde_json::from_slice(text).map_err(|error| ManifestError::Json(what, plain(&error.to_string(), 200)))
}

/// The type that the document has by itself and by what the registry said. OCI leaves out either.
fn agreed_type(raw: &Raw, outside: Option<&str>) -> Result<String, ManifestError> {
    match (raw.media_type.as_str(), outside) {
        ("", Some(outside)) => Ok(outside.to_owned()),
        ("", None) if raw.manifests.is_some() => Ok(media::OCI_INDEX.to_owned()),
        ("", None) => Ok(media::OCI_MANIFEST.to_owned()),
        (inside, Some(outside)) if inside != outside => {
            Err(ManifestError::TypeConflict { inside: plain(inside, 100), outside: plain(outside, 100) })
        }
        (inside, _) => Ok(inside.to_owned()),
    }
}

fn check_size(what: impl Into<String>, size: u64, limit: u64) -> Result<(), ManifestError> {
    if size > limit { Err(ManifestError::Large { what: what.into(), size, limit }) } else { Ok(()) }
}

impl Manifest {
    /// Checks everything that can be known without the blobs.
    fn check(&self) -> Result<(), ManifestError> {
        let config_type = self.config.media_type.as_str();
        if ![media::OCI_CONFIG, media::DOCKER_CONFIG].contains(&config_type) {
            return Err(ManifestError::Type { what: "config", found: plain(config_type, 100) });
        }
        check_size("config", self.config.size, MAX_CONFIG)?;
        match self.layers.len() {
            0 => return Err(ManifestError::NoLayers),
            1..=MAX_LAYERS => {}
            count => return Err(ManifestError::Layers(count)),
        }
        let mut sizes = HashMap::from([(&self.config.digest, self.config.size)]);
        for (layer, number) in self.layers.iter().zip(1..) {
            check_layer(layer, number)?;
            if sizes.insert(&layer.digest, layer.size).is_some_and(|size| size != layer.size) {
                return Err(ManifestError::SizeConflict(layer.digest.clone()));
            }
        }
        Ok(())
    }

    /// Checks the sizes of the layers, of each and of all, which nothing else bounds.
    pub fn check_sizes(&self, layer_limit: u64, limit: u64) -> Result<(), ManifestError> {
        let mut all: u64 = 0;
        for (layer, number) in self.layers.iter().zip(1..) {
            check_size(format!("layer {number}"), layer.size, layer_limit)?;
            all = all.saturating_add(layer.size);
        }
        check_size("image", all, limit)
    }

    /// Parses the image's config, which has to fit to this manifest and to the platform.
    pub fn parse_config(&self, text: &[u8], platform: &Platform) -> Result<ImageConfig, ManifestError> {
        check_size("config", text.len() as u64, MAX_CONFIG)?;
        let config: ImageConfig = parsed("config", text)?;
        let found = config.platform();
        if !platform.accepts(&found) {
            return Err(ManifestError::Platform { wanted: platform.clone(), found: found.to_string() });
        }
        let named = config.rootfs.diff_ids.len();
        if named == self.layers.len() {
            Ok(config)
        } else {
            Err(ManifestError::DiffIds { layers: self.layers.len(), named })
        }
    }
}

fn check_layer(layer: &Descriptor, number: usize) -> Result<(), ManifestError> {
    let kind = media::layer_kind(&layer.media_type);
    if kind == LayerKind::Foreign || !layer.urls.is_empty() {
        let url = layer.urls.first().map_or("elsewhere", String::as_str);
        return Err(ManifestError::Foreign(number, plain(url, 200)));
    }
    match kind {
        LayerKind::Tar(_) => Ok(()),
        _ => Err(ManifestError::LayerType(number, plain(&layer.media_type, 100))),
    }
}
