//! What a specification's `image` means, and which images an operator allows.

use std::fmt;

use bathy_image::Recipe;
use bathy_registry::{Digest, Reference, ReferenceError, reference};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::SandboxSpec;

/// The root image of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Image {
    /// Built on this machine by a recipe of ours, such as `default`.
    Recipe(String),
    /// From a registry, as docker reads its name.
    Registry(Reference),
}

impl Image {
    /// Reads the name of an image. The names of recipes come first: `docker.io/library/default` is the other image.
    pub fn parse(text: &str) -> Result<Self, ReferenceError> {
        if Recipe::images().any(|name| name == text) {
            Ok(Self::Recipe(text.to_owned()))
        } else {
            text.parse().map(Self::Registry)
        }
    }
}

impl SandboxSpec {
    /// The sandbox's root image. One that was resolved has its digest.
    pub fn root_image(&self) -> Result<Image, ReferenceError> {
        let image = Image::parse(&self.image)?;
        Ok(match (image, &self.image_digest) {
            (Image::Registry(reference), Some(digest)) => Image::Registry(reference.pinned(digest)),
            (image, _) => image,
        })
    }

    /// The root image as it is recorded: in full and with its digest, if it is from a registry.
    pub fn image_text(&self) -> String {
        match self.root_image() {
            Ok(Image::Registry(reference)) => reference.to_string(),
            Ok(Image::Recipe(_)) | Err(_) => self.image.clone(),
        }
    }
}

/// Not an entry of a list of images.
#[derive(Debug, Error)]
#[error(
    "{0:?} does not name images. Write `default`, a repository such as `debian` or `ghcr.io/owner/name`, one with :TAG or @DIGEST, or all of a registry or owner: `ghcr.io/*`, `ghcr.io/owner/*`"
)]
pub struct ImageRuleError(String);

/// An entry of an operator's list of images.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ImageRule {
    text: String,
    matches: Matches,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Matches {
    Recipe(String),
    /// All repositories of a registry whose names begin with this.
    Below {
        registry: String,
        prefix: String,
    },
    Repository {
        registry: String,
        repository: String,
        only: Only,
    },
}

/// Which images of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Only {
    All,
    Tag(String),
    Digest(Digest),
}

impl ImageRule {
    /// Whether an image may be used. `pinned` is the digest that its reference led to, once that is known.
    pub fn allows(&self, image: &Image, pinned: Option<&Digest>) -> bool {
        match (&self.matches, image) {
            (Matches::Recipe(name), Image::Recipe(wanted)) => name == wanted,
            (Matches::Below { registry, prefix }, Image::Registry(wanted)) => {
                wanted.registry() == registry && wanted.repository().starts_with(prefix.as_str())
            }
            (Matches::Repository { registry, repository, only }, Image::Registry(wanted)) => {
                wanted.registry() == registry
                    && wanted.repository() == repository
                    && match only {
                        Only::All => true,
                        // With a digest, the tag is not even looked at.
                        Only::Tag(tag) => wanted.digest().is_none() && wanted.tag() == Some(tag.as_str()),
                        Only::Digest(digest) => wanted.digest().or(pinned) == Some(digest),
                    }
            }
            _ => false,
        }
    }

    /// The rule as the name of an image, if it is one.
    pub fn as_image(&self) -> Option<&str> {
        (!matches!(self.matches, Matches::Below { .. })).then_some(&*self.text)
    }
}

impl fmt::Display for ImageRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl TryFrom<String> for ImageRule {
    type Error = ImageRuleError;

    fn try_from(text: String) -> Result<Self, ImageRuleError> {
        let matches = Matches::parse(&text).ok_or_else(|| ImageRuleError(text.clone()))?;
        Ok(Self { text, matches })
    }
}

impl From<ImageRule> for String {
    fn from(rule: ImageRule) -> Self {
        rule.text
    }
}

impl Matches {
    fn parse(text: &str) -> Option<Self> {
        if let Some(above) = text.strip_suffix("/*") {
            return Self::below(above);
        }
        let reference = match Image::parse(text).ok()? {
            Image::Recipe(name) => return Some(Self::Recipe(name)),
            Image::Registry(reference) => reference,
        };
        let last = text.split('@').next()?.rsplit('/').next()?;
        let only = match (reference.digest(), reference.tag()) {
            (Some(digest), _) => Only::Digest(digest.clone()),
            // Not the tag that a name without one stands for.
            (None, Some(tag)) if last.contains(':') => Only::Tag(tag.to_owned()),
            _ => Only::All,
        };
        let (registry, repository) = (reference.registry().to_owned(), reference.repository().to_owned());
        Some(Self::Repository { registry, repository, only })
    }

