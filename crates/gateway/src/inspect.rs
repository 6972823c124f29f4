//! Reading what a guest says first on a connection, and keeping it back until it was judged.
//!
//! What the guest sends waits here. TLS tells one name, once; plain HTTP is followed from request to request. Only what was
//! judged and let through goes on to the host's socket.
//!
//! Where nothing that is said matters, nothing waits; but a name in TLS is remembered, for a policy to come.

#[cfg(test)]
mod tests;

use std::net::IpAddr;

use bathy_policy::{HostName, Inspected, InspectedRequest};

use crate::hello::{ClientHello, Hello, HelloReader, SecondHello};
use crate::http::{Host, HttpRefusal, MAX_HEAD, Request, RequestStream, Step};

/// How much of what the guest sent is kept back at most.
const MAX_BUFFERED: usize = MAX_HEAD + 16 * 1024;

/// What was read, to be judged, and to be judged again when the policy changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParsedTarget {
    /// The start of TLS.
    Tls {
        /// The name that the client gave.
        name: Option<HostName>,
        /// Whether the name may be another one inside.
        encrypted_hello: bool,
    },
    /// A request.
    Http {
        /// The name that the client gave.
        host: Option<HostName>,
        /// Whether it gave the address that it connects to.
        host_is_address: bool,
        /// The method.
        method: String,
        /// The path, if it has one plain spelling.
        path: Option<String>,
        /// Whether the server may make another method or path of it.
        rewrites: bool,
    },
    /// Something else.
    Other,
}

impl ParsedTarget {
    /// As the policy wants it.
    pub fn read(&self) -> Inspected<'_> {
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

    /// The name that the client gave.
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

/// What is to be done next.
#[derive(Debug, PartialEq, Eq)]
pub enum Inspection {
    /// More bytes are needed, of the guest or of the server.
    More,
    /// This is to be judged; [`Inspector::accept`] lets it through.
    Decide(ParsedTarget),
    /// It cannot be read in one way only. A connection whose name decides is at its end.
    Refused(String),
}

/// What a client speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppProtocol {
    /// Plain HTTP.
    Http,
    /// TLS.
    Tls,
    /// Something else, or nothing yet.
    Other,
}

#[derive(Debug)]
enum Mode {
    Unknown,
    /// A hello is read; it is kept with what it says.
    Tls(HelloReader, Option<Box<ClientHello>>),
    /// It was let through, and what may be a second one is looked for.
    SecondHello(SecondHello),
    Http(Box<RequestStream>),
    /// It was judged once and for all.
    Passing,
    /// It passes whatever it is, and the name of its hello is read on the way.
    Watching(HelloReader),
    /// The same, of a second hello.
    WatchingSecond(SecondHello),
}

/// Reads one connection.
#[derive(Debug)]
pub struct Inspector {
    address: IpAddr,
    buffered: Vec<u8>,
    /// How many of the kept bytes may go on.
    cleared: usize,
    /// How many of them the reader of hellos has seen.
    seen: usize,
    mode: Mode,
    /// How many requests were let through.
    requests: u64,
    /// What was read in passing.
    observed: Option<ParsedTarget>,
}

impl Inspector {
    /// For a connection to this address.
    pub fn new(address: IpAddr) -> Self {
        Self {
            address,
            buffered: Vec::new(),
            cleared: 0,
            seen: 0,
            mode: Mode::Unknown,
            requests: 0,
            observed: None,
        }
    }

    /// For a connection to this address that may say what it likes.
    pub fn passive(address: IpAddr) -> Self {
        Self { mode: Mode::Watching(HelloReader::new()), ..Self::new(address) }
    }

    /// What was read of a connection that may say what it likes.
    pub fn observed(&self) -> Option<&ParsedTarget> {
        self.observed.as_ref()
    }

    /// Whether what comes next is still to be judged.
    pub fn is_enforcing(&self) -> bool {
        matches!(self.mode, Mode::Unknown | Mode::Tls(..) | Mode::SecondHello(_) | Mode::Http(_))
    }

    /// How many bytes of the guest are taken now.
    pub fn space(&self) -> usize {
        MAX_BUFFERED.saturating_sub(self.buffered.len())
    }

    /// Takes bytes of the guest's, at most as many as there is [`Self::room`] for.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffered.extend_from_slice(bytes);
    }

    /// Takes bytes of the server's, in so far as they say whether the protocol changes.
    pub fn on_response(&mut self, bytes: &[u8]) {
        if let Mode::Http(stream) = &mut self.mode {
            stream.answer(bytes);
        }
    }

    /// Whether the server's bytes have to be shown to [`Self::push_answer`].
    pub fn wants_response(&self) -> bool {
        matches!(&self.mode, Mode::Http(stream) if stream.wants_response())
    }

    /// What may go on.
    pub fn cleared(&self) -> &[u8] {
        self.buffered.get(..self.cleared).unwrap_or_default()
    }

    /// So many of the cleared bytes have gone on.
    pub fn consume(&mut self, count: usize) {
        let count = count.min(self.cleared);
        self.buffered.drain(..count);
        self.cleared -= count;
        self.seen = self.seen.saturating_sub(count);
        if self.is_done() {
            self.buffered = Vec::new();
        }
    }

    /// Whether nothing has to be read any more, and nothing is kept: bytes may go on directly.
    pub fn is_done(&self) -> bool {
        self.buffered.is_empty() && matches!(self.mode, Mode::Passing)
    }

    /// Whether a request was let through before.
    pub fn has_passed_requests(&self) -> bool {
        self.requests > 0
    }

    /// What is spoken, as far as it was read.
    pub fn app_protocol(&self) -> AppProtocol {
        match self.mode {
            Mode::Http(_) => AppProtocol::Http,
            Mode::Tls(..) | Mode::SecondHello(_) => AppProtocol::Tls,
            Mode::Unknown | Mode::Passing | Mode::Watching(_) | Mode::WatchingSecond(_) => AppProtocol::Other,
        }
    }

    /// Reads on.
    pub fn parse(&mut self) -> Inspection {
        if matches!(self.mode, Mode::Unknown) {
            self.mode = match self.buffered.first() {
                None => return Inspection::More,
                // The type of a record with a handshake, or the first byte of an SSL 2 hello.
                Some(0x16 | 0x80..) => Mode::Tls(HelloReader::new(), None),
                // Whether some server would take it for HTTP, that reader knows best.
                Some(_) => Mode::Http(Box::default()),
            };
        }
        match &mut self.mode {
            Mode::Unknown => Inspection::More,
            Mode::Tls(reader, read) => {
                let hello = reader.push(self.buffered.get(self.seen..).unwrap_or_default());
                self.seen = self.buffered.len();
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

    /// Lets everything pass, and looks at what has not been seen yet.
    fn watch(&mut self) {
        self.cleared = self.buffered.len();
        let new = self.buffered.get(self.seen..).unwrap_or_default();
        self.seen = self.buffered.len();
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
                // Which name the server acts on, nobody can say.
                Err(_) => self.observed = None,
            }
            self.mode = Mode::Passing;
        }
    }

    /// Lets through what [`Next::Decide`] showed last.
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
