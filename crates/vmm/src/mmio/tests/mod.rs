//! The transport against a driver that behaves like Linux, and against hostile ones. Here is the guest's side of the
//! registers: well-behaved by default, and as hostile as a test wants it.

mod ordinary;
mod race;
mod registers;
mod rings;
mod setup;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bathy_devices::block::{Block, BlockConfig};
use bathy_devices::console::{CONTROL_RX_QUEUE, CONTROL_TX_QUEUE, Console};
use bathy_devices::testing::{Driver, DriverBuffer, readable, writable};
use bathy_devices::{GuestMemory, GuestRam, Outcome, VirtioDevice};
use vm_memory::{Bytes, GuestAddress};

use super::{Effect, Interrupt, Mmio, MmioError};

const MAGIC: u64 = 0x00;
const VERSION: u64 = 0x04;
const DEVICE_ID: u64 = 0x08;
const DEVICE_FEATURES: u64 = 0x10;
const DEVICE_FEATURES_SEL: u64 = 0x14;
const DRIVER_FEATURES: u64 = 0x20;
const DRIVER_FEATURES_SEL: u64 = 0x24;
const QUEUE_SEL: u64 = 0x30;
const QUEUE_NUM_MAX: u64 = 0x34;
const QUEUE_NUM: u64 = 0x38;
const QUEUE_READY: u64 = 0x44;
const QUEUE_NOTIFY: u64 = 0x50;
const INTERRUPT_STATUS: u64 = 0x60;
const INTERRUPT_ACK: u64 = 0x64;
const STATUS: u64 = 0x70;
const QUEUE_DESC: u64 = 0x80;
const QUEUE_DRIVER: u64 = 0x90;
const QUEUE_DEVICE: u64 = 0xa0;
const SHM_LEN: u64 = 0xb0;
const QUEUE_RESET: u64 = 0xc0;
const CONFIG_GENERATION: u64 = 0xfc;
const CONFIG: u64 = 0x100;

const ACKNOWLEDGE: u32 = 1;
const DRIVER: u32 = 1 | 2;
const FEATURES_OK: u32 = 1 | 2 | 8;
const DRIVER_OK: u32 = 1 | 2 | 8 | 4;
const FAILED: u32 = 128;

const VERSION_1: u64 = 1 << 32;

const RAM: u64 = 4 << 20;
/// Where queues are, one after the other.
const QUEUES: u64 = 0x1000;
const QUEUE_BYTES: u64 = 0x4000;
const HEADER: u64 = 0x2_0000;
const ANSWER: u64 = 0x2_1000;
const DATA: u64 = 0x3_0000;

const SECTORS: u64 = 64;

/// What a block request asks for.
const IN: u32 = 0;
const OUT: u32 = 1;

/// A device and the guest that has it.
struct Guest<D> {
    ram: Arc<GuestRam>,
    mmio: Mmio<D>,
    interrupt: Arc<Interrupt>,
}

fn ram() -> Arc<GuestRam> {
    Arc::new(GuestRam::create(RAM).unwrap())
}

impl<D: VirtioDevice> Guest<D> {
    fn new(device: D, ram: &Arc<GuestRam>) -> Self {
        let interrupt = Arc::new(Interrupt::new().unwrap());
        let mmio = Mmio::new(device, Arc::clone(ram), Arc::clone(&interrupt)).unwrap();
        Self { ram: Arc::clone(ram), mmio, interrupt }
    }

