//! Errors and times in the form that messages use.

use std::error::Error;
use std::time::{SystemTime, UNIX_EPOCH};

/// An error with its sources, on one line.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// The present wall-clock time in nanoseconds since 1970.
pub fn unix_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::io;

    use thiserror::Error;

    use super::*;

    #[derive(Debug, Error)]
    #[error("cannot start")]
    struct Outer(#[source] Inner);

    #[derive(Debug, Error)]
    #[error("no descriptors")]
    struct Inner(#[source] io::Error);

    #[test]
    fn a_failure_is_told_with_all_its_causes() {
        let error = Outer(Inner(io::Error::other("too many")));
        assert_eq!(chain(&error), "cannot start: no descriptors: too many");
    }
}
