//! The client's side of vhost-user, for tests: messages as the guest's driver sends them, or as a test wants them.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};

use bathy_devices::testing::Driver;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

pub const GET_FEATURES: u32 = 1;
pub const SET_FEATURES: u32 = 2;
pub const SET_OWNER: u32 = 3;
pub const SET_MEM_TABLE: u32 = 5;
pub const SET_VRING_NUM: u32 = 8;
pub const SET_VRING_ADDR: u32 = 9;
pub const SET_VRING_BASE: u32 = 10;
pub const GET_VRING_BASE: u32 = 11;
pub const SET_VRING_KICK: u32 = 12;
pub const SET_VRING_CALL: u32 = 13;
pub const GET_PROTOCOL_FEATURES: u32 = 15;
pub const SET_PROTOCOL_FEATURES: u32 = 16;
pub const SET_VRING_ENABLE: u32 = 18;
pub const SET_BACKEND_REQ_FD: u32 = 21;
pub const GET_CONFIG: u32 = 24;
pub const SET_CONFIG: u32 = 25;

pub const VERSION: u32 = 1;
pub const NEED_REPLY: u32 = 8;
pub const PROTOCOL_FEATURES_BIT: u64 = 1 << 30;

pub fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

pub fn longs(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

pub fn region(guest: u64, bytes: u64, user: u64, offset: u64) -> Vec<u8> {
    [words(&[1, 0]), longs(&[guest, bytes, user, offset])].concat()
}

pub fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a short payload");
    [words(&[request, flags, length]), payload.to_vec()].concat()
}

/// The payload of SET_VRING_ADDR for a queue.
pub fn ring_addresses(queue: u32, driver: &Driver<'_>) -> Vec<u8> {
    let rings = [driver.descriptor_table(), driver.used_ring(), driver.available_ring(), u64::MAX];
    [words(&[queue, 0]), longs(&rings)].concat()
}

/// Sends bytes, and descriptors with them, at once.
pub fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "at most 8 descriptors");
    }
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::DONTWAIT);
    assert_eq!(sent, Ok(bytes.len()), "the socket accepts a message");
}
