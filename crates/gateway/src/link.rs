//! The frames' way to and from the keeper. Nothing is lost on it: whoever is too fast waits.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bathy_protocol::network::{FRAME_HEADER, GATEWAY_MAC, GUEST_MAC, MAX_FRAME};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

/// Frames that wait until the keeper reads. Connections stop at the first; small answers may still come after it.
const MAX_QUEUED: usize = 64;

/// What kind of packet a frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EtherType {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
    /// ARP.
    Arp,
}

impl EtherType {
    /// The kind for this address.
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

/// What came.
pub enum Received<'a> {
    /// A frame.
    Frame(&'a [u8]),
    /// Nothing now.
    WouldBlock,
    /// The keeper is gone.
    Closed,
}

/// The link's end.
#[derive(Debug)]
pub struct Link {
    socket: OwnedFd,
    scratch: Vec<u8>,
    queued: VecDeque<Vec<u8>>,
    /// Frames and bytes that were sent to the guest.
    pub sent: (u64, u64),
    /// Frames that found no room.
    pub dropped: u64,
}

impl Link {
    /// A link over this socket.
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket, scratch: vec![0; MAX_FRAME], queued: VecDeque::new(), sent: (0, 0), dropped: 0 }
    }

    /// What to wait on.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Takes the next frame.
    pub fn receive<'a>(&self, buffer: &'a mut [u8]) -> Received<'a> {
        loop {
            match recv(&self.socket, &mut *buffer, RecvFlags::DONTWAIT | RecvFlags::TRUNC) {
                Ok((_, 0)) => return Received::Closed,
                // One that is longer than the buffer is none of the keeper's; what is left of it is malformed.
                Ok((_, length)) => return Received::Frame(buffer.get(..length).unwrap_or_default()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Received::WouldBlock,
                Err(_) => return Received::Closed,
            }
        }
    }

    /// Whether the keeper takes more.
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
        // What is written is built in place: nothing of the last packet may show through.
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

    /// Sends what had to wait.
    pub fn flush(&mut self) {
        while let Some(frame) = self.queued.front() {
            if !try_send(&self.socket, frame) {
                return;
            }
            self.queued.pop_front();
        }
    }
}

/// Whether the frame is off. A keeper that is gone is noticed when it is listened to.
fn try_send(socket: &OwnedFd, frame: &[u8]) -> bool {
    loop {
        match send(socket, frame, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN | Errno::NOBUFS) => return false,
            _ => return true,
        }
    }
}
