//! How an image wants to be run.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Platform, or_default};
use crate::digest::Digest;

/// The config of an image, as OCI and Docker write it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageConfig {
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "String::is_empty")]
    pub created: String,
    pub architecture: String,
    pub os: String,
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "String::is_empty")]
    pub variant: String,
    #[serde(default, deserialize_with = "or_default")]
    pub config: RunConfig,
    pub rootfs: RootFs,
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub history: Vec<History>,
}

impl ImageConfig {
    pub fn platform(&self) -> Platform {
        Platform::new(&self.os, &self.architecture, &self.variant)
    }
}

/// The command, environment and user of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct RunConfig {
    #[serde(deserialize_with = "or_default", skip_serializing_if = "String::is_empty")]
    pub user: String,
    /// `80/tcp`. The values mean nothing.
    #[serde(deserialize_with = "or_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub exposed_ports: BTreeMap<String, serde_json::Value>,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<String>,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub cmd: Vec<String>,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub volumes: BTreeMap<String, serde_json::Value>,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "String::is_empty")]
    pub working_dir: String,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "String::is_empty")]
    pub stop_signal: String,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub shell: Vec<String>,
    /// Preserved, but not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub healthcheck: Option<serde_json::Value>,
}

/// The digests of the layers without compression.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RootFs {
    #[serde(rename = "type")]
    pub kind: String,
    #[serde(default, deserialize_with = "or_default")]
    pub diff_ids: Vec<Digest>,
}

/// How one layer was made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct History {
    #[serde(deserialize_with = "or_default", skip_serializing_if = "String::is_empty")]
    pub created: String,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "String::is_empty")]
    pub created_by: String,
    #[serde(deserialize_with = "or_default", skip_serializing_if = "String::is_empty")]
    pub comment: String,
    pub empty_layer: bool,
}
