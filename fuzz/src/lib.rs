//! What the fuzz targets share: turning bytes into hostile guests.
//!
//! A target reads its input as a little program. Numbers that matter (addresses, lengths, queue indices) are drawn so
//! that the interesting ones are likely: inside memory, just at its end, and at the ends of their types.

pub mod block;
pub mod console;
pub mod mmio;
pub mod net;

use std::cell::OnceCell;
use std::sync::Arc;

use bathy_devices::GuestRam;
use bathy_devices::testing::{Driver, DriverBuffer};
use vm_memory::{Bytes, GuestAddress};

/// How much memory the guests of the fuzz targets have.
pub const RAM: u64 = 64 << 10;

/// Where memory goes on, in guests whose memory has a hole behind the first [`RAM`] bytes.
pub const ABOVE: u64 = 128 << 10;

/// The most steps that one input is read for.
pub const MAX_STEPS: usize = 200;

/// The input, read from its start; zeros when it has ended.
pub struct Input<'a> {
    bytes: &'a [u8],
}

impl<'a> Input<'a> {
    /// Reads from `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    /// Whether everything was read.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The next bytes, at most `count`.
    pub fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.bytes.split_at(count.min(self.bytes.len()));
        self.bytes = rest;
        taken
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let taken = self.take(N);
        out[..taken.len()].copy_from_slice(taken);
        out
    }

    /// One byte.
    pub fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    /// Two bytes.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// Four bytes.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// One of `choices`.
    pub fn choose<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::from(self.u8()) % choices.len()]
    }

    /// An address, mostly in memory.
    pub fn address(&mut self) -> u64 {
        match self.u8() {
            0..200 => self.u16().into(),
            200..220 => RAM.wrapping_sub(self.u8().into()),
            220..230 => RAM.wrapping_add(self.u8().into()),
            230..235 => u64::MAX - u64::from(self.u8()),
            235..240 => ABOVE - 16 + u64::from(self.u16()),
            _ => self.u64(),
        }
    }

    /// A length, mostly short.
    pub fn length(&mut self) -> u32 {
        match self.u8() {
            0..60 => self.u8().into(),
            60..120 => u32::from(self.u8()) * 16,
            120..180 => u32::from(self.u8()) * 512,
            180..220 => self.choose(&[0, 1, 8, 15, 16, 17, 20, 511, 512, 513, 4096]),
            220..230 => u32::MAX - u32::from(self.u8()),
            _ => self.u32(),
        }
    }

    /// One buffer of a chain.
    pub fn part(&mut self) -> DriverBuffer {
        let kind = self.u8();
        DriverBuffer { address: self.address(), length: self.length(), writable: kind & 1 != 0 }
    }

    /// Up to five buffers, readable ones first more often than not.
    pub fn parts(&mut self) -> Vec<DriverBuffer> {
        let shape = self.u8();
        let mut parts: Vec<DriverBuffer> = (0..1 + shape % 5).map(|_| self.part()).collect();
        if shape & 0x80 == 0 {
            parts.sort_by_key(|part| part.writable);
        }
        parts
    }
}

/// Guest memory, zeroed. It is made once, because mapping it anew would take longer than all the rest.
pub fn ram() -> Arc<GuestRam> {
    thread_local! {
        static MEMORY: OnceCell<Arc<GuestRam>> = const { OnceCell::new() };
    }
    let ram =
        MEMORY.with(|cell| Arc::clone(cell.get_or_init(|| Arc::new(GuestRam::create(RAM).expect("memory")))));
    let zeros = [0; RAM as usize];
    ram.memory().write_slice(&zeros, GuestAddress(0)).expect("inside memory");
    ram
}

/// Lets a driver do one thing to its queue, well-formed or not.
pub fn drive(input: &mut Input<'_>, ram: &GuestRam, driver: &mut Driver<'_>) {
    match input.u8() % 8 {
        0..4 => {
            driver.push(&input.parts());
        }
        4 => {
            let (index, part) = (u16::from(input.u8() % 16), input.part());
            driver.write_descriptor(index, part, input.u16(), input.u16() % 18);
        }
        5 => driver.publish(input.u16() % 18),
        6 => driver.set_available(input.u16()),
        _ => {
            let (address, bytes) = (input.u16(), input.take(16));
            let _ = ram.memory().write_slice(bytes, GuestAddress(address.into()));
        }
    }
}
