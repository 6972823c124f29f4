//! A token bucket: what is not taken is saved up to a limit, what is taken too fast has to wait.

use std::time::Duration;

const NANOSECONDS: u128 = 1_000_000_000;

#[derive(Debug)]
pub(super) struct Bucket {
    capacity: u64,
    per_second: u64,
    tokens: u64,
    filled_at: Duration,
}

impl Bucket {
    pub(super) fn new(capacity: u64, per_second: u64, now: Duration) -> Self {
        Self { capacity, per_second, tokens: capacity, filled_at: now }
    }

    pub(super) fn tokens(&self) -> u64 {
        self.tokens
    }

    pub(super) fn set_tokens(&mut self, tokens: u64) {
        self.tokens = tokens.min(self.capacity);
    }

    /// Adds what time has brought since the last call.
    pub(super) fn refill(&mut self, now: Duration) {
        let nanoseconds = now.saturating_sub(self.filled_at).as_nanos();
        let earned = nanoseconds.saturating_mul(u128::from(self.per_second)) / NANOSECONDS;
        let earned = u64::try_from(earned).unwrap_or(u64::MAX);
        self.tokens = self.tokens.saturating_add(earned);
        if self.tokens >= self.capacity {
            self.tokens = self.capacity;
            self.filled_at = now.max(self.filled_at);
        } else {
            // Only the time that the tokens took is used up, so that asking often loses no fraction of one.
            self.filled_at = self.filled_at.saturating_add(self.time_for(earned));
        }
    }

    pub(super) fn take(&mut self, count: u64) {
        self.tokens = self.tokens.saturating_sub(count);
    }

    /// How long it takes until there are `count` tokens.
    pub(super) fn time_until(&self, count: u64) -> Duration {
        let missing = count.min(self.capacity).saturating_sub(self.tokens);
        self.time_for(missing)
    }

    fn time_for(&self, count: u64) -> Duration {
        let nanoseconds =
            u128::from(count).saturating_mul(NANOSECONDS).div_ceil(u128::from(self.per_second.max(1)));
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }
}
