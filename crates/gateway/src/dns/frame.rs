//! DNS over TCP: each message is preceded by a two-byte length.

use thiserror::Error;

use super::MAX_MESSAGE;

const LENGTH: usize = 2;

/// A message that is too long. The stream has to be closed.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("A DNS message of {length} bytes was announced; at most {limit} are accepted")]
pub struct FrameTooLong {
    pub length: usize,
    pub limit: usize,
}

/// Splits a stream into messages. It buffers one message at most, and what the caller pushed behind it.
#[derive(Debug)]
pub struct FrameReader {
    limit: usize,
    buffered: Vec<u8>,
    /// Where the next message begins in the buffer. The buffer is compacted once per push, not once per message: a
    /// stream of empty messages would else cost quadratic time.
    start: usize,
}

impl FrameReader {
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { limit, buffered: Vec::new(), start: 0 }
    }

    /// Buffers the next bytes of the stream. Call [`FrameReader::next`] until it has no more before the next push.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffered.drain(..self.start);
        self.start = 0;
        self.buffered.extend_from_slice(bytes);
    }

    /// The next complete message.
    ///
    /// # Errors
    /// If a message is announced that is longer than the limit.
    #[expect(clippy::should_implement_trait, reason = "an iterator would have no place for the error")]
    pub fn next(&mut self) -> Result<Option<Vec<u8>>, FrameTooLong> {
        let rest = self.buffered.get(self.start..).unwrap_or_default();
        let Some(announced) = rest.first_chunk::<LENGTH>() else { return Ok(None) };
        let length = usize::from(u16::from_be_bytes(*announced));
        if length > self.limit {
            return Err(FrameTooLong { length, limit: self.limit });
        }
        let Some(message) = rest.get(LENGTH..LENGTH + length).map(<[u8]>::to_vec) else { return Ok(None) };
        self.start += LENGTH + length;
        Ok(Some(message))
    }
}

/// The message with its length in front.
///
/// # Errors
/// If it is longer than a message can be.
pub fn frame(message: &[u8]) -> Result<Vec<u8>, FrameTooLong> {
    let length = u16::try_from(message.len())
        .map_err(|_| FrameTooLong { length: message.len(), limit: MAX_MESSAGE })?;
    Ok([&length.to_be_bytes(), message].concat())
}
