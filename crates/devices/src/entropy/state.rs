//! What an entropy device has to save to go on in another process. The place in its queue is part of the transport's state.

use serde::{Deserialize, Serialize};

use super::device::Entropy;
use crate::device::VirtioDevice;

/// An entropy device's state between requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntropyState {
    /// Bytes that may be taken without waiting.
    pub tokens: u64,
    /// The feature bits that the driver accepted.
    pub acked_features: u64,
}

impl Entropy {
    /// Makes the device that `state` describes again.
    pub fn restore(state: EntropyState) -> Self {
        let EntropyState { tokens, acked_features } = state;
        let mut device = Self::new();
        device.bucket.set_tokens(tokens);
        device.acked_features = acked_features & device.features();
        device
    }

    /// The state between requests.
    pub fn save(&self) -> EntropyState {
        // Every field is named, so that a new one is either saved or left out for a reason: the clock is this process's,
        // and the chain is empty between requests.
        let Self { bucket, clock: _, acked_features, chain: _ } = self;
        EntropyState { tokens: bucket.tokens(), acked_features: *acked_features }
    }
}
