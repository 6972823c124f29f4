//! The console against a driver that behaves like Linux, and against hostile ones.

mod limits;
mod state;

use vm_memory::{Bytes, GuestAddress};

use super::{
    BUFFER_BYTES, CONTROL_RX_QUEUE, CONTROL_TX_QUEUE, Console, ConsoleError, MAX_CHAIN_BYTES, RX_QUEUE,
    TX_QUEUE,
};
use crate::ring::RingError;
use crate::testing::{Driver, readable, writable};
use crate::{DeviceError, GuestRam, Outcome, Queue, VirtioDevice};

const DEVICE_READY: u16 = 0;
const PORT_ADD: u16 = 1;
const PORT_READY: u16 = 3;
const PORT_OPEN: u16 = 6;
const PORT_NAME: u16 = 7;

const CONTROL: u64 = 0x20000;
const CONTROL_BUFFERS: u64 = 0x21000;
const DATA: u64 = 0x40000;
const RX: u64 = 0x80000;

struct Bench<'mem> {
    ram: &'mem GuestRam,
    drivers: [Driver<'mem>; 4],
    queues: [Queue; 4],
    console: Console,
}

impl<'mem> Bench<'mem> {
    fn new(ram: &'mem GuestRam) -> Self {
        let drivers = [0x1000, 0x4000, 0x8000, 0xc000].map(|base| Driver::new(ram.memory(), base, 64));
        let queues = [0, 1, 2, 3].map(|i: usize| drivers[i].device_queue());
        Self { ram, drivers, queues, console: Console::new() }
    }

    /// A console whose port a guest process has open.
    fn opened(ram: &'mem GuestRam) -> Self {
        let mut bench = Self::new(ram);
        for _ in 0..32 {
            bench.offer_control_buffer();
        }
        bench.send_control(DEVICE_READY, 1).unwrap();
        bench.send_control(PORT_READY, 1).unwrap();
        bench.send_control(PORT_OPEN, 1).unwrap();
        bench.received_control();
        bench
    }

    fn process(&mut self, queue: usize) -> Result<Outcome, DeviceError> {
        self.console.process(queue, &mut self.queues[queue], self.ram.memory())
    }

    /// Works on one queue and on all that follows, as a transport does.
    fn run(&mut self, queue: usize) -> Result<(), DeviceError> {
        self.process(queue)?;
        while let Some(next) = self.console.follow_up() {
            self.process(next)?;
        }
        Ok(())
    }

    fn send_control(&mut self, event: u16, value: u16) -> Result<(), DeviceError> {
        self.send_control_about(0, event, value)
    }

    fn send_control_about(&mut self, port: u32, event: u16, value: u16) -> Result<(), DeviceError> {
        self.push_control(port, event, value);
        self.run(CONTROL_TX_QUEUE)
    }

    /// Puts a control message into its queue, where the device has yet to look.
    fn push_control(&mut self, port: u32, event: u16, value: u16) {
        let mut raw = port.to_le_bytes().to_vec();
        raw.extend(event.to_le_bytes());
        raw.extend(value.to_le_bytes());
        self.ram.memory().write_slice(&raw, GuestAddress(CONTROL)).unwrap();
        self.drivers[CONTROL_TX_QUEUE].push(&[readable(CONTROL, 8)]);
    }

    fn offer_control_buffer(&mut self) {
        let slot = self.drivers[CONTROL_RX_QUEUE].push(&[writable(CONTROL_BUFFERS, 64)]);
        // Each buffer has a place of its own, by the number of its descriptor.
        let address = CONTROL_BUFFERS + 64 * u64::from(slot);
        self.drivers[CONTROL_RX_QUEUE].write_descriptor(slot, writable(address, 64), 0, 0);
    }

    /// The control messages that the guest has received since the last call: event, value and payload.
    fn received_control(&mut self) -> Vec<(u16, u16, Vec<u8>)> {
        let used = self.drivers[CONTROL_RX_QUEUE].take_used();
        used.iter()
            .map(|(slot, length)| {
                let mut raw = vec![0; usize::try_from(*length).unwrap()];
                let address = CONTROL_BUFFERS + 64 * u64::from(*slot);
                self.ram.memory().read_slice(&mut raw, GuestAddress(address)).unwrap();
                assert_eq!(raw[..4], [0; 4]);
                (
                    u16::from_le_bytes([raw[4], raw[5]]),
                    u16::from_le_bytes([raw[6], raw[7]]),
                    raw[8..].to_vec(),
                )
            })
            .collect()
    }

