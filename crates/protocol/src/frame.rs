//! The wire format: a header of twelve bytes, then the payload.
//!
//! ```text
//! 0        4        8       9         12
//! | length | stream | chan. | reserved | payload …
//! ```
//! Numbers are little-endian. The reserved bytes are zero, so that garbage is detected early.

use thiserror::Error;

/// The buffer capacity that a decoder keeps when it is not needed.
const IDLE_CAPACITY: usize = 256 * 1024;

/// The length of the header in bytes.
pub const HEADER_LEN: usize = 12;

/// The type of a frame's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Channel {
    /// An encoded message of the stream.
    Control = 0,
    /// Data for the command's standard input.
    Stdin = 1,
    /// Data of the command's standard output.
    Stdout = 2,
    /// Data of the command's standard error.
    Stderr = 3,
}

impl Channel {
    fn from_wire(byte: u8) -> Result<Self, FrameError> {
        match byte {
            0 => Ok(Self::Control),
            1 => Ok(Self::Stdin),
            2 => Ok(Self::Stdout),
            3 => Ok(Self::Stderr),
            other => Err(FrameError::UnknownChannel(other)),
        }
    }
}

/// A violation of the frame format.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum FrameError {
    /// The announced length exceeds what this side accepts.
    #[error("The peer announced a frame of {length} bytes; at most {limit} are accepted")]
    TooLong {
        /// The announced payload length.
        length: u32,
        /// The accepted maximum payload length.
        limit: u32,
    },
    /// The channel number is unknown.
    #[error("The peer sent a frame for the unknown channel {0}")]
    UnknownChannel(u8),
    /// A reserved byte is not zero.
    #[error("The peer sent a frame whose reserved bytes are not zero")]
    Reserved,
}

/// One frame, borrowed from the decoder's buffer.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The stream that it belongs to.
    pub stream: u32,
    /// The type of the payload.
    pub channel: Channel,
    /// The bytes after the header.
    pub payload: &'a [u8],
}

/// Appends one frame to `out`. The payload must not exceed the limit that the receiver enforces.
pub fn encode(stream: u32, channel: Channel, payload: &[u8], out: &mut Vec<u8>) {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    debug_assert!(length <= crate::MAX_REQUEST);
    out.reserve(HEADER_LEN + payload.len());
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(&stream.to_le_bytes());
    out.extend_from_slice(&[channel as u8, 0, 0, 0]);
    out.extend_from_slice(payload);
}

/// Splits a byte stream into frames. It buffers at most one frame of unread bytes beyond what was pushed.
#[derive(Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// Where the unread part of `buffer` starts.
    start: usize,
    /// The maximum payload of a control frame.
    control_limit: u32,
}

impl Decoder {
    /// A decoder that accepts control messages of at most `control_limit` bytes. Data frames are always
    /// limited to [`crate::MAX_PAYLOAD`].
    pub fn new(control_limit: u32) -> Self {
        Self { buffer: Vec::new(), start: 0, control_limit }
    }

