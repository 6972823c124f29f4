//! What somebody probably meant.

use std::fmt;

/// The candidate that is closest to a word, if it is close enough to be the same word mistyped.
pub(crate) fn closest(word: &str, candidates: &[&'static str]) -> Option<&'static str> {
    let lower = word.to_ascii_lowercase();
    candidates
        .iter()
        .map(|candidate| (strsim::damerau_levenshtein(&lower, &candidate.to_ascii_lowercase()), *candidate))
        .filter(|(distance, candidate)| *distance <= allowance(candidate))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Short words have many neighbours that mean something else.
fn allowance(candidate: &str) -> usize {
    if candidate.len() >= 6 { 2 } else { 1 }
}

/// The end of an error message: a question if there is a suggestion, nothing otherwise.
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
