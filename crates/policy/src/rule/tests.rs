mod bad_input;
mod paths;
mod text;

use super::Rule;

fn rule(text: &str) -> Rule {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}
