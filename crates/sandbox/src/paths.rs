//! Where things are kept, by the XDG rules.

use std::env;
use std::path::PathBuf;

use thiserror::Error;

/// There is no place to keep things.
#[derive(Debug, Error)]
#[error(
    "Neither {0} nor HOME is set to an absolute path, so there is no place for bathy's files. Set one of them"
)]
pub struct PathsError(&'static str);

/// The folders of one user.
#[derive(Clone, Debug)]
pub struct Paths {
    /// What can be built again.
    pub cache: PathBuf,
    /// What belongs to live sandboxes.
    pub state: PathBuf,
}

impl Paths {
    /// The caller's folders.
    pub fn of_user() -> Result<Self, PathsError> {
        Ok(Self { cache: base("XDG_CACHE_HOME", ".cache")?, state: base("XDG_STATE_HOME", ".local/state")? })
    }
}

fn base(variable: &'static str, below_home: &str) -> Result<PathBuf, PathsError> {
    let absolute = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    absolute(variable)
        .or_else(|| absolute("HOME").map(|home| home.join(below_home)))
        .map(|base| base.join("bathysphere"))
        .ok_or(PathsError(variable))
}
