//! The link of the network card: frames between the card and the gateway. Nothing is lost on it while both ends are there; when
//! the gateway is gone the card has no link, and nothing that the guest sends goes anywhere.

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

/// What a round of work left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    /// Nothing can be moved now.
    Done,
    /// There is more.
    More,
    /// The host has no memory for a frame now, and will not say when it has.
    Short,
    /// The gateway is gone.
    Gone,
}

impl NicLink {
    /// A link over this socket.
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket, readable: true, writable: true }
    }

    /// What to watch.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The socket may be ready for more.
    pub fn wake(&mut self) {
        (self.readable, self.writable) = (true, true);
    }

    /// Whether something could be moved now.
    pub fn has_work(&self, card: &Net) -> bool {
        (self.writable && card.frame().is_some()) || (self.readable && card.wants_frames())
    }

    /// Moves what can be moved.
    pub fn work(&mut self, card: &mut Net) -> Moved {
        let mut count = 0;
        while self.writable && count < AT_ONCE {
            let Some(frame) = card.frame() else { break };
            match send(&self.socket, frame, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(_) => card.drop_frame(),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.writable = false,
                Err(Errno::NOBUFS | Errno::NOMEM) => return Moved::Short,
                Err(_) => return Moved::Gone,
            }
            count += 1;
        }
        while self.readable && count < 2 * AT_ONCE {
            let Some(space) = card.space() else { break };
            match recv(&self.socket, space, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Moved::Gone,
                // What the card does not take is no frame, and the gateway's mistake.
                Ok((length, _)) => drop(card.commit(length)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.readable = false,
                Err(_) => return Moved::Gone,
            }
            count += 1;
        }
        if count >= AT_ONCE { Moved::More } else { Moved::Done }
    }
}
