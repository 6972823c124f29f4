//! What a network device has to save to go on in another process. The place in each queue is part of the transport's state.

use serde::{Deserialize, Serialize};

use super::counters::Counters;
use super::device::Net;
use super::frames::Frames;
use super::{BUFFER_FRAMES, MAX_FRAME_BYTES, MAX_LARGE_FRAME_BYTES, MIN_FRAME_BYTES, NetError};
use crate::device::VirtioDevice;

/// A network device's state between rounds of work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetState {
    /// The guest's address on the link.
    pub mac: [u8; 6],
    /// Whether the link is up.
    pub link_up: bool,
    /// Frames that the guest has not received yet.
    pub to_guest: Vec<Vec<u8>>,
    /// Frames from the guest that were not taken yet.
    pub from_guest: Vec<Vec<u8>>,
    /// What has happened so far.
    pub counters: Counters,
    /// The feature bits that the driver accepted.
    pub acked_features: u64,
}

impl Net {
    /// Makes the device that `state` describes again. Both of its queues have work to do.
    ///
    /// # Errors
    /// When the state holds more than a device can, or frames that no device takes.
    pub fn restore(state: &NetState) -> Result<Self, NetError> {
        let NetState { mac, link_up, to_guest, from_guest, counters, acked_features } = state;
        let mut net = Self::new(*mac);
        fill(&mut net.to_guest, to_guest, MAX_FRAME_BYTES)?;
        fill(&mut net.from_guest, from_guest, MAX_LARGE_FRAME_BYTES)?;
        (net.link_up, net.counters) = (*link_up, *counters);
        net.acked_features = acked_features & net.features();
        net.work = [true; 2];
        Ok(net)
    }

    /// The state between rounds of work.
    pub fn save(&self) -> NetState {
        // Every field is named, so that a new one is either saved or left out for a reason.
        let Self {
            mac,
            link_up,
            to_guest,
            from_guest,
            counters,
            acked_features,
            // A restored device looks at both its queues, and finds a stalled frame there.
            stalled: _,
            work: _,
            // Empty between rounds of work.
            chains: _,
        } = self;
        NetState {
            mac: *mac,
            link_up: *link_up,
            to_guest: to_guest.iter().map(<[u8]>::to_vec).collect(),
            from_guest: from_guest.iter().map(<[u8]>::to_vec).collect(),
            counters: *counters,
            acked_features: *acked_features,
        }
    }
}

fn fill(frames: &mut Frames, saved: &[Vec<u8>], longest: usize) -> Result<(), NetError> {
    let fits = |frame: &Vec<u8>| (MIN_FRAME_BYTES..=longest).contains(&frame.len());
    let complete =
        saved.len() <= BUFFER_FRAMES && saved.iter().all(|frame| fits(frame) && frames.push(frame));
    if complete { Ok(()) } else { Err(NetError::State) }
}
