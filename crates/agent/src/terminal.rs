//! The pseudo-terminal of one command.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bathy_protocol::TerminalSize;
use rustix::fs::{Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::termios::{InputModes, OptionalActions, Winsize, tcgetattr, tcsetattr, tcsetwinsize};

use crate::sys;

/// The most bytes that can be buffered between a command and us, on both sides, rounded up.
pub const CAPACITY: usize = 128 * 1024;

/// Both sides of a new terminal.
pub struct Terminal {
    /// The agent's side, set to non-blocking.
    pub master: OwnedFd,
    /// The command's side, its controlling terminal.
    pub slave: OwnedFd,
}

impl Terminal {
    /// Opens a terminal of this size that belongs to `user`.
    pub fn open(size: TerminalSize, user: u32) -> Result<Self, Errno> {
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        // Inside the devpts mount, where only the kernel creates files.
        let master = rustix::fs::open("/dev/pts/ptmx", flags, Mode::empty())?;
        let slave = sys::terminal_peer(master.as_fd())
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        rustix::fs::fchown(&slave, Some(Uid::from_raw(user)), None)?;
        // Otherwise erasing a multi-byte character would leave some of its bytes behind.
        let mut modes = tcgetattr(&slave)?;
        modes.input_modes |= InputModes::IUTF8;
        tcsetattr(&slave, OptionalActions::Now, &modes)?;
        resize(master.as_fd(), size)?;
        Ok(Self { master, slave })
    }
}

/// Changes the size; the kernel notifies the programs on the terminal.
pub fn resize(master: BorrowedFd<'_>, size: TerminalSize) -> Result<(), Errno> {
    let size = Winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(master, size)
}
