//! Moving bytes between the port's buffers and the guest's queues.

use std::collections::VecDeque;

use virtio_bindings::virtio_ids::VIRTIO_ID_CONSOLE;
use virtio_queue::Queue;

use super::request::{CONTROL_BYTES, DriverMessage};
use super::session::{Hangup, Session};
use super::{
    BUFFER_BYTES, CONTROL_RX_QUEUE, CONTROL_TX_QUEUE, ConsoleError, MAX_CHAIN_BYTES, RX_QUEUE, TX_QUEUE,
};
use crate::device::{DeviceError, Outcome, TRANSPORT_FEATURES, VirtioDevice, read_space};
use crate::memory::GuestMemory;
use crate::ring::{Chain, Ring, RingError, run_round};

/// Feature bit: ports are announced by control messages.
const F_MULTIPORT: u32 = 1;

/// A byte stream between host and guest.
///
/// The host's side never blocks: [`send`](Self::send) takes what fits, [`take`](Self::take) gives what is there. After
/// either, and after [`reconnect`](Self::reconnect), the transport has to work on the queues that
/// [`follow_up`](VirtioDevice::follow_up) names.
#[derive(Debug, Default)]
pub struct Console {
    pub(super) to_guest: VecDeque<u8>,
    pub(super) from_guest: VecDeque<u8>,
    pub(super) session: Session,
    pub(super) acked_features: u64,
    pub(super) chain: Chain,
}

impl Console {
    /// Makes a console that no guest has found yet.
    pub fn new() -> Self {
        Self { chain: Chain::new(), ..Self::default() }
    }

    /// Queues data for the guest; returns how much of it fitted. It is delivered once a guest process has the port
    /// open.
    pub fn send(&mut self, data: &[u8]) -> usize {
        let taken = data.len().min(self.room());
        self.to_guest.extend(data.get(..taken).unwrap_or_default());
        self.session.mark(RX_QUEUE);
        taken
    }

    /// How much [`send`](Self::send) would take now.
    pub fn room(&self) -> usize {
        BUFFER_BYTES.saturating_sub(self.to_guest.len())
    }

    /// How many bytes from the guest wait to be taken.
    pub fn received(&self) -> usize {
        self.from_guest.len()
    }

    /// Takes at most `max` bytes that the guest sent.
    pub fn take(&mut self, max: usize) -> Vec<u8> {
        let count = max.min(self.from_guest.len());
        self.session.mark(TX_QUEUE);
        self.from_guest.drain(..count).collect()
    }

    /// Whether a guest process has the port open and no hang-up is under way.
    pub fn guest_open(&self) -> bool {
        self.session.is_open()
    }

    /// How often a guest process has opened the port; a change means that the other end is a new one.
    pub fn sessions(&self) -> u64 {
        self.session.sessions
    }

    /// Hangs up and comes back: both buffers are emptied, the guest's process reads an end of file, and what it sends
    /// before it has closed and opened the port again is thrown away.
    pub fn reconnect(&mut self) {
        self.to_guest.clear();
        self.from_guest.clear();
        self.session.hang_up();
    }

    fn fill_guest(&mut self, ring: &mut Ring<'_>, chain: &mut Chain) -> Result<(), DeviceError> {
        while self.session.is_open() && !self.to_guest.is_empty() && ring.pop(chain)? {
            if chain.writable_bytes() == 0 {
                return Err(ConsoleError::SmallBuffer(0).into());
            }
            let mut written: u32 = 0;
            let (first, second) = self.to_guest.as_slices();
            for part in [first, second] {
                let count = chain.write(ring.mem(), written, part)?;
                written = written.saturating_add(u32::try_from(count).unwrap_or(u32::MAX));
            }
            self.to_guest.drain(..(written as usize).min(self.to_guest.len()));
            ring.complete(chain, written)?;
        }
        Ok(())
    }

