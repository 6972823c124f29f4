//! The block device against well-behaved and hostile drivers.

mod host;
mod hostile;
mod limits;
mod ordinary;
mod parts;
mod state;

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

use vm_memory::{Bytes, GuestAddress};

use super::{Block, BlockConfig, BlockError, BlockState, ID_BYTES, MAX_RANGE_SECTORS, MAX_SEGMENTS};
use crate::testing::{Driver, DriverBuffer, readable, writable};
use crate::{DeviceError, GuestMemory, GuestRam, Outcome, Queue, VirtioDevice};

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPPORTED: u8 = 2;
/// What the status byte holds before the device has answered.
const UNANSWERED: u8 = 0xaa;

const RAM: u64 = 4 << 20;
const QUEUE: u64 = 0x1000;
const HEADER: u64 = 0x10000;
const STATUS: u64 = 0x11000;
const DATA: u64 = 0x20000;
const SECTORS: u64 = 64;

/// A disk of [`SECTORS`] sectors whose bytes are all different from their neighbours.
fn pattern() -> Vec<u8> {
    (0..SECTORS * 512).map(|i| u8::try_from((i / 512 + i) % 251).unwrap()).collect()
}

fn disk_file() -> File {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&pattern(), 0).unwrap();
    file
}

struct Bench<'mem> {
    mem: &'mem GuestMemory,
    driver: Driver<'mem>,
    queue: Queue,
    file: File,
    block: Block,
}

impl<'mem> Bench<'mem> {
    fn new(ram: &'mem GuestRam) -> Self {
        Self::with(ram, BlockConfig { id: "disk".into(), ..BlockConfig::default() })
    }

    fn with(ram: &'mem GuestRam, config: BlockConfig) -> Self {
        let file = disk_file();
        let block = Block::new(file.try_clone().unwrap(), config).unwrap();
        let driver = Driver::new(ram.memory(), QUEUE, 256);
        let queue = driver.device_queue();
        Self { mem: ram.memory(), driver, queue, file, block }
    }

    fn header(&self, kind: u32, sector: u64) -> DriverBuffer {
        self.mem.write_obj(kind.to_le(), GuestAddress(HEADER)).unwrap();
        self.mem.write_obj(sector.to_le(), GuestAddress(HEADER + 8)).unwrap();
        self.mem.write_obj(UNANSWERED, GuestAddress(STATUS)).unwrap();
        readable(HEADER, 16)
    }

    fn push(&mut self, kind: u32, sector: u64, data: &[DriverBuffer]) {
        let header = self.header(kind, sector);
        let parts: Vec<DriverBuffer> = [&[header], data, &[writable(STATUS, 1)]].concat();
        self.driver.push(&parts);
    }

    fn process(&mut self) -> Result<Outcome, DeviceError> {
        self.block.process(0, &mut self.queue, self.mem)
    }

    /// Makes one request, and returns its status and the length in the used ring.
    fn request(&mut self, kind: u32, sector: u64, data: &[DriverBuffer]) -> (u8, u32) {
        self.push(kind, sector, data);
        self.process().unwrap();
        let used = self.driver.take_used();
        assert_eq!(used.len(), 1);
        (self.mem.read_obj(GuestAddress(STATUS)).unwrap(), used[0].1)
    }

    fn guest_bytes(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.mem.read_slice(&mut bytes, GuestAddress(address)).unwrap();
        bytes
    }

    fn file_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(self.file.metadata().unwrap().len()).unwrap()];
        self.file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// Writes the payload of a discard or write-zeroes request to guest memory.
    fn ranges(&self, list: &[(u64, u32, u32)]) -> DriverBuffer {
        let mut raw = Vec::new();
        for (sector, sectors, flags) in list {
            raw.extend_from_slice(&sector.to_le_bytes());
            raw.extend_from_slice(&sectors.to_le_bytes());
            raw.extend_from_slice(&flags.to_le_bytes());
        }
        self.mem.write_slice(&raw, GuestAddress(DATA)).unwrap();
        readable(DATA, u32::try_from(raw.len()).unwrap())
    }

    /// Expects an error now, and silence ever after.
    fn stops_once(&mut self) -> DeviceError {
        let error = self.process().unwrap_err();
        assert_eq!(self.process().unwrap(), Outcome::default());
        error
    }
}

fn ram() -> GuestRam {
    GuestRam::create(RAM).unwrap()
}
