//! Parses the first bytes of a client, and holds them back until the policy has decided.
//!
//! TLS names a server once, in the SNI of its ClientHello; plain HTTP is followed from request to request. Only
//! cleared bytes are sent to the host's socket.
//!
//! Where the content cannot change the decision nothing is held back, but the SNI is recorded in case the policy
//! changes.

#[cfg(test)]
mod tests;

use std::net::IpAddr;

use bathy_policy::{HostName, Inspected, InspectedRequest};

use crate::hello::{ClientHello, Hello, HelloReader, SecondHello};
use crate::http::{Host, HttpRefusal, MAX_HEAD, Request, RequestStream, Step};

/// How many bytes of the client are held back at most.
const MAX_BUFFERED: usize = MAX_HEAD + 16 * 1024;

/// What a client asked for. Decided at once, and again when the policy changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParsedTarget {
    /// The first bytes are a TLS ClientHello.
    Tls {
        /// The server name (SNI).
        name: Option<HostName>,
        /// Whether the SNI may only be the outer name of an encrypted ClientHello.
        encrypted_hello: bool,
    },
    /// The next bytes are an HTTP request.
    Http {
        /// The host name in the request.
        host: Option<HostName>,
        /// Whether the request names the address that is connected to.
        host_is_address: bool,
        method: String,
        /// The path, if it has one plain spelling.
        path: Option<String>,
        /// Whether a header field may override the method or the path.
        rewrites: bool,
    },
    /// Neither TLS nor HTTP.
    Other,
}

impl ParsedTarget {
    /// The same as the policy crate's type.
    pub fn inspected(&self) -> Inspected<'_> {
        match self {
            Self::Tls { name, encrypted_hello } => {
                Inspected::Tls { name: name.as_ref(), encrypted_hello: *encrypted_hello }
            }
            Self::Http { host, host_is_address, method, path, rewrites } => Inspected::Http {
                host: host.as_ref(),
                host_is_address: *host_is_address,
                request: InspectedRequest { method, path: path.as_deref(), rewrites: *rewrites },
            },
            Self::Other => Inspected::Other,
        }
    }

    /// The name that the client asked for, if any.
    pub fn name(&self) -> Option<&HostName> {
        match self {
            Self::Tls { name, .. } => name.as_ref(),
            Self::Http { host, .. } => host.as_ref(),
            Self::Other => None,
        }
    }

    fn of_request(request: &Request, address: IpAddr) -> Self {
        let host = request.authority.as_ref().map(|authority| &authority.host);
        Self::Http {
            host: match host {
                Some(Host::Name(name)) => Some(name.clone()),
                _ => None,
            },
            host_is_address: matches!(host, Some(Host::Address(named)) if *named == address),
            method: request.method.clone(),
            path: request.path.as_ref().ok().cloned(),
            rewrites: request.rewrites,
        }
    }
}

/// What to do after parsing.
#[derive(Debug, PartialEq, Eq)]
pub enum Inspection {
    /// Wait for more bytes of the client or of the server.
    More,
    /// Ask the policy; [`Inspector::accept`] clears it.
    Decide(ParsedTarget),
    /// The bytes are ambiguous, so the connection is denied.
    Refused(String),
}

/// The application protocol of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppProtocol {
    Http,
    Tls,
    /// Neither, or not known yet.
    Other,
}

#[derive(Debug)]
enum Mode {
    Unknown,
    /// A ClientHello is being parsed; it is kept until it is accepted.
    Tls(HelloReader, Option<Box<ClientHello>>),
    /// The ClientHello was accepted, and a second one may follow.
    SecondHello(SecondHello),
    Http(Box<RequestStream>),
    /// Everything passes: no decision can follow.
    Passing,
    /// Everything passes, and the first ClientHello is parsed on the way.
    Watching(HelloReader),
    /// Everything passes, and a second ClientHello is looked for.
    WatchingSecond(SecondHello),
}

/// Inspects the client's side of one connection.
#[derive(Debug)]
pub struct Inspector {
    address: IpAddr,
    buffered: Vec<u8>,
    /// How many of the buffered bytes may be sent.
    cleared: usize,
    /// How many of the buffered bytes were parsed by a ClientHello reader.
    parsed: usize,
    mode: Mode,
    /// How many requests were accepted.
    requests: u64,
    /// What was parsed without being decided.
    observed: Option<ParsedTarget>,
}

impl Inspector {
    /// Holds back what the client sends for a decision.
    pub fn new(address: IpAddr) -> Self {
        Self {
            address,
            buffered: Vec::new(),
            cleared: 0,
            parsed: 0,
            mode: Mode::Unknown,
            requests: 0,
            observed: None,
        }
    }

    /// Lets everything pass, and records the SNI.
    pub fn passive(address: IpAddr) -> Self {
        Self { mode: Mode::Watching(HelloReader::new()), ..Self::new(address) }
    }

    /// What was parsed of a connection that needed no decision.
    pub fn observed(&self) -> Option<&ParsedTarget> {
        self.observed.as_ref()
    }

    /// Whether what the client sends next is held back for a decision.
    pub fn is_enforcing(&self) -> bool {
        matches!(self.mode, Mode::Unknown | Mode::Tls(..) | Mode::SecondHello(_) | Mode::Http(_))
    }

    /// How many bytes [`Self::push`] accepts now.
    pub fn space(&self) -> usize {
        MAX_BUFFERED.saturating_sub(self.buffered.len())
    }

