//! Clients over streamable HTTP: authentication, allowed hosts and origins, and limits.
//!
//! A page in a browser can send requests to this machine. So every request needs a token, and its Host and Origin have to
//! be allowed.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use http::header::{AUTHORIZATION, HOST, ORIGIN, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Bytes};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rmcp::ServerHandler;
use rmcp::transport::streamable_http_server::session::local::{LocalSessionManager, SessionConfig};
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use tokio::net::TcpListener;

use self::connections::Connections;
use self::sessions::Sessions;
use crate::token::Token;

mod body;
mod connections;
mod sessions;

/// The path of the server.
pub const PATH: &str = "/mcp";
/// The largest request body, in bytes.
const MAX_BODY: usize = 16 << 20;
/// The most values in a request body. A short one takes dozens of times its text in memory; a tool needs few.
const MAX_VALUES: usize = 64 * 1024;
/// The most connections at the same time. One that has not shown the token is evicted for a new one.
const MAX_CONNECTIONS: usize = 256;
/// How long a connection may take to show the token.
const AUTHENTICATION: Duration = Duration::from_secs(3);
/// How long an authenticated client may take to send the headers of its next request.
const HEADERS: Duration = Duration::from_secs(15);
/// The most sessions of older clients.
const MAX_SESSIONS: usize = 256;
/// The header with the session of a request, or of an answer that begins one.
const SESSION_ID: HeaderName = HeaderName::from_static("mcp-session-id");
/// How long a session of an older client may be idle: longer than the longest call.
const SESSION: Duration = Duration::from_secs(2 * 3600);
/// The pause after a failed accept, such as for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

type Answer = Response<BoxBody<Bytes, Infallible>>;

/// The checks that every request has to pass.
#[derive(Clone, Debug)]
pub struct Guard {
    token: Token,
    hosts: Vec<String>,
    origins: Vec<String>,
}

impl Guard {
    /// Allows clients with this token, at the server's address or a name of this machine.
    pub fn new(token: Token, address: SocketAddr) -> Self {
        let mut hosts = vec!["localhost".to_owned()];
        // The unspecified address is never a Host.
        if !address.ip().is_unspecified() {
            hosts.push(address.ip().to_string());
        }
        Self { token, hosts, origins: Vec::new() }
    }

    /// Allows these hosts too, with or without a port.
    #[must_use]
    pub fn allow_hosts(mut self, hosts: impl IntoIterator<Item = String>) -> Self {
        self.hosts.extend(hosts.into_iter().map(|host| host.to_ascii_lowercase()));
        self
    }

    /// Allows pages of these origins, such as `https://example.com`.
    #[must_use]
    pub fn allow_origins(mut self, origins: impl IntoIterator<Item = String>) -> Self {
        self.origins
            .extend(origins.into_iter().map(|origin| origin.trim_end_matches('/').to_ascii_lowercase()));
        self
    }

    /// Lets a request pass, or returns its refusal.
    fn check(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), Box<Answer>> {
        let forbidden = |text| Box::new(answer(StatusCode::FORBIDDEN, text));
        // A target in absolute form names a host too, and both have to be allowed.
        let is_allowed = |host: &str| self.host_is_allowed(&host.to_ascii_lowercase());
        let target = uri.authority().map(|authority| is_allowed(authority.as_str()));
        let header = headers.contains_key(HOST).then(|| only(headers, &HOST).is_some_and(is_allowed));
        if target == Some(false) || !header.or(target).unwrap_or(false) {
            return Err(forbidden(
                "This Host is not allowed. Start the server with --allow-host if it should be.\n",
            ));
        }
        if headers.contains_key(ORIGIN)
            && !only(headers, &ORIGIN).is_some_and(|origin| self.origin_is_allowed(origin))
        {
            return Err(forbidden(
                "This Origin is not allowed. Start the server with --allow-origin if it should be.\n",
            ));
        }
        if uri.path().trim_end_matches('/') != PATH {
            return Err(Box::new(answer(StatusCode::NOT_FOUND, "The MCP server is at /mcp.\n")));
        }
        let shown = only(headers, &AUTHORIZATION).and_then(|value| {
            let (scheme, token) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
        });
        match shown {
            Some(token) if self.token.is(token) => Ok(()),
            Some(_) => Err(Box::new(unauthorized("Bearer realm=\"bathysphere\", error=\"invalid_token\""))),
            None => Err(Box::new(unauthorized("Bearer realm=\"bathysphere\""))),
        }
    }

    fn host_is_allowed(&self, host: &str) -> bool {
        let name = without_port(host);
        is_loopback(name) || self.hosts.iter().any(|allowed| allowed == host || allowed == name)
    }

    fn origin_is_allowed(&self, origin: &str) -> bool {
        let origin = origin.to_ascii_lowercase();
        let local = ["http://", "https://"]
            .iter()
            .find_map(|scheme| origin.strip_prefix(scheme))
            .is_some_and(|host| !host.contains(['/', '@', '?', '#']) && is_local(without_port(host)));
        local || self.origins.contains(&origin)
    }
}

/// The value of a header that occurs exactly once.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?;
    if values.next().is_some() {
        return None;
    }
    value.to_str().ok()
}

