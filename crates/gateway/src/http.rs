//! Plain HTTP/1 from the client: which host, method and path each request asks for.
//!
//! [`RequestStream`] follows the stream from request to request, so that the second request on a persistent
//! connection is decided like the first. It is stricter than a server has to be: bytes that two parsers could read
//! as different requests (request smuggling) are refused.

mod head;
mod response;
mod sniff;
mod stream;
mod target;
#[cfg(test)]
mod tests;

use thiserror::Error;

pub use response::{Denial, denial};
pub use stream::{RequestStream, Step};
pub use target::{Authority, Host, PathProblem, rule_path};

/// The longest request head, and the most that a caller has to buffer before it is cleared.
pub const MAX_HEAD: usize = 64 * 1024;
pub const MAX_FIELDS: usize = 200;

/// One request, known before any of its bytes may be forwarded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Capital letters, digits, hyphens and underscores.
    pub method: String,
    /// The request target as the client wrote it.
    pub target: String,
    pub form: Form,
    /// The host that the client asks for. Only an HTTP/1.0 request may have none.
    pub authority: Option<Authority>,
    /// The path in the canonical spelling of rules, or why it has none. That matters only where a rule has a path.
    pub path: Result<String, PathProblem>,
    pub body: Body,
    /// The protocols of an Upgrade field, printable. Only WebSocket is forwarded to the server.
    pub upgrade: Option<String>,
    /// Whether a field may override the method or path above, as some frameworks allow. Where a rule has a method
    /// or path, such a request is to be denied.
    pub rewrites: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Origin,
    /// A whole URL, as sent to a proxy.
    Absolute,
    Asterisk,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// The Content-Length, or 0 without one.
    Length(u64),
    Chunked,
}

/// Why a request stream cannot be followed. Nothing more is cleared after it.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum HttpRefusal {
    /// No server accepts the start of the stream as HTTP/1.
    #[error("The connection does not start with an HTTP request")]
    NotHttp,
    /// HTTP/2 with prior knowledge.
    #[error("The client speaks HTTP/2 without TLS, which is not inspected; use HTTP/1.1")]
    Http2,
    #[error("The request is neither HTTP/1.0 nor HTTP/1.1")]
    Version,
    #[error("The request has {0}")]
    TooLong(&'static str),
    /// A strict parser refuses it.
    #[error("The request is malformed: {0}")]
    Malformed(&'static str),
    /// The target does not fit the method, or has no comparable host.
    #[error("The target of the request is not accepted: {0}")]
    Target(&'static str),
    /// The Host field is missing, repeated, unusable, or contradicts the target.
    #[error("The Host of the request is not accepted: {0}")]
    Host(&'static str),
    /// Two parsers could disagree about where the request ends.
    #[error("The end of the request is ambiguous: {0}")]
    Framing(&'static str),
    /// A tunnel, whose content could not be inspected.
    #[error(
        "CONNECT is not forwarded, because a host name decides here and a tunnel hides it; connect directly"
    )]
    Connect,
    /// An Upgrade after other requests, whose responses would hide whether it took effect.
    #[error("A WebSocket must be the first request of its connection")]
    LateSwitch,
    /// The server's response to a WebSocket request is not HTTP.
    #[error("The server's response to the WebSocket request is not HTTP")]
    BadResponse,
    /// The head was changed after the decision.
    #[error("The head of the request was changed after the policy check")]
    Changed,
}
