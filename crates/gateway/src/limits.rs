//! Rate limits and the connection quota of a sandbox.

use std::time::{Duration, Instant};

use bathy_protocol::network::NetworkLimits;

/// A token bucket: refilled at a constant rate, with a burst of one second. It can be overdrawn, and repays the
/// debt first.
#[derive(Debug)]
pub struct TokenBucket {
    per_second: i64,
    left: i64,
    /// Billionths of a token.
    fraction: u64,
    last: Instant,
}

impl TokenBucket {
    pub fn new(per_second: u64, now: Instant) -> Self {
        let per_second = i64::try_from(per_second).unwrap_or(i64::MAX);
        Self { per_second, left: per_second, fraction: 0, last: now }
    }

    fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.last);
        self.last = now;
        let each = u128::try_from(self.per_second).unwrap_or(0);
        let parts = passed.as_nanos().saturating_mul(each) + u128::from(self.fraction);
        let whole = i64::try_from(parts / 1_000_000_000).unwrap_or(i64::MAX);
        self.fraction = u64::try_from(parts % 1_000_000_000).unwrap_or(0);
        self.left = self.left.saturating_add(whole).min(self.per_second);
    }

    pub fn has_tokens(&mut self, now: Instant) -> bool {
        self.refill(now);
        self.left > 0
    }

    pub fn take_one(&mut self, now: Instant) -> bool {
        let has_tokens = self.has_tokens(now);
        self.left = self.left.saturating_sub(i64::from(has_tokens));
        has_tokens
    }

    /// Takes tokens even if that overdraws the bucket.
    pub fn take(&mut self, amount: u64) {
        self.left = self.left.saturating_sub(i64::try_from(amount).unwrap_or(i64::MAX));
    }

    pub fn left(&self) -> u64 {
        u64::try_from(self.left).unwrap_or(0)
    }

    /// When an empty bucket will have tokens again, between [`SHORTEST_WAIT`] and [`LONGEST_WAIT`] from now.
    pub fn ready_at(&self) -> Instant {
        if self.left > 0 {
            return self.last;
        }
        let owed = u128::from(self.left.unsigned_abs()) + 1;
        let each = u128::try_from(self.per_second.max(1)).unwrap_or(1);
        let wait = u64::try_from(owed.saturating_mul(1_000_000_000) / each).unwrap_or(u64::MAX);
        self.last + Duration::from_nanos(wait).clamp(SHORTEST_WAIT, LONGEST_WAIT)
    }
}

/// Bounds of the time until an empty bucket is checked again.
const SHORTEST_WAIT: Duration = Duration::from_millis(10);
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// What a sandbox may still use.
#[derive(Debug)]
pub struct Quota {
    /// Connections and flows that may be open at the same time.
    pub connections: usize,
    /// New connections and flows from the guest.
    pub outbound: TokenBucket,
    /// New connections and flows from inbound peers at published ports.
    pub inbound: TokenBucket,
    /// Bytes and packets from the guest.
    pub up: (TokenBucket, TokenBucket),
    /// Bytes and packets to the guest.
    pub down: (TokenBucket, TokenBucket),
}

impl Quota {
    pub fn new(limits: &NetworkLimits, now: Instant) -> Self {
        let traffic = || (TokenBucket::new(limits.bytes, now), TokenBucket::new(limits.packets.into(), now));
        Self {
            connections: usize::try_from(limits.connections).unwrap_or(usize::MAX),
            outbound: TokenBucket::new(limits.new_connections.into(), now),
            inbound: TokenBucket::new(limits.new_connections.into(), now),
            up: traffic(),
            down: traffic(),
        }
    }

    /// Empties every bucket: what an earlier gateway of this sandbox has used is not known.
    pub fn use_up(&mut self) {
        let Self { connections: _, outbound, inbound, up, down } = self;
        for bucket in [outbound, inbound, &mut up.0, &mut up.1, &mut down.0, &mut down.1] {
            bucket.take(bucket.left());
        }
    }

    /// Whether the rate limit allows frames from the guest.
    ///
    /// # Errors
    /// When it will again.
    pub fn may_send(&mut self, now: Instant) -> Result<(), Instant> {
        may(&mut self.up, now)
    }

    /// Whether the rate limit allows frames to the guest.
    ///
    /// # Errors
    /// When it will again.
    pub fn may_receive(&mut self, now: Instant) -> Result<(), Instant> {
        may(&mut self.down, now)
    }
}

