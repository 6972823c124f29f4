//! Where things are kept, by the XDG rules.

use std::env;
use std::path::PathBuf;

use bathy_image::trust::{self, TrustError};
use thiserror::Error;

/// There is no place to keep things.
#[derive(Debug, Error)]
pub enum PathsError {
    /// The environment does not say where.
    #[error(
        "Neither {0} nor HOME is set to an absolute path, so there is no place for bathy's files. Set one of them"
    )]
    Unset(&'static str),
    /// Others could change what is kept there.
    #[error(transparent)]
    Trust(#[from] TrustError),
}

/// The folders of one user.
#[derive(Clone, Debug)]
pub struct Paths {
    /// What can be built again.
    pub cache: PathBuf,
    /// What belongs to live sandboxes.
    pub state: PathBuf,
}

impl Paths {
    /// The caller's folders. They are refused where another user could put something into them: what is there is run.
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
