//! What images are called: `debian`, `ghcr.io/owner/name:tag`, `localhost:5000/name@sha256:…`, read as docker reads them.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use thiserror::Error;

use crate::digest::{Digest, DigestError};
use crate::text::plain;

/// The registry of names without one.
pub const DOCKER_HUB: &str = "docker.io";
/// Where that registry is.
const DOCKER_HUB_SERVER: &str = "registry-1.docker.io";
const DEFAULT_TAG: &str = "latest";
/// Of registry and repository together.
const MAX_NAME: usize = 255;
const MAX_TAG: usize = 128;

/// A text that is not the name of an image.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ReferenceError {
    #[error("An image's name is empty. A name is like `debian`, `debian:12` or `ghcr.io/owner/name:tag`")]
    Empty,
    #[error("{given:?} is an address. An image's name has no `{scheme}://`{}", suggestion(.hint.as_ref()))]
    Scheme { given: String, scheme: String, hint: Option<String> },
    #[error("{given:?} is not an image's name: repositories are in lower case{}", suggestion(.hint.as_ref()))]
    UpperCase { given: String, hint: Option<String> },
    #[error("{0:?} is not an image's name: {1:?} is no registry. A registry is a host, or HOST:PORT")]
    Registry(String, String),
    #[error(
        "{given:?} is not an image's name: {part:?} is no part of a repository. Use lower-case letters and digits, separated by '.', '_', '__' or dashes"
    )]
    Repository { given: String, part: String },
    #[error(
        "{given:?} is not an image's name: {tag:?} is no tag. A tag has at most {MAX_TAG} letters, digits, '_', '.' or '-', and does not begin with '.' or '-'"
    )]
    Tag { given: String, tag: String },
    #[error("{0:?} is not an image's name: what follows '@' is no digest")]
    Digest(String, #[source] DigestError),
    #[error("An image's name is longer than {MAX_NAME} characters")]
    Long,
    #[error("{0:?} looks like the digits of a digest. Write NAME@sha256:{0}")]
    Bare(String),
}

fn suggestion(hint: Option<&String>) -> String {
    hint.map_or_else(String::new, |hint| format!(". Did you mean `{hint}`?"))
}

/// The name of an image. `Display` prints it in full, and what it prints is read as the same again.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reference {
    registry: String,
    repository: String,
    tag: Option<String>,
    digest: Option<Digest>,
}

impl Reference {
    /// A host, or `host:port`, in lower case.
    pub fn registry(&self) -> &str {
        &self.registry
    }

    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// None only if there is a digest.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    pub fn digest(&self) -> Option<&Digest> {
        self.digest.as_ref()
    }

    /// Where the registry's server is: `host` or `host:port`.
    pub fn server(&self) -> &str {
        server(&self.registry)
    }

    /// What the registry is asked for: the digest, which leaves it no choice, or else the tag.
    pub fn target(&self) -> String {
        let by_tag = || self.tag.clone().unwrap_or_default();
        self.digest.as_ref().map_or_else(by_tag, ToString::to_string)
    }

    /// The same repository and tag at one digest.
    pub fn pinned(&self, digest: &Digest) -> Self {
        Self { digest: Some(digest.clone()), ..self.clone() }
    }
}

/// Where a registry's server is.
pub fn server(registry: &str) -> &str {
    if registry == DOCKER_HUB { DOCKER_HUB_SERVER } else { registry }
}

/// Checks the name of a registry alone, as `login` takes it, and puts it in its one form.
pub fn registry(text: &str) -> Result<String, ReferenceError> {
    canonical_registry(text).ok_or_else(|| {
        let shown = plain(text, MAX_NAME);
        ReferenceError::Registry(shown.clone(), shown)
    })
}

/// Whether this host is this machine by its name alone: `localhost` or a loopback address.
pub fn is_loopback(host: &str) -> bool {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    host == "localhost" || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

impl FromStr for Reference {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        let given = || plain(text, 300);
        check_whole(text)?;
        let (name, digest) = match text.split_once('@') {
            None => (text, None),
            Some((name, digest)) => {
                let digest = digest.parse().map_err(|error| ReferenceError::Digest(given(), error))?;
                (name, Some(digest))
            }
        };
        let (name, tag) = split_tag(name);
        if let Some(tag) = tag.filter(|tag| !is_tag(tag)) {
            return Err(ReferenceError::Tag { given: given(), tag: plain(tag, MAX_TAG) });
        }
        let (registry, repository) = split_registry(name);
        let registry = canonical_registry(registry)
            .ok_or_else(|| ReferenceError::Registry(given(), plain(registry, MAX_NAME)))?;
        check_repository(text, repository)?;
        let repository = if registry == DOCKER_HUB && !repository.contains('/') {
            format!("library/{repository}")
        } else {
            repository.to_owned()
        };
        if registry.len() + 1 + repository.len() > MAX_NAME {
            return Err(ReferenceError::Long);
        }
        let default = if digest.is_none() { Some(DEFAULT_TAG) } else { None };
        Ok(Self { registry, repository, tag: tag.or(default).map(str::to_owned), digest })
    }
}

