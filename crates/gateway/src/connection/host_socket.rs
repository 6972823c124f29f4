//! The host's side of a connection: a non-blocking socket, and which of its directions are still open.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

use super::turn::Turn;
use crate::host;
use crate::inspect::Inspector;
use crate::stack::Stack;

#[derive(Debug)]
pub(super) struct HostSocket {
    pub(super) socket: OwnedFd,
    readable: bool,
    writable: bool,
    /// The peer has sent its FIN, and everything before it was read.
    read_closed: bool,
    /// Our FIN is sent, or queued in the kernel.
    write_closed: bool,
    aborted: bool,
}

impl HostSocket {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            readable: false,
            writable: false,
            read_closed: false,
            write_closed: false,
            aborted: false,
        }
    }

    /// Epoll reports edges only: after one, both directions are tried until they would block.
    pub(super) fn wake(&mut self) {
        (self.readable, self.writable) = (true, true);
    }

    /// The result of connecting, or `None` while it is pending.
    pub(super) fn connected(&self) -> Option<Result<(), Errno>> {
        self.writable.then(|| host::connect_result(&self.socket))
    }

    pub(super) fn is_read_closed(&self) -> bool {
        self.read_closed
    }

    pub(super) fn is_write_closed(&self) -> bool {
        self.write_closed
    }

    pub(super) fn can_write(&self) -> bool {
        self.writable && !self.write_closed
    }

    /// Sends a FIN. The socket can still be read.
    pub(super) fn close_write(&mut self) {
        self.write_closed = true;
        // A socket that has failed reports it when it is read.
        let _ = shutdown(&self.socket, Shutdown::Write);
    }

    /// Makes the kernel send a reset instead of a FIN when the socket is closed.
    pub(super) fn abort(&mut self) {
        self.aborted = true;
        host::reset_on_close(&self.socket);
    }

    /// The socket, if both sides have closed and the peer has not acknowledged everything yet.
    pub(super) fn into_closing(self) -> Option<OwnedFd> {
        let is_clean = self.read_closed && self.write_closed && !self.aborted;
        (is_clean && !host::is_closed(&self.socket)).then_some(self.socket)
    }

    /// Sends the bytes that the inspector has cleared.
    pub(super) fn send_cleared(&mut self, inspector: &mut Inspector) -> Result<(), Errno> {
        while self.writable && !inspector.cleared().is_empty() {
            match send(&self.socket, inspector.cleared(), SendFlags::NOSIGNAL) {
                Ok(count) => inspector.consume(count),
                Err(Errno::AGAIN) => self.writable = false,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Sends straight from the stack's receive buffer, without inspection.
    pub(super) fn send_from(&mut self, stack: &mut Stack, turn: &mut Turn<'_>) -> Result<(), Errno> {
        while self.can_write() && turn.left > 0 && stack.tcp().recv_queue() > 0 {
            let sent = stack.tcp().recv(|bytes| {
                let part = bytes.get(..bytes.len().min(turn.left)).unwrap_or(bytes);
                let result = send(&self.socket, part, SendFlags::NOSIGNAL);
                (result.unwrap_or(0), result)
            });
            match sent {
                Ok(Ok(count)) => turn.sent(count),
                Ok(Err(Errno::AGAIN)) => self.writable = false,
                Ok(Err(Errno::INTR)) => {}
                Ok(Err(error)) => return Err(error),
                Err(_) => break,
            }
        }
        Ok(())
    }

    /// Receives straight into the stack's send buffer. An inspector that waits for the server's response sees it too.
    pub(super) fn receive_into(
        &mut self,
        stack: &mut Stack,
        mut inspector: Option<&mut Inspector>,
        turn: &mut Turn<'_>,
    ) -> Result<(), Errno> {
        while self.readable && !self.read_closed && turn.may_receive() && stack.tcp().can_send() {
            let most = turn.most_received();
            let inspector = inspector.as_deref_mut().filter(|inspector| inspector.wants_response());
            let received = stack.tcp().send(|space| {
                let length = space.len().min(most);
                let space = space.get_mut(..length).unwrap_or_default();
                let result = recv(&self.socket, &mut *space, RecvFlags::empty()).map(|(count, _)| count);
                if let (Some(inspector), Ok(count)) = (inspector, result) {
                    inspector.on_response(space.get(..count).unwrap_or_default());
                }
                (result.unwrap_or(0), result)
            });
            match received {
                Ok(Ok(0)) => self.read_closed = true,
                Ok(Ok(count)) => turn.received(count),
                Ok(Err(Errno::AGAIN)) => self.readable = false,
                Ok(Err(Errno::INTR)) => {}
                Ok(Err(error)) => return Err(error),
                Err(_) => break,
            }
        }
        Ok(())
    }
}
