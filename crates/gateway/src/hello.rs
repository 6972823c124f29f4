//! The SNI of a TLS ClientHello, parsed without taking part in the handshake.
//!
//! The reader accepts the start of a client's stream in any segmentation. It reassembles the handshake message over
//! any number of segments and records, so that a fragmented ClientHello is parsed as the server will parse it. What
//! two servers could parse differently is refused.

#[cfg(test)]
pub(crate) mod cuts;
mod message;
mod second;
#[cfg(test)]
mod tests;

use bathy_policy::HostName;
use thiserror::Error;

pub use second::SecondHello;

/// The longest handshake message with its header. A ClientHello with post-quantum keys has about 2 KiB.
pub const MAX_HELLO: usize = 64 * 1024;
/// How many records a ClientHello may be fragmented into. A client needs one or two; one byte per record is
/// accepted too.
pub const MAX_RECORDS: usize = 2048;

/// The longest plaintext record (RFC 8446).
const MAX_RECORD: usize = 1 << 14;
const RECORD_HEADER: usize = 5;
const HANDSHAKE_HEADER: usize = 4;
const HANDSHAKE: u8 = 22;
const APPLICATION_DATA: u8 = 23;
const CLIENT_HELLO: u8 = 1;

/// What the bytes so far are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hello {
    /// Bytes are missing to complete the ClientHello.
    More,
    NotTls,
    Read(Box<ClientHello>),
    /// A ClientHello that must not be forwarded where a name decides.
    Refused(HelloRefusal),
}

/// The fields of a ClientHello that matter here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientHello {
    /// The server name (SNI).
    pub name: Option<HostName>,
    /// Whether there is an encrypted ClientHello, or GREASE that looks like one. The SNI may then be only the outer
    /// name.
    pub encrypted_hello: bool,
    /// Whether the client sends data before the handshake is complete (0-RTT).
    pub early_data: bool,
    /// The application protocols that the client offers, printable, for the log.
    pub protocols: Vec<String>,
}

/// Why a ClientHello is refused.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum HelloRefusal {
    #[error("The client sent an SSL 2 hello; use TLS 1.2 or later")]
    Ssl2,
    /// The client offers no version from TLS 1.2 on.
    #[error("The client offers no TLS version from 1.2 on")]
    OldTls,
    /// The message or the number of records exceeds its limit.
    #[error(
        "The ClientHello is longer than {MAX_HELLO} bytes, or spread over more than {MAX_RECORDS} records"
    )]
    TooLong,
    /// A record of another type, or an empty or oversized one, between the fragments of a ClientHello.
    #[error("The ClientHello is interrupted by a record that does not belong there")]
    Record,
    /// The first handshake message has another type.
    #[error("The first TLS handshake message is of type {0} and not a ClientHello")]
    NotHello(u8),
    /// Handshake bytes follow the ClientHello in the same record.
    #[error("More handshake bytes follow the ClientHello before the server has answered")]
    Trailing,
    /// The lengths inside the ClientHello contradict each other.
    #[error("The ClientHello is malformed: {0}")]
    Malformed(&'static str),
    #[error("The ClientHello has the extension {0} twice")]
    Twice(u16),
    /// The server_name extension does not hold exactly one host name.
    #[error("The server_name extension must hold exactly one host name")]
    Names,
    /// The server_name is an IP address.
    #[error("The server_name is an IP address; only host names are allowed there")]
    Address,
    /// The server_name is not a valid host name.
    #[error("The server_name is not a valid host name")]
    BadName,
    /// The second ClientHello, after a HelloRetryRequest, has another name.
    #[error("The client's second ClientHello does not have the name of its first")]
    Changed,
}

/// Parses the ClientHello at the start of a client's stream.
///
/// The work is linear: each byte is parsed once as it comes, and the message once when it is complete.
#[derive(Debug, Default)]
pub struct HelloReader {
    /// The handshake message so far, without record headers.
    message: Vec<u8>,
    /// The header of the current record.
    header: Vec<u8>,
    /// How many bytes of the current record are missing.
    remaining: usize,
    records: usize,
    /// Whether this may be an encrypted TLS 1.2 record, which has the same type and by chance the first bytes of a
    /// ClientHello. The next record distinguishes them.
    may_be_encrypted: bool,
    length: usize,
    result: Option<Hello>,
}

impl HelloReader {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Parses the next bytes of the stream. Any result but [`Hello::More`] is final: later bytes are ignored.
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

    /// How many bytes of the stream were parsed. After [`Hello::Read`] these are the ClientHello with its record
    /// headers, and [`SecondHello`] goes on behind them.
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
            // No server accepts this inside a ClientHello, so it was an encrypted record.
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
        // A record has a maximal length, so the buffer exceeds the message by that at most.
        if self.message.len() > length || (self.message.len() == length && self.remaining > 0) {
            return Err(HelloRefusal::Trailing);
        }
        let Some(body) = self.message.get(HANDSHAKE_HEADER..length) else { return Ok(None) };
        message::read(body).map(|hello| Some(Hello::Read(Box::new(hello))))
    }

    /// The length of the handshake message with its header, once the header is complete.
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

/// Recognizes SSL 2: a length of two bytes with the highest bit set, the message type, and a
/// version.
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