/// What is wrong with a name as a whole.
fn check_whole(text: &str) -> Result<(), ReferenceError> {
    let is_digits = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if text.is_empty() {
        Err(ReferenceError::Empty)
    } else if let Some((scheme, rest)) = text.split_once("://") {
        let hint = readable(rest.trim_end_matches('/'));
        Err(ReferenceError::Scheme { given: plain(text, 300), scheme: plain(scheme, 20), hint })
    } else if is_digits {
        Err(ReferenceError::Bare(text.to_owned()))
    } else {
        Ok(())
    }
}

fn readable(text: &str) -> Option<String> {
    // What is short enough for a hint and has no second scheme, so that this ends.
    let fits = text.len() <= 300 && !text.contains("://");
    (fits && text.parse::<Reference>().is_ok()).then(|| text.to_owned())
}

/// A colon before the last slash belongs to a port.
fn split_tag(name: &str) -> (&str, Option<&str>) {
    match name.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
        _ => (name, None),
    }
}

/// The first part is a registry if it could not be a part of a repository.
fn split_registry(name: &str) -> (&str, &str) {
    let is_registry = |part: &str| part.contains(['.', ':']) || part == "localhost";
    match name.split_once('/') {
        Some((first, rest)) if is_registry(first) => (first, rest),
        _ => (DOCKER_HUB, name),
    }
}

fn canonical_registry(text: &str) -> Option<String> {
    let (host, port) = if text.starts_with('[') {
        let (address, rest) = text.split_once(']')?;
        address.get(1..)?.parse::<Ipv6Addr>().ok()?;
        (&text[..=address.len()], if rest.is_empty() { None } else { Some(rest.strip_prefix(':')?) })
    } else {
        text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)))
    };
    let is_host = host.starts_with('[') || (host.len() <= 253 && host.split('.').all(is_label));
    let is_port = |port: &str| {
        port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|port| port != 0)
    };
    if !is_host || !port.is_none_or(is_port) {
        return None;
    }
    let registry = text.to_ascii_lowercase();
    Some(if ["index.docker.io", DOCKER_HUB_SERVER].contains(&&*registry) {
        DOCKER_HUB.into()
    } else {
        registry
    })
}

fn is_label(label: &str) -> bool {
    let inside = label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    inside && (1..=63).contains(&label.len()) && !label.starts_with('-') && !label.ends_with('-')
}

fn is_tag(tag: &str) -> bool {
    let inside = tag.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte));
    inside && (1..=MAX_TAG).contains(&tag.len()) && !tag.starts_with(['.', '-'])
}

fn check_repository(text: &str, repository: &str) -> Result<(), ReferenceError> {
    let given = plain(text, 300);
    if let Some(part) = repository.split('/').find(|part| !is_part(part)) {
        if part.bytes().any(|byte| byte.is_ascii_uppercase()) && is_part(&part.to_ascii_lowercase()) {
            let lower = repository.to_ascii_lowercase();
            let hint = readable(&text.replacen(repository, &lower, 1));
            return Err(ReferenceError::UpperCase { given, hint });
        }
        return Err(ReferenceError::Repository { given, part: plain(part, MAX_NAME) });
    }
    Ok(())
}

/// Letters and digits, separated by one dot, one or two underscores, or any dashes.
fn is_part(part: &str) -> bool {
    let is_word = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = part.as_bytes();
    let ends = [bytes.first(), bytes.last()].into_iter().all(|end| end.is_some_and(is_word));
    let is_separator =
        |run: &[u8]| matches!(run, b"" | b"." | b"_" | b"__") || run.iter().all(|byte| *byte == b'-');
    ends && separators(bytes, is_word).all(is_separator)
}

/// The runs of bytes between words.
fn separators(bytes: &[u8], is_word: impl Fn(&u8) -> bool + Copy) -> impl Iterator<Item = &[u8]> {
    bytes
        .chunk_by(move |one, other| is_word(one) == is_word(other))
        .filter(move |run| !run.iter().any(is_word))
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        self.tag.iter().try_for_each(|tag| write!(f, ":{tag}"))?;
        self.digest.iter().try_for_each(|digest| write!(f, "@{digest}"))
    }
}

impl Serialize for Reference {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Reference {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
#[path = "reference_tests.rs"]
mod tests;