    /// Adds bytes that arrived from the peer.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 {
            self.buffer.drain(..self.start);
            self.start = 0;
            // A single long message does not keep its memory allocated.
            if self.buffer.capacity() > IDLE_CAPACITY && self.buffer.len() < IDLE_CAPACITY {
                self.buffer.shrink_to(IDLE_CAPACITY);
            }
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next complete frame, or `None` until more bytes arrive.
    pub fn next_frame(&mut self) -> Result<Option<Frame<'_>>, FrameError> {
        let Some(frame) = self.peek()? else { return Ok(None) };
        let end = self.start + HEADER_LEN + frame.payload.len();
        let (stream, channel) = (frame.stream, frame.channel);
        let begin = std::mem::replace(&mut self.start, end) + HEADER_LEN;
        let payload = self.buffer.get(begin..end).unwrap_or_default();
        Ok(Some(Frame { stream, channel, payload }))
    }

    /// Whether [`next_frame`](Self::next_frame) would return a frame or an error now.
    pub fn has_frame(&self) -> bool {
        !matches!(self.peek(), Ok(None))
    }

    fn peek(&self) -> Result<Option<Frame<'_>>, FrameError> {
        let unread = self.buffer.get(self.start..).unwrap_or_default();
        let Some((header, rest)) = unread.split_first_chunk::<HEADER_LEN>() else { return Ok(None) };
        let [l0, l1, l2, l3, s0, s1, s2, s3, channel, reserved @ ..] = *header;
        if reserved != [0; 3] {
            return Err(FrameError::Reserved);
        }
        let channel = Channel::from_wire(channel)?;
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        let limit = if channel == Channel::Control { self.control_limit } else { crate::MAX_PAYLOAD };
        if length > limit {
            return Err(FrameError::TooLong { length, limit });
        }
        let Some(payload) = rest.get(..length as usize) else { return Ok(None) };
        Ok(Some(Frame { stream: u32::from_le_bytes([s0, s1, s2, s3]), channel, payload }))
    }

    /// Discards a partial frame: the peer closed the connection and a new one begins.
    pub fn reset(&mut self) {
        self.buffer.clear();
        self.start = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_any_split_of_the_byte_stream() {
        let mut wire = Vec::new();
        encode(1, Channel::Stdout, b"hello", &mut wire);
        encode(7, Channel::Control, b"", &mut wire);
        for cut in 0..wire.len() {
            let mut decoder = Decoder::new(16);
            let mut seen = Vec::new();
            for part in [&wire[..cut], &wire[cut..]] {
                decoder.push(part);
                while let Some(frame) = decoder.next_frame().unwrap() {
                    seen.push((frame.stream, frame.channel, frame.payload.to_vec()));
                }
            }
            assert_eq!(
                seen,
                [(1, Channel::Stdout, b"hello".to_vec()), (7, Channel::Control, Vec::new())],
                "cut at {cut}"
            );
        }
    }

    #[test]
    fn c1_a_frame_of_four_gib_is_refused_from_its_header_alone() {
        let mut decoder = Decoder::new(16);
        decoder.push(&[0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(
            decoder.next_frame(),
            Err(FrameError::TooLong { length: u32::MAX, limit: crate::MAX_PAYLOAD })
        );
    }

    #[test]
    fn garbage_in_the_header_is_named() {
        let mut decoder = Decoder::new(16);
        decoder.push(&[0, 0, 0, 0, 1, 0, 0, 0, 9, 0, 0, 0]);
        assert_eq!(decoder.next_frame(), Err(FrameError::UnknownChannel(9)));
        decoder.reset();
        decoder.push(&[0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 1, 0]);
        assert_eq!(decoder.next_frame(), Err(FrameError::Reserved));
    }

    #[test]
    fn a_whole_frame_or_an_error_can_be_told_from_a_part() {
        let mut wire = Vec::new();
        encode(1, Channel::Stdout, b"hello", &mut wire);
        for end in 0..wire.len() {
            let mut decoder = Decoder::new(16);
            decoder.push(&wire[..end]);
            assert!(!decoder.has_frame(), "{end}");
            decoder.push(&wire[end..]);
            assert!(decoder.has_frame(), "{end}");
            decoder.next_frame().unwrap().unwrap();
            assert!(!decoder.has_frame(), "{end}");
        }
        let mut decoder = Decoder::new(16);
        decoder.push(&[0, 0, 0, 0, 1, 0, 0, 0, 9, 0, 0, 0]);
        assert!(decoder.has_frame());
    }

    #[test]
    fn reset_forgets_half_a_frame() {
        let mut decoder = Decoder::new(16);
        decoder.push(&[5, 0, 0, 0, 1]);
        decoder.reset();
        let mut wire = Vec::new();
        encode(2, Channel::Stdin, b"x", &mut wire);
        decoder.push(&wire);
        assert_eq!(decoder.next_frame().unwrap().unwrap().payload, b"x");
    }
}
