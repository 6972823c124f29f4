//! HTTP for registries: one request at a time on persistent connections, redirects that send no secret to another host,
//! and time limits for every step. The API blocks; everything asynchronous is private to this module.

mod body;
mod connect;
mod link;
mod proxy;
mod tls;
mod url;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use rustls::pki_types::InvalidDnsNameError;
use thiserror::Error;

pub use body::{Content, FileContent};
pub use link::{Call, Link, Response};
pub use proxy::{Proxies, ProxyError};
pub use tls::TlsError;
pub use url::{Origin, Scheme, Url, UrlError, encoded};

use crate::cancel::Cancel;

/// Why there is no answer, or only a part of it.
#[derive(Debug, Error)]
pub enum HttpError {
    #[error(
        "{0} cannot be used without TLS: only a registry on this machine itself can (localhost, 127.0.0.1, [::1])"
    )]
    Plain(String),
    #[error("There is no host {0}, or its address cannot be looked up")]
    Resolve(String, #[source] io::Error),
    #[error("Cannot connect to {0}")]
    Connect(String, #[source] io::Error),
    #[error("{0} does not accept a connection within {1:?}")]
    ConnectTimeout(String, Duration),
    #[error("Cannot use TLS with {0}")]
    Tls(String, #[source] TlsError),
    #[error("{0:?} cannot be the name of a TLS server")]
    ServerName(String, #[source] InvalidDnsNameError),
    #[error("Cannot reach {0} through the proxy")]
    Proxy(String, #[source] ProxyError),
    #[error("The connection to {0} was cut")]
    Cut(String, #[source] hyper::Error),
    #[error("{0} sends nothing, or next to nothing, for {1:?}")]
    Stalled(String, Duration),
    #[error("{0} redirects more than {1} times")]
    Redirects(String, usize),
    #[error("{0} redirects to {1}, which is not as safe as TLS")]
    Downgrade(String, String),
    #[error("{0} redirects to something that is no address")]
    Location(String, #[source] UrlError),
    #[error("{0} sends more than {1} bytes where fewer are expected")]
    Long(String, u64),
    #[error("Cannot read {0}")]
    File(PathBuf, #[source] io::Error),
    #[error("Cannot prepare for the network")]
    Runtime(#[source] io::Error),
    #[error("A request has a value that HTTP cannot carry")]
    Request(#[source] http::Error),
    #[error("It was cancelled")]
    Cancelled,
}

impl HttpError {
    /// Whether the same may succeed a moment later.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Cut(..) | Self::Stalled(..))
    }
}

/// How long is waited for others.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// For a connection, TLS included.
    pub connect: Duration,
    /// For an answer to begin, and for each part of it.
    pub idle: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { connect: Duration::from_secs(10), idle: Duration::from_secs(60) }
    }
}

/// How connections are made.
#[derive(Debug)]
pub struct Net {
    pub timeouts: Timeouts,
    pub proxies: Proxies,
    pub cancel: Cancel,
    /// Whether plain HTTP is spoken, which only loopback addresses get.
    pub insecure: bool,
    tls: tls::Tls,
}

impl Net {
    /// With the system's certificates, or those in a file.
    pub fn new(timeouts: Timeouts, proxies: Proxies, cancel: Cancel, insecure: bool) -> Self {
        Self { timeouts, proxies, cancel, insecure, tls: tls::Tls::default() }
    }

    /// Trusts the certificates in this file instead of the system's.
    pub fn with_certificates(mut self, file: Option<PathBuf>) -> Self {
        self.tls = tls::Tls::new(file);
        self
    }
}
