//! The head of a request: its end, its request line and its header fields.

use super::target::{self, Authority};
use super::{Body, HttpRefusal, MAX_FIELDS, MAX_HEAD, Request};

/// The longest registered method has 17 letters.
const MAX_METHOD: usize = 32;
/// The most digits of a Content-Length that always fit into 64 bits.
const MAX_DIGITS: usize = 19;

/// Header fields by which some frameworks override the method or path.
const REWRITING: [&str; 5] =
    ["x-http-method", "x-http-method-override", "x-method-override", "x-original-url", "x-rewrite-url"];

/// The Upgrade field, and the name of equal length that hides it from the server.
const UPGRADE: &[u8] = b"upgrade";
const HIDDEN: &[u8; UPGRADE.len()] = b"X-Plain";
/// The only protocol that a connection may be upgraded to. Its messages go to the host of the request, while in
/// HTTP/2 (`h2c`) or TLS each request could name another one.
const WEBSOCKET: &[u8] = b"websocket";

/// Finds the end of a head incrementally, and refuses illegal bytes as soon as they are there.
#[derive(Debug, Default)]
pub(super) struct Scan {
    scanned: usize,
    method_ended: bool,
    line_ended: bool,
}

impl Scan {
    /// Scans the bytes that are new. Returns the length of the head once it is complete.
    pub(super) fn read(&mut self, pending: &[u8]) -> Result<Option<usize>, HttpRefusal> {
        while let Some(&byte) = pending.get(self.scanned) {
            let before = self.scanned.checked_sub(1).and_then(|index| pending.get(index));
            self.scanned += 1;
            if self.scanned > MAX_HEAD {
                return Err(HttpRefusal::TooLong("a head of more than 64 KiB"));
            }
            match (before, byte) {
                (Some(b'\r'), b'\n') => {}
                (_, b'\n') => return Err(HttpRefusal::Malformed("a line ends without CR")),
                (Some(b'\r'), _) => return Err(HttpRefusal::Malformed("a CR is inside a line")),
                (_, b'\r' | b'\t') => {}
                (_, byte) if byte.is_ascii_control() => {
                    return Err(HttpRefusal::Malformed("a control character is in the head"));
                }
                _ => {}
            }
            self.check_method(byte)?;
            let seen = pending.get(..self.scanned).unwrap_or_default();
            if byte == b'\n' && !self.line_ended {
                request_line(seen.strip_suffix(b"\r\n").unwrap_or(seen))?;
                self.line_ended = true;
            }
            if byte == b'\n' && seen.ends_with(b"\r\n\r\n") {
                return Ok(Some(self.scanned));
            }
        }
        Ok(None)
    }

    /// Whether the request line was complete and well formed.
    pub(super) fn is_past_line(&self) -> bool {
        self.line_ended
    }

    /// Other protocols fail here, mostly before their first line ends.
    fn check_method(&mut self, byte: u8) -> Result<(), HttpRefusal> {
        if self.method_ended {
            return Ok(());
        }
        self.method_ended = byte == b' ' && self.scanned > 1;
        if self.method_ended || (is_method_byte(byte) && self.scanned <= MAX_METHOD) {
            Ok(())
        } else {
            Err(HttpRefusal::Malformed("the method is not one"))
        }
    }
}

/// Lower case is refused: a case-insensitive server would see a method that no rule names.
fn is_method_byte(byte: u8) -> bool {
    byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'-' || byte == b'_'
}

fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

struct RequestLine<'a> {
    method: &'a str,
    target: &'a str,
    /// True for HTTP/1.1, where the Host field is required.
    names_host: bool,
}

fn request_line(line: &[u8]) -> Result<RequestLine<'_>, HttpRefusal> {
    let malformed = HttpRefusal::Malformed("the request line is not METHOD TARGET VERSION");
    let line = str::from_utf8(line).map_err(|_| malformed.clone())?;
    let mut words = line.split(' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(malformed);
    };
    if target.is_empty() || !target.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(malformed);
    }
    match (method, version) {
        ("PRI", "HTTP/2.0") => Err(HttpRefusal::Http2),
        (_, "HTTP/1.1") => Ok(RequestLine { method, target, names_host: true }),
        (_, "HTTP/1.0") => Ok(RequestLine { method, target, names_host: false }),
        (_, version) if version.starts_with("HTTP/") => Err(HttpRefusal::Version),
        _ => Err(malformed),
    }
}

/// The header fields that matter here.
#[derive(Default)]
struct Fields<'a> {
    hosts: Vec<&'a [u8]>,
    lengths: Vec<&'a [u8]>,
    codings: Vec<&'a [u8]>,
    upgrades: Vec<&'a [u8]>,
    rewrites: bool,
}

pub(super) struct Head {
    pub(super) request: Request,
    /// Whether the protocol may change after it.
    pub(super) switches: bool,
}

