//! Reading what a guest says first on a connection, and keeping it back until it was judged.
//!
//! What the guest sends waits here. TLS tells one name, once; plain HTTP is followed from request to request. Only what was
//! judged and let through goes on to the host's socket.
//!
//! Where nothing that is said matters, nothing waits; but a name in TLS is remembered, for a policy to come.

#[cfg(test)]
mod tests;

use std::net::IpAddr;

use bathy_policy::{HostName, HttpSeen, Read};

use crate::hello::{ClientHello, Hello, HelloReader, SecondHello};
use crate::http::{Host, HttpRefusal, MAX_HEAD, Request, RequestStream, Step};

/// How much of what the guest sent is kept back at most.
const MOST_KEPT: usize = MAX_HEAD + 16 * 1024;

/// What was read, to be judged, and to be judged again when the policy changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
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

impl Found {
    /// As the policy wants it.
    pub fn read(&self) -> Read<'_> {
        match self {
            Self::Tls { name, encrypted_hello } => {
                Read::Tls { name: name.as_ref(), encrypted_hello: *encrypted_hello }
            }
            Self::Http { host, host_is_address, method, path, rewrites } => Read::Http {
                host: host.as_ref(),
                host_is_address: *host_is_address,
                request: HttpSeen { method, path: path.as_deref(), rewrites: *rewrites },
            },
            Self::Other => Read::Other,
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
pub enum Next {
    /// More bytes are needed, of the guest or of the server.
    More,
    /// This is to be judged; [`Inspector::accept`] lets it through.
    Decide(Found),
    /// It cannot be read in one way only. A connection whose name decides is at its end.
    Refused(String),
}

/// What a client speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speech {
    /// Plain HTTP.
    Http,
    /// TLS.
    Tls,
    /// Something else, or nothing yet.
    Other,
}

#[derive(Debug)]
enum Kind {
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
    kept: Vec<u8>,
    /// How many of the kept bytes may go on.
    cleared: usize,
    /// How many of them the reader of hellos has seen.
    seen: usize,
    kind: Kind,
    /// How many requests were let through.
    requests: u64,
    /// What was read in passing.
    noticed: Option<Found>,
}

impl Inspector {
    /// For a connection to this address.
    pub fn new(address: IpAddr) -> Self {
        Self {
            address,
            kept: Vec::new(),
            cleared: 0,
            seen: 0,
            kind: Kind::Unknown,
            requests: 0,
            noticed: None,
        }
    }

    /// For a connection to this address that may say what it likes.
    pub fn watching(address: IpAddr) -> Self {
        Self { kind: Kind::Watching(HelloReader::new()), ..Self::new(address) }
    }

    /// What was read of a connection that may say what it likes.
    pub fn noticed(&self) -> Option<&Found> {
        self.noticed.as_ref()
    }

    /// Whether what comes next is still to be judged.
    pub fn is_judging(&self) -> bool {
        matches!(self.kind, Kind::Unknown | Kind::Tls(..) | Kind::SecondHello(_) | Kind::Http(_))
    }

    /// How many bytes of the guest are taken now.
    pub fn room(&self) -> usize {
        MOST_KEPT.saturating_sub(self.kept.len())
    }

    /// Takes bytes of the guest's, at most as many as there is [`Self::room`] for.
    pub fn push(&mut self, bytes: &[u8]) {
        self.kept.extend_from_slice(bytes);
    }

    /// Takes bytes of the server's, in so far as they say whether the protocol changes.
    pub fn push_answer(&mut self, bytes: &[u8]) {
        if let Kind::Http(stream) = &mut self.kind {
            stream.answer(bytes);
        }
    }

    /// Whether the server's bytes have to be shown to [`Self::push_answer`].
    pub fn wants_answers(&self) -> bool {
        matches!(&self.kind, Kind::Http(stream) if stream.wants_answer())
    }

    /// What may go on.
    pub fn cleared(&self) -> &[u8] {
        self.kept.get(..self.cleared).unwrap_or_default()
    }

    /// So many of the cleared bytes have gone on.
    pub fn consume(&mut self, count: usize) {
        let count = count.min(self.cleared);
        self.kept.drain(..count);
        self.cleared -= count;
        self.seen = self.seen.saturating_sub(count);
        if self.is_done() {
            self.kept = Vec::new();
        }
    }

    /// Whether nothing has to be read any more, and nothing is kept: bytes may go on directly.
    pub fn is_done(&self) -> bool {
        self.kept.is_empty() && matches!(self.kind, Kind::Passing)
    }