/// `name` of `name:port`, without the brackets of an IPv6 address.
fn without_port(host: &str) -> &str {
    if let Some(rest) = host.strip_prefix('[') {
        return match rest.split_once(']') {
            Some((name, port)) if port.is_empty() || is_port(port) => name,
            _ => host,
        };
    }
    match host.split_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

fn is_port(text: &str) -> bool {
    text.strip_prefix(':').is_some_and(|port| port.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Whether it is a loopback address. A name does not count: a name server could change it.
fn is_loopback(name: &str) -> bool {
    name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn is_local(name: &str) -> bool {
    name == "localhost" || is_loopback(name)
}

fn answer(status: StatusCode, text: &'static str) -> Answer {
    let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())).boxed());
    *response.status_mut() = status;
    response
}

fn unauthorized(challenge: &'static str) -> Answer {
    let mut response = answer(StatusCode::UNAUTHORIZED, "A bearer token is needed.\n");
    response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
    response
}

/// A handler behind its guard.
pub struct Endpoint<H> {
    guard: Guard,
    service: StreamableHttpService<H, LocalSessionManager>,
    sessions: Sessions,
}

impl<H: ServerHandler + Clone> Endpoint<H> {
    /// Serves clones of `handler` to requests that `guard` lets pass.
    pub fn new(handler: H, guard: Guard) -> Self {
        let mut session = SessionConfig::default();
        session.keep_alive = Some(SESSION);
        let mut manager = LocalSessionManager::default();
        manager.session_config = session;
        let manager = Arc::new(manager);
        let config = StreamableHttpServerConfig::default()
            .with_max_request_body_bytes(MAX_BODY)
            // The guard checks both.
            .disable_allowed_hosts()
            .disable_allowed_origins();
        let sessions = Sessions::new(Arc::clone(&manager), MAX_SESSIONS);
        let service = StreamableHttpService::new(move || Ok(handler.clone()), manager, config);
        Self { guard, service, sessions }
    }

    /// Answers one request. `passed` is called if the guard lets it pass, before anything else is done.
    pub async fn answer<B>(&self, request: Request<B>, passed: impl FnOnce()) -> Answer
    where
        B: Body + Send + 'static,
        B::Error: std::fmt::Display,
    {
        if let Err(refusal) = self.guard.check(request.uri(), request.headers()) {
            return *refusal;
        }
        passed();
        if let Some(id) = only(request.headers(), &SESSION_ID) {
            self.sessions.touch(id);
        }
        // Also before: a client that does not wait for its answer leaves a session behind.
        self.sessions.trim().await;
        let is_end = request.method() == Method::DELETE;
        let (parts, content) = request.into_parts();
        let content = match body::read(content).await {
            Ok(content) => content,
            Err(refusal) => return answer(refusal.status(), refusal.text()),
        };
        let request = Request::from_parts(parts, Full::new(content));
        let response = self.service.handle(request).await;
        // Clients take "accepted" for a failure to end the session.
        if is_end && response.status() == StatusCode::ACCEPTED {
            return answer(StatusCode::NO_CONTENT, "");
        }
        if response.headers().contains_key(SESSION_ID) {
            self.sessions.trim().await;
        }
        response
    }
}

/// Listens. An address that other machines reach needs `remote`.
pub async fn listen(address: SocketAddr, remote: bool) -> io::Result<TcpListener> {
    if !address.ip().is_loopback() && !remote {
        return Err(io::Error::other(format!(
            "{address} can be reached from other machines, and the token would cross the network unencrypted. Use 127.0.0.1, or give --allow-remote if something in front of it encrypts"
        )));
    }
    TcpListener::bind(address).await
}

/// Serves until it is dropped.
pub async fn serve<H: ServerHandler + Clone>(listener: TcpListener, endpoint: Endpoint<H>) {
    let endpoint = Arc::new(endpoint);
    let connections = Connections::new(MAX_CONNECTIONS);
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(_) => {
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let slot = Arc::new(connections.slot().await);
        // Answers are small, and the client waits for each.
        let _ = stream.set_nodelay(true);
        let endpoint = Arc::clone(&endpoint);
        tokio::spawn(async move {
            let held = Arc::clone(&slot);
            let service = service_fn(move |request| {
                let (endpoint, slot) = (Arc::clone(&endpoint), Arc::clone(&held));
                async move { Ok::<_, Infallible>(endpoint.answer(request, || slot.authenticated()).await) }
            });
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADERS)
                .serve_connection(TokioIo::new(stream), service);
            tokio::pin!(connection);
            let late = tokio::time::sleep(AUTHENTICATION);
            tokio::pin!(late);
            let mut waiting = true;
            loop {
                tokio::select! {
                    // Requests that have arrived are read before the connection is evicted.
                    biased;
                    // A client may disconnect at any time.
                    _ = &mut connection => break,
                    () = slot.evicted() => {
                        // It may have shown the token in the meantime.
                        if !slot.is_authenticated() {
                            break;
                        }
                    }
                    () = &mut late, if waiting => {
                        if !slot.is_authenticated() {
                            break;
                        }
                        waiting = false;
                    }
                }
            }
        });
    }
}

#[cfg(test)]
#[path = "http_tests.rs"]
mod tests;
