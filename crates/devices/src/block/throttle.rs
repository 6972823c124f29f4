//! How fast a disk may be used: token buckets for what is written, read and flushed.

use std::fmt;
use std::time::Duration;

use super::{BURST_SECONDS, BlockLimits, MAX_REQUEST_BYTES, ThrottleState};
use crate::bucket::{Bucket, Clock, monotonic};

/// A queue that has to wait does so for at least this long: many small requests are then done together, and not one by one
/// with a wake-up each.
const SHORTEST_WAIT: Duration = Duration::from_millis(5);

/// What a request takes of the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Charge {
    Nothing,
    Read(u64),
    /// So many bytes, or work that counts as much.
    Write(u64),
    Flush,
}

/// The buckets of one disk; without one there is no limit.
pub(super) struct Throttle {
    limits: BlockLimits,
    write: Option<Bucket>,
    read: Option<Bucket>,
    flush: Option<Bucket>,
    clock: Clock,
}

impl fmt::Debug for Throttle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Throttle").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl Throttle {
    pub(super) fn new(limits: BlockLimits) -> Self {
        Self::with_clock(limits, Box::new(monotonic))
    }

    /// Full buckets, which are refilled by `clock`.
    pub(super) fn with_clock(limits: BlockLimits, clock: Clock) -> Self {
        let now = clock();
        let bucket = |rate: Option<u64>, least| {
            let bucket = |rate: u64| Bucket::new(rate.saturating_mul(BURST_SECONDS).max(least), rate, now);
            rate.map(bucket)
        };
        // The largest request has to fit, or it would be charged for less than it is.
        let request = u64::from(MAX_REQUEST_BYTES);
        Self {
            limits,
            write: bucket(limits.write_bandwidth, request),
            read: bucket(limits.read_bandwidth, request),
            flush: bucket(limits.flushes, 1),
            clock,
        }
    }

    /// As it was saved: what was used up then is not there now.
    pub(super) fn restore(state: ThrottleState) -> Self {
        let ThrottleState { limits, write_tokens, read_tokens, flush_tokens } = state;
        let mut throttle = Self::new(limits);
        let buckets = [&mut throttle.write, &mut throttle.read, &mut throttle.flush];
        for (bucket, tokens) in buckets.into_iter().zip([write_tokens, read_tokens, flush_tokens]) {
            bucket.iter_mut().for_each(|bucket| bucket.set_tokens(tokens));
        }
        throttle
    }

    pub(super) fn save(&self) -> ThrottleState {
        let tokens = |bucket: &Option<Bucket>| bucket.as_ref().map_or(0, Bucket::tokens);
        ThrottleState {
            limits: self.limits,
            write_tokens: tokens(&self.write),
            read_tokens: tokens(&self.read),
            flush_tokens: tokens(&self.flush),
        }
    }

    /// Adds what time has brought; once for each round of work is enough.
    pub(super) fn refill(&mut self) {
        let mut buckets = [&mut self.write, &mut self.read, &mut self.flush];
        if buckets.iter().any(|bucket| bucket.is_some()) {
            let now = (self.clock)();
            buckets.iter_mut().filter_map(|bucket| bucket.as_mut()).for_each(|bucket| bucket.refill(now));
        }
    }

    /// Takes a request's tokens, or returns how long to wait for them.
    pub(super) fn admit(&mut self, charge: Charge) -> Result<(), Duration> {
        let (bucket, count) = match charge {
            Charge::Nothing => return Ok(()),
            Charge::Read(bytes) => (&mut self.read, bytes),
            Charge::Write(bytes) => (&mut self.write, bytes),
            Charge::Flush => (&mut self.flush, 1),
        };
        let Some(bucket) = bucket else { return Ok(()) };
        match bucket.time_until(count) {
            Duration::ZERO => {
                bucket.take(count);
                Ok(())
            }
            wait => Err(wait.max(SHORTEST_WAIT)),
        }
    }
}
