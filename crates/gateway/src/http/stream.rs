//! Follows the client's side of a connection from request to request.

use super::head::{self, Head, Scan};
use super::response::{FirstStatus, StatusReader};
use super::sniff::looks_like_http;
use super::{Body, HttpRefusal, Request};

const MAX_CHUNK_DIGITS: usize = 15;
/// How many bytes all trailers of one body may have.
const MAX_TRAILERS: usize = 8 * 1024;

/// What the caller has to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Forward so many of the given bytes, counted from the first, at least one.
    Cleared(usize),
    /// Ask the policy about this request. [`RequestStream::accept`] clears it; a caller that denies it closes.
    Decide(Box<Request>),
    /// Wait for more bytes.
    More,
    /// Wait for [`RequestStream::accept`], or for the server's response to a WebSocket request, see
    /// [`RequestStream::on_response`].
    Held,
}

/// Follows the bytes of a client, and clears them request by request.
///
/// The caller buffers what is not cleared, at most [`super::MAX_HEAD`], and passes it again together with what came
/// after it. Each byte is parsed once, except for an incomplete chunk-size line or trailer, which are short.
#[derive(Debug)]
pub struct RequestStream {
    state: State,
    /// Whether a request was accepted before.
    began: bool,
    /// Whether the first request asks for a WebSocket.
    may_switch: bool,
    /// The status of the response to the first request.
    status: StatusReader,
    refused: Option<HttpRefusal>,
}

#[derive(Debug)]
enum State {
    /// The next head is being scanned.
    Head(Scan),
    /// The first line is malformed with this error: it may be another protocol.
    Undetermined(HttpRefusal),
    /// A head is complete, and the caller has not accepted it.
    AwaitingDecision(PendingRequest),
    /// So many bytes of a head or body are cleared, then comes the rest.
    Passing(u64, Then),
    /// The chunk-size line is next.
    ChunkSize,
    /// The end of line behind a chunk is next.
    ChunkEnd,
    /// A trailer or the end of the body is next, after so many bytes of trailers.
    Trailers(usize),
    /// The server's response to an Upgrade is pending.
    Switching,
    /// The protocol was upgraded: bytes are cleared without parsing.
    Opaque,
}

/// A request that the caller has not accepted yet.
#[derive(Clone, Copy, Debug)]
struct PendingRequest {
    length: usize,
    body: Body,
    switches: bool,
}

#[derive(Clone, Copy, Debug)]
enum Then {
    Body(Body),
    ChunkEnd,
    Switching,
}

impl Default for RequestStream {
    fn default() -> Self {
        Self::new()
    }
}

impl RequestStream {
    #[must_use]
    pub fn new() -> Self {
        Self {
            state: State::Head(Scan::default()),
            began: false,
            may_switch: false,
            status: StatusReader::default(),
            refused: None,
        }
    }

    /// Parses `pending`: all bytes of the client that are not cleared yet, the new ones at the end.
    ///
    /// # Errors
    /// If the bytes cannot be followed. What was cleared before stays cleared; the error is final.
    pub fn read(&mut self, pending: &[u8]) -> Result<Step, HttpRefusal> {
        let mut cleared = 0;
        loop {
            match self.advance(pending.get(cleared..).unwrap_or_default()) {
                Ok(Step::Cleared(count)) => cleared += count,
                Ok(Step::More | Step::Held) if cleared > 0 => return Ok(Step::Cleared(cleared)),
                Ok(step) => return Ok(step),
                Err(refused) => {
                    self.refused = Some(refused.clone());
                    // What precedes the error is cleared; the next call returns the error.
                    return if cleared > 0 { Ok(Step::Cleared(cleared)) } else { Err(refused) };
                }
            }
            // The caller gets a head at the start of `pending`.
            if cleared > 0 && (cleared == pending.len() || matches!(self.state, State::Head(_))) {
                return Ok(Step::Cleared(cleared));
            }
        }
    }

    /// Clears the request of [`Step::Decide`]. `pending` is what was passed then: an Upgrade to anything but
    /// WebSocket is renamed in it, so that the server does not see it.
    pub fn accept(&mut self, pending: &mut [u8]) {
        let State::AwaitingDecision(request) = self.state else { return };
        let Some(head) = pending.get_mut(..request.length).filter(|head| head.ends_with(b"\r\n\r\n")) else {
            self.refused = Some(HttpRefusal::Changed);
            return;
        };
        if !request.switches {
            head::hide_upgrades(head);
        }
        self.began = true;
        self.may_switch |= request.switches;
        let then = if request.switches { Then::Switching } else { Then::Body(request.body) };
        self.state = State::Passing(u64::try_from(request.length).unwrap_or(u64::MAX), then);
    }

    /// Observes the server's bytes, from the first one on, while [`RequestStream::wants_response`]. Only 101 in
    /// response to a WebSocket request changes the protocol.
    pub fn on_response(&mut self, bytes: &[u8]) {
        self.status.push(bytes);
        self.settle_switch();
    }

    /// Whether the server's bytes have to be passed to [`RequestStream::on_response`].
    #[must_use]
    pub fn wants_response(&self) -> bool {
        (!self.began || self.may_switch) && self.status.so_far() == FirstStatus::More
    }

