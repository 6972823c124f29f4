//! The disk itself: executing requests on the file.

use std::io;
use std::time::Duration;

use rustix::fs::{FallocateFlags, fallocate, fdatasync};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use virtio_queue::Queue;
use vm_memory::GuestMemoryBackend;

use super::backing::{Backing, Data, Parts};
use super::request::{Clears, Extent, HEADER_BYTES, Limits, ParseError, Request, Status, parse};
use super::throttle::{Charge, Throttle};
use super::{
    BlockConfig, BlockError, BlockLimits, ID_BYTES, MAX_RANGE_SECTORS, MAX_RANGES, MAX_SEGMENT_BYTES,
    MAX_SEGMENTS, SECTOR,
};
use crate::bucket::Clock;
use crate::device::{DeviceError, Outcome, TRANSPORT_FEATURES, VirtioDevice, read_space};
use crate::memory::GuestMemory;
use crate::ring::{Buffer, Chain, Ring, RingError, pieces, run_round};
use crate::sys::Pieces;

/// After this much data the device lets others work before it goes on.
const ROUND_BYTES: u64 = 16 << 20;

/// What a request counts for besides its data where it makes the host work: few of them are done before others have
/// their turn.
const FLUSH_COST: u64 = ROUND_BYTES / 4;
const RANGE_COST: u64 = ROUND_BYTES / 64;

/// The alignment of discards that the driver is asked for: the pages that the host's file systems free.
const DISCARD_ALIGNMENT: u32 = 8;

/// Files as a disk.
#[derive(Debug)]
pub struct Block {
    pub(super) data: Data,
    pub(super) config: BlockConfig,
    pub(super) sectors: u64,
    pub(super) acked_features: u64,
    pub(super) host_error: Option<io::ErrorKind>,
    pub(super) host_errors: u64,
    pub(super) traffic: Traffic,
    pub(super) throttle: Throttle,
    pub(super) chain: Chain,
}

/// How much a disk has moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Bytes that the guest read from the disk.
    pub read: u64,
    /// Bytes that the guest wrote to the disk.
    pub written: u64,
}

impl Block {
    /// Makes a disk of a file or of several. It has the size that they have now.
    ///
    /// # Errors
    /// When the files do not fit what the configuration asks for.
    pub fn new(backing: impl Into<Backing>, config: BlockConfig) -> Result<Self, BlockError> {
        if config.id.len() > ID_BYTES {
            return Err(BlockError::LongId(config.id));
        }
        let (data, bytes) = Data::new(backing.into(), config.read_only)?;
        Ok(Self {
            data,
            throttle: Throttle::new(config.limits),
            config,
            sectors: bytes / SECTOR,
            acked_features: 0,
            host_error: None,
            host_errors: 0,
            traffic: Traffic::default(),
            chain: Chain::new(),
        })
    }

    /// Measures the limits by `clock`, from full buckets on.
    #[must_use]
    pub fn with_clock(mut self, clock: Clock) -> Self {
        self.throttle = Throttle::with_clock(self.config.limits, clock);
        self
    }

    /// Takes all limits off, for good; requests that wait are done with the next round of work.
    pub fn lift_limits(&mut self) {
        self.config.limits = BlockLimits::default();
        self.throttle = Throttle::new(self.config.limits);
    }

    /// The latest error of the host's that made a request fail, if there was one since the last call. The guest saw
    /// an I/O error; the host may want to report that its disk is full.
    pub fn take_host_error(&mut self) -> Option<io::ErrorKind> {
        self.host_error.take()
    }

    /// How much was asked of the disk since it was made.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// How many bytes the disk's files occupy on the host.
    pub fn occupied(&self) -> u64 {
        self.data.occupied()
    }

    /// How many requests failed because of the host.
    pub fn host_errors(&self) -> u64 {
        self.host_errors
    }

    fn limits(&self) -> Limits {
        Limits { sectors: self.sectors, read_only: self.config.read_only }
    }

    /// Carries requests out; returns how long to wait when a limit is reached.
    fn work(&mut self, ring: &mut Ring<'_>, chain: &mut Chain) -> Result<Option<Duration>, DeviceError> {
        let mut left = ROUND_BYTES;
        self.throttle.refill();
        while ring.pop(chain)? {
            let request = match parse(chain, ring.mem(), self.limits()) {
                Ok(request) => request,
                Err(ParseError::Ring(error)) => return Err(error.into()),
                Err(ParseError::Block(error)) => return Err(error.into()),
            };
            let cost = self.cost(&request);
            if let Err(wait) = self.throttle.admit(self.charge(&request, cost)) {
                // Parsed anew when its time has come: until then the guest may change it.
                ring.put_back();
                return Ok(Some(wait));
            }
            let (status, written) = self.execute(request, chain, ring.mem())?;
            // The status is the last byte of the last writable buffer, wherever the data ended.
            let status_at = chain.writable_bytes() - 1;
            chain.write(ring.mem(), status_at, &[status.to_byte()])?;
            ring.complete(chain, written + 1)?;

            let data = u64::from(chain.readable_bytes()) + u64::from(chain.writable_bytes());
            left = left.saturating_sub(data.saturating_add(cost));
            if left == 0 {
                ring.cut_short();
                break;
            }
        }
        Ok(None)
    }

