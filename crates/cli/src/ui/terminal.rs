//! The caller's terminal: raw while it shows a guest's terminal, and restored in every case.

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;

use bathy_protocol::TerminalSize;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// The size of a terminal that does not report one.
const DEFAULT_SIZE: TerminalSize = TerminalSize { rows: 24, columns: 80 };

/// The terminal's settings before it became raw. A static, because a panic drops nothing.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// Leaves the alternate screen and shows the cursor.
const PLAIN_SCREEN: &str = "\x1b[?1049l\x1b[?25h";

/// Raw mode of the terminal on standard input, which lasts until this is dropped.
#[derive(Debug)]
pub struct Raw {
    screen: bool,
}

impl Raw {
    /// Makes the terminal raw.
    pub fn enter() -> io::Result<Self> {
        Self::begin(false)
    }

    /// Makes the terminal raw and switches to the alternate screen.
    pub fn enter_screen() -> io::Result<Self> {
        let raw = Self::begin(true)?;
        write!(io::stdout(), "\x1b[?1049h\x1b[?25l")?;
        io::stdout().flush()?;
        Ok(raw)
    }

    fn begin(screen: bool) -> io::Result<Self> {
        let stdin = io::stdin();
        let before = tcgetattr(&stdin)?;
        let mut raw = before.clone();
        raw.make_raw();
        if let Ok(mut slot) = BEFORE.lock() {
            *slot = Some(before);
        }
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore(screen);
            report(panic);
        }));
        tcsetattr(&stdin, OptionalActions::Now, &raw)?;
        Ok(Self { screen })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        restore(self.screen);
    }
}

/// Restores the terminal. Failures are ignored.
fn restore(screen: bool) {
    if let Ok(mut slot) = BEFORE.try_lock()
        && let Some(before) = slot.take()
    {
        if screen {
            let _ = write!(io::stdout(), "{PLAIN_SCREEN}").and_then(|()| io::stdout().flush());
        }
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &before);
    }
}

/// The size of the caller's terminal, on any standard stream.
pub fn size() -> TerminalSize {
    let of = |fd: BorrowedFd<'_>| tcgetwinsize(fd).ok().filter(|size| size.ws_row > 0 && size.ws_col > 0);
    of(io::stdin().as_fd())
        .or_else(|| of(io::stdout().as_fd()))
        .or_else(|| of(io::stderr().as_fd()))
        .map_or(DEFAULT_SIZE, |size| TerminalSize { rows: size.ws_row, columns: size.ws_col })
}

/// Writes all bytes, even if another program made the output non-blocking.
pub fn write_all(to: BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(to, bytes) {
            Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => match poll(&mut [PollFd::from_borrowed_fd(to, PollFlags::OUT)], None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            },
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
