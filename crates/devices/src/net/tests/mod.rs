//! The network device against well-behaved and hostile drivers.

mod buffers;
mod headers;
mod hostile;
mod ordinary;
mod state;
mod wakeups;

use vm_memory::{Bytes, GuestAddress};

use super::{
    BUFFER_BYTES, BUFFER_FRAMES, MAX_FRAME_BYTES, MAX_LARGE_FRAME_BYTES, Net, NetError, NetState, RX_QUEUE,
    Refused, TX_QUEUE,
};
use crate::testing::{Driver, readable, writable};
use crate::{DeviceError, GuestMemory, GuestRam, Outcome, Queue, QueueT, VirtioDevice};

// Feature bits, by their numbers in the virtio specification.
const CSUM: u64 = 1;
const GUEST_CSUM: u64 = 1 << 1;
const MTU: u64 = 1 << 3;
const MAC: u64 = 1 << 5;
const TSO4: u64 = 1 << 11;
const TSO6: u64 = 1 << 12;
const MRG_RXBUF: u64 = 1 << 15;
const STATUS: u64 = 1 << 16;
const EVENT_IDX: u64 = 1 << 29;
const VERSION_1: u64 = 1 << 32;

const ADDRESS: [u8; 6] = [2, 0, 0, 0, 0, 9];
const RAM: u64 = 4 << 20;
const SIZE: u16 = 256;
const RX: u64 = 0x1000;
const TX: u64 = 0x4000;
/// Where headers of frames from the guest are.
const HEADER: u64 = 0x8000;
/// Where frames from the guest are.
const FRAME: u64 = 0x2_0000;
/// Where buffers for frames to the guest are.
const BUFFERS: u64 = 0x10_0000;
const HEADER_BYTES: u32 = 12;

/// A header that asks for nothing.
const PLAIN: [u8; 12] = [0; 12];

struct Bench<'mem> {
    mem: &'mem GuestMemory,
    rx: Driver<'mem>,
    tx: Driver<'mem>,
    queues: [Queue; 2],
    net: Net,
}

impl<'mem> Bench<'mem> {
    /// A driver that accepts everything, and wants an interrupt for everything.
    fn new(ram: &'mem GuestRam) -> Self {
        let net = Net::new(ADDRESS);
        let features = net.features();
        Self::with(ram, net, features & !EVENT_IDX)
    }

    /// A driver that accepts everything but these.
    fn without(ram: &'mem GuestRam, features: u64) -> Self {
        let net = Net::new(ADDRESS);
        let offered = net.features();
        assert_eq!(offered & features, features, "what was never offered cannot be left out");
        Self::with(ram, net, offered & !EVENT_IDX & !features)
    }

    fn with(ram: &'mem GuestRam, mut net: Net, features: u64) -> Self {
        net.set_features(features);
        let (rx, tx) = (Driver::new(ram.memory(), RX, SIZE), Driver::new(ram.memory(), TX, SIZE));
        let mut queues = [rx.device_queue(), tx.device_queue()];
        for queue in &mut queues {
            queue.set_event_idx(features & EVENT_IDX != 0);
        }
        Self { mem: ram.memory(), rx, tx, queues, net }
    }

    fn process(&mut self, queue: usize) -> Result<Outcome, DeviceError> {
        self.net.process(queue, &mut self.queues[queue], self.mem)
    }

    /// What a transport does after the owner's side did something.
    fn service(&mut self) -> Outcome {
        let mut total = Outcome::default();
        while let Some(queue) = self.net.follow_up() {
            total = total.merge(self.process(queue).unwrap());
        }
        total
    }

    fn write(&self, address: u64, bytes: &[u8]) {
        self.mem.write_slice(bytes, GuestAddress(address)).unwrap();
    }

    fn read(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.mem.read_slice(&mut bytes, GuestAddress(address)).unwrap();
        bytes
    }

    /// The driver sends one frame, and the device looks at it.
    fn send(&mut self, header: [u8; 12], frame: &[u8]) {
        self.push(header, frame);
        self.process(TX_QUEUE).unwrap();
    }

    fn push(&mut self, header: [u8; 12], frame: &[u8]) {
        self.write(HEADER, &header);
        self.write(FRAME, frame);
        self.tx.push(&[readable(HEADER, HEADER_BYTES), readable(FRAME, length(frame))]);
    }

    /// Whether a frame with this header comes through. The guest gets its buffers back in any case.
    fn passes(&mut self, header: [u8; 12], frame: &[u8]) -> bool {
        self.send(header, frame);
        assert_eq!(self.tx.take_used().len(), 1);
        let passed = self.net.frame().map(|seen| assert!(seen == frame, "the frame was changed")).is_some();
        self.net.drop_frame();
        assert_eq!(self.net.frame(), None);
        passed
    }

    /// The driver posts buffers of these lengths, one after the other from [`BUFFERS`] on, each a chain of its own.
    fn post(&mut self, lengths: &[u32]) {
        let mut place = BUFFERS;
        for length in lengths {
            self.rx.push(&[writable(place, *length)]);
            place += u64::from(*length);
        }
    }

    /// The owner hands over a frame, and the device does what it can with it.
    fn offer(&mut self, frame: &[u8]) -> Outcome {
        self.net.offer(frame).unwrap();
        self.service()
    }

    /// Expects an error now, and silence ever after.
    fn stops_once(&mut self, queue: usize) -> DeviceError {
        let error = self.process(queue).unwrap_err();
        assert_eq!(self.process(queue).unwrap(), Outcome::default());
        error
    }
}

fn ram() -> GuestRam {
    GuestRam::create(RAM).unwrap()
}

fn length(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap()
}

/// A frame of `length` bytes that differs from its neighbours' in every place.
fn frame(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|i| u8::try_from(i % 251).unwrap().wrapping_add(seed)).collect()
}
