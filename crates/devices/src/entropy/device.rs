//! Filling the guest's buffers.

use std::fmt;
use std::io;
use std::time::Duration;

use rustix::rand::{GetRandomFlags, getrandom};
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;
use virtio_queue::Queue;

use super::{BURST_BYTES, BYTES_PER_SECOND, EntropyError};
use crate::bucket::{Bucket, Clock, monotonic};
use crate::device::{DeviceError, Outcome, TRANSPORT_FEATURES, VirtioDevice, read_space};
use crate::memory::GuestMemory;
use crate::ring::{Chain, Ring, run_round};

/// A waiting request is answered when there are at least this many bytes for it, not byte by byte.
const WORTHWHILE_BYTES: u64 = 1024;

/// Random bytes from the host's kernel.
pub struct Entropy {
    pub(super) bucket: Bucket,
    pub(super) clock: Clock,
    pub(super) acked_features: u64,
    pub(super) chain: Chain,
}

impl fmt::Debug for Entropy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entropy").field("bucket", &self.bucket).finish_non_exhaustive()
    }
}

impl Default for Entropy {
    fn default() -> Self {
        Self::new()
    }
}

impl Entropy {
    /// Makes a device whose bucket is full.
    pub fn new() -> Self {
        Self::with_clock(Box::new(monotonic))
    }

    /// Makes a device that measures its rate by `clock`.
    pub fn with_clock(clock: Clock) -> Self {
        let bucket = Bucket::new(BURST_BYTES, BYTES_PER_SECOND, clock());
        Self { bucket, clock, acked_features: 0, chain: Chain::new() }
    }

    /// Answers requests; returns how long to wait when the bucket is empty.
    fn work(&mut self, ring: &mut Ring<'_>, chain: &mut Chain) -> Result<Option<Duration>, DeviceError> {
        self.bucket.refill((self.clock)());
        while ring.pop(chain)? {
            let wanted = u64::from(chain.writable_bytes());
            if wanted == 0 {
                return Err(EntropyError::NoBuffer.into());
            }
            let worthwhile = wanted.min(WORTHWHILE_BYTES);
            if self.bucket.tokens() < worthwhile {
                ring.put_back();
                return Ok(Some(self.bucket.time_until(worthwhile)));
            }
            // A request need not be filled: its length in the used ring is what the guest got.
            let granted = wanted.min(self.bucket.tokens());
            let written = fill(chain, ring.mem(), granted)?;
            self.bucket.take(u64::from(written));
            ring.complete(chain, written)?;
        }
        Ok(None)
    }
}

fn fill(chain: &Chain, mem: &GuestMemory, count: u64) -> Result<u32, DeviceError> {
    let mut block = [0; 4096];
    let mut done: u32 = 0;
    while u64::from(done) < count {
        let left = usize::try_from(count - u64::from(done)).unwrap_or(usize::MAX).min(block.len());
        let Some(part) = block.get_mut(..left) else { break };
        random(part).map_err(EntropyError::Source)?;
        let written = chain.write(mem, done, part)?;
        if written == 0 {
            break;
        }
        done = done.saturating_add(u32::try_from(written).unwrap_or(u32::MAX));
    }
    Ok(done)
}

fn random(mut out: &mut [u8]) -> io::Result<()> {
    while !out.is_empty() {
        match getrandom(&mut *out, GetRandomFlags::empty()) {
            Ok(count) => out = out.get_mut(count..).unwrap_or_default(),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

impl VirtioDevice for Entropy {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn features(&self) -> u64 {
        TRANSPORT_FEATURES
    }

    fn set_features(&mut self, acked: u64) {
        self.acked_features = acked;
    }

    fn queue_count(&self) -> usize {
        1
    }

    fn read_config(&self, offset: u32, out: &mut [u8]) {
        read_space(&[], offset, out);
    }

    fn process(
        &mut self,
        index: usize,
        queue: &mut Queue,
        mem: &GuestMemory,
    ) -> Result<Outcome, DeviceError> {
        if index != 0 {
            return Err(DeviceError::NoSuchQueue(index));
        }
        let mut chain = std::mem::take(&mut self.chain);
        let mut retry_after = None;
        let outcome = run_round(queue, mem, |ring| {
            retry_after = self.work(ring, &mut chain)?;
            Ok(())
        });
        self.chain = chain;
        Ok(Outcome { retry_after, ..outcome? })
    }

    fn reset(&mut self) {
        self.acked_features = 0;
    }
}
