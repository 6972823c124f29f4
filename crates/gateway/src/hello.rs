//! The name in a TLS ClientHello, read without taking part in the handshake.
//!
//! The reader is fed the start of a client's stream as it comes. It puts the handshake message together over any number
//! of segments and records, so that a hello cut into pieces is read as the server will read it. Whatever two servers
//! could read in two ways is refused.

#[cfg(test)]
pub(crate) mod cuts;
mod message;
mod second;
#[cfg(test)]
mod tests;

use bathy_policy::HostName;
use thiserror::Error;

pub use second::SecondHello;

/// The longest handshake message that is read, with its header. Hellos with post-quantum keys have about 2 KiB.
pub const MAX_HELLO: usize = 64 * 1024;
/// Over how many records a hello may be spread. A client needs one or two; a hello cut byte by byte still passes.
pub const MAX_RECORDS: usize = 2048;

/// The longest record before encryption, from RFC 8446.
const MAX_RECORD: usize = 1 << 14;
const RECORD_HEADER: usize = 5;
const HANDSHAKE_HEADER: usize = 4;
const HANDSHAKE: u8 = 22;
const APPLICATION_DATA: u8 = 23;
const CLIENT_HELLO: u8 = 1;

/// What the bytes so far are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hello {
    /// The start of a hello: more bytes are needed.
    More,
    /// Something other than TLS.
    NotTls,
    /// A whole ClientHello.
    Read(Box<ClientHello>),
    /// A hello that must not be passed on where a name decides.
    Refused(HelloRefusal),
}

/// What a ClientHello says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientHello {
    /// The server's name, if the client gave one.
    pub name: Option<HostName>,
    /// Whether an encrypted inner hello is there, or a dummy that looks like one: from outside they are the same.
    /// The name of a real one is not the name that the server acts on.
    pub encrypted_hello: bool,
    /// Whether the client sends data before the handshake is complete (0-RTT).
    pub early_data: bool,
    /// The application protocols that the client offers, printable, for the log.
    pub protocols: Vec<String>,
}

/// Why a hello is refused.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum HelloRefusal {
    /// The client speaks the format of SSL 2.
    #[error("The client sent an SSL 2 hello; use TLS 1.2 or later")]
    Ssl2,
    /// The client offers nothing from TLS 1.2 on.
    #[error("The client offers no TLS version from 1.2 on")]
    OldTls,
    /// The message or the pieces it came in have a limit.
    #[error(
        "The ClientHello is longer than {MAX_HELLO} bytes, or spread over more than {MAX_RECORDS} records"
    )]
    TooLong,
    /// A record of another kind, an empty one or an oversized one stands between the pieces of the hello.
    #[error("The ClientHello is cut by a record that does not belong there")]
    Record,
    /// The first handshake message is another one.
    #[error("The first TLS handshake message is of type {0} and not a ClientHello")]
    NotHello(u8),
    /// Handshake bytes follow the hello in the same record.
    #[error("More handshake bytes follow the ClientHello before the server has answered")]
    Trailing,
    /// The lengths inside the hello contradict each other.
    #[error("The ClientHello is malformed: {0}")]
    Malformed(&'static str),
    /// An extension comes twice.
    #[error("The ClientHello has the extension {0} twice")]
    Twice(u16),
    /// The server_name extension does not hold exactly one host name.
    #[error("The server_name extension must hold exactly one host name")]
    Names,
    /// The server_name is an address.
    #[error("The server_name is an IP address; only host names may stand there")]
    Address,
    /// The server_name is not a name that can be compared.
    #[error("The server_name is not a valid host name")]
    BadName,
    /// The server asked for another hello, and that one says something else.
    #[error("The client's second ClientHello does not have the name of its first")]
    Changed,
}

/// Reads the hello at the start of a client's stream.
///
/// The work is proportional to the bytes: each is looked at once as it comes, and the message once when it is whole.
#[derive(Debug, Default)]
pub struct HelloReader {
    /// The handshake message as far as it came, without the record headers.
    message: Vec<u8>,
    /// The header of the record that is being read.
    header: Vec<u8>,
    /// How many bytes of that record are still to come.
    remaining: usize,
    records: usize,
    /// Whether this may be an encrypted record of TLS 1.2, which has the same type and by chance the first bytes of a
    /// hello. What comes after it tells.
    may_be_encrypted: bool,
    length: usize,
    result: Option<Hello>,
}

