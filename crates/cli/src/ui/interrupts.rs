//! Ctrl-C for code that runs: the first one interrupts it, the second one gives up waiting.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::net::Shutdown;
use rustix::process::{Signal, getpid, kill_process};

use crate::sys;

/// Takes the signals that ask us to stop, for as long as it lives.
#[derive(Debug)]
pub struct Interrupts {
    asked: Arc<OwnedFd>,
    over: Arc<OwnedFd>,
    /// The first signal, 0 while there was none.
    signal: Arc<AtomicU8>,
    watcher: Option<JoinHandle<()>>,
}

impl Interrupts {
    /// From now on a signal makes [`Self::fd`] readable. A second one shuts `connection` down, or ends this program if
    /// there is none to be shut.
    pub fn take(connection: Option<OwnedFd>) -> io::Result<Self> {
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Arc::new);
        let (asked, over, signal) = (event()?, event()?, Arc::new(AtomicU8::new(0)));
        let signals = sys::stop_signals()?;
        let watch =
            Watch { signals, asked: asked.clone(), over: over.clone(), signal: signal.clone(), connection };
        let watcher =
            Some(std::thread::Builder::new().name("signals".to_owned()).spawn(move || watch.run())?);
        Ok(Self { asked, over, signal, watcher })
    }

    /// Readable when the code is to be interrupted.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.asked.as_fd()
    }

    /// What interrupts the code for a reason of our own.
    pub fn trigger(&self) -> Trigger {
        Trigger(self.asked.clone())
    }

    /// The signal that came, if one did.
    pub fn signal(&self) -> Option<u8> {
        Some(self.signal.load(Ordering::Relaxed)).filter(|signal| *signal > 0)
    }
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        raise(&self.over);
        if let Some(watcher) = self.watcher.take() {
            // It cannot panic, and there is nobody to tell if it did.
            let _ = watcher.join();
        }
        // The signals that came meanwhile were meant for the code; the descriptor that held them is gone.
        let _ = sys::forget_stop_signals();
    }
}

/// Interrupts the code.
#[derive(Clone, Debug)]
pub struct Trigger(Arc<OwnedFd>);

impl Trigger {
    /// Does it.
    pub fn pull(&self) {
        raise(&self.0);
    }
}

fn raise(event: &OwnedFd) {
    // It can only fail when it was raised more often than anybody counts.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

struct Watch {
    signals: OwnedFd,
    asked: Arc<OwnedFd>,
    over: Arc<OwnedFd>,
    signal: Arc<AtomicU8>,
    connection: Option<OwnedFd>,
}

impl Watch {
    fn run(self) {
        loop {
            let mut fds = [&self.signals, &self.over].map(|fd| PollFd::new(fd, PollFlags::IN));
            let _ = poll(&mut fds, None);
            let [signalled, over] = fds.map(|fd| !fd.revents().is_empty());
            if over {
                return;
            }
            if signalled && let Ok(number) = sys::read_signal(&self.signals) {
                self.received(number);
            }
        }
    }

    fn received(&self, number: u8) {
        if self.signal.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            raise(&self.asked);
            return;
        }
        match &self.connection {
            Some(connection) => drop(rustix::net::shutdown(connection, Shutdown::Both)),
            None => {
                // In this thread it is delivered, and ends us as it would have at first.
                let _ = sys::unblock_signals();
                if let Some(signal) = Signal::from_named_raw(number.into()) {
                    let _ = kill_process(getpid(), signal);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trigger_makes_the_descriptor_readable() {
        let interrupts = Interrupts::take(None).unwrap();
        let readable = || {
            let mut fds = [PollFd::from_borrowed_fd(interrupts.fd(), PollFlags::IN)];
            poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
        };
        assert!(!readable());
        interrupts.trigger().pull();
        assert!(readable());
        assert_eq!(interrupts.signal(), None);
    }
}
