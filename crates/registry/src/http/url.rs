//! Addresses on the web, as far as registries need them.

use std::fmt;

use http::Uri;
use thiserror::Error;

use crate::reference::is_loopback;
use crate::text::plain;

const MAX_URL: usize = 16 << 10;

/// Not an address that is followed.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum UrlError {
    #[error("{0:?} is no address")]
    Form(String),
    #[error("{0:?} is neither http nor https")]
    Scheme(String),
    #[error("An address has a user name in it")]
    User,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    Http,
    Https,
}

/// A server: what may share a connection, and secrets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Origin {
    pub scheme: Scheme,
    /// In lower case, an IPv6 address in brackets.
    pub host: String,
    pub port: u16,
}

impl Origin {
    /// `host` or `host:port`, as the Host header has it.
    pub fn authority(&self) -> String {
        match (self.scheme, self.port) {
            (Scheme::Http, 80) | (Scheme::Https, 443) => self.host.clone(),
            (_, port) => format!("{}:{port}", self.host),
        }
    }

    pub fn is_loopback(&self) -> bool {
        is_loopback(&self.host)
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.authority())
    }
}

/// An address without user name and fragment.
#[derive(Clone, PartialEq, Eq)]
pub struct Url {
    pub origin: Origin,
    /// Path and query.
    pub target: String,
}

impl fmt::Debug for Url {
    /// Without the query: of a redirect it is often a key to what it leads to.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.target.split('?').next().unwrap_or_default();
        write!(f, "{}{path}", self.origin)
    }
}

impl Url {
    pub fn parse(text: &str) -> Result<Self, UrlError> {
        let form = || UrlError::Form(shown(text));
        if text.len() > MAX_URL {
            return Err(form());
        }
        let text_without_fragment = text.split('#').next().unwrap_or(text);
        let uri: Uri = text_without_fragment.parse().map_err(|_| form())?;
        let scheme = match uri.scheme_str() {
            Some("http") => Scheme::Http,
            Some("https") => Scheme::Https,
            Some(_) => return Err(UrlError::Scheme(shown(text))),
            None => return Err(form()),
        };
        let authority = uri.authority().ok_or_else(form)?;
        if authority.as_str().contains('@') {
            return Err(UrlError::User);
        }
        let port = match authority.port() {
            Some(port) => port.as_str().parse().map_err(|_| form())?,
            // A port that is no number below 65536.
            None if authority.as_str() != authority.host() => return Err(form()),
            None if scheme == Scheme::Http => 80,
            None => 443,
        };
        let host = authority.host().to_ascii_lowercase();
        if host.is_empty() || port == 0 {
            return Err(form());
        }
        let target = uri.path_and_query().map_or("/", |target| target.as_str());
        // `https://host?query` has no path.
        let target = if target.starts_with('/') { target.to_owned() } else { format!("/{target}") };
        Ok(Self { origin: Origin { scheme, host, port }, target })
    }

    /// Where a Location header on an answer from here leads.
    pub fn join(&self, location: &str) -> Result<Self, UrlError> {
        let origin = &self.origin;
        let scheme = if origin.scheme == Scheme::Http { "http" } else { "https" };
        if let Some(rest) = location.strip_prefix("//") {
            return Self::parse(&format!("{scheme}://{rest}"));
        }
        let path = self.target.split('?').next().unwrap_or_default();
        let base = format!("{scheme}://{}", origin.authority());
        if location.starts_with('/') {
            Self::parse(&format!("{base}{location}"))
        } else if location.starts_with('?') {
            Self::parse(&format!("{base}{path}{location}"))
        } else if location.split(['/', '?']).next().is_some_and(|first| first.contains(':')) {
            Self::parse(location)
        } else if location.is_empty() {
            Err(UrlError::Form(String::new()))
        } else {
            let folder = path.rfind('/').map_or("/", |end| &path[..=end]);
            Self::parse(&format!("{base}{folder}{location}"))
        }
    }

    /// The same with one more pair in the query.
    pub fn with_query(&self, name: &str, value: &str) -> Self {
        let separator = if self.target.contains('?') { '&' } else { '?' };
        let target = format!("{}{separator}{name}={}", self.target, encoded(value));
        Self { origin: self.origin.clone(), target }
    }
}

fn shown(text: &str) -> String {
    plain(text.split('?').next().unwrap_or_default(), 200)
}

/// Percent-encoded for a query or a form.
pub fn encoded(value: &str) -> String {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    let mut text = String::with_capacity(value.len());
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            text.push(char::from(byte));
        } else {
            let digit = |value: u8| char::from(DIGITS[usize::from(value)]);
            text.extend(['%', digit(byte >> 4), digit(byte & 15)]);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn addresses_are_read() {
        let read = url("https://Example.com/a/b?c=d#e");
        assert_eq!((read.origin.authority().as_str(), read.target.as_str()), ("example.com", "/a/b?c=d"));
        assert_eq!(url("http://[::1]:5000").origin.authority(), "[::1]:5000");
        assert_eq!(url("https://host?x").target, "/?x");
        assert_eq!(url("https://host:443/").origin, url("https://host/").origin);
        assert_ne!(url("http://host/").origin, url("https://host/").origin);
        assert_eq!(format!("{:?}", url("https://host/a?secret")), "host/a");
    }

    #[test]
    fn other_things_are_not() {
        for text in [
            "",
            "/a",
            "host",
            "https://",
            "https://host:0/",
            "https://host:99999/",
            "https://a b/",
            "https://h/\u{1}",
        ] {
            assert!(matches!(Url::parse(text), Err(UrlError::Form(_))), "{text}");
        }
        assert!(matches!(Url::parse("ftp://host/"), Err(UrlError::Scheme(_))));
        assert_eq!(Url::parse("https://user:pass@host/"), Err(UrlError::User));
        assert!(Url::parse(&format!("https://h/{}", "a".repeat(MAX_URL))).is_err());
        let error = Url::parse("https:///x?secret").unwrap_err().to_string();
        assert!(!error.contains("secret"), "{error}");
    }

    #[test]
    fn locations_are_joined() {
        let base = url("https://host:5000/v2/name/blobs/x?y");
        for (location, expected) in [
            ("/p?q", "https://host:5000/p?q"),
            ("z", "https://host:5000/v2/name/blobs/z"),
            ("?z=/a:b", "https://host:5000/v2/name/blobs/x?z=/a:b"),
            ("//other/p", "https://other/p"),
            ("http://other/p", "http://other/p"),
        ] {
            assert_eq!(base.join(location).unwrap(), url(expected), "{location}");
        }
        assert!(base.join("").is_err() && base.join("javascript:x").is_err());
        assert!(url("http://host/").join("//h2/").unwrap().origin.scheme == Scheme::Http);
    }

    #[test]
    fn queries_are_encoded() {
        let asked = url("https://host/token?a=b").with_query("scope", "repository:a/b:pull,push");
        assert_eq!(asked.target, "/token?a=b&scope=repository%3Aa%2Fb%3Apull%2Cpush");
        assert_eq!(url("https://host/").with_query("s", "ä&=").target, "/?s=%C3%A4%26%3D");
    }
}
