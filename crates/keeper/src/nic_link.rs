//! The link of the network device: frames between the device and the gateway. No frame is lost while both ends are open. When the
//! gateway has exited, the device's link is down and the guest's frames are dropped.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bathy_devices::net::Net;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

/// How many frames are moved each way before others have their turn.
const AT_ONCE: usize = 256;

/// A link to a gateway. Its socket is watched by edges: what it is ready for is remembered here.
#[derive(Debug)]
pub struct NicLink {
    socket: OwnedFd,
    readable: bool,
    writable: bool,
}

/// The state of the link after a round of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    /// Nothing can be moved now.
    Done,
    More,
    /// The host has no memory for a frame now, and reports no event when it has.
    NoMemory,
    /// The gateway closed its end.
    Closed,
}

impl NicLink {
    /// A link over this socket.
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket, readable: true, writable: true }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The socket may be ready for more.
    pub fn wake(&mut self) {
        (self.readable, self.writable) = (true, true);
    }

    /// Whether something could be moved now.
    pub fn has_work(&self, nic: &Net) -> bool {
        (self.writable && nic.frame().is_some()) || (self.readable && nic.wants_frames())
    }

    /// Moves what can be moved.
    pub fn work(&mut self, nic: &mut Net) -> Moved {
        let mut count = 0;
        while self.writable && count < AT_ONCE {
            let Some(frame) = nic.frame() else { break };
            match send(&self.socket, frame, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(_) => nic.drop_frame(),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.writable = false,
                Err(Errno::NOBUFS | Errno::NOMEM) => return Moved::NoMemory,
                Err(_) => return Moved::Closed,
            }
            count += 1;
        }
        while self.readable && count < 2 * AT_ONCE {
            let Some(space) = nic.space() else { break };
            match recv(&self.socket, space, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Moved::Closed,
                // The device rejects only data that is not a frame, which a working gateway never sends.
                Ok((length, _)) => drop(nic.commit(length)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.readable = false,
                Err(_) => return Moved::Closed,
            }
            count += 1;
        }
        if count >= AT_ONCE { Moved::More } else { Moved::Done }
    }
}
