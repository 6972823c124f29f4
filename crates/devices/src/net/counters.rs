//! What has happened on the link.

use serde::{Deserialize, Serialize};

/// Frames that went one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrameCount {
    /// How many frames were counted.
    pub frames: u64,
    /// How many bytes they had, without the headers of virtio.
    pub bytes: u64,
}

impl FrameCount {
    pub(super) fn count(&mut self, length: usize) {
        self.frames = self.frames.wrapping_add(1);
        self.bytes = self.bytes.wrapping_add(u64::try_from(length).unwrap_or(u64::MAX));
    }
}

/// Why frames were dropped, and how many for each reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dropped {
    /// From the guest: shorter than an Ethernet header.
    pub short: u64,
    /// From the guest: longer than the link allows.
    pub long: u64,
    /// From the guest: to be segmented in a way that virtio does not define.
    pub unknown_gso: u64,
    /// From the guest: to be segmented or completed though the driver never accepted that.
    pub not_negotiated: u64,
    /// From the guest: its checksum is outside of the frame, or it is to be segmented without one.
    pub checksum: u64,
    /// From the guest: it claims to be spread over several buffers.
    pub num_buffers: u64,
    /// To the guest: its driver's buffers can never hold it.
    pub no_room: u64,
    /// Either way: the link was down.
    pub link_down: u64,
}

impl Dropped {
    pub(super) fn count(&mut self, reason: Reason) {
        let counter = match reason {
            Reason::Short => &mut self.short,
            Reason::Long => &mut self.long,
            Reason::UnknownGso => &mut self.unknown_gso,
            Reason::NotNegotiated => &mut self.not_negotiated,
            Reason::Checksum => &mut self.checksum,
            Reason::NumBuffers => &mut self.num_buffers,
            Reason::NoRoom => &mut self.no_room,
            Reason::LinkDown => &mut self.link_down,
        };
        *counter = counter.wrapping_add(1);
    }
}

/// What a network device has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Frames from the guest that were passed on.
    pub from_guest: FrameCount,
    /// Frames that the guest has received.
    pub to_guest: FrameCount,
    /// Frames that were neither.
    pub dropped: Dropped,
}

/// Why a frame is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    Short,
    Long,
    UnknownGso,
    NotNegotiated,
    Checksum,
    NumBuffers,
    NoRoom,
    LinkDown,
}