    /// The guest writes to the port.
    fn write(&mut self, data: &[u8]) -> Result<(), DeviceError> {
        self.ram.memory().write_slice(data, GuestAddress(DATA)).unwrap();
        self.drivers[TX_QUEUE].push(&[readable(DATA, u32::try_from(data.len()).unwrap())]);
        self.run(TX_QUEUE)
    }

    /// The guest offers one buffer for data from the host.
    fn offer(&mut self, length: u32) {
        self.drivers[RX_QUEUE].push(&[writable(RX, length)]);
    }

    /// What the latest buffer for data from the host holds.
    fn read(&mut self) -> Vec<u8> {
        let used = self.drivers[RX_QUEUE].take_used();
        let length = used.last().map_or(0, |(_, length)| *length);
        let mut data = vec![0; usize::try_from(length).unwrap()];
        self.ram.memory().read_slice(&mut data, GuestAddress(RX)).unwrap();
        data
    }
}

fn ram() -> GuestRam {
    GuestRam::create(1 << 20).unwrap()
}

mod ordinary {
    use super::*;

    #[test]
    fn handshake_offers_one_named_port_that_is_no_console() {
        let ram = ram();
        let mut bench = Bench::new(&ram);
        for _ in 0..4 {
            bench.offer_control_buffer();
        }

        bench.send_control(DEVICE_READY, 1).unwrap();
        assert_eq!(bench.received_control(), [(PORT_ADD, 1, vec![])]);
        bench.send_control(PORT_READY, 1).unwrap();
        assert_eq!(
            bench.received_control(),
            [(PORT_NAME, 1, b"bathysphere".to_vec()), (PORT_OPEN, 1, vec![])]
        );
        assert!(!bench.console.guest_open());
        bench.send_control(PORT_OPEN, 1).unwrap();
        assert!(bench.console.guest_open());
        assert_eq!(bench.console.sessions(), 1);
        let mut ports = [0; 4];
        bench.console.read_config(4, &mut ports);
        assert_eq!(ports, 1_u32.to_le_bytes());
    }

    #[test]
    fn answers_wait_for_the_guests_buffers() {
        let ram = ram();
        let mut bench = Bench::new(&ram);
        bench.send_control(DEVICE_READY, 1).unwrap();
        assert_eq!(bench.received_control(), []);
        bench.offer_control_buffer();
        bench.run(CONTROL_RX_QUEUE).unwrap();
        assert_eq!(bench.received_control(), [(PORT_ADD, 1, vec![])]);
    }

    #[test]
    fn bytes_flow_both_ways_in_order() {
        let ram = ram();
        let mut bench = Bench::opened(&ram);

        bench.write(b"from ").unwrap();
        bench.write(b"the guest").unwrap();
        assert_eq!(bench.console.received(), 14);
        assert_eq!(bench.console.take(7), b"from th");
        assert_eq!(bench.console.take(100), b"e guest");

        assert_eq!(bench.console.send(b"to the guest"), 12);
        bench.offer(7);
        bench.run(RX_QUEUE).unwrap();
        assert_eq!(bench.read(), b"to the ");
        bench.offer(64);
        bench.run(RX_QUEUE).unwrap();
        assert_eq!(bench.read(), b"guest");
    }

    #[test]
    fn data_waits_until_the_guest_has_opened_the_port() {
        let ram = ram();
        let mut bench = Bench::opened(&ram);
        bench.send_control(PORT_OPEN, 0).unwrap();
        bench.offer(64);
        bench.console.send(b"early");
        bench.run(RX_QUEUE).unwrap();
        assert_eq!(bench.read(), b"");

        bench.send_control(PORT_OPEN, 1).unwrap();
        assert_eq!(bench.read(), b"early");
        assert_eq!(bench.console.sessions(), 2);
    }

    #[test]
    fn send_takes_what_fits() {
        let mut console = Console::new();
        assert_eq!(console.send(&vec![1; BUFFER_BYTES - 1]), BUFFER_BYTES - 1);
        assert_eq!(console.room(), 1);
        assert_eq!(console.send(b"xyz"), 1);
        assert_eq!(console.send(b"xyz"), 0);
    }

    #[test]
    fn reconnect_waits_for_the_guest_to_close_and_drops_the_old_session() {
        let ram = ram();
        let mut bench = Bench::opened(&ram);
        bench.write(b"old").unwrap();
        bench.console.send(b"old");

        bench.console.reconnect();
        bench.run(CONTROL_RX_QUEUE).unwrap();
        assert_eq!(bench.received_control(), [(PORT_OPEN, 0, vec![])]);
        assert_eq!(bench.console.received(), 0);
        assert!(!bench.console.guest_open());
        bench.write(b"still old").unwrap();
        assert_eq!(bench.console.received(), 0);

        bench.send_control(PORT_OPEN, 0).unwrap();
        assert_eq!(bench.received_control(), [(PORT_OPEN, 1, vec![])]);
        bench.send_control(PORT_OPEN, 1).unwrap();
        assert!(bench.console.guest_open());
        bench.write(b"new").unwrap();
        assert_eq!(bench.console.take(100), b"new");
        bench.offer(64);
        bench.run(RX_QUEUE).unwrap();
        assert_eq!(bench.read(), b"");
    }

