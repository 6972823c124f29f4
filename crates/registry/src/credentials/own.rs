//! What `bathy login` keeps: a file that only its user reads.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use super::{Credentials, CredentialsError, Secret};

const MAX_FILE: u64 = 4 << 20;
const BY_OTHERS: u32 = 0o077;

/// A file of logins. It need not exist.
#[derive(Clone, Debug)]
pub struct Logins {
    path: PathBuf,
}

#[derive(Default, Serialize, Deserialize)]
struct Contents {
    #[serde(default)]
    registries: BTreeMap<String, Login>,
}

#[derive(Serialize, Deserialize)]
struct Login {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    password: Option<Secret>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    identity_token: Option<Secret>,
}

impl Logins {
    pub fn at(path: PathBuf) -> Self {
        Self { path }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn find(&self, registry: &str) -> Result<Option<Credentials>, CredentialsError> {
        let login = self.read()?.registries.remove(registry);
        Ok(login.and_then(|login| match login {
            Login { identity_token: Some(token), .. } => Some(Credentials::IdentityToken(token)),
            Login { user: Some(user), password: Some(password), .. } => {
                Some(Credentials::Password { user, password })
            }
            Login { .. } => None,
        }))
    }

    /// The registries that there are logins for.
    pub fn registries(&self) -> Result<Vec<String>, CredentialsError> {
        Ok(self.read()?.registries.into_keys().collect())
    }

    /// Keeps a login in place of an earlier one.
    pub fn set(&self, registry: &str, credentials: &Credentials) -> Result<(), CredentialsError> {
        let login = match credentials.clone() {
            Credentials::Password { user, password } => {
                Login { user: Some(user), password: Some(password), identity_token: None }
            }
            Credentials::IdentityToken(token) => {
                Login { user: None, password: None, identity_token: Some(token) }
            }
        };
        self.change(|contents| contents.registries.insert(registry.to_owned(), login)).map(|_| ())
    }

    /// Forgets a login. Returns whether there was one.
    pub fn remove(&self, registry: &str) -> Result<bool, CredentialsError> {
        if self.read()?.registries.contains_key(registry) {
            self.change(|contents| contents.registries.remove(registry)).map(|old| old.is_some())
        } else {
            Ok(false)
        }
    }

    fn read(&self) -> Result<Contents, CredentialsError> {
        let failed = |error| CredentialsError::Read(self.path.clone(), error);
        let file = match File::open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Contents::default()),
            opened => opened.map_err(failed)?,
        };
        let found = file.metadata().map_err(failed)?;
        if found.uid() != geteuid().as_raw() && found.uid() != 0 {
            return Err(CredentialsError::Owner(self.path.clone()));
        }
        if found.mode() & BY_OTHERS != 0 {
            return Err(CredentialsError::Mode(self.path.clone(), found.mode() & 0o7777));
        }
        let mut text = Zeroizing::new(String::new());
        file.take(MAX_FILE).read_to_string(&mut text).map_err(failed)?;
        // The message of the parser could quote what is there.
        serde_json::from_str(&text)
            .map_err(|error| CredentialsError::Form(self.path.clone(), error.line(), error.column()))
    }

    fn change<T>(&self, change: impl FnOnce(&mut Contents) -> T) -> Result<T, CredentialsError> {
        let failed = |error| CredentialsError::Write(self.path.clone(), error);
        let folder = self.path.parent().unwrap_or_else(|| Path::new("."));
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
        // Two logins at once: neither loses the other's.
        let lock = File::open(folder).map_err(failed)?;
        flock(&lock, FlockOperation::LockExclusive).map_err(|error| failed(error.into()))?;
        let mut contents = self.read()?;
        let result = change(&mut contents);
        let text = serde_json::to_string_pretty(&contents);
        let text = Zeroizing::new(text.map_err(|error| failed(error.into()))?);
        let new = self.path.with_extension("new");
        let write = || {
            let _ = fs::remove_file(&new);
            let mut file = File::options().write(true).create_new(true).mode(0o600).open(&new)?;
            file.set_permissions(Permissions::from_mode(0o600))?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&new, &self.path)?;
            lock.sync_all()
        };
        write().map_err(failed)?;
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn password(text: &str) -> Credentials {
        Credentials::Password { user: "me".into(), password: Secret::new(text.into()) }
    }

    #[test]
    fn logins_are_kept_for_this_user_alone() {
        let home = tempfile::tempdir().unwrap();
        let logins = Logins::at(home.path().join("config/bathysphere/registries.json"));
        assert_eq!(logins.find("ghcr.io").unwrap(), None);
        assert!(!logins.remove("ghcr.io").unwrap());
        assert!(!logins.path().exists());
        logins.set("ghcr.io", &password("one")).unwrap();
        logins.set("localhost:5000", &Credentials::IdentityToken(Secret::new("two".into()))).unwrap();
        logins.set("ghcr.io", &password("three")).unwrap();
        assert_eq!(logins.find("ghcr.io").unwrap(), Some(password("three")));
        assert_eq!(logins.registries().unwrap(), ["ghcr.io", "localhost:5000"]);
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
        assert_eq!((mode(logins.path()), mode(logins.path().parent().unwrap())), (0o600, 0o700));
        assert!(logins.remove("ghcr.io").unwrap());
        assert_eq!(logins.find("ghcr.io").unwrap(), None);
        assert!(logins.find("localhost:5000").unwrap().is_some());
    }

    #[test]
    fn a_file_that_others_read_or_that_is_broken_is_refused_without_its_content() {
        let home = tempfile::tempdir().unwrap();
        let logins = Logins::at(home.path().join("logins.json"));
        logins.set("ghcr.io", &password("hunter2")).unwrap();
        fs::set_permissions(logins.path(), Permissions::from_mode(0o640)).unwrap();
        assert!(logins.find("ghcr.io").unwrap_err().to_string().contains("chmod 600"));
        fs::set_permissions(logins.path(), Permissions::from_mode(0o600)).unwrap();
        fs::write(logins.path(), r#"{"registries": {"ghcr.io": {"password": hunter2"#).unwrap();
        let error = logins.find("ghcr.io").unwrap_err();
        assert!(
            matches!(error, CredentialsError::Form(..)) && !format!("{error:?} {error}").contains("hunter2")
        );
        assert!(logins.set("ghcr.io", &password("x")).is_err(), "what cannot be read is not replaced");
    }

    #[test]
    fn secrets_have_no_text() {
        let shown = format!(
            "{:?} {:?}",
            password("hunter2"),
            Credentials::IdentityToken(Secret::new("hunter2".into()))
        );
        assert!(!shown.contains("hunter2") && shown.contains("(secret)"), "{shown}");
    }
}
