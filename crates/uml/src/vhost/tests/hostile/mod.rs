//! Messages of an attacker in place of the driver: each gets one typed error and a closed connection.

mod descriptors;
mod framing;
mod memory;
mod order;
mod queues;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use bathy_devices::block::{Block, BlockConfig};
use bathy_devices::testing::{Driver, readable, writable};
use bathy_devices::{GuestRam, Outcome};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{Mode, OFlags, open};
use rustix::net::{SendFlags, SocketType, send};
use rustix::pipe::pipe;
use vm_memory::{Bytes, GuestAddress};

use super::super::testing::{
    GET_CONFIG, GET_FEATURES, NEED_REPLY, SET_BACKEND_REQ_FD, SET_FEATURES, SET_MEM_TABLE, SET_OWNER,
    SET_PROTOCOL_FEATURES, SET_VRING_ADDR, SET_VRING_BASE, SET_VRING_CALL, SET_VRING_ENABLE, SET_VRING_KICK,
    SET_VRING_NUM, VERSION, longs, message, region, ring_addresses, words,
};
use super::super::{MAX_CONFIG_BYTES, MessageError, SocketError, VhostError, VringError};
use super::frontend::{ACCEPTED_PROTOCOL, Frontend, RAM, RESERVED, is_abandoned, sockets};

const QUEUE: u64 = 0x20000;
const DATA: u64 = 0x50000;

type Disk = Frontend<Block>;

fn fresh() -> Disk {
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    Frontend::new(Block::new(file, BlockConfig::default()).unwrap())
}

fn owned() -> Disk {
    let mut disk = fresh();
    disk.request(SET_OWNER, &[], &[]).unwrap();
    disk
}

fn negotiated() -> Disk {
    let mut disk = fresh();
    disk.negotiate();
    disk
}

fn with_memory() -> Disk {
    let mut disk = negotiated();
    disk.share_memory();
    disk
}

fn running() -> Disk {
    let mut disk = fresh();
    let ram = Arc::clone(&disk.ram);
    disk.set_up(&[Driver::new(ram.memory(), QUEUE, 256)]);
    disk
}

/// Sends one message and checks that it ends the connection, once, with nothing left open.
fn fails(disk: &mut Disk, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> VhostError {
    let error = disk.request(request, payload, fds).unwrap_err();
    assert!(disk.backend.is_ended());
    assert_eq!(disk.backend.on_event(1000).unwrap(), Outcome::default());
    assert_eq!(disk.backend.on_event(1001).unwrap(), Outcome::default());
    assert_eq!(disk.pending_events(), 0);
    error
}

fn vring_error(error: VhostError) -> VringError {
    match error {
        VhostError::Vring { source, .. } => source,
        other => panic!("{other:?} is not about a queue"),
    }
}

fn message_error(error: VhostError) -> MessageError {
    match error {
        VhostError::Socket(SocketError::Message(error)) => error,
        other => panic!("{other:?} is not about a message"),
    }
}
