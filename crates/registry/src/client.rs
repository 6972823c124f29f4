//! What callers use: pull, push, resolve, check a login. Every call blocks until it is done.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, StatusCode};
use thiserror::Error;

use crate::auth::{AuthError, Tokens};
use crate::cancel::Cancel;
use crate::credentials::{Credentials, CredentialsError, Keychain};
use crate::digest::Digest;
use crate::http::{HttpError, Net, Origin, Proxies, Timeouts};
use crate::manifest::Platform;
use crate::reference::{Reference, is_loopback};
use crate::transfer::session::Session;

const GIB: u64 = 1 << 30;

/// Options of a pull that are not part of the reference.
#[derive(Clone, Debug)]
pub struct Options {
    /// Plain HTTP, for registries on loopback addresses only.
    pub insecure: bool,
    /// Certificates to trust instead of the system's.
    pub certificates: Option<PathBuf>,
    pub timeouts: Timeouts,
    /// None by default: see [`Proxies::of_environment`].
    pub proxies: Proxies,
    pub retries: Retries,
    pub limits: Limits,
    /// How many layers are transferred at once.
    pub parallel: usize,
    pub platform: Platform,
    pub cancel: Cancel,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            insecure: false,
            certificates: None,
            timeouts: Timeouts::default(),
            proxies: Proxies::default(),
            retries: Retries::default(),
            limits: Limits::default(),
            parallel: 4,
            platform: Platform::default(),
            cancel: Cancel::default(),
        }
    }
}

/// How often something is tried again that a server could not do, or that was cut.
#[derive(Clone, Copy, Debug)]
pub struct Retries {
    /// How often in a row without any progress.
    pub count: u32,
    /// The first pause. Each further one is twice as long.
    pub first: Duration,
    /// The longest pause, also if the server asks for more.
    pub longest: Duration,
}

impl Default for Retries {
    fn default() -> Self {
        Self { count: 4, first: Duration::from_millis(500), longest: Duration::from_secs(60) }
    }
}

impl Retries {
    /// The pause after `failures` of them. None if that was the last.
    pub(crate) fn pause(&self, failures: u32) -> Option<Duration> {
        let pause = self.first.saturating_mul(2_u32.saturating_pow(failures.saturating_sub(1)));
        (failures <= self.count).then(|| pause.min(self.longest))
    }
}

/// The largest images that are pulled, compressed.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub layer: u64,
    pub image: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { layer: 16 * GIB, image: 64 * GIB }
    }
}

/// Why a registry does not do what it was asked for.
#[derive(Debug, Error)]
pub enum ClientError {
    #[error(transparent)]
    Http(#[from] HttpError),
    #[error(transparent)]
    Auth(AuthError),
    #[error(transparent)]
    Credentials(CredentialsError),
    #[error(
        "{0} is not on this machine: only registries at localhost, 127.0.0.1 or [::1] are reached without TLS"
    )]
    Insecure(String),
    #[error(
        "{registry} wants a login, or there is no such repository. If you have an account there: bathy login {registry}"
    )]
    Login { registry: String },
    #[error("{registry} does not accept the login for it. To replace it: bathy login {registry}")]
    WrongLogin { registry: String },
    #[error("{registry} denies access{message}. To use another account: bathy login {registry}")]
    Denied { registry: String, message: String },
    #[error("{registry} has no repository {repository}")]
    UnknownRepository { registry: String, repository: String },
    #[error(
        "{registry} has nothing called {target} in {repository}: no such tag or digest, or no such repository"
    )]
    UnknownTag { registry: String, repository: String, target: String },
    #[error("{registry} has no {what}{message}")]
    NotFound { registry: String, what: String, message: String },
    #[error("{origin} gets too many requests from here{message}{}", again(*.after))]
    Busy { origin: Origin, after: Option<Duration>, message: String },
    #[error("{origin} answers with {status} when asked for {what}{message}")]
    Status { origin: Origin, status: StatusCode, what: String, message: String },
    #[error("{origin} answers a request for a part of {what} with another part")]
    Range { origin: Origin, what: String },
    #[error("{origin} ends before all of {what} was sent: {found} of {size} bytes")]
    Short { origin: Origin, what: String, found: u64, size: u64 },
    #[error("{what} has {found} bytes in the registry, expected {expected}")]
    Size { what: String, found: u64, expected: u64 },
    #[error(
        "{what} has the wrong content: its digest is {found}, expected {expected}. Nothing of it was kept"
    )]
    Mismatch { what: String, expected: Digest, found: Digest },
    #[error("{0} names no digest for {1}, or one that cannot be read")]
    NoDigest(Origin, String),
    #[error("{0} gives no place to upload {1} to")]
    NoUpload(Origin, String),
}

