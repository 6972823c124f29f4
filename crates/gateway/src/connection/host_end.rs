//! The host's end of a connection: its socket, and how far it is.

use std::os::fd::OwnedFd;

use crate::host;

#[derive(Debug)]
pub(super) struct HostEnd {
    pub(super) socket: OwnedFd,
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// It sends nothing more.
    pub(super) ended: bool,
    /// It is sent nothing more.
    pub(super) shut: bool,
    broken: bool,
}

impl HostEnd {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self { socket, readable: false, writable: false, ended: false, shut: false, broken: false }
    }

    /// Makes the other side notice that the connection broke, when the socket is closed.
    pub(super) fn break_off(&mut self) {
        self.broken = true;
        host::break_off(&self.socket);
    }

    /// The socket, if both sides have ended and the other one has not acknowledged all of it.
    pub(super) fn into_closing(self) -> Option<OwnedFd> {
        let is_clean = self.ended && self.shut && !self.broken;
        (is_clean && !host::is_closed(&self.socket)).then_some(self.socket)
    }
}