    /// What it takes of the disk's limits.
    fn charge(&self, request: &Request, cost: u64) -> Charge {
        match request {
            Request::Read(extent) => Charge::Read(extent.bytes),
            Request::Write(extent) => Charge::Write(extent.bytes),
            Request::Discard(_) | Request::WriteZeroes(_) => Charge::Write(cost),
            Request::Flush if self.is_durable() => Charge::Flush,
            Request::Flush | Request::GetId | Request::Refused(_) => Charge::Nothing,
        }
    }

    /// What it counts for besides its data.
    fn cost(&self, request: &Request) -> u64 {
        match request {
            Request::Flush if self.is_durable() => FLUSH_COST,
            Request::Discard(list) | Request::WriteZeroes(list) => {
                list.iter().fold(0, |cost, _| cost.saturating_add(RANGE_COST))
            }
            _ => 0,
        }
    }

    /// Whether what was written has to outlive the sandbox.
    fn is_durable(&self) -> bool {
        !self.config.volatile && !self.config.read_only
    }

    /// Carries a request out; returns its status and how many bytes of data were put into guest memory.
    fn execute(
        &mut self,
        request: Request,
        chain: &Chain,
        mem: &GuestMemory,
    ) -> Result<(Status, u32), RingError> {
        let result = match request {
            Request::Refused(status) => return Ok((status, 0)),
            Request::Read(extent) => {
                self.traffic.read = self.traffic.read.saturating_add(extent.bytes);
                self.read(extent, chain, mem)?
            }
            Request::Write(extent) => {
                self.traffic.written = self.traffic.written.saturating_add(extent.bytes);
                self.write(extent, chain, mem)?
            }
            Request::Flush => self.flush().map(|()| 0),
            Request::GetId => {
                let mut id = [0; ID_BYTES];
                for (to, from) in id.iter_mut().zip(self.config.id.bytes()) {
                    *to = from;
                }
                chain.write(mem, 0, &id)?;
                Ok(u32::try_from(ID_BYTES).unwrap_or(0))
            }
            Request::Discard(list) => self.discard(&list).map(|()| 0),
            Request::WriteZeroes(list) => self.write_zeroes(&list).map(|()| 0),
        };
        Ok(match result {
            Ok(written) => (Status::Ok, written),
            Err(error) if error.kind() == io::ErrorKind::Unsupported => (Status::Unsupported, 0),
            Err(error) => {
                self.host_error = Some(error.kind());
                self.host_errors = self.host_errors.saturating_add(1);
                (Status::Failed, 0)
            }
        })
    }

    fn read(&self, extent: Extent, chain: &Chain, mem: &GuestMemory) -> Result<io::Result<u32>, RingError> {
        match &self.data {
            Data::File(file) => {
                let Some((mut memory, length)) = collect(mem, chain.writable(), 0, extent.bytes)? else {
                    return Ok(Err(io::ErrorKind::InvalidInput.into()));
                };
                Ok(memory.read_from(file, extent.offset).map(|()| length))
            }
            Data::Parts(parts) => read_parts(parts, extent, chain, mem),
        }
    }

    fn write(&self, extent: Extent, chain: &Chain, mem: &GuestMemory) -> Result<io::Result<u32>, RingError> {
        let Some((mut memory, _)) = collect(mem, chain.readable(), HEADER_BYTES, extent.bytes)? else {
            return Ok(Err(io::ErrorKind::InvalidInput.into()));
        };
        Ok(self.data.file().and_then(|file| memory.write_to(file, extent.offset)).map(|()| 0))
    }

    fn flush(&self) -> io::Result<()> {
        if self.is_durable() { Ok(fdatasync(self.data.file()?)?) } else { Ok(()) }
    }

