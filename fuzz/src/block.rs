//! A disk, and requests to it that are likely to get past the first checks.

use std::cell::OnceCell;
use std::fs::File;
use std::os::unix::fs::FileExt;

use bathy_devices::GuestMemory;
use bathy_devices::block::{Block, BlockConfig, BlockLimits};
use bathy_devices::testing::{Driver, DriverBuffer, readable, writable};
use rustix::fs::{MemfdFlags, memfd_create};
use vm_memory::{Bytes, GuestAddress};

use crate::Input;

const SECTORS: u64 = 16;
const CONTENT: [u8; (SECTORS * 512) as usize] = [0x5a; (SECTORS * 512) as usize];

/// Below the rings, so that a request seldom destroys them by accident.
const HEADER: u64 = 0x100;

fn file() -> File {
    thread_local! {
        static DISK: OnceCell<File> = const { OnceCell::new() };
    }
    let make = || File::from(memfd_create("disk", MemfdFlags::CLOEXEC).expect("a memory file"));
    let file = DISK.with(|cell| cell.get_or_init(make).try_clone().expect("a descriptor"));
    file.write_all_at(&CONTENT, 0).expect("the disk can be written");
    file
}

/// The disk's file, whatever becomes of the device.
pub struct Disk {
    file: File,
    read_only: bool,
}

impl Disk {
    /// Makes a disk of the kind that the input says.
    pub fn new(input: &mut Input<'_>) -> (Self, Block) {
        let file = file();
        let kind = input.u8();
        let read_only = kind & 1 != 0;
        // Small limits, so that queues are put back and taken up again.
        let limits = if kind & 4 == 0 {
            BlockLimits::default()
        } else {
            BlockLimits { write_bandwidth: Some(1), read_bandwidth: Some(1), flushes: Some(1) }
        };
        let config = BlockConfig { read_only, volatile: kind & 2 != 0, id: "fuzz".into(), limits };
        let block = Block::new(file.try_clone().expect("a descriptor"), config).expect("a disk");
        (Self { file, read_only }, block)
    }

    /// Whatever was asked, the disk keeps its size, and a read-only one its content.
    pub fn check(self, block: &mut Block) {
        assert_eq!(self.file.metadata().expect("the disk's size").len(), SECTORS * 512);
        if self.read_only {
            let mut now = [0; CONTENT.len()];
            self.file.read_exact_at(&mut now, 0).expect("the disk can be read");
            assert!(now == CONTENT, "a read-only disk was changed");
        }
        assert_eq!(block.host_errors(), 0, "{:?}", block.take_host_error());
        assert!(Block::restore(self.file, block.save()).is_ok());
    }
}

/// A request that is likely to get past the first checks.
pub fn push_request(input: &mut Input<'_>, mem: &GuestMemory, driver: &mut Driver<'_>) {
    let kind = match input.u8() {
        0..240 => input.choose(&[0_u32, 1, 4, 8, 11, 13]),
        _ => input.u32(),
    };
    let sector = match input.u8() {
        0..200 => u64::from(input.u8() % 18),
        200..220 => u64::MAX / 512 + u64::from(input.u8()),
        _ => input.u64(),
    };
    mem.write_obj(kind, GuestAddress(HEADER)).expect("inside memory");
    mem.write_obj(sector, GuestAddress(HEADER + 8)).expect("inside memory");
    let ranges = input.u8() % 20;
    for i in 0..u64::from(ranges) {
        let (sector, sectors, flags) =
            (u64::from(input.u8() % 18), input.length() / 16, u32::from(input.u8() % 3));
        let at = HEADER + 16 + 16 * i;
        mem.write_obj(sector, GuestAddress(at)).expect("inside memory");
        mem.write_obj([sectors, flags], GuestAddress(at + 8)).expect("inside memory");
    }
    let mut parts = vec![readable(HEADER, 16)];
    match kind {
        11 | 13 => parts.push(readable(HEADER + 16, 16 * u32::from(ranges))),
        _ => parts.extend((0..input.u8() % 4).map(|_| DriverBuffer { writable: kind != 1, ..input.part() })),
    }
    parts.push(writable(0xf000, 1));
    driver.push(&parts);
}
