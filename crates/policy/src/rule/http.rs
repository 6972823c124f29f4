//! Requests by method and path.
//!
//! Servers disagree on what `/a/../b`, `//`, `%2e` or a backslash mean. Paths are compared in canonical spelling.
//! An ambiguous path is matched by no allow rule with a path, and by every deny rule with one.

use crate::policy::InspectedRequest;

/// The default port of `http://`.
pub(super) const PORT: u16 = 80;

/// Every method that a rule can name.
pub(super) const METHODS: [&str; 18] = [
    "GET",
    "HEAD",
    "POST",
    "PUT",
    "PATCH",
    "DELETE",
    "OPTIONS",
    TUNNEL,
    "TRACE",
    "QUERY",
    "PROPFIND",
    "PROPPATCH",
    "MKCOL",
    "COPY",
    "MOVE",
    "LOCK",
    "UNLOCK",
    "REPORT",
];

/// The method that asks a proxy for a tunnel. An allow rule has to name it.
const TUNNEL: &str = "CONNECT";

/// The requests that a rule matches.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HttpMatch {
    methods: Vec<&'static str>,
    path: Option<String>,
}

impl HttpMatch {
    /// No methods match all, no path matches all. A path that ends in a star is a prefix.
    pub(super) fn new(mut methods: Vec<&'static str>, path: Option<String>) -> Self {
        methods.sort_unstable();
        methods.dedup();
        Self { methods, path: path.filter(|path| path != "/*") }
    }

    pub(super) fn methods_text(&self) -> String {
        if self.methods.is_empty() { String::new() } else { format!("{} ", self.methods.join(",")) }
    }

    pub(super) fn path_text(&self) -> &str {
        self.path.as_deref().unwrap_or("")
    }

    /// Whether an allow rule matches the request, which is compared exactly.
    pub(super) fn allows(&self, request: &InspectedRequest<'_>) -> bool {
        let path_fits = |pattern: &String| {
            request.path.and_then(plain_path).is_some_and(|path| match pattern.strip_suffix('*') {
                Some(prefix) => path.starts_with(prefix),
                None => path == *pattern,
            })
        };
        let any_method = self.methods.is_empty() && request.method != TUNNEL;
        let total = self.methods.is_empty() && self.path.is_none();
        (any_method || self.methods.contains(&request.method))
            && self.path.as_ref().is_none_or(path_fits)
            && (total || !request.rewrites)
    }

    /// Whether a deny rule matches the request. A server that is lenient about case or spelling must not be a
    /// bypass.
    pub(super) fn denies(&self, request: &InspectedRequest<'_>) -> bool {
        let path_fits = |pattern: &String| {
            request.path.and_then(plain_path).is_none_or(|path| {
                let (path, pattern) = (path.to_ascii_lowercase(), pattern.to_ascii_lowercase());
                match pattern.strip_suffix('*') {
                    Some(prefix) => path.starts_with(prefix) || format!("{path}/") == prefix,
                    None => path.trim_end_matches('/') == pattern.trim_end_matches('/'),
                }
            })
        };
        let method_fits = self.methods.iter().any(|known| known.eq_ignore_ascii_case(request.method));
        let fits = (self.methods.is_empty() || method_fits) && self.path.as_ref().is_none_or(path_fits);
        fits || request.rewrites
    }
}

/// The canonical spelling of a path: what need not be percent-encoded is not, the rest is in capital letters. None
/// if servers could interpret it as another path. Idempotent.
pub fn plain_path(path: &str) -> Option<String> {
    let mut plain = String::with_capacity(path.len());
    let mut bytes = path.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            let doubtful = !byte.is_ascii_graphic() || matches!(byte, b'\\' | b';' | b'?' | b'#');
            plain.push(Some(char::from(byte)).filter(|_| !doubtful)?);
            continue;
        }
        let decoded = hex(bytes.next()?)? * 16 + hex(bytes.next()?)?;
        match decoded {
            b'/' | b'\\' | b'%' | b';' => return None,
            // Never in UTF-8, but careless decoders turn these into a slash or a dot.
            0xc0 | 0xc1 | 0xf5.. => return None,
            byte if byte.is_ascii_control() => return None,
            byte if byte.is_ascii_graphic() && !matches!(byte, b'?' | b'#') => plain.push(char::from(byte)),
            byte => plain.push_str(&format!("%{byte:02X}")),
        }
    }
    let mut segments = plain.strip_prefix('/')?.split('/').rev();
    // The last segment is empty if the path ends in a slash.
    let last_is_clear = segments.next().is_some_and(|last| !matches!(last, "." | ".."));
    let clear = last_is_clear && segments.all(|segment| !matches!(segment, "" | "." | ".."));
    clear.then_some(plain)
}

fn hex(digit: u8) -> Option<u8> {
    let value = char::from(digit).to_digit(16)?;
    u8::try_from(value).ok()
}
