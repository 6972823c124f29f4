//! The client's side of the protocol. Nothing here waits: the user of a connection polls and moves bytes.
//!
//! A keeper may be under its guest's control, so everything it sends is validated here.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;
use std::{fmt, io};

use bathy_protocol::message::{decode, encode};
use bathy_protocol::{
    Answer, CONNECTION, Channel, Decoder, FrameError, FromKeeper, MAX_PAYLOAD, MessageError, Request,
    ToKeeper, WindowError, frame,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use thiserror::Error;

/// The connection to the sandbox failed.
#[derive(Debug, Error)]
pub enum ConnectionError {
    /// The keeper closed the connection without a report.
    #[error("The sandbox's keeper exited")]
    KeeperExited,
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The keeper exceeded a flow-control window.
    #[error(transparent)]
    Window(#[from] WindowError),
    /// Data on a channel that only the client may use.
    #[error("The sandbox sent data on {0:?}, which only the client may use")]
    WrongDirection(Channel),
    /// The sandbox did not answer in time.
    #[error("The sandbox did not answer within {0} s. `bathy kill` ends it")]
    NoAnswer(u64),
    #[error("Cannot communicate with the sandbox's keeper")]
    Socket(#[source] io::Error),
}

#[derive(Debug, PartialEq, Eq)]
pub enum Arrival {
    Keeper(FromKeeper),
    Answer(u32, Answer),
    /// Output of a command.
    Output(u32, Channel, Vec<u8>),
}

/// A callback for when the guest has become its own process.
type WhenGuestStarts = Box<dyn FnOnce() + Send>;

/// The connection to a keeper.
pub struct Connection {
    socket: OwnedFd,
    decoder: Decoder,
    outbox: Vec<u8>,
    when_guest_starts: Option<WhenGuestStarts>,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl Connection {
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self { socket, decoder: Decoder::new(MAX_PAYLOAD), outbox: Vec::new(), when_guest_starts: None })
    }

    /// Registers work that [`Self::receive`] runs once, while the guest boots: a delay does no harm then.
    pub fn when_guest_starts(&mut self, work: impl FnOnce() + Send + 'static) {
        self.when_guest_starts = Some(Box::new(work));
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether the connection is open and nothing has arrived. A pooled connection can have been closed
    /// meanwhile.
    pub fn is_quiet(&self) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.fd(), PollFlags::IN | PollFlags::RDHUP)];
        matches!(poll(&mut fds, Some(&Timespec::default())), Ok(0))
    }

    /// Sends a message with a file descriptor to the keeper, after everything that is queued. Does not block.
    ///
    /// # Errors
    /// [`io::ErrorKind::ResourceBusy`] if the keeper does not read at present.
    pub fn send_with_descriptor(&mut self, message: &ToKeeper, socket: &OwnedFd) -> io::Result<()> {
        self.send().map_err(io::Error::other)?;
        if self.unsent() > 0 {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        let mut bytes = Vec::new();
        encode(CONNECTION, message, &mut bytes).map_err(io::Error::other)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let sockets = [socket.as_fd()];
        ancillary.push(SendAncillaryMessage::ScmRights(&sockets));
        let sent = sendmsg(&self.socket, &[io::IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
        if sent == bytes.len() {
            Ok(())
        } else {
            Err(io::Error::other("the keeper accepted only part of a message"))
        }
    }

    /// How many queued bytes are not sent yet.
    pub fn unsent(&self) -> usize {
        self.outbox.len()
    }

    /// Queues a request about a stream.
    pub fn queue(&mut self, stream: u32, request: &Request) -> Result<(), ConnectionError> {
        Ok(encode(stream, request, &mut self.outbox)?)
    }

    /// Queues a message for the keeper itself, which it accepts from its owner only.
    pub fn queue_to_keeper(&mut self, message: &ToKeeper) -> Result<(), ConnectionError> {
        Ok(encode(CONNECTION, message, &mut self.outbox)?)
    }

    /// Queues bytes for a command's standard input, within its window.
    pub fn input(&mut self, stream: u32, bytes: &[u8]) {
        frame::encode(stream, Channel::Stdin, bytes, &mut self.outbox);
    }

    /// Sends as much as the keeper accepts without blocking.
    pub fn send(&mut self) -> Result<(), ConnectionError> {
        while !self.outbox.is_empty() {
            match rustix::net::send(&self.socket, &self.outbox, SendFlags::NOSIGNAL) {
                Ok(count) => drop(self.outbox.drain(..count)),
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                // Messages that the keeper sent before it exited may still be unread.
                Err(Errno::PIPE | Errno::CONNRESET) => self.outbox.clear(),
                Err(error) => return Err(ConnectionError::Socket(error.into())),
            }
        }
        Ok(())
    }

    /// Waits until something arrives.
    pub fn wait(&self, timeout: Duration) -> Result<(), ConnectionError> {
        let mut fds = [PollFd::from_borrowed_fd(self.fd(), PollFlags::IN)];
        match poll(&mut fds, Timespec::try_from(timeout).ok().as_ref()) {
            Ok(0) => Err(ConnectionError::NoAnswer(timeout.as_secs())),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(ConnectionError::Socket(error.into())),
        }
    }

    /// Receives and decodes what has arrived.
    pub fn receive(&mut self) -> Result<Vec<Arrival>, ConnectionError> {
        let mut buffer = [0u8; 64 * 1024];
        match rustix::net::recv(&self.socket, &mut buffer, RecvFlags::empty()) {
            Ok((0, _)) | Err(Errno::CONNRESET) => return Err(ConnectionError::KeeperExited),
            Ok((count, _)) => self.decoder.push(buffer.get(..count).unwrap_or_default()),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(ConnectionError::Socket(error.into())),
        }
        let mut arrivals = Vec::new();
        while let Some(frame) = self.decoder.next_frame()? {
            arrivals.push(match (frame.stream, frame.channel) {
                (CONNECTION, _) => match decode(frame.payload)? {
                    FromKeeper::GuestStarted => {
                        if let Some(work) = self.when_guest_starts.take() {
                            work();
                        }
                        continue;
                    }
                    message => Arrival::Keeper(message),
                },
                (stream, Channel::Control) => Arrival::Answer(stream, decode(frame.payload)?),
                (_, Channel::Stdin) => return Err(ConnectionError::WrongDirection(Channel::Stdin)),
                (stream, channel) => Arrival::Output(stream, channel, frame.payload.to_vec()),
            });
        }
        Ok(arrivals)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    #[test]
    fn guest_start_work_runs_once() {
        let (ours, keepers) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let mut connection = Connection::new(ours).unwrap();
        let count = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&count);
        connection.when_guest_starts(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        let warning = FromKeeper::Warning("warm".to_owned());
        let mut bytes = Vec::new();
        // A compromised keeper may repeat itself.
        for message in [&FromKeeper::GuestStarted, &warning, &FromKeeper::GuestStarted] {
            encode(CONNECTION, message, &mut bytes).unwrap();
        }
        rustix::net::send(&keepers, &bytes, SendFlags::NOSIGNAL).unwrap();
        assert_eq!(connection.receive().unwrap(), [Arrival::Keeper(warning)]);
        assert_eq!(count.load(Ordering::Relaxed), 1);
        assert_eq!(Arc::strong_count(&count), 1, "and nothing is held for it any longer");
    }
}