impl HelloReader {
    /// A reader at the start of a stream.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the bytes that follow those of the calls before. Anything but [`Hello::More`] is final: later bytes are
    /// not read.
    pub fn push(&mut self, mut bytes: &[u8]) -> Hello {
        while self.result.is_none() && !bytes.is_empty() {
            let before = bytes.len();
            let step = if self.remaining == 0 {
                self.take_header(&mut bytes)
            } else {
                self.take_fragment(&mut bytes)
            };
            self.length += before - bytes.len();
            self.result = step.unwrap_or_else(|refusal| Some(Hello::Refused(refusal)));
            if self.result.is_some() {
                self.message = Vec::new();
            }
        }
        self.result.clone().unwrap_or(Hello::More)
    }

    /// How many bytes of the stream were read. After [`Hello::Read`] these are the hello with its record headers, and what
    /// follows is for [`SecondHello`].
    #[must_use]
    pub fn length(&self) -> usize {
        self.length
    }

    fn take_header(&mut self, bytes: &mut &[u8]) -> Result<Option<Hello>, HelloRefusal> {
        let Some((byte, rest)) = bytes.split_first() else { return Ok(None) };
        *bytes = rest;
        self.header.push(*byte);
        if self.records == 0 && !could_be_tls(&self.header) {
            return first_bytes_of_something_else(&self.header);
        }
        match self.header.first() {
            Some(&HANDSHAKE) => {}
            // No server takes this inside a hello, so it was none.
            Some(&APPLICATION_DATA) if self.may_be_encrypted => {
                return Err(HelloRefusal::NotHello(CLIENT_HELLO));
            }
            _ if self.records > 0 => return Err(HelloRefusal::Record),
            _ => {}
        }
        if let [_, major, _, high, low] = *self.header.as_slice() {
            let length = usize::from(u16::from_be_bytes([high, low]));
            if major != 3 || length == 0 || length > MAX_RECORD {
                return Err(HelloRefusal::Record);
            }
            if self.records == MAX_RECORDS {
                return Err(HelloRefusal::TooLong);
            }
            self.records += 1;
            self.remaining = length;
            self.header.clear();
        }
        debug_assert!(self.header.len() < RECORD_HEADER);
        Ok(None)
    }

    fn take_fragment(&mut self, bytes: &mut &[u8]) -> Result<Option<Hello>, HelloRefusal> {
        let (fragment, rest) = bytes.split_at(self.remaining.min(bytes.len()));
        *bytes = rest;
        self.remaining -= fragment.len();
        self.message.extend_from_slice(fragment);
        let Some(length) = self.announced_length()? else { return Ok(None) };
        // A record is never longer than its limit, so the message is kept at most that much too long.
        if self.message.len() > length || (self.message.len() == length && self.remaining > 0) {
            return Err(HelloRefusal::Trailing);
        }
        let Some(body) = self.message.get(HANDSHAKE_HEADER..length) else { return Ok(None) };
        message::read(body).map(|hello| Some(Hello::Read(Box::new(hello))))
    }

    /// How long the handshake message is with its header, once its header is there.
    fn announced_length(&self) -> Result<Option<usize>, HelloRefusal> {
        match *self.message.as_slice() {
            [kind, ..] if kind != CLIENT_HELLO => Err(HelloRefusal::NotHello(kind)),
            [_, high, middle, low, ..] => {
                let body = u32::from_be_bytes([0, high, middle, low]);
                let length = usize::try_from(body).unwrap_or(usize::MAX).saturating_add(HANDSHAKE_HEADER);
                let is_sure = !self.may_be_encrypted || self.message.len() > MAX_HELLO;
                if length > MAX_HELLO && is_sure { Err(HelloRefusal::TooLong) } else { Ok(Some(length)) }
            }
            _ => Ok(None),
        }
    }
}

fn could_be_tls(start: &[u8]) -> bool {
    matches!(start, [] | [HANDSHAKE] | [HANDSHAKE, 3, ..])
}

/// Tells SSL 2 from anything else: two bytes of length with the highest bit set, the type of a hello, and a version.
fn first_bytes_of_something_else(start: &[u8]) -> Result<Option<Hello>, HelloRefusal> {
    match *start {
        [high] | [high, _] if high & 0x80 != 0 => Ok(None),
        [high, _, CLIENT_HELLO] | [high, _, CLIENT_HELLO, 0 | 3] if high & 0x80 != 0 => Ok(None),
        [high, _, CLIENT_HELLO, 0, 2] | [high, _, CLIENT_HELLO, 3, _] if high & 0x80 != 0 => {
            Err(HelloRefusal::Ssl2)
        }
        _ => Ok(Some(Hello::NotTls)),
    }
}
