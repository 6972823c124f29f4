//! The body of a ClientHello. Every length is checked against the bytes that are there; trailing bytes are refused.

use std::net::IpAddr;
use std::str;

use super::{ClientHello, HelloRefusal};
use bathy_policy::HostName;

/// How many extensions a ClientHello may have. Browsers send about twenty.
const MAX_EXTENSIONS: usize = 128;
/// How many application protocols are logged.
const MAX_PROTOCOLS: usize = 16;

const SERVER_NAME: u16 = 0;
const ALPN: u16 = 16;
const EARLY_DATA: u16 = 42;
const SUPPORTED_VERSIONS: u16 = 43;
/// Encrypted ClientHello, its drafts, and its predecessor ESNI.
const ENCRYPTED_HELLO: [u16; 7] = [0xfe0d, 0xfe0c, 0xfe0b, 0xfe0a, 0xfe09, 0xfe08, 0xffce];

const TLS_1_2: u16 = 0x0303;
const TLS_1_3: u16 = 0x0304;

/// Parses the body of the handshake message.
pub(super) fn read(body: &[u8]) -> Result<ClientHello, HelloRefusal> {
    let mut rest = Bytes(body);
    let version = rest.number("no version")?;
    rest.take(32, "no random")?;
    let session = rest.short_vector("no session id")?;
    let suites = rest.long_vector("no cipher suites")?;
    let compressions = rest.short_vector("no compression methods")?;
    if session.0.len() > 32 {
        return Err(HelloRefusal::Malformed("the session id is too long"));
    }
    if suites.0.is_empty() || !suites.0.len().is_multiple_of(2) || compressions.0.is_empty() {
        return Err(HelloRefusal::Malformed("empty or odd lists of ciphers or compression methods"));
    }
    // A server that ignores supported_versions uses this field, so it must not be old either.
    if version < TLS_1_2 {
        return Err(HelloRefusal::OldTls);
    }
    let mut hello = ClientHello::default();
    if rest.0.is_empty() {
        return Ok(hello);
    }
    let mut extensions = rest.long_vector("no extensions")?;
    rest.end("bytes behind the extensions")?;
    let mut seen: Vec<u16> = Vec::new();
    while !extensions.0.is_empty() {
        let kind = extensions.number("half an extension")?;
        let content = extensions.long_vector("half an extension")?;
        if seen.contains(&kind) {
            return Err(HelloRefusal::Twice(kind));
        }
        if seen.len() == MAX_EXTENSIONS {
            return Err(HelloRefusal::Malformed("too many extensions"));
        }
        seen.push(kind);
        match kind {
            SERVER_NAME => hello.name = Some(server_name(content)?),
            SUPPORTED_VERSIONS => check_versions(content)?,
            ALPN => hello.protocols = protocols(content)?,
            EARLY_DATA => hello.early_data = true,
            kind if ENCRYPTED_HELLO.contains(&kind) => hello.encrypted_hello = true,
            _ => {}
        }
    }
    Ok(hello)
}

fn server_name(mut content: Bytes<'_>) -> Result<HostName, HelloRefusal> {
    const WHAT: &str = "the server_name extension";
    let mut list = content.long_vector(WHAT)?;
    content.end(WHAT)?;
    if list.0.is_empty() {
        return Err(HelloRefusal::Names);
    }
    let kind = list.byte(WHAT)?;
    let name = list.long_vector(WHAT)?;
    if kind != 0 || !list.0.is_empty() {
        return Err(HelloRefusal::Names);
    }
    let name = str::from_utf8(name.0).map_err(|_| HelloRefusal::BadName)?;
    let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    if bare.parse::<IpAddr>().is_ok() {
        return Err(HelloRefusal::Address);
    }
    // RFC 6066 forbids a trailing dot, and servers differ in how they treat one.
    if name.ends_with('.') {
        return Err(HelloRefusal::BadName);
    }
    name.parse().map_err(|_| HelloRefusal::BadName)
}

/// GREASE values are greater than any version, so only known versions count.
fn check_versions(mut content: Bytes<'_>) -> Result<(), HelloRefusal> {
    const WHAT: &str = "the supported_versions extension";
    let mut list = content.short_vector(WHAT)?;
    content.end(WHAT)?;
    let mut offered = false;
    while !list.0.is_empty() {
        offered |= matches!(list.number(WHAT)?, TLS_1_2 | TLS_1_3);
    }
    if offered { Ok(()) } else { Err(HelloRefusal::OldTls) }
}

fn protocols(mut content: Bytes<'_>) -> Result<Vec<String>, HelloRefusal> {
    const WHAT: &str = "the list of application protocols";
    let mut list = content.long_vector(WHAT)?;
    content.end(WHAT)?;
    let mut protocols = Vec::new();
    while !list.0.is_empty() {
        let protocol = list.short_vector(WHAT)?;
        if protocol.0.is_empty() {
            return Err(HelloRefusal::Malformed(WHAT));
        }
        if protocols.len() < MAX_PROTOCOLS {
            protocols.push(protocol.0.escape_ascii().to_string());
        }
    }
    Ok(protocols)
}

/// The bytes that are still to be parsed. `what` names the field in errors.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, count: usize, what: &'static str) -> Result<&'a [u8], HelloRefusal> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(HelloRefusal::Malformed(what))?;
        self.0 = rest;
        Ok(taken)
    }

    fn byte(&mut self, what: &'static str) -> Result<u8, HelloRefusal> {
        let (byte, rest) = self.0.split_first().ok_or(HelloRefusal::Malformed(what))?;
        self.0 = rest;
        Ok(*byte)
    }

    fn number(&mut self, what: &'static str) -> Result<u16, HelloRefusal> {
        Ok(u16::from_be_bytes([self.byte(what)?, self.byte(what)?]))
    }

    /// Bytes behind a one-byte length.
    fn short_vector(&mut self, what: &'static str) -> Result<Self, HelloRefusal> {
        let length = self.byte(what)?;
        self.take(length.into(), what).map(Self)
    }

    /// Bytes behind a two-byte length.
    fn long_vector(&mut self, what: &'static str) -> Result<Self, HelloRefusal> {
        let length = self.number(what)?;
        self.take(length.into(), what).map(Self)
    }

    fn end(&self, what: &'static str) -> Result<(), HelloRefusal> {
        if self.0.is_empty() { Ok(()) } else { Err(HelloRefusal::Malformed(what)) }
    }
}
