//! Receiving whole messages from a stream socket, without ever waiting for the peer.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, recvmsg, send,
};
use thiserror::Error;

use super::message::{HEADER_BYTES, Header, MAX_PAYLOAD_BYTES, MessageError};

/// No message that is served comes with more descriptors.
const MAX_DESCRIPTORS: usize = 1;

/// How a connection ends.
#[derive(Debug, Error)]
pub enum SocketError {
    /// The peer closed its end, between two messages or within one.
    #[error("The guest closed the device's connection")]
    Closed,
    /// The peer's bytes are not a message.
    #[error("The guest sent something that is not a message")]
    Message(#[from] MessageError),
    /// More descriptors than any message has.
    #[error("The guest sent more file descriptors than any message has")]
    TooManyDescriptors,
    /// The peer asks and does not read the answers.
    #[error("The guest does not read the answers to its requests")]
    Unread,
    #[error("The device's connection failed")]
    Io(#[source] io::Error),
}

/// One message as it came in.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) header: Header,
    pub(super) payload: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
}

/// A connected socket, and the part of a message that has arrived.
#[derive(Debug)]
pub(super) struct Socket {
    fd: OwnedFd,
    buffer: [u8; HEADER_BYTES + MAX_PAYLOAD_BYTES],
    filled: usize,
    header: Option<Header>,
    descriptors: Vec<OwnedFd>,
}

impl Socket {
    pub(super) fn new(fd: OwnedFd) -> Self {
        Self {
            fd,
            buffer: [0; HEADER_BYTES + MAX_PAYLOAD_BYTES],
            filled: 0,
            header: None,
            descriptors: Vec::with_capacity(MAX_DESCRIPTORS),
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The next whole message, or `None` when the rest of it has not arrived yet.
    pub(super) fn receive(&mut self) -> Result<Option<Frame>, SocketError> {
        loop {
            let wanted = HEADER_BYTES + self.header.map_or(0, |header| header.bytes as usize);
            if self.filled < wanted {
                if !self.read_some(wanted)? {
                    return Ok(None);
                }
                continue;
            }
            let Some(header) = self.header.take() else {
                let raw = self.buffer.first_chunk().ok_or(SocketError::Closed)?;
                self.header = Some(Header::parse(raw)?);
                continue;
            };
            self.filled = 0;
            let payload = self.buffer.get(HEADER_BYTES..wanted).unwrap_or_default().to_vec();
            return Ok(Some(Frame { header, payload, descriptors: std::mem::take(&mut self.descriptors) }));
        }
    }

    /// Reads up to the end of the part that is wanted; `false` when nothing is there.
    fn read_some(&mut self, wanted: usize) -> Result<bool, SocketError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let target = self.buffer.get_mut(self.filled..wanted).unwrap_or_default();
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = match recvmsg(&self.fd, &mut [IoSliceMut::new(target)], &mut control, flags) {
            Ok(received) => received,
            Err(Errno::AGAIN) => return Ok(false),
            Err(Errno::INTR) => return Ok(true),
            Err(Errno::CONNRESET | Errno::PIPE) => return Err(SocketError::Closed),
            Err(error) => return Err(SocketError::Io(error.into())),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.descriptors.extend(fds);
            }
        }
        // What does not fit the buffer is closed by the kernel, which sets this flag.
        if received.flags.contains(ReturnFlags::CTRUNC) || self.descriptors.len() > MAX_DESCRIPTORS {
            return Err(SocketError::TooManyDescriptors);
        }
        if received.bytes == 0 {
            return Err(SocketError::Closed);
        }
        self.filled += received.bytes;
        Ok(true)
    }

    /// Sends an answer. The driver waits for each answer before its next request, so there is always buffer space for one.
    pub(super) fn answer(&self, message: &[u8]) -> Result<(), SocketError> {
        loop {
            match send(&self.fd, message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(count) if count == message.len() => return Ok(()),
                Ok(_) | Err(Errno::AGAIN) => return Err(SocketError::Unread),
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(SocketError::Closed),
                Err(error) => return Err(SocketError::Io(error.into())),
            }
        }
    }
}
