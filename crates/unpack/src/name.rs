//! Paths of archive entries.

use crate::layer::Refusal;
use crate::limits::Limits;

/// The most characters of a name that a message shows.
const SHOWN: usize = 120;

/// A name as a message shows it: escaped and shortened.
pub(crate) fn printable(name: &[u8]) -> String {
    let head = name.get(..SHOWN * 4).unwrap_or(name);
    let escaped: String = String::from_utf8_lossy(head).escape_debug().collect();
    if escaped.chars().count() <= SHOWN && head.len() == name.len() {
        return escaped;
    }
    let mut short: String = escaped.chars().take(SHOWN).collect();
    short.push('…');
    short
}

/// The components of an archive's path, from the root on. A leading `/` and components that are `.` have no meaning;
/// `..` is refused wherever it is. The root itself has no components.
pub(crate) fn components<'a>(path: &'a [u8], limits: &Limits) -> Result<Vec<&'a [u8]>, Refusal> {
    if path.is_empty() {
        return Err(Refusal::EmptyName);
    }
    if path.len() > limits.path {
        return Err(Refusal::PathTooLong(limits.path));
    }
    let mut found = Vec::new();
    for component in path.split(|byte| *byte == b'/') {
        match component {
            b"" | b"." => continue,
            b".." => return Err(Refusal::ParentInName),
            _ if component.contains(&0) => return Err(Refusal::NulInName),
            _ if component.len() > limits.component => {
                return Err(Refusal::ComponentTooLong(limits.component));
            }
            _ => found.push(component),
        }
        if found.len() > limits.depth {
            return Err(Refusal::TooDeep(limits.depth));
        }
    }
    Ok(found)
}

/// Whether a name can be that of a file.
pub(crate) fn is_component(name: &[u8]) -> bool {
    !matches!(name, b"" | b"." | b"..")
        && name.len() <= 255
        && !name.iter().any(|byte| matches!(byte, 0 | b'/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_escaped_and_shortened() {
        assert_eq!(printable(b"etc/passwd"), "etc/passwd");
        assert_eq!(printable(b"a\x1b[31m\n\xff"), "a\\u{1b}[31m\\n\u{fffd}");
        assert_eq!(printable("a\u{202e}b".as_bytes()), "a\\u{202e}b");
        assert_eq!(printable(&[b'x'; 5000]).chars().count(), SHOWN + 1);
        assert_eq!(printable(&[b'x'; SHOWN]).chars().count(), SHOWN);
    }

    #[test]
    fn a_path_is_its_components() {
        let limits = Limits::default();
        let of = |path: &'static [u8]| components(path, &limits);
        assert_eq!(of(b"./a//b/./c/").unwrap(), [b"a", b"b", b"c"]);
        assert_eq!(of(b"/etc/passwd").unwrap(), [b"etc".as_slice(), b"passwd"]);
        assert!(of(b"./").unwrap().is_empty());
        assert!(of(b"/").unwrap().is_empty());
        assert!(matches!(of(b""), Err(Refusal::EmptyName)));
        for path in [b"..".as_slice(), b"../a", b"a/..", b"a/../b", b"/..", b"./.."] {
            assert!(matches!(components(path, &limits), Err(Refusal::ParentInName)), "{path:?}");
        }
        assert!(matches!(of(b"a\0b"), Err(Refusal::NulInName)));
    }

    #[test]
    fn a_path_has_limits() {
        let limits = Limits::default();
        let long = [b'a'; 256];
        assert!(components(&long[..255], &limits).is_ok());
        assert!(matches!(components(&long, &limits), Err(Refusal::ComponentTooLong(255))));
        assert!(components(&b"a/".repeat(256), &limits).is_ok());
        assert!(matches!(components(&b"a/".repeat(257), &limits), Err(Refusal::TooDeep(256))));
        assert!(components(&b"a//////////////////".repeat(215), &limits).is_ok());
        assert!(matches!(components(&[b'/'; 4097], &limits), Err(Refusal::PathTooLong(4096))));
    }
}