/// Parses a complete head, including the empty line at its end.
pub(super) fn parse(head: &[u8]) -> Result<Head, HttpRefusal> {
    let mut lines = head.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    let line = request_line(lines.next().unwrap_or_default())?;
    let mut fields = Fields::default();
    for (number, field) in lines.take_while(|line| !line.is_empty()).enumerate() {
        if number == MAX_FIELDS {
            return Err(HttpRefusal::TooLong("more than 200 header fields"));
        }
        let (name, value) = field_line(field)?;
        match name.as_str() {
            "host" => fields.hosts.push(value),
            "content-length" => fields.lengths.push(value),
            "transfer-encoding" => fields.codings.push(value),
            "upgrade" => fields.upgrades.push(value),
            "connection" if lists_needed_field(value) => {
                return Err(HttpRefusal::Framing("the Connection field asks to drop a field that is needed"));
            }
            // Gateways that pass fields on as variables (CGI) treat an underscore as a hyphen.
            "content_length" | "transfer_encoding" => {
                return Err(HttpRefusal::Framing("a field imitates one that delimits the body"));
            }
            name => fields.rewrites |= is_rewriting(name),
        }
    }
    let host = host_field(&fields.hosts)?;
    if host.is_none() && line.names_host {
        return Err(HttpRefusal::Host("HTTP/1.1 needs one"));
    }
    let read = target::read(line.method, line.target, host)?;
    let body = body(&fields, line.names_host)?;
    let switches = matches!(fields.upgrades.as_slice(), [only] if only.eq_ignore_ascii_case(WEBSOCKET));
    if switches && (line.method != "GET" || body != Body::Length(0)) {
        return Err(HttpRefusal::Framing("a request for a WebSocket is a GET without a body"));
    }
    let upgrade =
        (!fields.upgrades.is_empty()).then(|| fields.upgrades.join(&b", "[..]).escape_ascii().to_string());
    let request = Request {
        method: line.method.to_owned(),
        target: line.target.to_owned(),
        form: read.form,
        authority: read.authority,
        path: read.path,
        body,
        upgrade,
        rewrites: fields.rewrites,
    };
    Ok(Head { request, switches })
}

/// Renames Upgrade fields in place, at equal length. Some clients offer an upgrade unasked (Java, curl with
/// `--http2`); a server that does not see it stays with HTTP/1.
pub(super) fn hide_upgrades(head: &mut [u8]) {
    for line in head.split_mut(|byte| *byte == b'\n') {
        let name = line.split_at_mut_checked(UPGRADE.len()).filter(|(_, rest)| rest.first() == Some(&b':'));
        if let Some((name, _)) = name.filter(|(name, _)| name.eq_ignore_ascii_case(UPGRADE)) {
            name.copy_from_slice(HIDDEN);
        }
    }
}

/// A reverse proxy drops the fields that Connection lists, so that the server behind it would parse another
/// request.
fn lists_needed_field(connection: &[u8]) -> bool {
    let needed: [&[u8]; 3] = [b"content-length", b"host", b"transfer-encoding"];
    let mut listed = connection.split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
    listed.any(|listed| needed.iter().any(|needed| listed.eq_ignore_ascii_case(needed)))
}

/// The name in lower case and the trimmed value. Control characters were refused while scanning.
fn field_line(line: &[u8]) -> Result<(String, &[u8]), HttpRefusal> {
    if line.first().is_some_and(|byte| byte.is_ascii_whitespace()) {
        return Err(HttpRefusal::Malformed("a header field is folded over two lines"));
    }
    let colon = line.iter().position(|byte| *byte == b':');
    let (name, value) = colon.and_then(|colon| line.split_at_checked(colon)).unwrap_or_default();
    if name.is_empty() || !name.iter().all(|byte| is_token_byte(*byte)) {
        return Err(HttpRefusal::Malformed(
            "a header field has no name, or one with a space or odd character",
        ));
    }
    let name = name.escape_ascii().to_string().to_ascii_lowercase();
    Ok((name, value.strip_prefix(b":").unwrap_or(value).trim_ascii()))
}

/// Refuses trailer fields that belong into the head. `line` has no end of line.
pub(super) fn check_trailer(line: &[u8]) -> Result<(), HttpRefusal> {
    let (name, _) = field_line(line)?;
    let only_in_heads =
        ["host", "content-length", "content_length", "transfer-encoding", "transfer_encoding", "upgrade"];
    if only_in_heads.contains(&name.as_str()) || is_rewriting(&name) {
        return Err(HttpRefusal::Framing("a trailer holds a field that belongs in a head"));
    }
    Ok(())
}

/// Programs behind a CGI gateway cannot distinguish an underscore from a hyphen.
fn is_rewriting(name: &str) -> bool {
    REWRITING.contains(&name.replace('_', "-").as_str())
}

fn host_field(hosts: &[&[u8]]) -> Result<Option<Authority>, HttpRefusal> {
    match hosts {
        [] => Ok(None),
        [host] => {
            let host = str::from_utf8(host).ok().and_then(target::authority);
            host.map(Some)
                .ok_or(HttpRefusal::Host("it is neither a host name nor an address, with or without a port"))
        }
        _ => Err(HttpRefusal::Host("there is more than one")),
    }
}

fn body(fields: &Fields<'_>, may_be_chunked: bool) -> Result<Body, HttpRefusal> {
    match (fields.lengths.as_slice(), fields.codings.as_slice()) {
        ([], []) => Ok(Body::Length(0)),
        ([length], []) => {
            length_value(length).ok_or(HttpRefusal::Framing("the Content-Length is not a number"))
        }
        ([], [coding]) if may_be_chunked && coding.eq_ignore_ascii_case(b"chunked") => Ok(Body::Chunked),
        ([], _) => Err(HttpRefusal::Framing("the Transfer-Encoding is not just chunked")),
        (_, []) => Err(HttpRefusal::Framing("there is more than one Content-Length")),
        _ => Err(HttpRefusal::Framing("both Content-Length and Transfer-Encoding are there")),
    }
}

fn length_value(text: &[u8]) -> Option<Body> {
    let digits = str::from_utf8(text).ok()?;
    let fits = digits.len() <= MAX_DIGITS && digits.bytes().all(|byte| byte.is_ascii_digit());
    fits.then(|| digits.parse().ok()).flatten().map(Body::Length)
}
