//! The header in front of every frame in a queue: the only structured bytes of the network device.

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS,
    VIRTIO_NET_HDR_F_DATA_VALID, VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_ECN,
    VIRTIO_NET_HDR_GSO_NONE, VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6, VIRTIO_NET_HDR_GSO_UDP,
    VIRTIO_NET_HDR_GSO_UDP_L4,
};

use super::counters::Reason;
use super::{MAX_FRAME_BYTES, MAX_LARGE_FRAME_BYTES, MIN_FRAME_BYTES};

/// The length of the header, which is the same whatever was negotiated besides version 1.
pub(super) const HEADER_BYTES: usize = 12;

/// What is offered beyond what every device offers. Frames to the guest are never to be segmented, so GUEST_TSO4 and
/// GUEST_TSO6 are not here: a driver without mergeable buffers learns from the MTU how large its buffers have to be.
pub(super) const FEATURES: u64 = 1 << VIRTIO_NET_F_MAC
    | 1 << VIRTIO_NET_F_MTU
    | 1 << VIRTIO_NET_F_STATUS
    | 1 << VIRTIO_NET_F_CSUM
    | 1 << VIRTIO_NET_F_GUEST_CSUM
    | 1 << VIRTIO_NET_F_MRG_RXBUF
    | 1 << VIRTIO_NET_F_HOST_TSO4
    | 1 << VIRTIO_NET_F_HOST_TSO6;

/// What the driver accepted, as far as frames are concerned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Accepted {
    /// A frame to the guest may be spread over several chains.
    pub(super) mergeable: bool,
    /// The guest wants to know that a frame's checksum is good.
    guest_checksum: bool,
    checksum: bool,
    tso4: bool,
    tso6: bool,
}

impl Accepted {
    pub(super) fn new(features: u64) -> Self {
        let has = |bit: u32| features & 1 << bit != 0;
        Self {
            mergeable: has(VIRTIO_NET_F_MRG_RXBUF),
            guest_checksum: has(VIRTIO_NET_F_GUEST_CSUM),
            checksum: has(VIRTIO_NET_F_CSUM),
            tso4: has(VIRTIO_NET_F_HOST_TSO4),
            tso6: has(VIRTIO_NET_F_HOST_TSO6),
        }
    }

    /// The header of a frame to the guest that fills `chains` chains.
    pub(super) fn header_to_guest(self, chains: u16) -> [u8; HEADER_BYTES] {
        let [low, high] = chains.to_le_bytes();
        [self.flags_to_guest(), 0, 0, 0, 0, 0, 0, 0, 0, 0, low, high]
    }

    fn flags_to_guest(self) -> u8 {
        if self.guest_checksum { DATA_VALID } else { 0 }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the field has one byte, and so have its values")]
const DATA_VALID: u8 = VIRTIO_NET_HDR_F_DATA_VALID as u8;

/// The header of a frame from the guest, as far as anything in it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FrameHeader {
    flags: u8,
    gso_type: u8,
    csum_start: u16,
    csum_offset: u16,
    num_buffers: u16,
}

impl FrameHeader {
    pub(super) fn parse(raw: [u8; HEADER_BYTES]) -> Self {
        // Between these are the headers' length and the segments' size, which are not used.
        let [flags, gso_type, _, _, _, _, s0, s1, o0, o1, n0, n1] = raw;
        Self {
            flags,
            gso_type,
            csum_start: u16::from_le_bytes([s0, s1]),
            csum_offset: u16::from_le_bytes([o0, o1]),
            num_buffers: u16::from_le_bytes([n0, n1]),
        }
    }

    /// Whether a frame of `length` bytes with this header can be passed on, and if not, why.
    pub(super) fn check(self, length: usize, accepted: Accepted) -> Result<(), Reason> {
        if length < MIN_FRAME_BYTES {
            return Err(Reason::Short);
        }
        let longest = if self.is_large(accepted)? { MAX_LARGE_FRAME_BYTES } else { MAX_FRAME_BYTES };
        if length > longest {
            return Err(Reason::Long);
        }
        self.check_checksum(length, accepted)?;
        // Linux sets this field only if buffers are mergeable, and leaves what was there before otherwise.
        if accepted.mergeable && self.num_buffers != 0 {
            return Err(Reason::NumBuffers);
        }
        Ok(())
    }

    /// Whether the frame is to be segmented.
    fn is_large(self, accepted: Accepted) -> Result<bool, Reason> {
        let congestion_marked = u32::from(self.gso_type) & VIRTIO_NET_HDR_GSO_ECN != 0;
        let allowed = match u32::from(self.gso_type) & !VIRTIO_NET_HDR_GSO_ECN {
            VIRTIO_NET_HDR_GSO_NONE if !congestion_marked => return Ok(false),
            VIRTIO_NET_HDR_GSO_TCPV4 => accepted.tso4,
            VIRTIO_NET_HDR_GSO_TCPV6 => accepted.tso6,
            VIRTIO_NET_HDR_GSO_UDP | VIRTIO_NET_HDR_GSO_UDP_L4 => false,
            _ => return Err(Reason::UnknownGso),
        };
        if allowed && !congestion_marked { Ok(true) } else { Err(Reason::NotNegotiated) }
    }

    /// A frame that is to be segmented needs a checksum: without those, a driver cannot have it segmented either.
    fn check_checksum(self, length: usize, accepted: Accepted) -> Result<(), Reason> {
        if u32::from(self.flags) & VIRTIO_NET_HDR_F_NEEDS_CSUM == 0 {
            let large = u32::from(self.gso_type) != VIRTIO_NET_HDR_GSO_NONE;
            return if large { Err(Reason::Checksum) } else { Ok(()) };
        }
        if !accepted.checksum {
            return Err(Reason::NotNegotiated);
        }
        let end = usize::from(self.csum_start) + usize::from(self.csum_offset) + 2;
        if end > length { Err(Reason::Checksum) } else { Ok(()) }
    }
}