fn again(after: Option<Duration>) -> String {
    after.map_or_else(String::new, |after| format!(". It asks to try again in {} s", after.as_secs()))
}

impl ClientError {
    /// Whether the same may succeed a moment later.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Http(error) => error.is_transient(),
            Self::Short { .. } => true,
            _ => false,
        }
    }

    pub fn is_cancelled(&self) -> bool {
        matches!(self, Self::Http(HttpError::Cancelled) | Self::Auth(AuthError::Http(HttpError::Cancelled)))
    }
}

impl From<AuthError> for ClientError {
    fn from(error: AuthError) -> Self {
        match error {
            AuthError::Http(error) => Self::Http(error),
            other => Self::Auth(other),
        }
    }
}

/// What a registry says of a login.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum LoginCheck {
    Accepted,
    /// It asks nobody for a login, so any would have been accepted.
    NotAsked,
}

/// A client of registries. It remembers tokens as long as it lives; threads may share it.
#[derive(Debug)]
pub struct Client {
    pub(crate) options: Options,
    pub(crate) keychain: Keychain,
    pub(crate) net: Net,
    pub(crate) tokens: Arc<Tokens>,
}

impl Client {
    pub fn new(options: Options, keychain: Keychain) -> Self {
        let Options { timeouts, proxies, cancel, .. } = options.clone();
        let net = Net::new(timeouts, proxies, cancel, options.insecure);
        let net = net.with_certificates(options.certificates.clone());
        Self { options, keychain, net, tokens: Arc::default() }
    }

    /// The digest of what a reference leads to at this moment.
    pub fn resolve(&self, reference: &Reference) -> Result<Digest, ClientError> {
        let mut session = Session::of(self, reference, "pull")?;
        session.resolve(reference)
    }

    /// Checks that a registry accepts a login, before it is kept. What earlier logins led to does not count.
    pub fn check_login(&self, registry: &str, credentials: &Credentials) -> Result<LoginCheck, ClientError> {
        let mut session = Session::new(self, registry, None, Cancel::default())?;
        session.use_credentials(credentials.clone());
        session.check()
    }

    pub(crate) fn check_insecure(&self, server: &str) -> Result<(), ClientError> {
        let host = match server.strip_prefix('[') {
            Some(_) => server.rsplit_once("]:").map_or(server, |(host, _)| &server[..=host.len()]),
            None => server.split(':').next().unwrap_or(server),
        };
        if self.options.insecure && !is_loopback(host) {
            Err(ClientError::Insecure(server.to_owned()))
        } else {
            Ok(())
        }
    }
}

/// How long a server asks to be left alone: seconds, or a date.
pub(crate) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(http::header::RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    Some(date.duration_since(std::time::SystemTime::now()).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_end() {
        let retries = Retries { count: 3, first: Duration::from_secs(1), longest: Duration::from_secs(3) };
        let pauses: Vec<_> =
            (1..=4).map(|failures| retries.pause(failures).map(|pause| pause.as_secs())).collect();
        assert_eq!(pauses, [Some(1), Some(2), Some(3), None]);
        assert_eq!(Retries { count: u32::MAX, ..retries }.pause(1000), Some(retries.longest));
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let after = |text: &str| {
            retry_after(&HeaderMap::from_iter([(http::header::RETRY_AFTER, text.parse().unwrap())]))
        };
        assert_eq!(after("7"), Some(Duration::from_secs(7)));
        assert_eq!(after("Wed, 21 Oct 2015 07:28:00 GMT"), Some(Duration::ZERO));
        assert!(after("Fri, 31 Dec 9999 23:59:59 GMT") > Some(Duration::from_secs(3600)));
        assert_eq!((after("-1"), after("soon"), after("")), (None, None, None));
        assert_eq!(retry_after(&HeaderMap::new()), None);
    }

    #[test]
    fn only_this_machine_is_reached_without_tls() {
        let client = Client::new(Options { insecure: true, ..Options::default() }, Keychain::empty());
        for server in ["localhost", "localhost:5000", "127.0.0.1:80", "[::1]", "[::1]:5000"] {
            client.check_insecure(server).unwrap();
        }
        for server in ["example.com", "10.0.0.1:5000", "[::2]:5000", "[::2]", "localhost.example.com:5000"] {
            let error = client.check_insecure(server).unwrap_err().to_string();
            assert!(error.contains("not on this machine"), "{error}");
        }
        let client = Client::new(Options::default(), Keychain::empty());
        client.check_insecure("example.com").unwrap();
    }
}
