//! The standard streams of the caller: what a command is connected to, and the state of the terminal.

use std::cell::RefCell;
use std::error::Error;
use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bathy_client::attach::{LocalTerminal, Sink, Stdio};

use crate::sys;
use crate::ui::escape::{Returns, Stream};
use crate::ui::exit_code::JSON_OUTPUT;
use crate::ui::terminal::{self, Raw};

/// How a command is connected to the caller.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wiring {
    /// Standard input goes to the command.
    pub stdin: bool,
    /// The command has a terminal, shown on ours.
    pub terminal: bool,
    /// Output is collected for a report.
    pub json: bool,
    /// Ctrl-P Ctrl-Q detaches, and the command continues.
    pub detachable: bool,
}

/// The caller's streams while the command runs. Dropping them restores the terminal.
#[derive(Debug)]
pub struct CallerStdio {
    wiring: Wiring,
    stop: OwnedFd,
    resized: Option<OwnedFd>,
    raw: Option<Raw>,
    outputs: [Output; 2],
}

/// An output for bytes of a guest. They are escaped on a terminal, unless the command has a terminal of its own, and unchanged
/// in files and pipes.
#[derive(Debug)]
struct Output {
    fd: BorrowedFd<'static>,
    escape: Option<RefCell<Stream>>,
}

impl Output {
    fn new(fd: BorrowedFd<'static>, escaped: bool) -> Self {
        Self { fd, escape: escaped.then(|| RefCell::new(Stream::new(Returns::Pass))) }
    }

    fn sink(&self) -> Sink<'_> {
        match &self.escape {
            None => Sink::Descriptor(self.fd),
            Some(stream) => {
                Sink::Filtered(self.fd, Box::new(|bytes| stream.borrow_mut().push(bytes).into_bytes()))
            }
        }
    }

    /// Flushes an incomplete character.
    fn finish(&self) {
        if let Some(stream) = &self.escape {
            // The terminal may be closed.
            let _ = terminal::write_all(self.fd, stream.borrow_mut().finish().as_bytes());
        }
    }
}

impl CallerStdio {
    /// Catches signals. The terminal stays as it is until [`Self::enter`].
    pub fn new(wiring: Wiring) -> Result<Self, Box<dyn Error>> {
        if wiring.terminal && !io::stdin().is_terminal() {
            return Err("The input is not a terminal. Leave -t out, or run this from a terminal".into());
        }
        let escaped = |fd: BorrowedFd<'_>| !wiring.terminal && fd.is_terminal();
        let (stdout, stderr) = (rustix::stdio::stdout(), rustix::stdio::stderr());
        Ok(Self {
            wiring,
            stop: sys::stop_signals()?,
            resized: if wiring.terminal { Some(sys::resize_signals()?) } else { None },
            raw: None,
            outputs: [Output::new(stdout, escaped(stdout)), Output::new(stderr, escaped(stderr))],
        })
    }

    /// Makes the terminal raw, if the command has it: from now on keys go to the command.
    pub fn enter(&mut self) -> io::Result<()> {
        if self.wiring.terminal {
            self.raw = Some(Raw::enter()?);
        }
        Ok(())
    }

    pub fn stdio(&self) -> Stdio<'_> {
        let [stdout, stderr] = self
            .outputs
            .each_ref()
            .map(|output| if self.wiring.json { Sink::memory(JSON_OUTPUT) } else { output.sink() });
        let resized = self.resized.as_ref().map(AsFd::as_fd);
        Stdio {
            stdin: self.wiring.stdin.then(rustix::stdio::stdin),
            stdout,
            stderr,
            interrupt: Some(self.stop.as_fd()),
            terminal: resized.map(|resized| LocalTerminal { fd: rustix::stdio::stdin(), resized }),
            detach_keys: self.wiring.detachable,
        }
    }

    /// Restores the terminal, and returns the descriptor of signals.
    pub fn close(self) -> OwnedFd {
        self.outputs.iter().for_each(Output::finish);
        drop(self.raw);
        self.stop
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c1_only_output_to_a_terminal_is_escaped() {
        let hostile = b"\x1b[2J";
        let escaped = Output::new(rustix::stdio::stdout(), true);
        let Sink::Filtered(_, mut filter) = escaped.sink() else { panic!("nothing is escaped") };
        assert_eq!(filter(hostile), b"\\u{1b}[2J");
        assert!(matches!(Output::new(rustix::stdio::stdout(), false).sink(), Sink::Descriptor(_)));
    }
}