fn may((bytes, packets): &mut (TokenBucket, TokenBucket), now: Instant) -> Result<(), Instant> {
    let (has_bytes, has_packets) = (bytes.has_tokens(now), packets.has_tokens(now));
    if has_bytes && has_packets { Ok(()) } else { Err(bytes.ready_at().max(packets.ready_at())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_holds_one_second_and_fills_steadily() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(100, start);
        assert_eq!((0..200).filter(|_| bucket.take_one(start)).count(), 100);
        let mut taken = 0;
        for step in 1..=1000 {
            taken += u32::from(bucket.take_one(start + Duration::from_millis(step)));
        }
        assert!((99..=100).contains(&taken), "{taken}");
        assert_eq!((0..500).filter(|_| bucket.take_one(start + Duration::from_secs(100))).count(), 100);
    }

    #[test]
    fn an_empty_bucket_tells_when_it_has_tokens_again() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(1000, start);
        bucket.take(5000);
        assert!(!bucket.has_tokens(start));
        assert!(bucket.ready_at() > start);
        let later = bucket.ready_at();
        assert!(!bucket.has_tokens(start + Duration::from_millis(3900)), "four thousand are owed");
        assert!(
            later <= start + Duration::from_secs(4) && bucket.has_tokens(start + Duration::from_millis(4002))
        );
    }

    #[test]
    fn frames_that_are_longer_than_what_is_left_do_not_raise_the_rate() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(100_000, start);
        let mut meter = 0;
        for step in 0..10_000 {
            if bucket.has_tokens(start + Duration::from_millis(step)) {
                bucket.take(65_000);
                meter += 65_000;
            }
        }
        // A burst of one second, ten seconds at the rate, and one frame.
        assert!((1_000_000..=1_165_000).contains(&meter), "{meter}");
    }

    #[test]
    fn a_debt_is_waited_for_within_bounds() {
        let start = Instant::now();
        for (taken, left, milliseconds) in
            [(0, 1000, 0), (999, 1, 0), (1000, 0, 10), (1009, 0, 10), (1499, 0, 500), (9000, 0, 1000)]
        {
            let mut bucket = TokenBucket::new(1000, start);
            bucket.take(taken);
            assert_eq!(bucket.left(), left, "{taken}");
            assert_eq!(bucket.ready_at(), start + Duration::from_millis(milliseconds), "{taken}");
            assert_eq!(bucket.has_tokens(start), left > 0, "{taken}");
        }
    }

    #[test]
    fn n9_what_was_used_up_comes_back_at_the_rate_and_not_at_once() {
        let start = Instant::now();
        let limits = NetworkLimits { new_connections: 100, ..NetworkLimits::default() };
        let mut quota = Quota::new(&limits, start);
        quota.use_up();
        assert!(!quota.outbound.take_one(start) && !quota.inbound.take_one(start));
        assert!(quota.may_send(start).is_err() && quota.may_receive(start).is_err());
        let later = start + Duration::from_millis(500);
        assert_eq!((0..200).filter(|_| quota.outbound.take_one(later)).count(), 50);
        assert!(quota.may_send(later).is_ok() && quota.may_receive(later).is_ok());
    }

    #[test]
    fn each_way_needs_bytes_and_packets_and_waits_for_the_later_of_both() {
        let now = Instant::now();
        let limits = NetworkLimits { bytes: 1000, packets: 100, connections: 7, ..NetworkLimits::default() };
        let later = |milliseconds| Err(now + Duration::from_millis(milliseconds));
        for (bytes, packets, expected) in
            [(999, 99, Ok(())), (1499, 0, later(500)), (0, 149, later(500)), (1499, 119, later(500))]
        {
            let mut quota = Quota::new(&limits, now);
            quota.up.0.take(bytes);
            quota.up.1.take(packets);
            assert_eq!(quota.may_send(now), expected, "{bytes} {packets}");
            assert_eq!(quota.may_receive(now), Ok(()), "the other way is free");
            let mut quota = Quota::new(&limits, now);
            quota.down.0.take(bytes);
            quota.down.1.take(packets);
            assert_eq!(quota.may_receive(now), expected, "{bytes} {packets}");
            assert_eq!(quota.may_send(now), Ok(()), "the other way is free");
            assert_eq!(quota.connections, 7);
        }
    }
}
