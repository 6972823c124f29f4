//! Proxies, as the environment names them. TLS goes through with CONNECT; the proxy sees the host's name and nothing else.

use std::{env, io};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::url::{Origin, Scheme, Url};
use crate::text::plain;

/// The longest answer to CONNECT.
const MAX_HEAD: usize = 8 << 10;

/// Why a proxy does not help.
#[derive(Debug, Error)]
pub enum ProxyError {
    #[error(
        "HTTPS_PROXY is not an address like http://host:port (https and socks proxies are not supported)"
    )]
    Form,
    #[error("It cannot be connected to")]
    Connect(#[source] io::Error),
    #[error("It refuses: {0:?}")]
    Refused(String),
    #[error("It does not answer as a proxy")]
    Answer,
}

/// Which proxy is used for which hosts.
#[derive(Clone, Default)]
pub struct Proxies {
    https: Option<String>,
    except: Vec<String>,
}

impl std::fmt::Debug for Proxies {
    /// Without the address, which may have a password in it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Proxies({}, except {:?})", if self.https.is_some() { "one" } else { "none" }, self.except)
    }
}

/// A proxy for one connection.
pub(super) struct Proxy {
    pub origin: Origin,
    authorization: Option<String>,
}

impl Proxies {
    /// `HTTPS_PROXY` or `ALL_PROXY`, and `NO_PROXY`, also in lower case.
    pub fn of_environment() -> Self {
        let read = |name: &str| {
            let found = env::var(name).or_else(|_| env::var(name.to_lowercase())).ok();
            found.filter(|value| !value.is_empty())
        };
        Self::new(read("HTTPS_PROXY").or_else(|| read("ALL_PROXY")), &read("NO_PROXY").unwrap_or_default())
    }

    /// This proxy for all hosts but those in a list with commas.
    pub fn new(https: Option<String>, except: &str) -> Self {
        let except = except.split(',').map(|part| part.trim().to_ascii_lowercase());
        Self { https, except: except.filter(|part| !part.is_empty()).collect() }
    }

    pub(super) fn for_origin(&self, origin: &Origin) -> Result<Option<Proxy>, ProxyError> {
        match &self.https {
            Some(https) if origin.scheme == Scheme::Https && !self.is_excepted(origin) => {
                Proxy::parse(https).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn is_excepted(&self, origin: &Origin) -> bool {
        let with_port = format!("{}:{}", origin.host, origin.port);
        origin.is_loopback()
            || self.except.iter().any(|part| {
                let domain = part.trim_start_matches('.');
                let is_below = || {
                    origin
                        .host
                        .strip_suffix(domain)
                        .is_some_and(|above| above.is_empty() || above.ends_with('.'))
                };
                part == "*" || *part == with_port || is_below()
            })
    }
}

impl Proxy {
    fn parse(text: &str) -> Result<Self, ProxyError> {
        let text = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
        let rest = text.strip_prefix("http://").ok_or(ProxyError::Form)?;
        let (user, host) = match rest.rsplit_once('@') {
            Some((user, host)) => (Some(user), host),
            None => (None, rest),
        };
        let url = Url::parse(&format!("http://{host}")).map_err(|_| ProxyError::Form)?;
        let authorization = user.map(|user| format!("Basic {}", BASE64_STANDARD.encode(decoded(user))));
        Ok(Self { origin: url.origin, authorization })
    }

    /// Asks for a connection to `origin` through `stream`.
    pub async fn connect(&self, stream: &mut TcpStream, origin: &Origin) -> Result<(), ProxyError> {
        let target = format!("{}:{}", origin.host, origin.port);
        let authorization = self
            .authorization
            .as_ref()
            .map_or_else(String::new, |value| format!("Proxy-Authorization: {value}\r\n"));
        let request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{authorization}\r\n");
        stream.write_all(request.as_bytes()).await.map_err(ProxyError::Connect)?;
        let mut head = Vec::new();
        // Byte by byte: what follows the head belongs to TLS.
        while !head.ends_with(b"\r\n\r\n") {
            if head.len() >= MAX_HEAD {
                return Err(ProxyError::Answer);
            }
            head.push(stream.read_u8().await.map_err(ProxyError::Connect)?);
        }
        let line = String::from_utf8_lossy(&head);
        let line = line.lines().next().unwrap_or_default();
        match line.split_once(' ') {
            Some(("HTTP/1.1" | "HTTP/1.0", status)) if status.starts_with('2') => Ok(()),
            Some(("HTTP/1.1" | "HTTP/1.0", status)) => Err(ProxyError::Refused(plain(status, 100))),
            _ => Err(ProxyError::Answer),
        }
    }
}

/// Decodes percent-encoded text.
fn decoded(text: &str) -> Vec<u8> {
    let mut bytes = text.bytes();
    let mut decoded = Vec::new();
    while let Some(byte) = bytes.next() {
        let mut ahead = bytes.clone();
        let digit = |byte: Option<u8>| byte.and_then(|byte| char::from(byte).to_digit(16));
        match (byte, digit(ahead.next()), digit(ahead.next())) {
            (b'%', Some(high), Some(low)) => {
                decoded.extend(u8::try_from(high * 16 + low));
                bytes = ahead;
            }
            _ => decoded.push(byte),
        }
    }
    decoded
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_used(except: &str, url: &str) -> bool {
        let origin = Url::parse(url).unwrap().origin;
        Proxies::new(Some("proxy:3128".into()), except).for_origin(&origin).unwrap().is_some()
    }

    #[test]
    fn exceptions_are_hosts_and_all_below() {
        assert!(is_used("", "https://ghcr.io/"));
        for except in ["*", "ghcr.io", ".io", "io", "x, GHCR.io:443", "ghcr.io,x"] {
            assert!(!is_used(except, "https://ghcr.io/"), "{except}");
        }
        for except in ["hcr.io", "ghcr.io:444", "a.ghcr.io", "example.com"] {
            assert!(is_used(except, "https://ghcr.io/"), "{except}");
        }
        assert!(!is_used("", "https://127.0.0.1/") && !is_used("", "http://ghcr.io/"));
    }

    #[test]
    fn a_proxy_has_a_port_and_perhaps_a_user() {
        let proxy = Proxy::parse("http://us%65r:p%40ss@proxy.example:3128/").unwrap();
        assert_eq!(proxy.origin.authority(), "proxy.example:3128");
        assert_eq!(proxy.authorization.unwrap(), format!("Basic {}", BASE64_STANDARD.encode("user:p@ss")));
        for wrong in ["socks5://x", "https://x", "http://", "a b"] {
            assert!(matches!(Proxy::parse(wrong), Err(ProxyError::Form)), "{wrong}");
        }
        let proxies = Proxies::new(Some("http://user:password@proxy".into()), "");
        assert!(!format!("{proxies:?}").contains("password"));
        assert_eq!(decoded("a%4"), b"a%4");
        assert_eq!(decoded("%zz%41"), b"%zzA");
    }
}
