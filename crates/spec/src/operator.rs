//! The operator's limits: a floor that specifications are raised to, and ceilings above which they are
//! refused. Users can narrow them but not widen them; of two files, the stricter value counts. Agents have an
//! additional ceiling, section `[mcp]`.

pub mod inward;
mod limits;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::{env, io};

use bathy_policy::NetworkPolicy;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use thiserror::Error;

use crate::config::{self, ConfigError};
use crate::{Engine, SandboxSpec, Security, Size};
use limits::{AGENTS, ALL_SANDBOXES, Agents, Ceiling, Limits};

pub const SYSTEM_FILE: &str = "/etc/bathysphere/config.toml";
/// The environment variable that names a single file to use instead.
pub const VARIABLE: &str = "BATHYSPHERE_CONFIG";

/// The operator's configuration is invalid or does not allow a specification.
#[derive(Debug, Error)]
pub enum OperatorError {
    #[error("The operator's configuration cannot be used")]
    File(#[from] ConfigError),
    /// A value is above a ceiling.
    #[error("{what} of {wanted} is more than the operator allows: the most is {most}, by {by}")]
    Ceiling {
        what: &'static str,
        wanted: String,
        most: String,
        /// The origin of the limit: key, section and file.
        by: String,
    },
    /// The image is not on a list.
    #[error("The image `{image}` is not one that the operator allows: {allowed}, by {by}")]
    Image { image: String, allowed: String, by: String },
    /// The limit on sandboxes is reached.
    #[error(
        "There are {count} sandboxes, those of `bathy run` and `bathy code` included, and the operator allows {most}, by {by}. Remove one with `bathy rm`, or wait until a command ends"
    )]
    Sandboxes { count: u32, most: u32, by: String },
    /// The network policy reaches further than public addresses.
    #[error("`{part}` reaches more than the operator allows: public addresses at most, by {by}")]
    Network {
        /// The preset or rule that reaches too far.
        part: String,
        by: String,
    },
}

/// The structure of a file.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Form {
    floor: Floor,
    ceiling: Ceiling,
    mcp: Agents,
    audit: Audit,
    network: Option<NetworkPolicy>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Floor {
    security: Option<Security>,
    engine: Option<Engine>,
}

/// How much of the audit log is kept. Of two files, the larger value counts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Audit {
    /// The size at which a file of the log is rotated.
    pub rotate_size: Option<Size>,
    /// How many rotated files are kept.
    pub keep: Option<u32>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Operator {
    /// How much of the audit log is kept.
    pub audit: Audit,
    security: Option<(Security, PathBuf)>,
    /// The file that requires hardware virtual machines, the stronger boundary.
    only_kvm: Option<PathBuf>,
    limits: Limits,
    agents: Limits,
    /// The network ceilings of every sandbox: all of them have to allow a destination.
    network: Vec<NetworkPolicy>,
}

/// A specification that the operator allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allowed {
    pub spec: SandboxSpec,
    /// Sentences for the user about what was made stricter.
    pub notes: Vec<String>,
}

impl Operator {
    /// Loads the configuration that applies to the present user.
    pub fn load() -> Result<Self, OperatorError> {
        if let Some(path) = env::var_os(VARIABLE).filter(|path| !path.is_empty()) {
            return Self::default().with(Path::new(&path));
        }
        let own = own_file(|name| env::var_os(name).map(PathBuf::from));
        Self::from_files([PathBuf::from(SYSTEM_FILE)].into_iter().chain(own))
    }

    /// Combines several files; missing files are skipped.
    pub fn from_files(paths: impl IntoIterator<Item = PathBuf>) -> Result<Self, OperatorError> {
        paths.into_iter().try_fold(Self::default(), |policy, path| match policy.clone().with(&path) {
            // A dangling link is an error: the operator's settings exist but cannot be read.
            Err(OperatorError::File(ConfigError::Read(_, error)))
                if error.kind() == io::ErrorKind::NotFound && path.symlink_metadata().is_err() =>
            {
                Ok(policy)
            }
            result => result,
        })
    }

