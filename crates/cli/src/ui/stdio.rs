//! The caller's ends of a command: which of our descriptors it is connected to, and in which state they are.

use std::cell::RefCell;
use std::error::Error;
use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bathy_client::attach::{LocalTerminal, Sink, Stdio};

use crate::sys;
use crate::ui::escape::{Returns, Stream};
use crate::ui::exit_code::JSON_OUTPUT;
use crate::ui::terminal::{self, Raw};

/// What is connected, and how.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wiring {
    /// Standard input goes to the command.
    pub stdin: bool,
    /// The command has a terminal, shown on ours.
    pub terminal: bool,
    /// Output is kept for a report.
    pub json: bool,
    /// Ctrl-P Ctrl-Q leaves the command running.
    pub detachable: bool,
}

/// Our side, for as long as the command runs. Dropping it restores the terminal.
#[derive(Debug)]
pub struct CallerStdio {
    wiring: Wiring,
    stop: OwnedFd,
    resized: Option<OwnedFd>,
    raw: Option<Raw>,
    outputs: [Output; 2],
}

/// An output for bytes from a guest: as they are into files, pipes and for a command that was given the terminal,
/// escaped onto a terminal otherwise.
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

    /// The beginning of a character whose rest never came.
    fn finish(&self) {
        if let Some(stream) = &self.escape {
            // A terminal that has gone away needs it no more.
            let _ = terminal::write_all(self.fd, stream.borrow_mut().finish().as_bytes());
        }
    }
}

impl CallerStdio {
    /// Takes the signals, and leaves the terminal as it is for now.
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

    /// The command is about to run: from now on keys go to it.
    pub fn enter(&mut self) -> io::Result<()> {
        if self.wiring.terminal {
            self.raw = Some(Raw::enter()?);
        }
        Ok(())
    }

    /// For the library.
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

    /// Restores the terminal, and hands back what tells of signals.
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
