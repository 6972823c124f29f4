//! The wire format: which messages there are, how long each is, and how many descriptors come with it.

use thiserror::Error;

/// The length of the header that starts every message.
pub(super) const HEADER_BYTES: usize = 12;

/// The most configuration bytes that the driver may ask for at once.
pub const MAX_CONFIG_BYTES: usize = 256;

const CONFIG_HEADER_BYTES: usize = 12;

/// The longest payload of any message that is accepted.
pub(super) const MAX_PAYLOAD_BYTES: usize = CONFIG_HEADER_BYTES + MAX_CONFIG_BYTES;

// Requests by their numbers in the vhost-user specification.
const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_OWNER: u32 = 3;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
const SET_BACKEND_REQ_FD: u32 = 21;
const GET_CONFIG: u32 = 24;
const SET_CONFIG: u32 = 25;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const FLAG_REPLY: u32 = 1 << 2;
const FLAG_NEED_REPLY: u32 = 1 << 3;

const VRING_INDEX_MASK: u64 = 0xff;
const VRING_NO_FD: u64 = 1 << 8;

/// A message that is not one of the protocol's.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum MessageError {
    /// A request that no driver of ours sends.
    #[error("The guest sent request {0}, which is not served")]
    Unknown(u32),
    /// A header whose flags are not those of a request.
    #[error("The guest sent a message with flags {0:#x}")]
    Flags(u32),
    /// A message that is shorter or longer than its kind.
    #[error("The guest sent request {request} with {bytes} bytes")]
    Size {
        request: u32,
        /// The length of its payload.
        bytes: u32,
    },
    /// A message with more or fewer descriptors than its kind.
    #[error("The guest sent request {request} with {count} file descriptors")]
    Descriptors {
        request: u32,
        /// How many descriptors came with it.
        count: usize,
    },
    /// A payload whose fields contradict each other.
    #[error("The guest sent request {0} with a payload that makes no sense")]
    Payload(u32),
}

/// The start of every message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) request: u32,
    pub(super) need_reply: bool,
    pub(super) bytes: u32,
}

impl Header {
    /// Reads a header and checks everything in it that can be checked before the payload is there.
    pub(super) fn parse(raw: &[u8; HEADER_BYTES]) -> Result<Self, MessageError> {
        let mut fields = Fields(raw);
        let (request, flags, bytes) = (fields.u32(), fields.u32(), fields.u32());
        if flags & VERSION_MASK != VERSION || flags & !(VERSION_MASK | FLAG_NEED_REPLY) != 0 {
            return Err(MessageError::Flags(flags));
        }
        if bytes as usize > MAX_PAYLOAD_BYTES {
            return Err(MessageError::Size { request, bytes });
        }
        Ok(Self { request, need_reply: flags & FLAG_NEED_REPLY != 0, bytes })
    }
}

/// Where the rings of one queue are, in the driver's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct VringAddress {
    pub(super) descriptors: u64,
    pub(super) used: u64,
    pub(super) available: u64,
}

/// One region of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Region {
    pub(super) guest: u64,
    pub(super) bytes: u64,
    pub(super) user: u64,
    pub(super) offset: u64,
}

/// What the driver asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    GetFeatures,
    SetFeatures(u64),
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    SetOwner,
    SetMemTable(Region),
    SetVringNum { queue: u32, entries: u32 },
    SetVringAddr { queue: u32, address: VringAddress },
    SetVringBase { queue: u32, base: u32 },
    GetVringBase { queue: u32 },
    SetVringKick { queue: u32 },
    SetVringCall { queue: u32, has_fd: bool },
    SetVringEnable { queue: u32, on: bool },
    SetBackendReqFd,
    GetConfig { offset: u32, bytes: u32 },
    SetConfig { offset: u32, data: Vec<u8> },
}