    /// Buffers bytes of the client, at most [`Self::space`].
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffered.extend_from_slice(bytes);
    }

    /// Observes bytes of the server, which show whether an Upgrade took effect.
    pub fn on_response(&mut self, bytes: &[u8]) {
        if let Mode::Http(stream) = &mut self.mode {
            stream.on_response(bytes);
        }
    }

    /// Whether [`Self::on_response`] has to observe the server's bytes.
    pub fn wants_response(&self) -> bool {
        matches!(&self.mode, Mode::Http(stream) if stream.wants_response())
    }

    /// The bytes that may be sent.
    pub fn cleared(&self) -> &[u8] {
        self.buffered.get(..self.cleared).unwrap_or_default()
    }

    /// Removes cleared bytes that were sent.
    pub fn consume(&mut self, count: usize) {
        let count = count.min(self.cleared);
        self.buffered.drain(..count);
        self.cleared -= count;
        self.parsed = self.parsed.saturating_sub(count);
        if self.is_done() {
            self.buffered = Vec::new();
        }
    }

    /// Whether nothing is left to inspect or to send, so that bytes may bypass the inspector.
    pub fn is_done(&self) -> bool {
        self.buffered.is_empty() && matches!(self.mode, Mode::Passing)
    }

    /// Whether a request was accepted before.
    pub fn has_passed_requests(&self) -> bool {
        self.requests > 0
    }

    /// The protocol, as far as it was parsed.
    pub fn app_protocol(&self) -> AppProtocol {
        match self.mode {
            Mode::Http(_) => AppProtocol::Http,
            Mode::Tls(..) | Mode::SecondHello(_) => AppProtocol::Tls,
            Mode::Unknown | Mode::Passing | Mode::Watching(_) | Mode::WatchingSecond(_) => AppProtocol::Other,
        }
    }

    /// Parses what was buffered.
    pub fn parse(&mut self) -> Inspection {
        if matches!(self.mode, Mode::Unknown) {
            self.mode = match self.buffered.first() {
                None => return Inspection::More,
                // The type of a handshake record, or the first byte of an SSL 2 hello.
                Some(0x16 | 0x80..) => Mode::Tls(HelloReader::new(), None),
                // The HTTP parser knows best what some server would accept as HTTP.
                Some(_) => Mode::Http(Box::default()),
            };
        }
        match &mut self.mode {
            Mode::Unknown => Inspection::More,
            Mode::Tls(reader, read) => {
                let hello = reader.push(self.buffered.get(self.parsed..).unwrap_or_default());
                self.parsed = self.buffered.len();
                match hello {
                    Hello::More => Inspection::More,
                    Hello::NotTls => Inspection::Decide(ParsedTarget::Other),
                    Hello::Refused(why) => Inspection::Refused(why.to_string()),
                    Hello::Read(hello) => {
                        let (name, encrypted_hello) = (hello.name.clone(), hello.encrypted_hello);
                        *read = Some(hello);
                        Inspection::Decide(ParsedTarget::Tls { name, encrypted_hello })
                    }
                }
            }
            Mode::Http(stream) => loop {
                match stream.read(self.buffered.get(self.cleared..).unwrap_or_default()) {
                    Ok(Step::Cleared(count)) => self.cleared += count,
                    Ok(Step::Decide(request)) => {
                        return Inspection::Decide(ParsedTarget::of_request(&request, self.address));
                    }
                    Ok(Step::More | Step::Held) => return Inspection::More,
                    Err(HttpRefusal::NotHttp) if self.requests == 0 => {
                        return Inspection::Decide(ParsedTarget::Other);
                    }
                    Err(why) => return Inspection::Refused(why.to_string()),
                }
            },
            Mode::SecondHello(second) => {
                let result = second.push(self.buffered.get(self.cleared..).unwrap_or_default());
                match result {
                    Err(why) => return Inspection::Refused(why.to_string()),
                    Ok(false) => self.mode = Mode::Passing,
                    Ok(true) => {}
                }
                self.cleared = self.buffered.len();
                Inspection::More
            }
            Mode::Passing | Mode::Watching(_) | Mode::WatchingSecond(_) => {
                self.watch();
                Inspection::More
            }
        }
    }

    /// Clears everything, and parses what was not parsed yet.
    fn watch(&mut self) {
        self.cleared = self.buffered.len();
        let new = self.buffered.get(self.parsed..).unwrap_or_default();
        self.parsed = self.buffered.len();
        let mut rest = new;
        if let Mode::Watching(reader) = &mut self.mode {
            let before = reader.length();
            match reader.push(new) {
                Hello::More => return,
                Hello::NotTls | Hello::Refused(_) => self.mode = Mode::Passing,
                Hello::Read(hello) => {
                    rest = new.get(reader.length() - before..).unwrap_or_default();
                    let (name, encrypted_hello) = (hello.name.clone(), hello.encrypted_hello);
                    self.observed = Some(ParsedTarget::Tls { name, encrypted_hello });
                    self.mode = Mode::WatchingSecond(SecondHello::new(&hello));
                }
            }
        }
        if let Mode::WatchingSecond(second) = &mut self.mode {
            match second.push(rest) {
                Ok(true) => return,
                Ok(false) => {}
                // Two ClientHellos that differ: which name the server uses is unknown.
                Err(_) => self.observed = None,
            }
            self.mode = Mode::Passing;
        }
    }

    /// Clears what [`Inspection::Decide`] returned last.
    pub fn accept(&mut self, target: &ParsedTarget) {
        match (&mut self.mode, target) {
            (Mode::Http(stream), ParsedTarget::Http { .. }) => {
                self.requests += 1;
                stream.accept(self.buffered.get_mut(self.cleared..).unwrap_or_default());
            }
            (Mode::Tls(reader, Some(hello)), ParsedTarget::Tls { .. }) => {
                self.cleared = reader.length().min(self.buffered.len());
                self.mode = Mode::SecondHello(SecondHello::new(hello));
            }
            _ => {
                self.mode = Mode::Passing;
                self.cleared = self.buffered.len();
            }
        }
    }
}