    /// A device whose driver has done everything as Linux does it, with a queue for each of `drivers`.
    fn started(device: D, ram: &Arc<GuestRam>, drivers: &[Driver<'_>]) -> Self {
        let mut guest = Self::new(device, ram);
        guest.start(drivers);
        guest
    }

    fn get(&self, register: u64) -> u32 {
        let mut bytes = [0xee; 4];
        self.mmio.read(register, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn put(&mut self, register: u64, value: u32) -> Effect {
        self.mmio.write(register, &value.to_le_bytes())
    }

    /// Writes registers one after the other.
    fn put_all(&mut self, list: &[(u64, u32)]) {
        for (register, value) in list {
            let _ = self.put(*register, *value);
        }
    }

    fn offered(&mut self) -> u64 {
        self.put_all(&[(DEVICE_FEATURES_SEL, 1)]);
        let high = u64::from(self.get(DEVICE_FEATURES));
        self.put_all(&[(DEVICE_FEATURES_SEL, 0)]);
        high << 32 | u64::from(self.get(DEVICE_FEATURES))
    }

    fn accept(&mut self, features: u64) {
        let (low, high) = halves(features);
        self.put_all(&[(DRIVER_FEATURES_SEL, 1), (DRIVER_FEATURES, high)]);
        self.put_all(&[(DRIVER_FEATURES_SEL, 0), (DRIVER_FEATURES, low)]);
    }

    /// Everything up to the moment when queues can be set up, with all features.
    fn negotiate(&mut self) {
        let offered = self.offered();
        self.negotiate_for(offered);
        assert_eq!(self.get(STATUS), FEATURES_OK);
    }

    fn negotiate_for(&mut self, features: u64) {
        self.put_all(&[(STATUS, 0), (STATUS, ACKNOWLEDGE), (STATUS, DRIVER)]);
        self.accept(features);
        self.put_all(&[(STATUS, FEATURES_OK)]);
    }

    /// Writes a queue's size and addresses.
    fn describe(&mut self, queue: u32, size: u32, rings: [u64; 3]) {
        self.put_all(&[(QUEUE_SEL, queue), (QUEUE_NUM, size)]);
        for (register, address) in [QUEUE_DESC, QUEUE_DRIVER, QUEUE_DEVICE].into_iter().zip(rings) {
            let (low, high) = halves(address);
            self.put_all(&[(register, low), (register + 4, high)]);
        }
    }

    fn set_up(&mut self, queue: u32, driver: &Driver<'_>) {
        assert_eq!(self.get(QUEUE_READY), 0);
        self.describe(queue, size_of(driver), rings_of(driver));
        self.put_all(&[(QUEUE_READY, 1)]);
        assert_eq!(self.get(QUEUE_READY), 1);
    }

    fn start(&mut self, drivers: &[Driver<'_>]) {
        self.negotiate();
        for (queue, driver) in (0..).zip(drivers) {
            self.put_all(&[(QUEUE_SEL, queue)]);
            self.set_up(queue, driver);
        }
        assert_eq!(self.put(STATUS, DRIVER_OK), Effect::Work);
        self.mmio.service().unwrap();
    }

    /// Notifies a queue by its register, and does what the event loop does then.
    fn kick(&mut self, queue: u32) -> Result<Outcome, MmioError> {
        match self.put(QUEUE_NOTIFY, queue) {
            Effect::Kick(queue) => self.mmio.on_kick(queue),
            Effect::Work => self.mmio.service(),
            Effect::None => Ok(Outcome::default()),
        }
    }

    /// Expects an error now, and silence ever after, whatever the driver does.
    fn stops_once(&mut self, queue: u32) -> MmioError {
        let error = self.kick(queue).unwrap_err();
        assert!(self.mmio.is_ended());
        let before = self.mmio.save();
        assert_eq!(self.kick(queue).unwrap(), Outcome::default());
        assert_eq!(self.mmio.on_kick(0).unwrap(), Outcome::default());
        assert_eq!(self.mmio.service().unwrap(), Outcome::default());
        assert_eq!(self.put(STATUS, 0), Effect::None);
        assert_eq!(self.mmio.save(), before);
        error
    }

    /// How many edges the interrupt line has had since the last call.
    fn edges(&self) -> u64 {
        self.interrupt.line().read().unwrap_or(0)
    }

    fn mem(&self) -> &GuestMemory {
        self.ram.memory()
    }
}

fn halves(whole: u64) -> (u32, u32) {
    let [a, b, c, d, e, f, g, h] = whole.to_le_bytes();
    (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]))
}

fn rings_of(driver: &Driver<'_>) -> [u64; 3] {
    [driver.descriptor_table(), driver.available_ring(), driver.used_ring()]
}

fn size_of(driver: &Driver<'_>) -> u32 {
    u32::try_from((driver.available_ring() - driver.descriptor_table()) / 16).unwrap()
}

fn drivers(ram: &GuestRam, count: u64, size: u16) -> Vec<Driver<'_>> {
    (0..count).map(|i| Driver::new(ram.memory(), QUEUES + QUEUE_BYTES * i, size)).collect()
}

/// A disk of [`SECTORS`] sectors, and its file.
fn disk(config: BlockConfig) -> (Block, File) {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&content(), 0).unwrap();
    (Block::new(file.try_clone().unwrap(), config).unwrap(), file)
}

fn content() -> Vec<u8> {
    (0..SECTORS * 512).map(|i| u8::try_from((i / 512 + i) % 251).unwrap()).collect()
}

fn bytes_of(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// The buffers of a block request, whose header is written to memory.
fn block_request(mem: &GuestMemory, kind: u32, sector: u64, data: &[DriverBuffer]) -> Vec<DriverBuffer> {
    mem.write_obj(kind.to_le(), GuestAddress(HEADER)).unwrap();
    mem.write_obj(sector.to_le(), GuestAddress(HEADER + 8)).unwrap();
    mem.write_obj(0xaa_u8, GuestAddress(ANSWER)).unwrap();
    [&[readable(HEADER, 16)], data, &[writable(ANSWER, 1)]].concat()
}

/// A console whose port a guest process has open.
fn open_console(ram: &Arc<GuestRam>, drivers: &mut [Driver<'_>]) -> Guest<Console> {
    let mut guest = Guest::started(Console::new(), ram, drivers);
    for _ in 0..8 {
        drivers[CONTROL_RX_QUEUE].push(&[writable(HEADER, 64)]);
    }
    for event in [0_u8, 3, 6] {
        ram.memory().write_slice(&[0, 0, 0, 0, event, 0, 1, 0], GuestAddress(ANSWER)).unwrap();
        drivers[CONTROL_TX_QUEUE].push(&[readable(ANSWER, 8)]);
        guest.kick(u32::try_from(CONTROL_TX_QUEUE).unwrap()).unwrap();
    }
    assert!(guest.mmio.device().guest_open());
    guest
}
