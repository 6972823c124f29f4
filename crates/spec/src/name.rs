//! Names and ids of sandboxes, and suggestions for mistyped ones.

use std::io;

use rustix::rand::{GetRandomFlags, getrandom};
use thiserror::Error;

/// The characters of an id: no capitals, and none of 0, 1, 8 and 9, which resemble letters.
const ID_ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
/// The length of an id: 60 bits, so that even a million sandboxes do not collide by chance.
const ID_LENGTH: usize = 12;
const MAX_NAME: usize = 63;
/// The shortest prefix of an id that is accepted in its place.
pub const MIN_PREFIX: usize = 4;
/// The most candidates in a message.
const SHOWN: usize = 8;
/// The similarity from which a name is suggested (Jaro-Winkler; 1 is equal).
const ALIKE: f64 = 0.8;

/// A name is invalid, unknown or ambiguous.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum NameError {
    #[error(
        "{0:?} is not a name. A name begins with a letter or digit and has at most {MAX_NAME} letters, digits, '_', '.' or '-'"
    )]
    Form(String),
    /// There is no sandbox with this name.
    #[error("There is no sandbox `{wanted}`{hint}")]
    Unknown {
        /// The requested name, escaped for a terminal.
        wanted: String,
        /// A suggestion, or empty.
        hint: String,
    },
    /// Several ids have this prefix.
    #[error("`{wanted}` could be any of {}. Give more of the id", .candidates.join(", "))]
    Ambiguous {
        wanted: String,
        /// Ids with this prefix; the last item may state that there are more.
        candidates: Vec<String>,
    },
}

/// Checks that `name` is valid for a sandbox.
pub fn check(name: &str) -> Result<(), NameError> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
    let begins = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    if begins && name.len() <= MAX_NAME && name.bytes().all(fits) {
        Ok(())
    } else {
        Err(NameError::Form(shortened(name)))
    }
}

pub fn new_id() -> io::Result<String> {
    let mut random = [0; ID_LENGTH];
    let filled = getrandom(&mut random, GetRandomFlags::empty())?;
    if filled != ID_LENGTH {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
    }
    // 32 divides 256: every character is equally likely.
    Ok(random.iter().map(|byte| char::from(ID_ALPHABET[usize::from(byte % 32)])).collect())
}

/// Whether `text` is a valid id. Ids become folder names, so nothing else may pass.
pub fn is_id(text: &str) -> bool {
    text.len() == ID_LENGTH && is_id_text(text)
}

/// Whether `text` is a valid prefix of an id.
pub fn is_prefix(text: &str) -> bool {
    (MIN_PREFIX..=ID_LENGTH).contains(&text.len()) && is_id_text(text)
}

fn is_id_text(text: &str) -> bool {
    text.bytes().all(|byte| ID_ALPHABET.contains(&byte))
}

/// The error for an unknown name, given all existing ones.
pub fn unknown<'a>(wanted: &str, existing: impl IntoIterator<Item = &'a str>) -> NameError {
    let hint = nearest(wanted, existing).map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
    NameError::Unknown { wanted: shortened(wanted).escape_debug().to_string(), hint }
}

/// The error for an ambiguous prefix.
pub fn ambiguous(wanted: &str, mut candidates: Vec<String>) -> NameError {
    let more = candidates.len().saturating_sub(SHOWN);
    candidates.truncate(SHOWN);
    if more > 0 {
        candidates.push(format!("{more} more"));
    }
    NameError::Ambiguous { wanted: wanted.to_owned(), candidates }
}

/// The candidate that is most similar to `wanted`, if any is similar enough.
pub fn nearest<'a>(wanted: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let plain = |text: &str| text.to_ascii_lowercase().replace('-', "_");
    // The cost of comparing is the product of the lengths, and no valid name is this long.
    let wanted = plain(wanted.get(..wanted.len().min(2 * MAX_NAME))?);
    candidates
        .into_iter()
        .map(|candidate| (strsim::jaro_winkler(&wanted, &plain(candidate)), candidate))
        .filter(|(likeness, _)| *likeness >= ALIKE)
        .max_by(|(one, _), (other, _)| one.total_cmp(other))
        .map(|(_, candidate)| candidate)
}

/// Cuts text for a message.
fn shortened(text: &str) -> String {
    match text.char_indices().nth(MAX_NAME + 1) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_have_a_form() {
        for name in ["a", "0", "web-1", "A.b_c", &"x".repeat(63)] {
            assert_eq!(check(name), Ok(()), "{name}");
        }
        for name in ["", "-a", ".", "..", ".a", "a/b", "a b", "a\n", "\u{e9}", "a\0", &"x".repeat(64)] {
            assert!(matches!(check(name), Err(NameError::Form(_))), "{name:?}");
        }
    }

    #[test]
    fn ids_differ_and_are_ids() {
        let ids: BTreeSet<_> = (0..1000).map(|_| new_id().unwrap()).collect();
        assert_eq!(ids.len(), 1000);
        assert!(ids.iter().all(|id| is_id(id) && is_prefix(&id[..4]) && check(id).is_ok()));
        for text in ["", "abc", "../../../etc", "abcdefghijk", "ABCDEFGHIJKL", "abcdefghijk0"] {
            assert!(!is_id(text), "{text}");
        }
        assert!(!is_prefix("abc"));
    }

    #[test]
    fn the_nearest_name_is_offered() {
        let existing = ["web", "database", "worker-1"];
        let message = |wanted| unknown(wanted, existing).to_string();
        assert_eq!(message("webb"), "There is no sandbox `webb`; did you mean `web`?");
        assert!(message("Databse").ends_with("did you mean `database`?"));
        assert!(message("worker_1").ends_with("did you mean `worker-1`?"));
        assert_eq!(message("zzz"), "There is no sandbox `zzz`");
    }

    #[test]
    fn hostile_names_are_harmless_in_messages() {
        let message = unknown("\u{1b}[2J", []).to_string();
        assert!(!message.contains('\u{1b}'), "{message}");
        assert!(unknown(&"\u{e9}".repeat(1_000_000), ["e"]).to_string().len() < 1000);
    }

    #[test]
    fn long_lists_of_candidates_are_cut() {
        let message = ambiguous("abcd", (0..20).map(|n| format!("abcd{n}")).collect()).to_string();
        assert!(message.contains("abcd7, 12 more"), "{message}");
    }
}
