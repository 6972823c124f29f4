//! What the operator allows: a floor that is raised to and ceilings that are refused beyond. Callers narrow it and
//! never widen it; of two files, the stricter one counts. What agents ask has a second ceiling, section `[mcp]`.

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
use limits::{AGENTS, Agents, Ceiling, EVERYBODY, Limits};

pub const SYSTEM_FILE: &str = "/etc/bathysphere/config.toml";
/// Names the one file to use instead.
pub const VARIABLE: &str = "BATHYSPHERE_CONFIG";

/// What the operator does not allow, or a policy that cannot be read.
#[derive(Debug, Error)]
pub enum OperatorError {
    #[error("The operator's configuration cannot be used")]
    File(#[from] ConfigError),
    /// More than a ceiling.
    #[error("{what} of {wanted} is more than the operator allows: the most is {most}, by {by}")]
    Ceiling {
        what: &'static str,
        wanted: String,
        most: String,
        /// Who says so: the key, the section and the file.
        by: String,
    },
    /// An image that is in no list.
    #[error("The image `{image}` is not one that the operator allows: {allowed}, by {by}")]
    Image { image: String, allowed: String, by: String },
    /// As many sandboxes as there may be.
    #[error(
        "There are {count} sandboxes, those of `bathy run` and `bathy code` included, and the operator allows {most}, by {by}. Remove one with `bathy rm`, or wait until a command ends"
    )]
    Sandboxes { count: u32, most: u32, by: String },
    /// A network that leads further than public addresses.
    #[error("`{part}` reaches more than the operator allows: public addresses at most, by {by}")]
    Network {
        /// The preset or the rule.
        part: String,
        by: String,
    },
    /// A path of the host.
    #[error(
        "Host path {0:?}: the operator allows none (limit host_paths), and no setting allows one. Copy files in and out instead"
    )]
    HostPath(PathBuf),
}

/// The form of a file.
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

/// How much of the audit log is kept. Of two files, each number counts that keeps more.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Audit {
    /// A file of the log is closed at this size.
    pub rotate_size: Option<Size>,
    /// How many closed files are kept.
    pub keep: Option<u32>,
}

/// Everything that the operator says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Operator {
    /// How much of the audit log is kept.
    pub audit: Audit,
    security: Option<(Security, PathBuf)>,
    /// The file that asks for hardware virtual machines, the stronger boundary.
    only_kvm: Option<PathBuf>,
    limits: Limits,
    agents: Limits,
    /// What any sandbox may reach at most: every one of them has to allow it.
    network: Vec<NetworkPolicy>,
}

/// A description that the operator allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allowed {
    pub spec: SandboxSpec,
    /// What was made stricter than asked for, in sentences for the caller.
    pub notes: Vec<String>,
}

impl Operator {
    /// The policy that holds for the caller.
    pub fn load() -> Result<Self, OperatorError> {
        if let Some(path) = env::var_os(VARIABLE).filter(|path| !path.is_empty()) {
            return Self::default().with(Path::new(&path));
        }
        let own = own_file(|name| env::var_os(name).map(PathBuf::from));
        Self::from_files([PathBuf::from(SYSTEM_FILE)].into_iter().chain(own))
    }

    /// The policy of several files; those that do not exist say nothing.
    pub fn from_files(paths: impl IntoIterator<Item = PathBuf>) -> Result<Self, OperatorError> {
        paths.into_iter().try_fold(Self::default(), |policy, path| match policy.clone().with(&path) {
            // A link that leads nowhere is not the same: what the operator had there cannot be read.
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
        self.limits.lower(form.ceiling, EVERYBODY, path);
        self.agents.lower(form.mcp.ceiling, AGENTS, path);
        self.agents.bound(form.mcp.network, path);
        self.network.extend(form.network);
        self.audit.rotate_size = self.audit.rotate_size.max(form.audit.rotate_size);
        self.audit.keep = self.audit.keep.max(form.audit.keep);
        Ok(self)
    }

    /// The policy for what agents ask: of the ceiling for everybody and the one for agents, the stricter one counts. Where
    /// the operator says nothing about agents, there is a usual limit for them.
    #[must_use]
    pub fn for_agents(&self) -> Self {
        let mut policy = self.clone();
        policy.limits.narrow(&self.agents.clone().or_usual());
        policy
    }

    /// The same for REPLs, which live until they are removed unless the operator says otherwise.
    #[must_use]
    pub fn for_repls(&self) -> Self {
        Self { limits: self.limits.clone().for_repls(), ..self.clone() }
    }

    /// The defaults of a caller who asks for nothing: never more than is allowed.
    pub fn defaults(&self) -> SandboxSpec {
        let mut spec = SandboxSpec::default();
        self.limits.defaults(&mut spec);
        spec
    }

    /// Refuses what is above a ceiling, raises what is below the floor, and sets limits that were left open.
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

    /// The engine that every sandbox has to use, whatever its description says: that may be older than this floor.
    pub fn engine_floor(&self) -> Option<Engine> {
        self.only_kvm.as_ref().map(|_| Engine::Kvm)
    }

    /// The refusal of a path of the host, of which sandboxes get none.
    pub fn refuse_host_path(path: impl Into<PathBuf>) -> OperatorError {
        OperatorError::HostPath(path.into())
    }

    /// What any sandbox may reach at most.
    pub fn network(&self) -> Vec<NetworkPolicy> {
        self.network.clone()
    }

    /// How many sandboxes there may be.
    pub fn sandboxes(&self) -> Option<u32> {
        self.limits.sandboxes.as_ref().map(|limit| limit.value)
    }

    /// The least security that commands run with.
    pub fn security(&self) -> Security {
        self.security.as_ref().map_or(Security::Default, |(floor, _)| *floor)
    }

    /// Refuses one more sandbox beside `count` others, if there may be no more.
    pub fn admit(&self, count: u32) -> Result<(), OperatorError> {
        match &self.limits.sandboxes {
            Some(limit) if count >= limit.value => {
                Err(OperatorError::Sandboxes { count, most: limit.value, by: limit.to_string() })
            }
            _ => Ok(()),
        }
    }
}

fn own_file(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let absolute = |name| variable(name).filter(|path| path.is_absolute());
    let base = absolute("XDG_CONFIG_HOME").or_else(|| absolute("HOME").map(|home| home.join(".config")))?;
    Some(base.join("bathysphere/config.toml"))
}
