//! Suggestions for mistyped words.

use std::fmt;

/// The closest candidate, if its edit distance is that of a typo.
pub(crate) fn closest(word: &str, candidates: &[&'static str]) -> Option<&'static str> {
    let lower = word.to_ascii_lowercase();
    candidates
        .iter()
        .map(|candidate| (strsim::damerau_levenshtein(&lower, &candidate.to_ascii_lowercase()), *candidate))
        .filter(|(distance, candidate)| *distance <= max_distance(candidate))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Short words have many neighbours with another meaning.
fn max_distance(candidate: &str) -> usize {
    if candidate.len() >= 6 { 2 } else { 1 }
}

/// The end of an error message: "Did you mean …?", or nothing without a suggestion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hint(pub(crate) Option<&'static str>);

impl Hint {
    pub(crate) fn of(word: &str, candidates: &[&'static str]) -> Self {
        Self(closest(word, candidates))
    }
}

impl fmt::Display for Hint {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |meant| write!(out, ". Did you mean {meant:?}?"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_words_may_have_two_mistakes_and_short_ones_a_single_one() {
        let table = [
            ("private", "private", true),
            ("PRIVATE", "private", true),
            ("prvte", "private", true),
            ("prve", "private", false),
            ("puxxic", "public", true),
            ("puxxxc", "public", false),
            ("trxce", "TRACE", true),
            ("trxxe", "TRACE", false),
        ];
        for (word, candidate, close) in table {
            assert_eq!(closest(word, &[candidate]), close.then_some(candidate), "{word}");
        }
        assert_eq!(closest("prvate", &["public", "private"]), Some("private"), "the closest one");
    }
}