    /// A server may respond before it has the whole request, so the status may be known already.
    fn settle_switch(&mut self) {
        if !matches!(self.state, State::Switching) {
            return;
        }
        match self.status.so_far() {
            FirstStatus::More => {}
            FirstStatus::Status(101) => self.state = State::Opaque,
            FirstStatus::Status(_) => self.state = State::Head(Scan::default()),
            // How this server has parsed the request is unknown.
            FirstStatus::Invalid => self.refused = Some(HttpRefusal::BadResponse),
        }
    }

    /// Whether the protocol was upgraded, so that bytes are cleared without parsing.
    #[must_use]
    pub fn is_opaque(&self) -> bool {
        matches!(self.state, State::Opaque)
    }

    fn advance(&mut self, pending: &[u8]) -> Result<Step, HttpRefusal> {
        self.settle_switch();
        if let Some(refused) = &self.refused {
            return Err(refused.clone());
        }
        match &mut self.state {
            State::Head(scan) => match scan.read(pending) {
                Ok(None) => Ok(Step::More),
                Ok(Some(length)) => self.show(pending.get(..length).unwrap_or_default()),
                Err(refused @ HttpRefusal::Malformed(_)) if !self.began && !scan.is_past_line() => {
                    self.state = State::Undetermined(refused);
                    self.advance(pending)
                }
                Err(refused) => Err(refused),
            },
            State::Undetermined(refused) => match looks_like_http(pending) {
                None => Ok(Step::More),
                Some(true) => Err(refused.clone()),
                Some(false) => Err(HttpRefusal::NotHttp),
            },
            State::AwaitingDecision(_) | State::Switching => Ok(Step::Held),
            State::Passing(remaining, then) => {
                let (passed, then) =
                    (usize::try_from(*remaining).unwrap_or(usize::MAX).min(pending.len()), *then);
                *remaining -= u64::try_from(passed).unwrap_or(u64::MAX);
                if *remaining == 0 {
                    self.state = then.state();
                }
                Ok(if passed == 0 && pending.is_empty() { Step::More } else { Step::Cleared(passed) })
            }
            State::ChunkSize => {
                // The digits with CR and LF.
                let Some(line) = line(pending, MAX_CHUNK_DIGITS + 2)? else { return Ok(Step::More) };
                let size = chunk_size(line)
                    .ok_or(HttpRefusal::Framing("the size of a chunk is not a plain number"))?;
                self.state = match size {
                    0 => State::Trailers(0),
                    size => State::Passing(size, Then::ChunkEnd),
                };
                Ok(Step::Cleared(line.len() + 2))
            }
            State::ChunkEnd => {
                let Some(line) = line(pending, 2)? else { return Ok(Step::More) };
                self.state = State::ChunkSize;
                Ok(Step::Cleared(line.len() + 2))
            }
            State::Trailers(bytes) => {
                let Some(line) = line(pending, MAX_TRAILERS - *bytes)? else { return Ok(Step::More) };
                *bytes += line.len() + 2;
                if line.is_empty() {
                    self.state = State::Head(Scan::default());
                } else {
                    head::check_trailer(line)?;
                }
                Ok(Step::Cleared(line.len() + 2))
            }
            State::Opaque if pending.is_empty() => Ok(Step::More),
            State::Opaque => Ok(Step::Cleared(pending.len())),
        }
    }

    fn show(&mut self, bytes: &[u8]) -> Result<Step, HttpRefusal> {
        let Head { request, switches } = head::parse(bytes)?;
        if switches && self.began {
            return Err(HttpRefusal::LateSwitch);
        }
        self.state =
            State::AwaitingDecision(PendingRequest { length: bytes.len(), body: request.body, switches });
        Ok(Step::Decide(Box::new(request)))
    }
}

impl Then {
    fn state(self) -> State {
        match self {
            Self::Body(Body::Length(0)) => State::Head(Scan::default()),
            Self::Body(Body::Length(length)) => State::Passing(length, Self::Body(Body::Length(0))),
            Self::Body(Body::Chunked) => State::ChunkSize,
            Self::ChunkEnd => State::ChunkEnd,
            Self::Switching => State::Switching,
        }
    }
}

/// The first line without its end, if it is complete within `limit` bytes.
fn line(pending: &[u8], limit: usize) -> Result<Option<&[u8]>, HttpRefusal> {
    let within = pending.get(..limit).unwrap_or(pending);
    let end = within.iter().position(|byte| byte.is_ascii_control() && *byte != b'\t');
    match end.map(|end| (end, within.get(end..end + 2))) {
        None if within.len() == limit => {
            Err(HttpRefusal::Framing("a line inside a chunked body is too long"))
        }
        Some((end, None)) if within.get(end) == Some(&b'\r') && within.len() < limit => Ok(None),
        None => Ok(None),
        Some((end, Some(b"\r\n"))) => Ok(within.get(..end)),
        Some(_) => Err(HttpRefusal::Framing("a line inside a chunked body does not end with CR and LF")),
    }
}

/// Chunk extensions are refused like everything else that is not a digit: only smuggling uses them.
fn chunk_size(line: &[u8]) -> Option<u64> {
    let digits = str::from_utf8(line).ok()?;
    let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    plain.then(|| u64::from_str_radix(digits, 16).ok()).flatten()
}
