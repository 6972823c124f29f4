//! Parses requests in guest memory. No number of the guest is trusted.

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID,
    VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

use super::{BlockError, ID_BYTES, MAX_RANGE_SECTORS, MAX_RANGES, MAX_REQUEST_BYTES, MAX_SEGMENTS, SECTOR};
use crate::memory::GuestMemory;
use crate::ring::{Chain, RingError};

/// The length of the header that starts every request.
pub(super) const HEADER_BYTES: u32 = 16;
const RANGE_BYTES: u32 = 16;

/// The one byte that ends every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Ok,
    Failed,
    Unsupported,
}

impl Status {
    pub(super) fn to_byte(self) -> u8 {
        let code = match self {
            Self::Ok => 0,
            Self::Failed => VIRTIO_BLK_S_IOERR,
            Self::Unsupported => VIRTIO_BLK_S_UNSUPP,
        };
        u8::try_from(code).unwrap_or(u8::MAX)
    }
}

/// A range of the disk, known to be inside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl Extent {
    /// The range of `bytes` bytes from `sector` on, if the disk has it.
    fn within(sectors: u64, sector: u64, bytes: u64) -> Option<Self> {
        let offset = sector.checked_mul(SECTOR)?;
        let end = offset.checked_add(bytes)?;
        (end <= sectors.checked_mul(SECTOR)?).then_some(Self { offset, bytes })
    }
}

/// One range of a discard or write-zeroes request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Clear {
    pub(super) offset: u64,
    pub(super) bytes: u64,
    /// The space may be given back to the host.
    pub(super) unmap: bool,
}

/// Ranges of a discard or write-zeroes request, all inside the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Clears {
    list: [Clear; MAX_RANGES as usize],
    count: usize,
}

impl Clears {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Clear> {
        self.list.iter().take(self.count)
    }
}

/// A request whose numbers have been checked against the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Read(Extent),
    Write(Extent),
    Flush,
    GetId,
    Discard(Clears),
    WriteZeroes(Clears),
    /// Something that is answered with a failure, and nothing else.
    Refused(Status),
}

/// What the host decided about the disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) sectors: u64,
    pub(super) read_only: bool,
}

/// Reads and checks the request in `chain`.
///
/// # Errors
/// When there is no whole header, or no byte for an answer.
pub(super) fn parse(chain: &Chain, mem: &GuestMemory, limits: Limits) -> Result<Request, ParseError> {
    if chain.writable_bytes() == 0 {
        return Err(BlockError::NoStatus.into());
    }
    let mut header = [0; HEADER_BYTES as usize];
    if chain.read(mem, 0, &mut header)? != header.len() {
        return Err(BlockError::NoHeader(chain.readable_bytes()).into());
    }
    let kind = u32_at(&header, 0);
    let sector = u64_at(&header, 8);
    let to_disk = chain.readable_bytes() - HEADER_BYTES;
    let to_guest = chain.writable_bytes() - 1;

    // The header and the status add two buffers to those of the data.
    let buffers = chain.readable().len() + chain.writable().len();
    let data = to_disk.saturating_add(to_guest);
    if buffers > MAX_SEGMENTS as usize + 2 || data > MAX_REQUEST_BYTES {
        return Ok(Request::Refused(Status::Failed));
    }

    let request = match kind {
        VIRTIO_BLK_T_IN => transfer(limits, sector, to_guest).map(Request::Read),
        VIRTIO_BLK_T_OUT if limits.read_only => None,
        VIRTIO_BLK_T_OUT => transfer(limits, sector, to_disk).map(Request::Write),
        VIRTIO_BLK_T_FLUSH => Some(Request::Flush),
        VIRTIO_BLK_T_GET_ID => (to_guest as usize >= ID_BYTES).then_some(Request::GetId),
        VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES if limits.read_only => None,
        VIRTIO_BLK_T_DISCARD => return clears(chain, mem, limits, 0, Request::Discard),
        VIRTIO_BLK_T_WRITE_ZEROES => {
            return clears(chain, mem, limits, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP, Request::WriteZeroes);
        }
        _ => Some(Request::Refused(Status::Unsupported)),
    };
    Ok(request.unwrap_or(Request::Refused(Status::Failed)))
}

fn transfer(limits: Limits, sector: u64, bytes: u32) -> Option<Extent> {
    let bytes = u64::from(bytes);
    if bytes == 0 || !bytes.is_multiple_of(SECTOR) {
        return None;
    }
    Extent::within(limits.sectors, sector, bytes)
}

fn clears(
    chain: &Chain,
    mem: &GuestMemory,
    limits: Limits,
    allowed_flags: u32,
    make: fn(Clears) -> Request,
) -> Result<Request, ParseError> {
    let bytes = chain.readable_bytes() - HEADER_BYTES;
    if bytes == 0 || !bytes.is_multiple_of(RANGE_BYTES) || bytes / RANGE_BYTES > MAX_RANGES {
        return Ok(Request::Refused(Status::Failed));
    }
    let mut raw = [0; (MAX_RANGES * RANGE_BYTES) as usize];
    let length = chain.read(mem, HEADER_BYTES, &mut raw)?;
    let mut found = Clears::default();
    for (slot, entry) in found.list.iter_mut().zip(raw.get(..length).unwrap_or_default().chunks_exact(16)) {
        let (sectors, flags) = (u32_at(entry, 8), u32_at(entry, 12));
        if flags & !allowed_flags != 0 {
            return Ok(Request::Refused(Status::Unsupported));
        }
        let extent = Extent::within(limits.sectors, u64_at(entry, 0), u64::from(sectors) * SECTOR);
        let (Some(Extent { offset, bytes }), true) = (extent, sectors <= MAX_RANGE_SECTORS) else {
            return Ok(Request::Refused(Status::Failed));
        };
        *slot = Clear { offset, bytes, unmap: flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 };
        found.count += 1;
    }
    Ok(make(found))
}

/// A request that cannot be answered.
#[derive(Debug)]
pub(super) enum ParseError {
    Ring(RingError),
    Block(BlockError),
}

impl From<RingError> for ParseError {
    fn from(error: RingError) -> Self {
        Self::Ring(error)
    }
}

impl From<BlockError> for ParseError {
    fn from(error: BlockError) -> Self {
        Self::Block(error)
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |raw| u32::from_le_bytes(*raw))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |raw| u64::from_le_bytes(*raw))
}