impl Request {
    /// Reads a payload. `payload` has the length that the header announced.
    pub(super) fn parse(header: Header, payload: &[u8], descriptors: usize) -> Result<Self, MessageError> {
        let Header { request, bytes, .. } = header;
        let length = payload.len();
        let exactly = |wanted: usize| {
            if length == wanted { Ok(()) } else { Err(MessageError::Size { request, bytes }) }
        };
        let mut fields = Fields(payload);
        let mut wanted_descriptors = 0;
        let parsed = match request {
            GET_FEATURES | GET_PROTOCOL_FEATURES | SET_OWNER | SET_BACKEND_REQ_FD => {
                exactly(0)?;
                match request {
                    GET_FEATURES => Self::GetFeatures,
                    GET_PROTOCOL_FEATURES => Self::GetProtocolFeatures,
                    SET_OWNER => Self::SetOwner,
                    _ => {
                        wanted_descriptors = 1;
                        Self::SetBackendReqFd
                    }
                }
            }
            SET_FEATURES => {
                exactly(8)?;
                Self::SetFeatures(fields.u64())
            }
            SET_PROTOCOL_FEATURES => {
                exactly(8)?;
                Self::SetProtocolFeatures(fields.u64())
            }
            SET_MEM_TABLE => {
                // The driver has all its memory in one region.
                exactly(40)?;
                wanted_descriptors = 1;
                if (fields.u32(), fields.u32()) != (1, 0) {
                    return Err(MessageError::Payload(request));
                }
                let (guest, bytes, user, offset) = (fields.u64(), fields.u64(), fields.u64(), fields.u64());
                Self::SetMemTable(Region { guest, bytes, user, offset })
            }
            SET_VRING_NUM | SET_VRING_BASE | GET_VRING_BASE | SET_VRING_ENABLE => {
                exactly(8)?;
                let (queue, value) = (fields.u32(), fields.u32());
                match request {
                    SET_VRING_NUM => Self::SetVringNum { queue, entries: value },
                    SET_VRING_BASE => Self::SetVringBase { queue, base: value },
                    GET_VRING_BASE => Self::GetVringBase { queue },
                    _ if value > 1 => return Err(MessageError::Payload(request)),
                    _ => Self::SetVringEnable { queue, on: value == 1 },
                }
            }
            SET_VRING_ADDR => {
                exactly(40)?;
                let (queue, flags) = (fields.u32(), fields.u32());
                if flags != 0 {
                    return Err(MessageError::Payload(request));
                }
                let (descriptors, used, available) = (fields.u64(), fields.u64(), fields.u64());
                Self::SetVringAddr { queue, address: VringAddress { descriptors, used, available } }
            }
            SET_VRING_KICK | SET_VRING_CALL => {
                exactly(8)?;
                let value = fields.u64();
                let queue = u32::try_from(value & VRING_INDEX_MASK).unwrap_or(u32::MAX);
                let has_fd = value & VRING_NO_FD == 0;
                wanted_descriptors = usize::from(has_fd);
                match request {
                    _ if value & !(VRING_INDEX_MASK | VRING_NO_FD) != 0 => {
                        return Err(MessageError::Payload(request));
                    }
                    SET_VRING_CALL => Self::SetVringCall { queue, has_fd },
                    // A queue without a kick would have to be polled.
                    _ if !has_fd => return Err(MessageError::Payload(request)),
                    _ => Self::SetVringKick { queue },
                }
            }
            GET_CONFIG | SET_CONFIG => {
                let (offset, size, flags) = (fields.u32(), fields.u32(), fields.u32());
                if flags > 1 || size as usize > MAX_CONFIG_BYTES {
                    return Err(MessageError::Payload(request));
                }
                exactly(CONFIG_HEADER_BYTES + size as usize)?;
                match request {
                    GET_CONFIG => Self::GetConfig { offset, bytes: size },
                    _ => Self::SetConfig { offset, data: fields.0.to_vec() },
                }
            }
            _ => return Err(MessageError::Unknown(request)),
        };
        if descriptors != wanted_descriptors {
            return Err(MessageError::Descriptors { request, count: descriptors });
        }
        Ok(parsed)
    }
}

/// Builds the answer to `request`.
pub(super) fn reply(request: u32, payload: &[u8]) -> Vec<u8> {
    let mut message = Vec::with_capacity(HEADER_BYTES + payload.len());
    message.extend_from_slice(&request.to_ne_bytes());
    message.extend_from_slice(&(VERSION | FLAG_REPLY).to_ne_bytes());
    message.extend_from_slice(&u32::try_from(payload.len()).unwrap_or(u32::MAX).to_ne_bytes());
    message.extend_from_slice(payload);
    message
}

/// Builds the payload of an answer about one queue.
pub(super) fn vring_state(queue: u32, value: u32) -> [u8; 8] {
    let (mut payload, [q, v]) = ([0; 8], [queue.to_ne_bytes(), value.to_ne_bytes()]);
    for (to, from) in payload.iter_mut().zip(q.into_iter().chain(v)) {
        *to = from;
    }
    payload
}

/// Builds the payload of an answer with configuration bytes.
pub(super) fn config(offset: u32, data: &[u8]) -> Vec<u8> {
    let mut payload = Vec::with_capacity(CONFIG_HEADER_BYTES + data.len());
    payload.extend_from_slice(&offset.to_ne_bytes());
    payload.extend_from_slice(&u32::try_from(data.len()).unwrap_or(u32::MAX).to_ne_bytes());
    payload.extend_from_slice(&0_u32.to_ne_bytes());
    payload.extend_from_slice(data);
    payload
}

/// Reads numbers one after the other, in the byte order that both ends of the socket share; zero beyond the end.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn u32(&mut self) -> u32 {
        let Some((raw, rest)) = self.0.split_first_chunk() else { return self.end() };
        self.0 = rest;
        u32::from_ne_bytes(*raw)
    }

    fn u64(&mut self) -> u64 {
        let Some((raw, rest)) = self.0.split_first_chunk() else { return self.end().into() };
        self.0 = rest;
        u64::from_ne_bytes(*raw)
    }

    fn end(&mut self) -> u32 {
        self.0 = &[];
        0
    }
}
