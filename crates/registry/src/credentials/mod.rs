//! Logins: our own (`bathy login`), and those that docker has already.

mod docker;
mod helper;
mod own;
mod secret;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;

pub use own::Logins;
pub use secret::{Credentials, Secret};

/// How long a credential helper may take. Some wait for a person to unlock something.
const HELPER_TIME: Duration = Duration::from_secs(30);

/// Why there are no credentials. None of these has any of them in its text.
#[derive(Debug, Error)]
pub enum CredentialsError {
    #[error("Cannot read {0}")]
    Read(PathBuf, #[source] io::Error),
    #[error("Cannot write {0}")]
    Write(PathBuf, #[source] io::Error),
    #[error("{0} is not readable: it should be JSON with an object for each registry (line {1}, column {2})")]
    Form(PathBuf, usize, usize),
    #[error("{0} has logins and others can read it (its mode is {1:o}): chmod 600 {0}")]
    Mode(PathBuf, u32),
    #[error("{0} belongs to another user")]
    Owner(PathBuf),
    #[error("The login for {1} in {0} is not base64 of `user:password`")]
    Auth(PathBuf, String),
    #[error("A credential helper's name is letters, digits, '-', '_' and '.', not {0:?}")]
    HelperName(String),
    #[error(
        "The credential helper {0} cannot be started. It is named in docker's config; install it, or run `bathy login`"
    )]
    HelperStart(String, #[source] io::Error),
    #[error("The credential helper {0} did not answer within {1:?}")]
    HelperTime(String, Duration),
    #[error("The credential helper {0} failed ({1})")]
    HelperFailed(String, String),
    #[error("The credential helper {0} gave an answer that is not understood")]
    HelperAnswer(String),
}

/// Where credentials come from.
#[derive(Clone, Debug)]
pub struct Keychain {
    own: Option<Logins>,
    docker: Option<PathBuf>,
    helper_time: Duration,
}

impl Keychain {
    /// No credentials at all.
    pub fn empty() -> Self {
        Self { own: None, docker: None, helper_time: HELPER_TIME }
    }

    /// Our own logins, then those of docker's config file. Neither has to exist.
    pub fn new(own: Option<Logins>, docker: Option<PathBuf>) -> Self {
        Self { own, docker, ..Self::empty() }
    }

    /// Where docker has its config by default.
    pub fn docker_config() -> Option<PathBuf> {
        let folder = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let folder = folder("DOCKER_CONFIG").or_else(|| folder("HOME").map(|home| home.join(".docker")));
        folder.map(|folder| folder.join("config.json"))
    }

    #[must_use]
    pub fn with_helper_time(mut self, time: Duration) -> Self {
        self.helper_time = time;
        self
    }

    /// The credentials for a registry (`host` or `host:port`, `docker.io` for the default one).
    pub fn find(&self, registry: &str) -> Result<Option<Credentials>, CredentialsError> {
        if let Some(found) = self.own.as_ref().map_or(Ok(None), |own| own.find(registry))? {
            return Ok(Some(found));
        }
        let docker = |path: &Path| docker::find(path, registry, self.helper_time);
        self.docker.as_deref().map_or(Ok(None), docker)
    }
}
