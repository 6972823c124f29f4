//! The folders for files, by the XDG rules.

use std::env;
use std::path::PathBuf;

use bathy_image::trust::{self, TrustError};
use thiserror::Error;

/// A folder is not available.
#[derive(Debug, Error)]
pub enum PathsError {
    /// The environment does not define it.
    #[error(
        "Neither {0} nor HOME is set to an absolute path, so bathy does not know where to store its files. Set one of them"
    )]
    Unset(&'static str),
    /// Other users could modify its content.
    #[error(transparent)]
    Trust(#[from] TrustError),
}

/// The folders of one user.
#[derive(Clone, Debug)]
pub struct Paths {
    /// Files that can be built again.
    pub cache: PathBuf,
    /// Files of existing sandboxes.
    pub state: PathBuf,
}

impl Paths {
    /// The present user's folders. They are refused if another user can write to them, because their content
    /// is executed.
    pub fn of_user() -> Result<Self, PathsError> {
        let paths =
            Self { cache: base("XDG_CACHE_HOME", ".cache")?, state: base("XDG_STATE_HOME", ".local/state")? };
        trust::check_folder(&paths.cache)?;
        trust::check_folder(&paths.state)?;
        Ok(paths)
    }
}

fn base(variable: &'static str, below_home: &str) -> Result<PathBuf, PathsError> {
    let absolute = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    absolute(variable)
        .or_else(|| absolute("HOME").map(|home| home.join(below_home)))
        .map(|base| base.join("bathysphere"))
        .ok_or(PathsError::Unset(variable))
}
