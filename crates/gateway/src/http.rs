//! Plain HTTP/1 as the client's side of a connection sends it: which host, method and path each request asks for.
//!
//! [`RequestStream`] follows the stream from request to request, so that the second request on a kept connection is
//! judged like the first. It is stricter than a server has to be: where two readers could find two different requests
//! in the same bytes, there is none.

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

/// The longest head of a request, and the most that a caller has to keep before it is cleared.
pub const MAX_HEAD: usize = 64 * 1024;
/// How many header fields a head may have.
pub const MAX_FIELDS: usize = 200;

/// One request, known before any of its bytes may be passed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The method: capital letters, digits, hyphens and underscores.
    pub method: String,
    /// The target as the client wrote it.
    pub target: String,
    /// Which form the target has.
    pub form: Form,
    /// Whom the client means. Only a request of HTTP/1.0 may leave it open.
    pub authority: Option<Authority>,
    /// The path in the one spelling that rules are compared with, or why it has none. A request with an unclear path is
    /// only a problem where a rule looks at paths.
    pub path: Result<String, PathProblem>,
    /// How the body is delimited.
    pub body: Body,
    /// What the client wants to change the connection to: the protocols of an Upgrade field, printable. Only a change to
    /// WebSocket ever reaches the server.
    pub upgrade: Option<String>,
    /// Whether a field asks the server to act on another method or path than the ones above, as some frameworks do.
    /// Where a rule looks at the method or path, such a request is to be denied.
    pub rewrites: bool,
}

/// The form of a request's target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A path: the usual form.
    Origin,
    /// A whole URL, as sent to a proxy.
    Absolute,
    /// The `*` of OPTIONS.
    Asterisk,
}

/// How the body of a request is delimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// So many bytes; none without a Content-Length.
    Length(u64),
    /// In chunks.
    Chunked,
}

/// Why a stream of requests cannot be followed. After one of these nothing more is cleared.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum HttpRefusal {
    /// The stream starts with something that no server takes for HTTP/1.
    #[error("The connection does not start with an HTTP request")]
    NotHttp,
    /// The client speaks HTTP/2 without asking first.
    #[error("The client speaks HTTP/2 without TLS, which is not read; use HTTP/1.1")]
    Http2,
    /// The version is neither 1.0 nor 1.1.
    #[error("The request is neither HTTP/1.0 nor HTTP/1.1")]
    Version,
    /// A limit is passed.
    #[error("The request has {0}")]
    TooLong(&'static str),
    /// Something that a strict reader does not take.
    #[error("The request is malformed: {0}")]
    Malformed(&'static str),
    /// The target does not fit the method, or names no host that can be compared.
    #[error("The target of the request is not accepted: {0}")]
    Target(&'static str),
    /// The Host field is missing, there twice, unusable, or contradicts the target.
    #[error("The Host of the request is not accepted: {0}")]
    Host(&'static str),
    /// Two readers could disagree about where the request ends.
    #[error("The end of the request is ambiguous: {0}")]
    Framing(&'static str),
    /// The client wants a tunnel, in which nothing could be read.
    #[error(
        "CONNECT is not passed on, because a host name decides here and a tunnel hides it; connect directly"
    )]
    Connect,
    /// A change of protocol comes after other requests, whose answers would hide whether it happened.
    #[error("A WebSocket must be the first request of its connection")]
    LateSwitch,
    /// The server's answer to a WebSocket is not HTTP.
    #[error("The server's answer does not tell whether the WebSocket began")]
    Answer,
    /// The head is not the one that was judged.
    #[error("The head of the request is not the one that was judged")]
    Changed,
}
