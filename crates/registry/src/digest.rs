//! Digests of content: `sha256:` and 64 hexadecimal digits.

use std::fmt;
use std::str::FromStr;

use ring::digest::{Context, SHA256, SHA512};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use thiserror::Error;

use crate::text::plain;

/// Not a digest that can be checked.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum DigestError {
    #[error("{0:?} is not a digest. A digest is `sha256:` and 64 hexadecimal digits")]
    Form(String),
    #[error("Digests of the algorithm {0:?} cannot be checked: only sha256 and sha512 can")]
    Algorithm(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Algorithm {
    Sha256,
    Sha512,
}

impl Algorithm {
    pub const ALL: [Self; 2] = [Self::Sha256, Self::Sha512];

    pub fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Sha512 => "sha512",
        }
    }

    fn hex_length(self) -> usize {
        match self {
            Self::Sha256 => 64,
            Self::Sha512 => 128,
        }
    }
}

/// The digest of some content. Its hexadecimal digits are lower case, so it can be a file's name.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest {
    algorithm: Algorithm,
    hex: String,
}

impl Digest {
    /// The sha256 of `content`.
    pub fn of(content: &[u8]) -> Self {
        let mut hasher = Hasher::new(Algorithm::Sha256);
        hasher.update(content);
        hasher.finish()
    }

    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    pub fn hex(&self) -> &str {
        &self.hex
    }

    /// Whether this is the digest of `content`.
    pub fn matches(&self, content: &[u8]) -> bool {
        let mut hasher = Hasher::new(self.algorithm);
        hasher.update(content);
        hasher.finish() == *self
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        let form = || DigestError::Form(plain(text, 160));
        let (algorithm, hex) = text.split_once(':').ok_or_else(form)?;
        let known = Algorithm::ALL.into_iter().find(|known| known.name() == algorithm);
        let algorithm = known.ok_or_else(|| DigestError::Algorithm(plain(algorithm, 40)))?;
        let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if hex.len() == algorithm.hex_length() && hex.bytes().all(is_hex) {
            Ok(Self { algorithm, hex: hex.to_owned() })
        } else {
            Err(form())
        }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.algorithm.name(), self.hex)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// A digest in the making.
#[derive(Clone)]
pub struct Hasher {
    algorithm: Algorithm,
    context: Context,
}

impl Hasher {
    pub fn new(algorithm: Algorithm) -> Self {
        let context = match algorithm {
            Algorithm::Sha256 => Context::new(&SHA256),
            Algorithm::Sha512 => Context::new(&SHA512),
        };
        Self { algorithm, context }
    }

    pub fn update(&mut self, content: &[u8]) {
        self.context.update(content);
    }

    pub fn finish(self) -> Digest {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let digit = |value: u8| char::from(DIGITS[usize::from(value & 15)]);
        let hash = self.context.finish();
        let hex = hash.as_ref().iter().flat_map(|byte| [digit(byte >> 4), digit(*byte)]).collect();
        Digest { algorithm: self.algorithm, hex }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn the_digest_of_nothing_is_the_known_one() {
        assert_eq!(Digest::of(b"").to_string(), EMPTY);
        let digest: Digest = EMPTY.parse().unwrap();
        assert!(digest.matches(b"") && !digest.matches(b"x"));
        let mut hasher = Hasher::new(Algorithm::Sha512);
        hasher.update(b"abc");
        let sha512 = hasher.finish();
        assert!(sha512.to_string().starts_with("sha512:ddaf35a193617abacc417349ae204131"));
        assert_eq!(sha512.to_string().parse::<Digest>().unwrap(), sha512);
        assert!(sha512.matches(b"abc"));
    }

    #[test]
    fn what_cannot_be_checked_is_not_a_digest() {
        let upper = EMPTY.replace('e', "E");
        for text in ["", "sha256", "sha256:", "sha256:abc", &EMPTY[..70], &format!("{EMPTY}0"), &upper] {
            assert!(matches!(text.parse::<Digest>(), Err(DigestError::Form(_))), "{text}");
        }
        for text in ["md5:d41d8cd98f00b204e9800998ecf8427e", "SHA256:x", ":x", "sha256+b64:x", "../x:y"] {
            assert!(matches!(text.parse::<Digest>(), Err(DigestError::Algorithm(_))), "{text}");
        }
    }
}
