//! Pseudorandom numbers from a seed.

use std::time::SystemTime;

/// A generator of 64-bit numbers (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator with this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.number() % end
    }

    /// True in `share` of `all` cases.
    pub fn chance(&mut self, share: u64, all: u64) -> bool {
        self.below(all) < share
    }

    /// An index of something that has `length` parts.
    pub fn index(&mut self, length: usize) -> usize {
        let end = u64::try_from(length).expect("it fits into memory");
        usize::try_from(self.below(end)).expect("it is less than a length")
    }

    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.index(choices.len())]
    }
}

/// The seed in this environment variable, or one from the clock.
pub fn seed_of(variable: &str) -> u64 {
    if let Ok(text) = std::env::var(variable) {
        return text.parse().expect("a seed is a number");
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("it is after 1970");
    u64::from(now.subsec_nanos()) ^ now.as_secs()
}