    /// Gives space back. Discarding is a hint, so a host file system that cannot do it is no failure.
    fn discard(&self, list: &Clears) -> io::Result<()> {
        for clear in list.iter().filter(|clear| clear.bytes > 0) {
            match self.fallocate(FallocateFlags::PUNCH_HOLE, clear.offset, clear.bytes) {
                Ok(()) | Err(Errno::OPNOTSUPP) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn write_zeroes(&self, list: &Clears) -> io::Result<()> {
        for clear in list.iter().filter(|clear| clear.bytes > 0) {
            let first = if clear.unmap { FallocateFlags::PUNCH_HOLE } else { FallocateFlags::ZERO_RANGE };
            match self.fallocate(first, clear.offset, clear.bytes) {
                // A hole reads as zeros too; where neither works, the driver writes the zeros itself.
                Err(Errno::OPNOTSUPP) => {
                    self.fallocate(FallocateFlags::PUNCH_HOLE, clear.offset, clear.bytes)?
                }
                result => result?,
            }
        }
        Ok(())
    }

    fn fallocate(&self, mode: FallocateFlags, offset: u64, bytes: u64) -> rustix::io::Result<()> {
        let file = self.data.file().map_err(|_| Errno::ROFS)?;
        loop {
            match fallocate(file, mode | FallocateFlags::KEEP_SIZE, offset, bytes) {
                Err(Errno::INTR) => {}
                result => return result,
            }
        }
    }
}

/// Reads what may be in several files. A part that became shorter since the disk was made is an error of the host's.
fn read_parts(
    parts: &Parts,
    extent: Extent,
    chain: &Chain,
    mem: &GuestMemory,
) -> Result<io::Result<u32>, RingError> {
    let mut done = 0_u32;
    for run in parts.runs(extent) {
        let length = match run.source {
            Some((file, offset)) => {
                let Some((mut memory, length)) = collect(mem, chain.writable(), done, run.bytes)? else {
                    return Ok(Err(io::ErrorKind::InvalidInput.into()));
                };
                if let Err(error) = memory.read_from(file, offset) {
                    return Ok(Err(error));
                }
                length
            }
            None => zero(chain, mem, done, run.bytes)?,
        };
        done = done.saturating_add(length);
    }
    Ok(Ok(done))
}

/// Writes `bytes` zeros; returns how many that are.
fn zero(chain: &Chain, mem: &GuestMemory, offset: u32, bytes: u64) -> Result<u32, RingError> {
    const ZEROS: [u8; 4096] = [0; 4096];
    let length = u32::try_from(bytes).unwrap_or(u32::MAX);
    let mut done = 0;
    while done < length {
        let count = ZEROS.len().min((length - done) as usize);
        match chain.write(mem, offset.saturating_add(done), ZEROS.get(..count).unwrap_or(&ZEROS))? {
            0 => break,
            written => done = done.saturating_add(u32::try_from(written).unwrap_or(u32::MAX)),
        }
    }
    Ok(length)
}

/// The pieces of guest memory for `bytes` bytes of data, or `None` when they are too many for one system call.
fn collect<'mem>(
    mem: &'mem GuestMemory,
    buffers: &[Buffer],
    offset: u32,
    bytes: u64,
) -> Result<Option<(Pieces<'mem>, u32)>, RingError> {
    let Ok(length) = u32::try_from(bytes) else { return Ok(None) };
    let mut found = Pieces::new();
    for piece in pieces(buffers, offset, length) {
        for slice in mem.get_slices(piece.address, piece.length as usize) {
            if !found.push(&slice.map_err(RingError::Memory)?) {
                return Ok(None);
            }
        }
    }
    Ok((found.remaining() as u64 == bytes).then_some((found, length)))
}

impl VirtioDevice for Block {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn features(&self) -> u64 {
        let common = TRANSPORT_FEATURES
            | 1 << VIRTIO_BLK_F_SIZE_MAX
            | 1 << VIRTIO_BLK_F_SEG_MAX
            | 1 << VIRTIO_BLK_F_BLK_SIZE
            | 1 << VIRTIO_BLK_F_FLUSH;
        if self.config.read_only {
            common | 1 << VIRTIO_BLK_F_RO
        } else {
            common | 1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES
        }
    }

    fn set_features(&mut self, acked: u64) {
        self.acked_features = acked;
    }

    fn queue_count(&self) -> usize {
        1
    }

    fn read_config(&self, offset: u32, out: &mut [u8]) {
        // struct virtio_blk_config; fields of features that are not offered stay zero.
        let mut space = [0; 60];
        let fields: [(usize, u32); 8] = [
            (8, MAX_SEGMENT_BYTES),
            (12, MAX_SEGMENTS),
            (20, 512),
            (36, MAX_RANGE_SECTORS),
            (40, MAX_RANGES),
            (44, DISCARD_ALIGNMENT),
            (48, MAX_RANGE_SECTORS),
            (52, MAX_RANGES),
        ];
        for (at, byte) in self.sectors.to_le_bytes().into_iter().enumerate() {
            space[at] = byte;
        }
        for (start, value) in fields {
            for (at, byte) in value.to_le_bytes().into_iter().enumerate() {
                space[start + at] = byte;
            }
        }
        const WRITE_ZEROES_MAY_UNMAP: usize = 56;
        space[WRITE_ZEROES_MAY_UNMAP] = 1;
        read_space(&space, offset, out);
    }

    fn process(
        &mut self,
        index: usize,
        queue: &mut Queue,
        mem: &GuestMemory,
    ) -> Result<Outcome, DeviceError> {
        if index != 0 {
            return Err(DeviceError::NoSuchQueue(index));
        }
        let mut chain = std::mem::take(&mut self.chain);
        let mut retry_after = None;
        let outcome = run_round(queue, mem, |ring| {
            retry_after = self.work(ring, &mut chain)?;
            Ok(())
        });
        self.chain = chain;
        Ok(Outcome { retry_after, ..outcome? })
    }

    fn reset(&mut self) {
        // What was used up of the limits stays used up: a guest can reset its disk as often as it likes.
        self.acked_features = 0;
    }
}
