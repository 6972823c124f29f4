//! Interrupts: notifications from the device to the driver.
//!
//! This is shared outside of the device's lock: a processor of the guest's that serves an interrupt never waits for a
//! device that is at work.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// A queue has completed chains.
const QUEUE: u32 = 1;
/// The configuration space has changed.
const CONFIG: u32 = 2;

/// The interrupt line of one device, and the reasons for which it was raised last.
#[derive(Debug)]
pub struct Interrupt {
    reasons: AtomicU32,
    line: EventFd,
}

impl Interrupt {
    /// Makes a line that nothing is connected to yet.
    ///
    /// # Errors
    /// When the host's kernel has no event counter for it.
    pub fn new() -> io::Result<Self> {
        Ok(Self { reasons: AtomicU32::new(0), line: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)? })
    }

    /// The event counter that is written for each edge of the line.
    pub fn line(&self) -> &EventFd {
        &self.line
    }

    /// What the driver reads as the reasons of the interrupt.
    pub fn status(&self) -> u32 {
        self.reasons.load(Ordering::SeqCst)
    }

    /// The driver has taken note of these reasons.
    pub fn acknowledge(&self, reasons: u32) {
        self.reasons.fetch_and(!reasons, Ordering::SeqCst);
    }

    /// Notifies the driver that a queue has completed chains.
    ///
    /// # Errors
    /// When the line is broken.
    pub fn raise(&self) -> io::Result<()> {
        self.raise_for(QUEUE)
    }

    /// Notifies the driver that the configuration space has changed.
    ///
    /// # Errors
    /// When the line is broken.
    pub fn raise_config(&self) -> io::Result<()> {
        self.raise_for(CONFIG)
    }

    /// The line is edge-triggered, so it is written even if the reason is set already: the driver may be just about
    /// to acknowledge the older one.
    fn raise_for(&self, reason: u32) -> io::Result<()> {
        self.reasons.fetch_or(reason, Ordering::SeqCst);
        match self.line.write(1) {
            // A counter that is full already holds an interrupt.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            result => result,
        }
    }

    /// Forgets all reasons, because the device was reset.
    pub(super) fn reset(&self) {
        self.reasons.store(0, Ordering::SeqCst);
    }
}