    #[test]
    fn reconnect_drops_old_data_that_is_still_in_the_queue() {
        let ram = ram();
        let mut bench = Bench::opened(&ram);
        // The buffer is full, so what comes next stays in the guest's queue.
        let chunk = vec![1; 32 << 10];
        for _ in 0..8 {
            bench.write(&chunk).unwrap();
        }
        bench.write(b"stuck").unwrap();
        assert_eq!(bench.drivers[TX_QUEUE].take_used().len(), 8);
        bench.console.reconnect();
        bench.send_control(PORT_OPEN, 0).unwrap();
        bench.send_control(PORT_OPEN, 1).unwrap();
        assert_eq!(bench.drivers[TX_QUEUE].take_used().len(), 1);
        assert_eq!(bench.console.take(100), b"");
    }

    #[test]
    fn opening_takes_effect_only_when_old_data_is_drained() {
        let ram = ram();
        let mut bench = Bench::opened(&ram);
        // A process that has closed the port left data in the queue, and the next one is opening it.
        bench.send_control(PORT_OPEN, 0).unwrap();
        bench.ram.memory().write_slice(b"old", GuestAddress(DATA)).unwrap();
        bench.drivers[TX_QUEUE].push(&[readable(DATA, 3)]);
        bench.console.reconnect();
        bench.ram.memory().write_slice(&[0, 0, 0, 0, 6, 0, 1, 0], GuestAddress(CONTROL)).unwrap();
        bench.drivers[CONTROL_TX_QUEUE].push(&[readable(CONTROL, 8)]);
        bench.drivers[CONTROL_TX_QUEUE].take_used();

        // The driver waits for an answer before it writes, so no answer means no new data.
        bench.process(CONTROL_TX_QUEUE).unwrap();
        assert_eq!(bench.drivers[CONTROL_TX_QUEUE].take_used(), []);
        bench.run(CONTROL_TX_QUEUE).unwrap();
        assert_eq!(bench.drivers[CONTROL_TX_QUEUE].take_used().len(), 1);
        assert!(bench.console.guest_open());
        assert_eq!(bench.console.received(), 0);
        bench.write(b"new").unwrap();
        assert_eq!(bench.console.take(100), b"new");
    }

    #[test]
    fn reconnect_before_the_guest_is_there_does_nothing() {
        let ram = ram();
        let mut bench = Bench::new(&ram);
        bench.console.reconnect();
        bench.offer_control_buffer();
        bench.send_control(DEVICE_READY, 1).unwrap();
        assert_eq!(bench.received_control(), [(PORT_ADD, 1, vec![])]);
    }

    #[test]
    fn reconnecting_again_and_again_sends_nothing_more() {
        let ram = ram();
        let mut bench = Bench::opened(&ram);
        bench.send_control(PORT_OPEN, 0).unwrap();
        for _ in 0..100 {
            bench.console.reconnect();
            bench.run(TX_QUEUE).unwrap();
        }
        assert_eq!(bench.received_control(), []);
        bench.send_control(PORT_OPEN, 1).unwrap();
        assert!(bench.console.guest_open());
    }

    #[test]
    fn state_survives_saving() {
        let ram = ram();
        let mut bench = Bench::opened(&ram);
        bench.write(b"from guest").unwrap();
        bench.console.send(b"to guest");
        let state = bench.console.save();
        let json = serde_json::to_string(&state).unwrap();

        let mut restored = Console::restore(serde_json::from_str(&json).unwrap()).unwrap();

        assert_eq!(restored.save(), state);
        assert!(restored.guest_open());
        assert_eq!(restored.take(100), b"from guest");

        let mut inflated = state;
        inflated.from_guest = vec![0; BUFFER_BYTES + 1];
        assert!(matches!(Console::restore(inflated), Err(ConsoleError::State)));
    }
}

mod hostile {
    use super::*;

    fn console_error(result: Result<(), DeviceError>) -> ConsoleError {
        match result {
            Err(DeviceError::Console(error)) => error,
            other => panic!("{other:?} is not about the console"),
        }
    }

