//! Protocol sniffing: whether a stream that is not well-formed HTTP is another protocol, or HTTP as a lenient
//! server accepts it.
//!
//! A policy may allow other protocols where it denies a request. So what any server could accept as a request must
//! not pass for another protocol: leading empty lines or spaces, lower case, other whitespace, other line ends, no
//! version.

const MAX_SNIFFED: usize = 1024;

/// The methods that some server acts on.
const METHODS: [&str; 18] = [
    "CONNECT",
    "COPY",
    "DELETE",
    "GET",
    "HEAD",
    "LOCK",
    "MKCOL",
    "MOVE",
    "OPTIONS",
    "PATCH",
    "POST",
    "PROPFIND",
    "PROPPATCH",
    "PUT",
    "QUERY",
    "REPORT",
    "TRACE",
    "UNLOCK",
];

/// Whether `start` may be an HTTP request, or `None` while more bytes are needed.
pub(super) fn looks_like_http(start: &[u8]) -> Option<bool> {
    let within = start.get(..MAX_SNIFFED).unwrap_or(start);
    let text = within.trim_ascii_start();
    let is_space = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\r');
    // After the method, some servers accept any byte that is not a control character.
    let mut in_word = true;
    let end = text.iter().position(|byte| {
        in_word &= !is_space(byte);
        let goes_on = byte.is_ascii_graphic() || is_space(byte) || (!in_word && !byte.is_ascii());
        !goes_on
    });
    let line = end.and_then(|end| text.get(..end)).unwrap_or(text);
    let word_end = line.iter().position(u8::is_ascii_whitespace).or(end);
    let (word, rest) = word_end.and_then(|end| line.split_at_checked(end)).unwrap_or_default();
    let is_method = METHODS.iter().any(|method| word.eq_ignore_ascii_case(method.as_bytes()));
    let has_version = line.windows(5).any(|part| part.eq_ignore_ascii_case(b"HTTP/"));
    // Servers answer unknown methods, and parse what follows as the next request.
    let has_target = matches!(rest.trim_ascii_start(), [b'/' | b'*', ..]);
    if is_method || has_version || has_target {
        return Some(true);
    }
    // Only the line counts, not what arrived with it: the client chooses the segmentation.
    match end {
        Some(_) => Some(false),
        None => (within.len() == MAX_SNIFFED).then_some(true),
    }
}
