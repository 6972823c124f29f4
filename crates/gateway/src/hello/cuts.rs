//! The same bytes in different segmentations.

/// A deterministic pseudo-random generator.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(2) + 1)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap() % end
    }
}

/// The bytes in one piece, byte by byte, and in pieces of random lengths.
pub(crate) fn cuts(bytes: &[u8]) -> Vec<Vec<&[u8]>> {
    let mut all = vec![vec![bytes], bytes.chunks(1).collect()];
    for seed in 0..24 {
        let mut numbers = Numbers::new(seed);
        let longest = [2, 5, 40, 700][numbers.below(4)];
        let mut rest = bytes;
        let mut pieces = Vec::new();
        while !rest.is_empty() {
            let (piece, after) = rest.split_at((1 + numbers.below(longest)).min(rest.len()));
            pieces.push(piece);
            rest = after;
        }
        all.push(pieces);
    }
    all
}
