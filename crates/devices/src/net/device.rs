//! Moving frames between the buffers and the guest's queues.

use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::VIRTIO_NET_S_LINK_UP;
use virtio_queue::Queue;

use super::counters::{Counters, Reason};
use super::frames::Frames;
use super::header::{Accepted, FEATURES, FrameHeader, HEADER_BYTES};
use super::{MAX_FRAME_BYTES, MIN_FRAME_BYTES, MTU, NetError, RX_QUEUE, Refused, TX_QUEUE};
use crate::device::{DeviceError, MAX_QUEUE_SIZE, Outcome, TRANSPORT_FEATURES, VirtioDevice, read_space};
use crate::memory::GuestMemory;
use crate::ring::{Chain, Done, Ring, run_round};

/// A link between the guest and its owner.
///
/// The owner's side never blocks. Frames from the guest are looked at with [`frame`](Self::frame) and removed with
/// [`drop_frame`](Self::drop_frame); frames for it are handed over with [`offer`](Self::offer), or written where they
/// will lie with [`space`](Self::space) and [`commit`](Self::commit). After any of these the transport has to work on
/// the queues that [`follow_up`](VirtioDevice::follow_up) names.
#[derive(Debug)]
pub struct Net {
    pub(super) mac: [u8; 6],
    pub(super) link_up: bool,
    pub(super) to_guest: Frames,
    pub(super) from_guest: Frames,
    pub(super) counters: Counters,
    pub(super) acked_features: u64,
    /// A frame stayed in the transmit queue because the buffer was full.
    pub(super) stalled: bool,
    /// Which queues have work to do.
    pub(super) work: [bool; 2],
    pub(super) chains: Chains,
}

/// Copies of a frame's chains, reused so that no frame allocates.
#[derive(Debug, Default)]
pub(super) struct Chains {
    first: Chain,
    next: Chain,
    done: Vec<Done>,
}

/// What became of a frame for the guest.
enum Fate {
    /// Its chains can be handed back.
    Placed,
    /// There are not enough chains yet.
    Waits,
    /// The driver can never post enough for it.
    NeverFits,
}

impl Net {
    /// Makes a device whose guest has the address `mac`, with its link up.
    pub fn new(mac: [u8; 6]) -> Self {
        Self {
            mac,
            link_up: true,
            to_guest: Frames::default(),
            from_guest: Frames::default(),
            counters: Counters::default(),
            acked_features: 0,
            stalled: false,
            work: [false; 2],
            chains: Chains::new(),
        }
    }

    /// The oldest frame from the guest that was not taken yet. It stays until [`drop_frame`](Self::drop_frame).
    pub fn frame(&self) -> Option<&[u8]> {
        self.from_guest.first()
    }

    /// Removes the frame that [`frame`](Self::frame) shows.
    pub fn drop_frame(&mut self) {
        if self.from_guest.drop_first() && self.stalled {
            self.mark(TX_QUEUE);
        }
    }

    /// Whether the buffer has space for another frame to the guest, of any length.
    pub fn wants_frames(&self) -> bool {
        self.to_guest.has_room(MAX_FRAME_BYTES)
    }

    /// Hands over a frame for the guest; its checksums have to be right. While the link is down it is dropped.
    ///
    /// # Errors
    /// When the buffer is full, which [`wants_frames`](Self::wants_frames) reports beforehand, or no frame has this length.
    pub fn offer(&mut self, frame: &[u8]) -> Result<(), Refused> {
        check_length(frame.len())?;
        let space = self.space().and_then(|space| space.get_mut(..frame.len())).ok_or(Refused::Full)?;
        space.copy_from_slice(frame);
        self.commit(frame.len())
    }

    /// Where the next frame for the guest will lie: space for the longest one, or `None` while the buffer is full. What is
    /// written there is handed over with [`commit`](Self::commit).
    pub fn space(&mut self) -> Option<&mut [u8]> {
        self.to_guest.space(MAX_FRAME_BYTES)
    }

    /// Hands over the first `length` bytes of [`space`](Self::space) as a frame for the guest, as
    /// [`offer`](Self::offer) does.
    ///
    /// # Errors
    /// As for [`offer`](Self::offer).
    pub fn commit(&mut self, length: usize) -> Result<(), Refused> {
        check_length(length)?;
        if !self.link_up {
            self.counters.dropped.count(Reason::LinkDown);
            return Ok(());
        }
        if !self.to_guest.commit(length) {
            return Err(Refused::Full);
        }
        self.mark(RX_QUEUE);
        Ok(())
    }

    /// What has happened so far. A reset by the driver changes none of it.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Whether the link is up.
    pub fn link_up(&self) -> bool {
        self.link_up
    }

    /// Takes the link down or up. Taken down, it loses all frames that wait on it, and those that come later.
    ///
    /// The guest finds the state in the configuration space, where its driver looks when it starts. No
    /// transport here sends an interrupt when it changes.
    pub fn set_link(&mut self, up: bool) {
        self.link_up = up;
        if !up {
            for _ in 0..self.to_guest.clear() + self.from_guest.clear() {
                self.counters.dropped.count(Reason::LinkDown);
            }
            self.mark(TX_QUEUE);
        }
    }

    fn mark(&mut self, queue: usize) {
        if let Some(flag) = self.work.get_mut(queue) {
            *flag = true;
        }
    }