    fn drain_guest(&mut self, ring: &mut Ring<'_>, chain: &mut Chain) -> Result<(), DeviceError> {
        while ring.pop(chain)? {
            let length = chain.readable_bytes();
            if length > MAX_CHAIN_BYTES {
                return Err(ConsoleError::LongChain(length).into());
            }
            if self.session.hangup == Hangup::None {
                if self.from_guest.len() + length as usize > BUFFER_BYTES {
                    ring.put_back();
                    return Ok(());
                }
                self.copy_from(chain, ring.mem())?;
            }
            ring.complete(chain, 0)?;
        }
        if self.session.hangup == Hangup::Drain && !ring.was_cut_short() {
            self.session.drained();
        }
        Ok(())
    }

    fn copy_from(&mut self, chain: &Chain, mem: &GuestMemory) -> Result<(), RingError> {
        let mut block = [0; 4096];
        let mut done: u32 = 0;
        while done < chain.readable_bytes() {
            let count = chain.read(mem, done, &mut block)?;
            if count == 0 {
                break;
            }
            self.from_guest.extend(block.get(..count).unwrap_or_default());
            done = done.saturating_add(u32::try_from(count).unwrap_or(u32::MAX));
        }
        Ok(())
    }

    fn send_control(&mut self, ring: &mut Ring<'_>, chain: &mut Chain) -> Result<(), DeviceError> {
        while !self.session.waiting.is_empty() && ring.pop(chain)? {
            let Some(message) = self.session.waiting.pop_front() else { break };
            let written = chain.write(ring.mem(), 0, &message)?;
            if written != message.len() {
                return Err(ConsoleError::SmallBuffer(chain.writable_bytes()).into());
            }
            ring.complete(chain, u32::try_from(written).unwrap_or(0))?;
            self.session.mark(CONTROL_TX_QUEUE);
        }
        Ok(())
    }

    fn on_control_message(&mut self, ring: &mut Ring<'_>, chain: &mut Chain) -> Result<(), DeviceError> {
        while self.session.accepts_control() && ring.pop(chain)? {
            let mut raw = [0; CONTROL_BYTES];
            if chain.read(ring.mem(), 0, &mut raw)? != raw.len() {
                return Err(ConsoleError::ShortControl(chain.readable_bytes()).into());
            }
            self.session.handle(DriverMessage::parse(raw)?);
            ring.complete(chain, 0)?;
        }
        Ok(())
    }
}

impl VirtioDevice for Console {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_CONSOLE
    }

    fn features(&self) -> u64 {
        TRANSPORT_FEATURES | 1 << F_MULTIPORT
    }

    fn set_features(&mut self, acked: u64) {
        self.acked_features = acked;
    }

    fn queue_count(&self) -> usize {
        4
    }

    fn read_config(&self, offset: u32, out: &mut [u8]) {
        // struct virtio_console_config: no size, one port, no emergency write.
        read_space(&[0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0], offset, out);
    }

    fn process(
        &mut self,
        index: usize,
        queue: &mut Queue,
        mem: &GuestMemory,
    ) -> Result<Outcome, DeviceError> {
        let mut chain = std::mem::take(&mut self.chain);
        let outcome = match index {
            RX_QUEUE => run_round(queue, mem, |ring| self.fill_guest(ring, &mut chain)),
            TX_QUEUE => run_round(queue, mem, |ring| self.drain_guest(ring, &mut chain)),
            CONTROL_RX_QUEUE => run_round(queue, mem, |ring| self.send_control(ring, &mut chain)),
            CONTROL_TX_QUEUE => run_round(queue, mem, |ring| self.on_control_message(ring, &mut chain)),
            _ => Err(DeviceError::NoSuchQueue(index)),
        };
        self.chain = chain;
        outcome
    }

    fn follow_up(&mut self) -> Option<usize> {
        self.session.take_marked()
    }

    fn reset(&mut self) {
        let chain = std::mem::take(&mut self.chain);
        *self = Self { chain, ..Self::default() };
    }
}
