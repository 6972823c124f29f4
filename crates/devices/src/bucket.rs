//! A token bucket: what is not taken is saved up to a limit, what is taken too fast has to wait. Time is passed in, so that
//! tests need not sleep.

use std::time::Duration;

/// A clock: the time since some fixed moment. Tests use their own.
pub type Clock = Box<dyn Fn() -> Duration + Send>;

const NANOSECONDS: u128 = 1_000_000_000;

#[derive(Debug)]
pub(crate) struct Bucket {
    capacity: u64,
    per_second: u64,
    tokens: u64,
    filled_at: Duration,
}

impl Bucket {
    pub(crate) fn new(capacity: u64, per_second: u64, now: Duration) -> Self {
        Self { capacity, per_second, tokens: capacity, filled_at: now }
    }

    pub(crate) fn tokens(&self) -> u64 {
        self.tokens
    }

    pub(crate) fn set_tokens(&mut self, tokens: u64) {
        self.tokens = tokens.min(self.capacity);
    }

    /// Adds what time has brought since the last call.
    pub(crate) fn refill(&mut self, now: Duration) {
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

    pub(crate) fn take(&mut self, count: u64) {
        self.tokens = self.tokens.saturating_sub(count);
    }

    /// How long it takes until there are `count` tokens.
    pub(crate) fn time_until(&self, count: u64) -> Duration {
        let missing = count.min(self.capacity).saturating_sub(self.tokens);
        self.time_for(missing)
    }

    fn time_for(&self, count: u64) -> Duration {
        let nanoseconds =
            u128::from(count).saturating_mul(NANOSECONDS).div_ceil(u128::from(self.per_second.max(1)));
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }
}

/// The host's monotonic clock.
pub(crate) fn monotonic() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    let nanoseconds = u32::try_from(now.tv_nsec).unwrap_or(0);
    Duration::new(seconds, nanoseconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Duration = Duration::from_secs(1000);

    fn at(milliseconds: u64) -> Duration {
        START + Duration::from_millis(milliseconds)
    }

    /// Holds 100, gets 50 per second, and is empty.
    fn empty() -> Bucket {
        let mut bucket = Bucket::new(100, 50, START);
        bucket.take(100);
        bucket
    }

    #[test]
    fn new_bucket_is_full_and_holds_no_more_than_its_capacity() {
        let mut bucket = Bucket::new(100, 50, START);
        assert_eq!(bucket.tokens(), 100);
        bucket.refill(at(60_000));
        assert_eq!(bucket.tokens(), 100);
        bucket.take(30);
        bucket.refill(at(60_000));
        assert_eq!(bucket.tokens(), 70, "time that passed while it was full counts for nothing");
        bucket.set_tokens(u64::MAX);
        assert_eq!(bucket.tokens(), 100);
    }

    #[test]
    fn refill_is_what_the_time_brings_however_often_it_is_asked() {
        let mut seldom = empty();
        seldom.refill(at(999));
        assert_eq!(seldom.tokens(), 49);
        let mut often = empty();
        (1..=999).for_each(|millisecond| often.refill(at(millisecond)));
        assert_eq!(often.tokens(), 49);
        often.refill(at(1000));
        assert_eq!(often.tokens(), 50, "no fraction is lost");
    }

    #[test]
    fn time_until_is_when_the_tokens_are_there_and_not_before() {
        let mut bucket = empty();
        let wait = bucket.time_until(7);
        assert_eq!(wait, Duration::from_millis(140));
        bucket.refill(START + wait - Duration::from_nanos(1));
        assert_eq!(bucket.tokens(), 6);
        bucket.refill(START + wait);
        assert_eq!((bucket.tokens(), bucket.time_until(7)), (7, Duration::ZERO));
    }

    #[test]
    fn more_than_fits_is_there_when_the_bucket_is_full() {
        let mut bucket = empty();
        assert_eq!(bucket.time_until(u64::MAX), Duration::from_secs(2));
        bucket.take(u64::MAX);
        assert_eq!(bucket.tokens(), 0);
    }

    #[test]
    fn time_that_goes_backwards_brings_nothing_and_costs_nothing() {
        let mut bucket = empty();
        bucket.refill(at(1000));
        bucket.refill(at(0));
        bucket.refill(Duration::ZERO);
        assert_eq!(bucket.tokens(), 50);
        bucket.refill(at(1000));
        assert_eq!(bucket.tokens(), 50, "the same second is not paid twice");
        bucket.refill(at(1020));
        assert_eq!(bucket.tokens(), 51);
    }

    #[test]
    fn largest_numbers_overflow_nowhere() {
        let mut bucket = Bucket::new(u64::MAX, u64::MAX, Duration::ZERO);
        bucket.take(u64::MAX);
        assert_eq!(bucket.time_until(u64::MAX), Duration::from_secs(1));
        bucket.refill(Duration::MAX);
        assert_eq!(bucket.tokens(), u64::MAX);
        bucket.take(1);
        bucket.refill(Duration::MAX);
        assert_eq!(bucket.tokens(), u64::MAX - 1);
    }

    #[test]
    fn rate_of_zero_refills_nothing_and_waits_without_dividing_by_it() {
        let mut bucket = Bucket::new(10, 0, START);
        bucket.take(10);
        bucket.refill(START + Duration::from_secs(3600));
        assert_eq!((bucket.tokens(), bucket.time_until(1)), (0, Duration::from_secs(1)));
        let mut nothing = Bucket::new(0, 0, START);
        nothing.refill(at(1));
        assert_eq!((nothing.tokens(), nothing.time_until(u64::MAX)), (0, Duration::ZERO));
    }

    #[test]
    fn time_is_that_of_the_monotonic_clock() {
        let clock = || {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
            Duration::new(now.tv_sec.try_into().unwrap(), now.tv_nsec.try_into().unwrap())
        };
        let (before, now, after) = (clock(), monotonic(), clock());
        assert!(before <= now && now <= after, "{before:?} {now:?} {after:?}");
    }
}