    fn drain_guest(&mut self, ring: &mut Ring<'_>, chain: &mut Chain) -> Result<(), DeviceError> {
        let accepted = Accepted::new(self.acked_features);
        self.stalled = false;
        while ring.pop(chain)? {
            if chain.writable_bytes() != 0 {
                return Err(NetError::WritableFrame(chain.writable_bytes()).into());
            }
            let mut raw = [0; HEADER_BYTES];
            if chain.read(ring.mem(), 0, &mut raw)? != raw.len() {
                return Err(NetError::ShortHeader(chain.readable_bytes()).into());
            }
            let length = (chain.readable_bytes() as usize).saturating_sub(HEADER_BYTES);
            let checked = FrameHeader::parse(raw).check(length, accepted);
            match if self.link_up { checked } else { Err(Reason::LinkDown) } {
                Err(reason) => self.counters.dropped.count(reason),
                Ok(()) => {
                    let Some(space) = self.from_guest.space(length) else {
                        ring.put_back();
                        self.stalled = true;
                        return Ok(());
                    };
                    chain.read(ring.mem(), HEADER_LENGTH, space)?;
                    self.from_guest.commit(length);
                    self.counters.from_guest.count(length);
                }
            }
            ring.complete(chain, 0)?;
        }
        Ok(())
    }

    fn fill_guest(&mut self, ring: &mut Ring<'_>, chains: &mut Chains) -> Result<(), DeviceError> {
        let accepted = Accepted::new(self.acked_features);
        while let Some(frame) = self.to_guest.first() {
            match chains.place(ring, frame, accepted)? {
                Fate::Placed => {
                    self.counters.to_guest.count(frame.len());
                    ring.complete_together(&chains.done)?;
                }
                Fate::NeverFits => self.counters.dropped.count(Reason::NoRoom),
                Fate::Waits => return Ok(()),
            }
            self.to_guest.drop_first();
        }
        Ok(())
    }
}

/// [`HEADER_BYTES`] as chains count.
const HEADER_LENGTH: u32 = 12;
const _: () = assert!(HEADER_LENGTH as usize == HEADER_BYTES);

impl Chains {
    /// Room for the longest chains, and for as many of them as a queue can hold.
    fn new() -> Self {
        Self {
            first: Chain::new(),
            next: Chain::new(),
            done: Vec::with_capacity(usize::from(MAX_QUEUE_SIZE)),
        }
    }

    /// Writes a frame to as many chains as it needs. Those are the driver's again only with [`Fate::Placed`]; otherwise
    /// they are back in the queue, where what was written to them will be written over.
    fn place(&mut self, ring: &mut Ring<'_>, frame: &[u8], accepted: Accepted) -> Result<Fate, DeviceError> {
        self.done.clear();
        let (mut rest, mut count) = (frame, 0);
        loop {
            let (chain, header) =
                if count == 0 { (&mut self.first, HEADER_LENGTH) } else { (&mut self.next, 0) };
            if !ring.pop(chain)? {
                ring.put_back_last(count);
                return Ok(if count == ring.size() { Fate::NeverFits } else { Fate::Waits });
            }
            count += 1;
            let room = room_behind(header, chain)?;
            if !accepted.mergeable && rest.len() > room {
                ring.put_back();
                return Ok(Fate::NeverFits);
            }
            let (now, later) = rest.split_at(rest.len().min(room));
            let written = chain.write(ring.mem(), header, now)?;
            self.done.push(chain.done(header.saturating_add(u32::try_from(written).unwrap_or(u32::MAX))));
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        self.first.write(ring.mem(), 0, &accepted.header_to_guest(count))?;
        Ok(Fate::Placed)
    }
}

/// How much of a frame fits a chain of the receive queue, behind `header` bytes of header.
fn room_behind(header: u32, chain: &Chain) -> Result<usize, NetError> {
    if chain.readable_bytes() != 0 {
        return Err(NetError::ReadableBuffer(chain.readable_bytes()));
    }
    let bytes = chain.writable_bytes();
    match bytes.checked_sub(header) {
        Some(room) if bytes != 0 => Ok(room as usize),
        _ => Err(NetError::SmallBuffer(bytes)),
    }
}

fn check_length(length: usize) -> Result<(), Refused> {
    if (MIN_FRAME_BYTES..=MAX_FRAME_BYTES).contains(&length) { Ok(()) } else { Err(Refused::Length(length)) }
}

impl VirtioDevice for Net {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn features(&self) -> u64 {
        TRANSPORT_FEATURES | FEATURES
    }

    fn set_features(&mut self, acked: u64) {
        self.acked_features = acked;
    }

    fn queue_count(&self) -> usize {
        2
    }

    fn read_config(&self, offset: u32, out: &mut [u8]) {
        // struct virtio_net_config: address, status, a number of queues that was not offered, MTU.
        let [a, b, c, d, e, f] = self.mac;
        let [status, _, _, _] = if self.link_up { VIRTIO_NET_S_LINK_UP } else { 0 }.to_le_bytes();
        let [low, high] = MTU.to_le_bytes();
        read_space(&[a, b, c, d, e, f, status, 0, 0, 0, low, high], offset, out);
    }

    fn process(
        &mut self,
        index: usize,
        queue: &mut Queue,
        mem: &GuestMemory,
    ) -> Result<Outcome, DeviceError> {
        let mut chains = std::mem::take(&mut self.chains);
        let outcome = match index {
            RX_QUEUE => run_round(queue, mem, |ring| self.fill_guest(ring, &mut chains)),
            TX_QUEUE => run_round(queue, mem, |ring| self.drain_guest(ring, &mut chains.first)),
            _ => Err(DeviceError::NoSuchQueue(index)),
        };
        self.chains = chains;
        outcome
    }

    fn follow_up(&mut self) -> Option<usize> {
        [TX_QUEUE, RX_QUEUE].into_iter().find(|queue| self.work.get_mut(*queue).is_some_and(std::mem::take))
    }

    fn reset(&mut self) {
        self.to_guest.clear();
        self.from_guest.clear();
        self.acked_features = 0;
        self.stalled = false;
        self.work = [false; 2];
    }
}
