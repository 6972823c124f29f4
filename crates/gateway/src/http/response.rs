//! Responses: whether the server switches protocols, and the gateway's own 403.

/// How many bytes of informational responses may precede the final one.
const MAX_INFORMATIONAL: usize = 64 * 1024;
/// The longest text in a 403.
const MAX_TEXT: usize = 512;

/// The first final response of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FirstStatus {
    More,
    /// The status code: a final one, or 101.
    Status(u16),
    /// Not an HTTP/1 response.
    Invalid,
}

/// Parses the status of a server's first final response, to learn whether an Upgrade took effect. It skips
/// informational responses (100, 102, 103), and starts at the server's first byte.
#[derive(Debug, Default)]
pub(super) struct StatusReader {
    line: Vec<u8>,
    /// Whether the fields of an informational response are being skipped.
    skipping: bool,
    read: usize,
    result: Option<FirstStatus>,
}

impl StatusReader {
    /// Parses the next bytes of the server.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        for byte in bytes {
            if self.result.is_some() {
                break;
            }
            self.line.push(*byte);
            self.read += 1;
            if *byte == b'\n' {
                self.end_line();
            } else if self.read >= MAX_INFORMATIONAL {
                self.result = Some(FirstStatus::Invalid);
            }
        }
    }

    pub(super) fn so_far(&self) -> FirstStatus {
        self.result.unwrap_or(FirstStatus::More)
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        let text = line.trim_ascii_end();
        if self.skipping {
            self.skipping = !text.is_empty();
            return;
        }
        match status(text) {
            Some(101) => self.result = Some(FirstStatus::Status(101)),
            Some(100..=199) => self.skipping = true,
            Some(status) => self.result = Some(FirstStatus::Status(status)),
            None => self.result = Some(FirstStatus::Invalid),
        }
    }
}

fn status(line: &[u8]) -> Option<u16> {
    let rest = line.strip_prefix(b"HTTP/1.1 ").or_else(|| line.strip_prefix(b"HTTP/1.0 "))?;
    let (digits, rest) = rest.split_at_checked(3)?;
    let plain = digits.iter().all(u8::is_ascii_digit) && (rest.is_empty() || rest.starts_with(b" "));
    let status = plain.then(|| str::from_utf8(digits).ok()).flatten()?.parse().ok()?;
    (100..=599).contains(&status).then_some(status)
}

/// The content of a 403.
#[derive(Clone, Copy, Debug)]
pub struct Denial<'a> {
    /// The destination that was denied.
    pub destination: &'a str,
    pub rule: &'a str,
    /// The command that would allow it.
    pub command: &'a str,
    /// Whether the request was a HEAD, whose response has no body.
    pub without_body: bool,
}

/// The response to a request that the policy denies: a 403 that explains it. The connection is closed after it.
#[must_use]
pub fn denial(denial: &Denial<'_>) -> Vec<u8> {
    let body = format!(
        "The network policy of this sandbox denies {}.\nRule: {}\nTo allow it, run on the host: {}\n",
        one_line(denial.destination),
        one_line(denial.rule),
        one_line(denial.command)
    );
    let mut answer = format!(
        "HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain; charset=utf-8\r\nX-Content-Type-Options: nosniff\r\n\
         Cache-Control: no-store\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    if !denial.without_body {
        answer.push_str(&body);
    }
    answer.into_bytes()
}

/// The texts are in the body only, so they cannot inject a header field; each on one line, they cannot imitate each
/// other.
fn one_line(text: &str) -> String {
    text.chars().take(MAX_TEXT).map(|letter| if letter.is_control() { '\u{fffd}' } else { letter }).collect()
}
