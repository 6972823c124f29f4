//! The guest's devices, and the one place that knows which event belongs to which of them.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use bathy_devices::block::{Block, BlockConfig, BlockError};
use bathy_devices::console::Console;
use bathy_devices::entropy::Entropy;
use bathy_devices::{GuestRam, Outcome};
use bathy_protocol::Usage;
use bathy_uml::vhost::{Backend, VhostError};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use thiserror::Error;

/// Events of the devices have tokens from here on; every device has [`TOKENS_EACH`] of them.
pub const FIRST_TOKEN: u64 = 16;
const TOKENS_EACH: u64 = 16;

/// A device could not be made.
#[derive(Debug, Error)]
pub enum DevicesError {
    /// A disk's file is not usable.
    #[error("Cannot serve the {0}")]
    Disk(&'static str, #[source] BlockError),
    /// A socket could not be made.
    #[error("Cannot make a device's socket")]
    Socket(#[source] io::Error),
    /// The event loop refused the device.
    #[error("Cannot serve a device")]
    Backend(#[from] VhostError),
}

/// All devices of a guest.
pub struct Devices {
    image: Backend<Block>,
    disk: Backend<Block>,
    control: Backend<Console>,
    entropy: Backend<Entropy>,
}

/// The guest's ends of the devices' sockets, in the order of [`bathy_uml::guest::DEVICES`].
pub struct GuestEnds([OwnedFd; 4]);

impl GuestEnds {
    /// The descriptors to hand to the guest.
    pub fn iter(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(AsFd::as_fd)
    }
}

impl Devices {
    /// Makes the devices and connects each to a socket whose other end the guest is given.
    pub fn new(
        image: File,
        disk: File,
        disk_is_kept: bool,
        ram: &Rc<GuestRam>,
        epoll: &Rc<OwnedFd>,
    ) -> Result<(Self, GuestEnds), DevicesError> {
        let (image_socket, image_end) = pair()?;
        let (disk_socket, disk_end) = pair()?;
        let (control_socket, control_end) = pair()?;
        let (entropy_socket, entropy_end) = pair()?;
        let image_config = BlockConfig { read_only: true, volatile: true, id: "image".to_owned() };
        let image =
            Block::new(image, image_config).map_err(|error| DevicesError::Disk("root image", error))?;
        let disk_config = BlockConfig { read_only: false, volatile: !disk_is_kept, id: "disk".to_owned() };
        let disk =
            Block::new(disk, disk_config).map_err(|error| DevicesError::Disk("writable disk", error))?;
        let (ram, epoll) = (|| Rc::clone(ram), || Rc::clone(epoll));
        let token = |index| FIRST_TOKEN + index * TOKENS_EACH;
        let devices = Self {
            image: Backend::new(image, image_socket, ram(), epoll(), token(0))?,
            disk: Backend::new(disk, disk_socket, ram(), epoll(), token(1))?,
            control: Backend::new(Console::new(), control_socket, ram(), epoll(), token(2))?,
            entropy: Backend::new(Entropy::new(), entropy_socket, ram(), epoll(), token(3))?,
        };
        Ok((devices, GuestEnds([image_end, disk_end, control_end, entropy_end])))
    }

    /// An event for a device.
    pub fn on_event(&mut self, token: u64) -> Result<Outcome, VhostError> {
        match token.saturating_sub(FIRST_TOKEN) / TOKENS_EACH {
            0 => self.image.on_event(token),
            1 => self.disk.on_event(token),
            2 => self.control.on_event(token),
            _ => self.entropy.on_event(token),
        }
    }

    /// Continues work that an earlier outcome left.
    pub fn service(&mut self) -> Result<Outcome, VhostError> {
        let disks = self.image.service()?.merge(self.disk.service()?);
        Ok(disks.merge(self.control.service()?).merge(self.entropy.service()?))
    }

    /// How often the agent has opened its port.
    pub fn agent_sessions(&self) -> u64 {
        self.control.device().sessions()
    }

    /// Bytes from the agent; to be followed by [`Self::service_control`], which makes use of the room.
    pub fn take_from_agent(&mut self, most: usize) -> Vec<u8> {
        self.control.device_mut().take(most)
    }

    /// Bytes for the agent; returns how many were taken. To be followed by [`Self::service_control`].
    pub fn send_to_agent(&mut self, bytes: &[u8]) -> usize {
        if bytes.is_empty() { 0 } else { self.control.device_mut().send(bytes) }
    }

    /// Lets the control channel move what the host's side changed.
    pub fn service_control(&mut self) -> Result<Outcome, VhostError> {
        self.control.service()
    }

    /// Bytes that the disks have moved, and those that the writable one occupies on the host.
    pub fn disk_usage(&self) -> Usage {
        let (image, disk) = (self.image.device(), self.disk.device());
        Usage {
            disk: disk.occupied(),
            disk_read: image.traffic().read.saturating_add(disk.traffic().read),
            disk_written: disk.traffic().written,
            ..Usage::default()
        }
    }

    /// The host's reason for failing a request of the guest's disks, once.
    pub fn take_disk_error(&mut self) -> Option<io::ErrorKind> {
        self.disk.device_mut().take_host_error().or_else(|| self.image.device_mut().take_host_error())
    }
}

fn pair() -> Result<(OwnedFd, OwnedFd), DevicesError> {
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|error| DevicesError::Socket(error.into()))?;
    rustix::io::ioctl_fionbio(&ours, true).map_err(|error| DevicesError::Socket(error.into()))?;
    Ok((ours, theirs))
}