    #[test]
    fn v11_flood_stays_in_the_guests_queue() {
        let ram = ram();
        let mut bench = Bench::opened(&ram);
        let chunk = vec![1; 60 << 10];
        for _ in 0..32 {
            bench.write(&chunk).unwrap();
        }
        // Four chunks fit, the rest is the guest's to keep.
        assert_eq!(bench.console.received(), 4 * chunk.len());
        assert_eq!(bench.drivers[TX_QUEUE].take_used().len(), 4);

        bench.console.take(2 * chunk.len());
        bench.run(TX_QUEUE).unwrap();
        assert_eq!(bench.console.received(), 4 * chunk.len());
        assert!(bench.console.received() <= BUFFER_BYTES);
    }

    #[test]
    fn v11_chain_that_is_too_long_stops_the_port() {
        let ram = ram();
        let mut bench = Bench::opened(&ram);
        bench.drivers[TX_QUEUE].push(&[readable(DATA, MAX_CHAIN_BYTES + 1)]);
        assert!(matches!(console_error(bench.run(TX_QUEUE)), ConsoleError::LongChain(_)));
        assert_eq!(bench.process(TX_QUEUE).unwrap(), Outcome::default());
    }

    #[test]
    fn v11_flood_of_control_messages_is_held_back() {
        let ram = ram();
        let mut bench = Bench::new(&ram);
        for _ in 0..60 {
            bench.send_control(DEVICE_READY, 1).unwrap();
        }
        let waiting = bench.console.save().control.len();
        assert!(waiting <= 16, "{waiting} messages wait");
        assert!(bench.drivers[CONTROL_TX_QUEUE].take_used().len() <= 16);
        // With buffers for the answers, everything goes on.
        for _ in 0..60 {
            bench.offer_control_buffer();
        }
        bench.run(CONTROL_RX_QUEUE).unwrap();
        assert_eq!(bench.received_control().len(), 60);
    }

    #[test]
    fn v11_control_messages_that_make_no_sense_stop_the_device() {
        let ram = ram();
        let unknown = Bench::opened(&ram).send_control(9, 1);
        assert!(matches!(console_error(unknown), ConsoleError::UnknownControl(9)));
        let host_only = Bench::opened(&ram).send_control(PORT_ADD, 1);
        assert!(matches!(console_error(host_only), ConsoleError::UnknownControl(PORT_ADD)));
        let other_port = Bench::opened(&ram).send_control_about(1, PORT_OPEN, 1);
        assert!(matches!(console_error(other_port), ConsoleError::NoSuchPort(1)));

        let mut bench = Bench::opened(&ram);
        bench.drivers[CONTROL_TX_QUEUE].push(&[readable(CONTROL, 7)]);
        assert!(matches!(console_error(bench.run(CONTROL_TX_QUEUE)), ConsoleError::ShortControl(7)));
    }

    #[test]
    fn v11_buffers_without_room_stop_the_device() {
        let ram = ram();
        let mut bench = Bench::opened(&ram);
        bench.drivers[RX_QUEUE].push(&[readable(RX, 64)]);
        bench.console.send(b"x");
        assert!(matches!(console_error(bench.run(RX_QUEUE)), ConsoleError::SmallBuffer(0)));

        let mut bench = Bench::new(&ram);
        bench.drivers[CONTROL_RX_QUEUE].push(&[writable(CONTROL_BUFFERS, 7)]);
        assert!(matches!(console_error(bench.send_control(DEVICE_READY, 1)), ConsoleError::SmallBuffer(7)));
    }

    #[test]
    fn v3_data_outside_memory_stops_the_port() {
        let ram = ram();
        let mut bench = Bench::opened(&ram);
        bench.drivers[TX_QUEUE].push(&[readable(u64::MAX - 1, 16)]);
        let result = bench.run(TX_QUEUE);
        assert!(matches!(result, Err(DeviceError::Ring(RingError::Unmapped { .. }))));
    }

    #[test]
    fn v2_one_round_handles_at_most_one_queue_of_chains() {
        let ram = ram();
        let mut bench = Bench::opened(&ram);
        for _ in 0..64 {
            bench.drivers[TX_QUEUE].push(&[readable(DATA, 1)]);
        }
        let outcome = bench.process(TX_QUEUE).unwrap();
        assert_eq!(bench.drivers[TX_QUEUE].take_used().len(), 64);
        assert!(outcome.more);
        assert!(!bench.process(TX_QUEUE).unwrap().more);
    }

    #[test]
    fn there_is_no_fifth_queue() {
        let ram = ram();
        let mut bench = Bench::new(&ram);
        let outcome = bench.console.process(4, &mut bench.queues[0], ram.memory());
        assert!(matches!(outcome, Err(DeviceError::NoSuchQueue(4))));
    }
}