    fn with(mut self, path: &Path) -> Result<Self, OperatorError> {
        let values = Value::Object(config::read::<Form>(path)?);
        let form: Form = serde_json::from_value(values).map_err(|error| ConfigError::Flag {
            key: path.display().to_string(),
            reason: error.to_string(),
        })?;
        if let Some(floor) = form.floor.security
            && self.security.as_ref().is_none_or(|(old, _)| floor > *old)
        {
            self.security = Some((floor, path.to_owned()));
        }
        if form.floor.engine == Some(Engine::Kvm) {
            self.only_kvm.get_or_insert_with(|| path.to_owned());
        }
        self.limits.lower(form.ceiling, ALL_SANDBOXES, path);
        self.agents.lower(form.mcp.ceiling, AGENTS, path);
        self.agents.bound(form.mcp.network, path);
        self.network.extend(form.network);
        self.audit.rotate_size = self.audit.rotate_size.max(form.audit.rotate_size);
        self.audit.keep = self.audit.keep.max(form.audit.keep);
        Ok(self)
    }

    /// The limits for agents: of the general ceiling and the one for agents, the stricter value counts. If
    /// the operator sets none for agents, defaults apply.
    #[must_use]
    pub fn for_agents(&self) -> Self {
        let mut policy = self.clone();
        policy.limits.narrow(&self.agents.clone().or_defaults(&self.limits));
        policy
    }

    /// The limits for agents' REPLs, which live until they are removed, unless the operator sets a limit.
    #[must_use]
    pub fn for_repls(&self) -> Self {
        Self { limits: self.limits.clone().for_repls(), ..self.clone() }
    }

    /// The default specification, lowered to what is allowed.
    pub fn defaults(&self) -> SandboxSpec {
        let mut spec = SandboxSpec::default();
        self.limits.defaults(&mut spec);
        spec
    }

    /// Sentences on those defaults of `spec` that a ceiling has lowered. `asked` is the same without the
    /// operator: what differs from the defaults there is not a default.
    pub fn lowered(&self, asked: &SandboxSpec, spec: &SandboxSpec) -> Vec<String> {
        self.limits.lowered(asked, spec)
    }

    /// Refuses values above a ceiling, raises those below the floor, and fills in open limits.
    pub fn apply(&self, mut spec: SandboxSpec) -> Result<Allowed, OperatorError> {
        let mut notes = Vec::new();
        self.limits.apply(&mut spec, &mut notes)?;
        if let Some((floor, file)) = self.security.as_ref().filter(|(floor, _)| *floor > spec.security) {
            spec.security = *floor;
            notes.push(format!("The operator requires {} security, by {}", floor.as_str(), file.display()));
        }
        if let Some(file) = &self.only_kvm
            && spec.engine != Engine::Kvm
        {
            spec.engine = Engine::Kvm;
            notes.push(format!("The operator requires the kvm engine, by {}", file.display()));
        }
        Ok(Allowed { spec, notes })
    }

    /// The engine that every sandbox must use, even if its specification, which may be older, names another one.
    pub fn engine_floor(&self) -> Option<Engine> {
        self.only_kvm.as_ref().map(|_| Engine::Kvm)
    }

    /// The network ceilings of every sandbox.
    pub fn network(&self) -> Vec<NetworkPolicy> {
        self.network.clone()
    }

    /// The limit on the number of sandboxes.
    pub fn sandboxes(&self) -> Option<u32> {
        self.limits.sandboxes.as_ref().map(|limit| limit.value)
    }

    /// The minimum security of all commands.
    pub fn security(&self) -> Security {
        self.security.as_ref().map_or(Security::Default, |(floor, _)| *floor)
    }

    /// Refuses one more sandbox beside `count` others if the limit is reached.
    pub fn admit(&self, count: u32) -> Result<(), OperatorError> {
        match &self.limits.sandboxes {
            Some(limit) if count >= limit.value => {
                Err(OperatorError::Sandboxes { count, most: limit.value, by: limit.to_string() })
            }
            _ => Ok(()),
        }
    }
}

/// The folder of the present user's own settings.
pub fn own_folder() -> Option<PathBuf> {
    folder_of(|name| env::var_os(name).map(PathBuf::from))
}

fn folder_of(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let absolute = |name| variable(name).filter(|path| path.is_absolute());
    let base = absolute("XDG_CONFIG_HOME").or_else(|| absolute("HOME").map(|home| home.join(".config")))?;
    Some(base.join("bathysphere"))
}

fn own_file(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    folder_of(variable).map(|folder| folder.join("config.toml"))
}