    /// Whether a request was let through before.
    pub fn has_passed_requests(&self) -> bool {
        self.requests > 0
    }

    /// What is spoken, as far as it was read.
    pub fn speech(&self) -> Speech {
        match self.kind {
            Kind::Http(_) => Speech::Http,
            Kind::Tls(..) | Kind::SecondHello(_) => Speech::Tls,
            Kind::Unknown | Kind::Passing | Kind::Watching(_) | Kind::WatchingSecond(_) => Speech::Other,
        }
    }

    /// Reads on.
    pub fn read_on(&mut self) -> Next {
        if matches!(self.kind, Kind::Unknown) {
            self.kind = match self.kept.first() {
                None => return Next::More,
                // The type of a record with a handshake, or the first byte of an SSL 2 hello.
                Some(0x16 | 0x80..) => Kind::Tls(HelloReader::new(), None),
                // Whether some server would take it for HTTP, that reader knows best.
                Some(_) => Kind::Http(Box::default()),
            };
        }
        match &mut self.kind {
            Kind::Unknown => Next::More,
            Kind::Tls(reader, read) => {
                let hello = reader.push(self.kept.get(self.seen..).unwrap_or_default());
                self.seen = self.kept.len();
                match hello {
                    Hello::More => Next::More,
                    Hello::NotTls => Next::Decide(Found::Other),
                    Hello::Refused(why) => Next::Refused(why.to_string()),
                    Hello::Read(hello) => {
                        let (name, encrypted_hello) = (hello.name.clone(), hello.encrypted_hello);
                        *read = Some(hello);
                        Next::Decide(Found::Tls { name, encrypted_hello })
                    }
                }
            }
            Kind::Http(stream) => loop {
                match stream.read(self.kept.get(self.cleared..).unwrap_or_default()) {
                    Ok(Step::Cleared(count)) => self.cleared += count,
                    Ok(Step::Decide(request)) => {
                        return Next::Decide(Found::of_request(&request, self.address));
                    }
                    Ok(Step::More | Step::Held) => return Next::More,
                    Err(HttpRefusal::NotHttp) if self.requests == 0 => return Next::Decide(Found::Other),
                    Err(why) => return Next::Refused(why.to_string()),
                }
            },
            Kind::SecondHello(second) => {
                let result = second.push(self.kept.get(self.cleared..).unwrap_or_default());
                match result {
                    Err(why) => return Next::Refused(why.to_string()),
                    Ok(false) => self.kind = Kind::Passing,
                    Ok(true) => {}
                }
                self.cleared = self.kept.len();
                Next::More
            }
            Kind::Passing | Kind::Watching(_) | Kind::WatchingSecond(_) => {
                self.watch();
                Next::More
            }
        }
    }

    /// Lets everything pass, and looks at what has not been seen yet.
    fn watch(&mut self) {
        self.cleared = self.kept.len();
        let new = self.kept.get(self.seen..).unwrap_or_default();
        self.seen = self.kept.len();
        let mut rest = new;
        if let Kind::Watching(reader) = &mut self.kind {
            let before = reader.length();
            match reader.push(new) {
                Hello::More => return,
                Hello::NotTls | Hello::Refused(_) => self.kind = Kind::Passing,
                Hello::Read(hello) => {
                    rest = new.get(reader.length() - before..).unwrap_or_default();
                    let (name, encrypted_hello) = (hello.name.clone(), hello.encrypted_hello);
                    self.noticed = Some(Found::Tls { name, encrypted_hello });
                    self.kind = Kind::WatchingSecond(SecondHello::new(&hello));
                }
            }
        }
        if let Kind::WatchingSecond(second) = &mut self.kind {
            match second.push(rest) {
                Ok(true) => return,
                Ok(false) => {}
                // Which name the server acts on, nobody can say.
                Err(_) => self.noticed = None,
            }
            self.kind = Kind::Passing;
        }
    }

    /// Lets through what [`Next::Decide`] showed last.
    pub fn accept(&mut self, found: &Found) {
        match (&mut self.kind, found) {
            (Kind::Http(stream), Found::Http { .. }) => {
                self.requests += 1;
                stream.accept(self.kept.get_mut(self.cleared..).unwrap_or_default());
            }
            (Kind::Tls(reader, Some(hello)), Found::Tls { .. }) => {
                self.cleared = reader.length().min(self.kept.len());
                self.kind = Kind::SecondHello(SecondHello::new(hello));
            }
            _ => {
                self.kind = Kind::Passing;
                self.cleared = self.kept.len();
            }
        }
    }
}
