//! Whether a stream that does not start like HTTP is another protocol, or HTTP as an easy-going server takes it.
//!
//! Another protocol may be allowed where a request is not. So what any server could take for a request must not pass for
//! another protocol: empty lines or spaces before it, small letters, other spaces, other line ends, no version.

/// How many bytes are looked at.
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

/// Whether `start` is meant as HTTP, as soon as that is clear.
pub(super) fn looks_like_http(start: &[u8]) -> Option<bool> {
    let within = start.get(..MAX_SNIFFED).unwrap_or(start);
    let text = within.trim_ascii_start();
    let is_space = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\r');
    // Behind the method some servers take any byte that is no control character.
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
    // Servers answer methods that they do not know, and go on with what comes behind.
    let has_target = matches!(rest.trim_ascii_start(), [b'/' | b'*', ..]);
    if is_method || has_version || has_target {
        return Some(true);
    }
    // Only the line counts, however much came with it: how a stream is cut is the client's choice.
    match end {
        Some(_) => Some(false),
        None => (within.len() == MAX_SNIFFED).then_some(true),
    }
}
