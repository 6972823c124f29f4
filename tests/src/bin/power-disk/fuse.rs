//! As much of the FUSE protocol as it takes to serve one file, which is the root of its file system.

use std::fs::File;
use std::io::{self, Read, Write};

use rustix::io::Errno;

use crate::disk::{Disk, SECTOR};

/// The largest read or write.
const MOST: usize = 1 << 20;
const PAGE: usize = 4096;
/// The size of what precedes the data of a write: the request's header and the write's own.
const REQUEST: usize = 40;
const WRITE: usize = 40;
/// The size of a request's buffer.
pub const BUFFER: usize = MOST + PAGE;

const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ_DATA: u32 = 15;
const WRITE_DATA: u32 = 16;
const RELEASE: u32 = 18;
const FSYNC: u32 = 20;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const DESTROY: u32 = 38;
/// Requests that have no answer: FORGET, INTERRUPT, BATCH_FORGET.
const SILENT: [u32; 3] = [2, 36, 42];

/// The version of the protocol that this is.
const VERSION: (u32, u32) = (7, 31);
const BIG_WRITES: u32 = 1 << 5;
const MAX_PAGES: u32 = 1 << 22;
/// The file's content bypasses the host's page cache: every write of the loop device is one request, and is acknowledged when
/// it was answered.
const DIRECT_IO: u32 = 1 << 0;

struct Request<'buffer> {
    operation: u32,
    unique: u64,
    body: &'buffer [u8],
}

/// The state of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It has not been mounted yet.
    New,
    /// It is mounted, and no request is pending.
    Mounted,
    Unmounted,
}

/// Answers the pending requests.
pub fn serve(device: &File, disk: &mut Disk, buffer: &mut [u8]) -> io::Result<State> {
    loop {
        let length = match (&*device).read(buffer) {
            Ok(length) => length,
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::AGAIN) => return Ok(State::Mounted),
                // A request that was cancelled before it was read.
                Some(Errno::NOENT | Errno::INTR) => continue,
                // With a request that the end of the file system has cancelled, it is the other one.
                Some(Errno::NODEV | Errno::CONNABORTED) => return Ok(State::Unmounted),
                Some(Errno::PERM) => return Ok(State::New),
                _ => return Err(error),
            },
        };
        let request = parse(buffer.get(..length).unwrap_or_default())?;
        if SILENT.contains(&request.operation) {
            continue;
        }
        let reply = reply(request.unique, answer(&request, disk));
        match (&*device).write(&reply) {
            Ok(_) => {}
            // The requester no longer waits.
            Err(error) if Errno::from_io_error(&error) == Some(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
    }
}

fn parse(bytes: &[u8]) -> io::Result<Request<'_>> {
    let body = bytes.get(REQUEST..).ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok(Request { operation: u32_at(bytes, 4)?, unique: u64_at(bytes, 8)?, body })
}

fn answer(request: &Request<'_>, disk: &mut Disk) -> io::Result<Vec<u8>> {
    let body = request.body;
    match request.operation {
        INIT => Ok(greeting()),
        GETATTR => Ok(attributes(disk.size())),
        OPEN => Ok(encode(&[0, 0, DIRECT_IO, 0])),
        READ_DATA => disk.read(u64_at(body, 8)?, size_at(body, 16)?),
        WRITE_DATA => {
            let size = size_at(body, 16)?;
            let data = body.get(WRITE..WRITE + size).ok_or(io::ErrorKind::UnexpectedEof)?;
            disk.write(u64_at(body, 8)?, data)?;
            Ok(encode(&[u32_at(body, 16)?, 0]))
        }
        FSYNC => disk.flush().map(|()| Vec::new()),
        FLUSH | RELEASE | DESTROY => Ok(Vec::new()),
        _ => Err(Errno::NOSYS.into()),
    }
}

fn reply(unique: u64, answer: io::Result<Vec<u8>>) -> Vec<u8> {
    let (error, body) = match answer {
        Ok(body) => (0, body),
        Err(error) => {
            let number = Errno::from_io_error(&error).unwrap_or_else(|| match error.kind() {
                io::ErrorKind::StorageFull => Errno::NOSPC,
                io::ErrorKind::InvalidInput => Errno::INVAL,
                _ => Errno::IO,
            });
            if number != Errno::NOSYS {
                eprintln!("power-disk: a request failed: {error}");
            }
            (-number.raw_os_error(), Vec::new())
        }
    };
    let length = u32::try_from(16 + body.len()).expect("an answer is not larger than a read");
    let header = [encode(&[length, error.cast_unsigned()]), unique.to_le_bytes().to_vec()].concat();
    [header, body].concat()
}

fn greeting() -> Vec<u8> {
    let most = u32::try_from(MOST).expect("a megabyte");
    let pages = u32::try_from(MOST / PAGE).expect("some hundred");
    let (major, minor) = VERSION;
    // Read-ahead, then the flags; two numbers of background requests share one number; a granularity of one nanosecond.
    let mut all = vec![major, minor, most, BIG_WRITES | MAX_PAGES, 12 << 16 | 16, most, 1, pages];
    all.resize(16, 0);
    encode(&all)
}

fn attributes(size: u64) -> Vec<u8> {
    const FILE: u32 = 0o100_600;
    let block = u32::try_from(SECTOR).expect("a sector is small");
    // Valid for a second. Then: inode, size, blocks, three times; their nanoseconds, mode, links, owner, group, device.
    let valid = [encode(&[1, 0, 0, 0]), 1u64.to_le_bytes().to_vec(), size.to_le_bytes().to_vec()].concat();
    let rest = encode(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, FILE, 1, 0, 0, 0, block, 0]);
    [valid, rest].concat()
}

fn encode(all: &[u32]) -> Vec<u8> {
    all.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn u32_at(bytes: &[u8], at: usize) -> io::Result<u32> {
    let part = bytes.get(at..).and_then(<[u8]>::first_chunk).ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok(u32::from_le_bytes(*part))
}

fn u64_at(bytes: &[u8], at: usize) -> io::Result<u64> {
    let part = bytes.get(at..).and_then(<[u8]>::first_chunk).ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok(u64::from_le_bytes(*part))
}

fn size_at(bytes: &[u8], at: usize) -> io::Result<usize> {
    usize::try_from(u32_at(bytes, at)?).map_err(io::Error::other)
}
