//! Ctrl-C for running code: the first one interrupts the code, the second one stops waiting for it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::net::Shutdown;
use rustix::process::{Signal, getpid, kill_process};

use crate::sys;

/// Catches the signals that stop a program, until it is dropped.
#[derive(Debug)]
pub struct Interrupts {
    asked: Arc<OwnedFd>,
    over: Arc<OwnedFd>,
    /// The first signal, or 0.
    signal: Arc<AtomicU8>,
    watcher: Option<JoinHandle<()>>,
}

impl Interrupts {
    /// From now on a signal makes [`Self::fd`] readable. A second one shuts `connection` down, or ends this program if there is
    /// none.
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

    /// Readable when the code has to be interrupted.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.asked.as_fd()
    }

    /// A way to interrupt the code without a signal.
    pub fn trigger(&self) -> Trigger {
        Trigger(self.asked.clone())
    }

    /// The signal that was caught, if any.
    pub fn signal(&self) -> Option<u8> {
        Some(self.signal.load(Ordering::Relaxed)).filter(|signal| *signal > 0)
    }
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        raise(&self.over);
        if let Some(watcher) = self.watcher.take() {
            // The thread cannot panic.
            let _ = watcher.join();
        }
        // Signals caught in the meantime were meant for the code, and their descriptor is closed.
        let _ = sys::forget_stop_signals();
    }
}

/// Interrupts the code without a signal.
#[derive(Clone, Debug)]
pub struct Trigger(Arc<OwnedFd>);

impl Trigger {
    pub fn pull(&self) {
        raise(&self.0);
    }
}

fn raise(event: &OwnedFd) {
    // It fails only if the counter overflows.
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
                // Unblocked in this thread, it is delivered and ends the program.
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
