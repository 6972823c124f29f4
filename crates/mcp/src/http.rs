//! Clients over streamable HTTP: who may speak, from where, and how much.
//!
//! A page in somebody's browser can send requests to this machine, so every request shows a token, and its Host and
//! Origin are ones that were meant to be used.

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

mod connections;
mod sessions;

/// Where the server is, below its address.
pub const PATH: &str = "/mcp";
/// The largest request.
const MAX_BODY: usize = 16 << 20;
/// How many connections there are at the same time. Whoever has not shown the token gives way to the next one.
const MAX_CONNECTIONS: usize = 256;
/// How long a connection may take to show the token.
const STRANGER: Duration = Duration::from_secs(3);
/// How long a client that has shown the token may take to say what it wants next.
const HEADERS: Duration = Duration::from_secs(15);
/// How many sessions of older clients are kept.
const MAX_SESSIONS: usize = 256;
/// Which session a request belongs to, and an answer begins.
const SESSION_ID: HeaderName = HeaderName::from_static("mcp-session-id");
/// How long a session of an older client is kept without a message: longer than the longest call.
const SESSION: Duration = Duration::from_secs(2 * 3600);
/// How long to wait when no connection can be accepted, such as for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

type Answer = Response<BoxBody<Bytes, Infallible>>;

/// Who may speak.
#[derive(Clone, Debug)]
pub struct Guard {
    token: Token,
    hosts: Vec<String>,
    origins: Vec<String>,
}

impl Guard {
    /// Clients with this token, at the address that is listened on or a name of this machine's own.
    pub fn new(token: Token, address: SocketAddr) -> Self {
        let mut hosts = vec!["localhost".to_owned()];
        // All addresses is no address that anybody calls.
        if !address.ip().is_unspecified() {
            hosts.push(address.ip().to_string());
        }
        Self { token, hosts, origins: Vec::new() }
    }

    /// Also at these names, with or without a port.
    #[must_use]
    pub fn allow_hosts(mut self, hosts: impl IntoIterator<Item = String>) -> Self {
        self.hosts.extend(hosts.into_iter().map(|host| host.to_ascii_lowercase()));
        self
    }

    /// Also from pages of these origins, such as `https://example.com`.
    #[must_use]
    pub fn allow_origins(mut self, origins: impl IntoIterator<Item = String>) -> Self {
        self.origins
            .extend(origins.into_iter().map(|origin| origin.trim_end_matches('/').to_ascii_lowercase()));
        self
    }

    /// Lets a request pass, or answers it.
    fn check(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), Box<Answer>> {
        let forbidden = |text| Box::new(answer(StatusCode::FORBIDDEN, text));
        // A target in absolute form names a host too, and neither excuses the other.
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

/// The value of a header that is there once.
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

/// An address that stays on this machine; no name, which a name server could change.
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
    /// Serves clones of `handler` to those whom `guard` lets pass.
    pub fn new(handler: H, guard: Guard) -> Self {
        let mut session = SessionConfig::default();
        session.keep_alive = Some(SESSION);
        let mut manager = LocalSessionManager::default();
        manager.session_config = session;
        let manager = Arc::new(manager);
        let config = StreamableHttpServerConfig::default()
            .with_max_request_body_bytes(MAX_BODY)
            // The guard has looked at both before.
            .disable_allowed_hosts()
            .disable_allowed_origins();
        let sessions = Sessions::new(Arc::clone(&manager), MAX_SESSIONS);
        let service = StreamableHttpService::new(move || Ok(handler.clone()), manager, config);
        Self { guard, service, sessions }
    }

    /// Answers one request. `passed` hears of it if the guard lets it pass, before anything else is done.
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
        // Before, because a client that does not wait for its answer leaves a session too.
        self.sessions.trim().await;
        let is_end = request.method() == Method::DELETE;
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

/// Listens. An address that other machines reach has to be meant: `remote`.
pub async fn listen(address: SocketAddr, remote: bool) -> io::Result<TcpListener> {
    if !address.ip().is_loopback() && !remote {
        return Err(io::Error::other(format!(
            "{address} can be reached from other machines, and the token would cross the network unencrypted. Use 127.0.0.1, or give --allow-remote if something in front of it encrypts"
        )));
    }
    TcpListener::bind(address).await
}

/// Serves for as long as it is awaited.
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
        let place = Arc::new(connections.place().await);
        // Answers are small and awaited.
        let _ = stream.set_nodelay(true);
        let endpoint = Arc::clone(&endpoint);
        tokio::spawn(async move {
            let held = Arc::clone(&place);
            let service = service_fn(move |request| {
                let (endpoint, place) = (Arc::clone(&endpoint), Arc::clone(&held));
                async move { Ok::<_, Infallible>(endpoint.answer(request, || place.known()).await) }
            });
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEADERS)
                .serve_connection(TokioIo::new(stream), service);
            tokio::pin!(connection);
            let late = tokio::time::sleep(STRANGER);
            tokio::pin!(late);
            let mut waiting = true;
            loop {
                tokio::select! {
                    // What has arrived is read before the connection is judged.
                    biased;
                    // A client that goes away is no event.
                    _ = &mut connection => break,
                    () = place.wanted() => {
                        // It may have shown the token since.
                        if !place.is_known() {
                            break;
                        }
                    }
                    () = &mut late, if waiting => {
                        if !place.is_known() {
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