    fn below(above: &str) -> Option<Self> {
        let is_registry = !above.contains('/') && (above.contains(['.', ':']) || above == "localhost");
        if is_registry {
            let registry = reference::registry(above).ok()?;
            return Some(Self::Below { registry, prefix: String::new() });
        }
        // Any name below it tells how the rest is read.
        let below: Reference = format!("{above}/x").parse().ok()?;
        let prefix = below.repository().strip_suffix('x')?.to_owned();
        Some(Self::Below { registry: below.registry().to_owned(), prefix })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn rule(text: &str) -> ImageRule {
        text.to_owned().try_into().unwrap()
    }

    fn allows(text: &str, image: &str) -> bool {
        rule(text).allows(&Image::parse(image).unwrap(), None)
    }

    #[test]
    fn names_of_recipes_come_before_those_of_registries() {
        assert_eq!(Image::parse("default").unwrap(), Image::Recipe("default".to_owned()));
        let Image::Registry(debian) = Image::parse("debian").unwrap() else { panic!("no recipe") };
        assert_eq!(debian.to_string(), "docker.io/library/debian:latest");
        assert!(matches!(Image::parse("docker.io/library/default"), Ok(Image::Registry(_))));
        assert!(Image::parse("Debian").is_err() && Image::parse("").is_err());
    }

    #[test]
    fn a_rule_is_of_a_recipe_a_registry_an_owner_or_a_repository() {
        for (text, yes, no) in [
            ("default", "default", "docker.io/library/default"),
            ("debian", "debian:12", "debian-slim"),
            ("debian", "docker.io/library/debian@", "owner/debian"),
            ("library/*", "debian", "owner/debian"),
            ("docker.io/*", "owner/debian", "ghcr.io/owner/debian"),
            ("ghcr.io/*", "ghcr.io/a/b/c", "ghcr.io.example/a/b/c"),
            ("ghcr.io/a/*", "ghcr.io/a/b/c", "ghcr.io/ab/c"),
            ("localhost:5000/*", "localhost:5000/a", "localhost:5001/a"),
            ("ghcr.io/a/b", "ghcr.io/a/b:c", "ghcr.io/a/b/c"),
            ("GHCR.io/a/b", "ghcr.io/a/b", "ghcr.io/a"),
        ] {
            let yes = if yes.ends_with('@') { format!("{yes}{DIGEST}") } else { yes.to_owned() };
            assert!(allows(text, &yes), "{text} {yes}");
            assert!(!allows(text, no) && !allows(text, "other.example/x"), "{text} {no}");
        }
    }

    #[test]
    fn a_tag_does_not_let_a_digest_in_and_a_digest_no_tag() {
        assert!(allows("debian:12", "debian:12") && !allows("debian:12", "debian"));
        assert!(allows("debian:latest", "debian"));
        assert!(!allows("debian:12", &format!("debian:12@{DIGEST}")));
        let pinned = format!("debian@{DIGEST}");
        assert!(allows(&pinned, &pinned) && allows(&pinned, &format!("debian:1@{DIGEST}")));
        assert!(!allows(&pinned, "debian") && !allows(&pinned, &format!("ubuntu@{DIGEST}")));
        let digest: Digest = DIGEST.parse().unwrap();
        let debian = Image::parse("debian:12").unwrap();
        assert!(rule(&pinned).allows(&debian, Some(&digest)), "that is where the tag led");
        assert!(!rule(&pinned).allows(&debian, Some(&Digest::of(b"x"))));
    }

    #[test]
    fn what_is_no_rule_is_refused() {
        for text in ["", "*", "/*", "http://x/*", "Debian", "a/*/b", "x:y:z", "ghcr.io:0/*", "evil\n"] {
            let error = ImageRule::try_from(text.to_owned()).unwrap_err().to_string();
            assert!(error.contains("does not name images"), "{error}");
        }
        assert_eq!(rule("ghcr.io/*").as_image(), None);
        assert_eq!(rule("debian:12").as_image(), Some("debian:12"));
        let text = serde_json::to_string(&rule("debian:12")).unwrap();
        assert_eq!(serde_json::from_str::<ImageRule>(&text).unwrap(), rule("debian:12"));
    }

    #[test]
    fn a_resolved_image_has_its_digest() {
        let digest: Digest = DIGEST.parse().unwrap();
        let spec = SandboxSpec {
            image: "debian:12".to_owned(),
            image_digest: Some(digest),
            ..SandboxSpec::default()
        };
        let Image::Registry(reference) = spec.root_image().unwrap() else { panic!("no recipe") };
        assert_eq!(reference.to_string(), format!("docker.io/library/debian:12@{DIGEST}"));
        let default = SandboxSpec { image: "default".to_owned(), ..spec };
        assert_eq!(default.root_image().unwrap(), Image::Recipe("default".to_owned()));
    }
}
