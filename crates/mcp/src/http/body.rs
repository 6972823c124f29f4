//! Reads the body of a request, and refuses one that would take much more memory as values than as text.

use std::pin::pin;

use http::StatusCode;
use http_body_util::BodyExt;
use hyper::body::{Body, Buf, Bytes};

use super::{MAX_BODY, MAX_VALUES};

/// Why a body is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    TooLarge,
    TooManyValues,
    /// It ended early.
    Broken,
}

impl Refusal {
    pub fn status(self) -> StatusCode {
        match self {
            Self::TooLarge | Self::TooManyValues => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Broken => StatusCode::BAD_REQUEST,
        }
    }

    pub fn text(self) -> &'static str {
        match self {
            Self::TooLarge => "The request is larger than 16 MiB.\n",
            Self::TooManyValues => "The request has more than 65,536 values.\n",
            Self::Broken => "The request ended early.\n",
        }
    }
}

/// Reads a whole body.
pub async fn read<B: Body>(body: B) -> Result<Bytes, Refusal> {
    let mut body = pin!(body);
    if body.size_hint().lower() > MAX_BODY as u64 {
        return Err(Refusal::TooLarge);
    }
    let mut content = Vec::new();
    let mut values = Values::default();
    while let Some(frame) = body.frame().await {
        let Ok(mut data) = frame.map_err(|_| Refusal::Broken)?.into_data() else { continue };
        while data.has_remaining() {
            let chunk = data.chunk();
            if chunk.len() > MAX_BODY - content.len() {
                return Err(Refusal::TooLarge);
            }
            values.count(chunk);
            if values.found > MAX_VALUES {
                return Err(Refusal::TooManyValues);
            }
            content.extend_from_slice(chunk);
            let count = chunk.len();
            data.advance(count);
        }
    }
    Ok(content.into())
}

/// Counts the values of a JSON text, and the names in its objects: each but the first follows a bracket, a comma or a colon
/// outside of strings.
#[derive(Debug, Default)]
struct Values {
    found: usize,
    in_string: bool,
    escaped: bool,
}

impl Values {
    fn count(&mut self, text: &[u8]) {
        for byte in text {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' if self.in_string => self.escaped = true,
                b'"' => self.in_string = !self.in_string,
                b'[' | b'{' | b',' | b':' if !self.in_string => self.found += 1,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::Full;

    use super::*;

    fn read_text(text: String) -> Result<Bytes, Refusal> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(read(Full::new(Bytes::from(text))))
    }

    #[test]
    fn c3_a_body_of_many_small_values_is_refused() {
        for value in ["0,", "[],", "{\"\":0},", "\"\\\"\","] {
            let text = format!("[{}0]", value.repeat(MAX_VALUES));
            assert_eq!(read_text(text), Err(Refusal::TooManyValues), "{value}");
        }
    }

    #[test]
    fn a_long_text_is_one_value() {
        let text = format!("{{\"content\": \"{}\"}}", "[{,:\\\"\\\\".repeat(MAX_VALUES));
        assert_eq!(read_text(text.clone()), Ok(text.into()));
        assert_eq!(read_text(" ".repeat(MAX_BODY + 1)), Err(Refusal::TooLarge));
    }
}
