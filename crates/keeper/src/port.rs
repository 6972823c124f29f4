//! A device, however the guest reaches it: over a socket, or by registers on the bus of a virtual machine.

use std::sync::Arc;

use bathy_devices::{Outcome, VirtioDevice};
use bathy_uml::vhost::{Backend, SocketError, VhostError};
use bathy_vmm::Slot;
use bathy_vmm::mmio::MmioError;
use thiserror::Error;

/// The guest broke a rule.
#[derive(Debug, Error)]
pub enum PortError {
    #[error(transparent)]
    Socket(#[from] VhostError),
    #[error(transparent)]
    Bus(#[from] MmioError),
}

impl PortError {
    /// Whether the guest has only closed its end.
    pub fn is_closed(&self) -> bool {
        matches!(self, Self::Socket(VhostError::Socket(SocketError::Closed)))
    }
}

#[expect(clippy::large_enum_variant, reason = "a guest has a handful of them")]
pub enum Port<D: VirtioDevice> {
    /// For a guest that is a process.
    Socket(Backend<D>),
    /// For a guest that is a virtual machine.
    Bus(Arc<Slot<D>>),
}

impl<D: VirtioDevice> Port<D> {
    /// An event for the device.
    pub fn on_event(&mut self, token: u64) -> Result<Outcome, PortError> {
        match self {
            Self::Socket(backend) => Ok(backend.on_event(token)?),
            Self::Bus(slot) => Ok(slot.on_event(token)?),
        }
    }

    /// Continues work that was left, or that the host's side made possible.
    pub fn service(&mut self) -> Result<Outcome, PortError> {
        match self {
            Self::Socket(backend) => Ok(backend.service()?),
            Self::Bus(slot) => Ok(slot.lock().service()?),
        }
    }

    /// Looks at the device, or changes it; a change is followed by [`service`](Self::service).
    pub fn with<R>(&mut self, work: impl FnOnce(&mut D) -> R) -> R {
        match self {
            Self::Socket(backend) => work(backend.device_mut()),
            Self::Bus(slot) => work(slot.lock().device_mut()),
        }
    }
}
