//! The logins in docker's config file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use zeroize::Zeroizing;

use super::{Credentials, CredentialsError, Secret, helper};
use crate::reference::DOCKER_HUB;

const MAX_FILE: u64 = 4 << 20;
/// What docker calls its own registry there.
const HUB_KEY: &str = "https://index.docker.io/v1/";

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Config {
    auths: BTreeMap<String, Auth>,
    cred_helpers: BTreeMap<String, String>,
    creds_store: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Auth {
    auth: Option<Secret>,
    username: Option<String>,
    password: Option<Secret>,
    identitytoken: Option<Secret>,
}

/// The credentials for a registry: of its own helper, of the file itself, of the helper for all others.
pub fn find(path: &Path, registry: &str, time: Duration) -> Result<Option<Credentials>, CredentialsError> {
    let Some(config) = read(path)? else { return Ok(None) };
    let key = if registry == DOCKER_HUB { HUB_KEY } else { registry };
    if let Some(name) =
        config.cred_helpers.iter().find(|(found, _)| is_for(found, registry)).map(|found| found.1)
    {
        return helper::get(name, key, time);
    }
    let entry = config.auths.iter().find(|(found, _)| is_for(found, registry));
    if let Some(found) = entry.map_or(Ok(None), |(_, auth)| auth.credentials(path, registry))? {
        return Ok(Some(found));
    }
    if config.creds_store.is_empty() { Ok(None) } else { helper::get(&config.creds_store, key, time) }
}

fn read(path: &Path) -> Result<Option<Config>, CredentialsError> {
    let failed = |error| CredentialsError::Read(path.to_owned(), error);
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(failed)?,
    };
    let mut text = Zeroizing::new(String::new());
    file.take(MAX_FILE).read_to_string(&mut text).map_err(failed)?;
    // The message of the parser could quote what is there.
    let form =
        |error: serde_json::Error| CredentialsError::Form(path.to_owned(), error.line(), error.column());
    serde_json::from_str(&text).map(Some).map_err(form)
}

/// Whether a key (`host`, `host:port`, or with scheme and path, as old versions wrote it) stands for a registry.
fn is_for(key: &str, registry: &str) -> bool {
    let host = key.split_once("://").map_or(key, |(_, rest)| rest);
    let host = host.split('/').next().unwrap_or_default().to_ascii_lowercase();
    let is_hub = ["docker.io", "index.docker.io", "registry-1.docker.io"].contains(&&*host);
    if registry == DOCKER_HUB { is_hub } else { host == registry }
}

impl Auth {
    fn credentials(&self, path: &Path, registry: &str) -> Result<Option<Credentials>, CredentialsError> {
        let filled = |secret: &Option<Secret>| secret.clone().filter(|secret| !secret.reveal().is_empty());
        if let Some(token) = filled(&self.identitytoken) {
            return Ok(Some(Credentials::IdentityToken(token)));
        }
        if let (Some(user), Some(password)) = (&self.username, filled(&self.password)) {
            return Ok(Some(Credentials::Password { user: user.clone(), password }));
        }
        let Some(auth) = filled(&self.auth) else { return Ok(None) };
        let decoded = || {
            let bytes = Zeroizing::new(BASE64_STANDARD.decode(auth.reveal()).ok()?);
            let (user, password) = std::str::from_utf8(&bytes).ok()?.split_once(':')?;
            let password = Secret::new(password.trim_end_matches('\0').to_owned());
            Some(Credentials::Password { user: user.to_owned(), password })
        };
        let wrong = || CredentialsError::Auth(path.to_owned(), registry.to_owned());
        decoded().map(Some).ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const TIME: Duration = Duration::from_secs(30);

    fn found(config: &str, registry: &str) -> Result<Option<Credentials>, CredentialsError> {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("config.json");
        fs::write(&path, config).unwrap();
        find(&path, registry, TIME)
    }

    fn password(user: &str, password: &str) -> Option<Credentials> {
        Some(Credentials::Password { user: user.into(), password: Secret::new(password.into()) })
    }

    #[test]
    fn logins_are_found_by_the_names_that_docker_gives_them() {
        let config = r#"{"auths": {
            "https://index.docker.io/v1/": {"auth": "bWU6c2VjOnJldA=="},
            "ghcr.io": {"username": "you", "password": "p"},
            "https://Old.example.com/v2/": {"auth": "YTpi"},
            "localhost:5000": {"identitytoken": "t", "auth": "PHRva2VuPjo="},
            "empty.example.com": {}
        }, "HttpHeaders": {"User-Agent": "x"}}"#;
        assert_eq!(found(config, "docker.io").unwrap(), password("me", "sec:ret"));
        assert_eq!(found(config, "ghcr.io").unwrap(), password("you", "p"));
        assert_eq!(found(config, "old.example.com").unwrap(), password("a", "b"));
        let token = Some(Credentials::IdentityToken(Secret::new("t".into())));
        assert_eq!(found(config, "localhost:5000").unwrap(), token);
        for other in ["localhost", "localhost:5001", "hcr.io", "empty.example.com", "example.com"] {
            assert_eq!(found(config, other).unwrap(), None, "{other}");
        }
        assert_eq!(find(Path::new("/nonexistent/config.json"), "ghcr.io", TIME).unwrap(), None);
        assert_eq!(found("{}", "ghcr.io").unwrap(), None);
    }

    #[test]
    fn a_broken_file_is_named_without_what_it_has() {
        let error = found(r#"{"auths": {"ghcr.io": {"auth": "aHVudGVyMg"}}}"#, "ghcr.io").unwrap_err();
        assert!(
            matches!(error, CredentialsError::Auth(..)) && !error.to_string().contains("aHVu"),
            "{error}"
        );
        let error = found(r#"{"auths": {"ghcr.io": {"password": hunter2}}}"#, "ghcr.io").unwrap_err();
        assert!(matches!(error, CredentialsError::Form(_, 1, _)), "{error:?}");
        assert!(!format!("{error} {error:?}").contains("hunter2"));
    }

    #[test]
    fn a_helper_for_one_registry_comes_first_and_the_one_for_all_last() {
        let config = r#"{"auths": {"ghcr.io": {"username": "you", "password": "p"}},
            "credHelpers": {"gcr.io": "../evil"}, "credsStore": "a/b"}"#;
        assert_eq!(found(config, "ghcr.io").unwrap(), password("you", "p"));
        for (registry, name) in [("gcr.io", "../evil"), ("quay.io", "a/b")] {
            let error = found(config, registry).unwrap_err();
            assert!(matches!(&error, CredentialsError::HelperName(wrong) if wrong == name), "{error:?}");
        }
    }
}
