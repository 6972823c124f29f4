//! The link to the keeper, which carries Ethernet frames. A full socket is backpressure: connections stop sending, and only
//! small replies can be dropped.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bathy_protocol::network::{FRAME_HEADER, GATEWAY_MAC, GUEST_MAC, MAX_FRAME};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

/// How many frames may be queued. Connections stop sending at the first; small replies may still follow it.
const MAX_QUEUED: usize = 64;

/// The EtherType of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EtherType {
    V4,
    V6,
    Arp,
}

impl EtherType {
    /// The IP version of this address.
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    fn number(self) -> [u8; 2] {
        match self {
            Self::V4 => [0x08, 0x00],
            Self::V6 => [0x86, 0xdd],
            Self::Arp => [0x08, 0x06],
        }
    }
}

pub enum Received<'a> {
    Frame(&'a [u8]),
    WouldBlock,
    /// The keeper has closed its end.
    Closed,
}

/// The gateway's end of the link.
#[derive(Debug)]
pub struct Link {
    socket: OwnedFd,
    scratch: Vec<u8>,
    queued: VecDeque<Vec<u8>>,
    /// Frames and bytes that were sent to the guest.
    pub sent: (u64, u64),
    /// Frames that were dropped because the queue was full.
    pub dropped: u64,
}

impl Link {
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket, scratch: vec![0; MAX_FRAME], queued: VecDeque::new(), sent: (0, 0), dropped: 0 }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub fn receive<'a>(&self, buffer: &'a mut [u8]) -> Received<'a> {
        loop {
            match recv(&self.socket, &mut *buffer, RecvFlags::DONTWAIT | RecvFlags::TRUNC) {
                Ok((_, 0)) => return Received::Closed,
                // A frame longer than the buffer is cut, and then malformed.
                Ok((_, length)) => return Received::Frame(buffer.get(..length).unwrap_or_default()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Received::WouldBlock,
                Err(_) => return Received::Closed,
            }
        }
    }

    /// Whether frames can be sent without being queued.
    pub fn has_space(&self) -> bool {
        self.queued.is_empty()
    }

    /// Sends a packet of this length, which `fill` writes.
    pub fn send(&mut self, ether_type: EtherType, length: usize, fill: impl FnOnce(&mut [u8])) {
        let end = FRAME_HEADER + length;
        let Some(frame) = self.scratch.get_mut(..end) else { return };
        let (header, packet) = frame.split_at_mut(FRAME_HEADER);
        let (to, from) = (GUEST_MAC, GATEWAY_MAC);
        for (place, byte) in header.iter_mut().zip(to.into_iter().chain(from).chain(ether_type.number())) {
            *place = byte;
        }
        // The scratch buffer is reused: nothing of the last packet may leak into this one.
        if ether_type != EtherType::Arp {
            packet.get_mut(..60.min(length)).unwrap_or_default().fill(0);
        }
        fill(packet);
        self.sent.0 += 1;
        self.sent.1 += u64::try_from(end).unwrap_or(0);
        if !self.queued.is_empty() || !try_send(&self.socket, frame) {
            if self.queued.len() < MAX_QUEUED {
                self.queued.push_back(frame.to_vec());
            } else {
                self.dropped += 1;
            }
        }
    }

    /// Sends as many queued frames as the socket accepts.
    pub fn flush(&mut self) {
        while let Some(frame) = self.queued.front() {
            if !try_send(&self.socket, frame) {
                return;
            }
            self.queued.pop_front();
        }
    }
}

/// Whether the frame was sent. A closed socket is detected when it is read.
fn try_send(socket: &OwnedFd, frame: &[u8]) -> bool {
    loop {
        match send(socket, frame, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN | Errno::NOBUFS) => return false,
            _ => return true,
        }
    }
}
