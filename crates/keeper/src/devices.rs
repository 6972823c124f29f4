//! The guest's devices, and the one place that knows which event belongs to which of them.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use bathy_devices::block::{Backing, Block, BlockConfig, BlockError, BlockLimits, DiskPart};
use bathy_devices::console::Console;
use bathy_devices::entropy::Entropy;
use bathy_devices::net::Net;
use bathy_devices::{GuestRam, Outcome};
use bathy_protocol::Usage;
use bathy_protocol::launch::Launch;
use bathy_protocol::network::GUEST_MAC;
use bathy_uml::vhost::{Backend, VhostError};
use bathy_vmm::bus::Registers;
use bathy_vmm::{Machine, Slot, SlotError, Wiring};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use thiserror::Error;

use crate::port::{Port, PortError};

/// Events of the devices have tokens from here on; every device has [`TOKENS_EACH`] of them.
pub const FIRST_TOKEN: u64 = 16;
const TOKENS_EACH: u64 = 16;

/// How many devices a guest has, besides a network device.
const COUNT: usize = 4;

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
    /// The machine has no place for it.
    #[error("Cannot serve a device")]
    Slot(#[from] SlotError),
}

/// The guest's devices before they are connected to a transport.
pub struct Models {
    image: Block,
    disk: Block,
    network: bool,
}

impl Models {
    /// A read-only image of several files and a writable disk, which is flushed only if the sandbox is persistent, and maybe a
    /// network device.
    pub fn new(image: Vec<File>, disk: File, launch: &Launch) -> Result<Self, DevicesError> {
        let wanted = launch.disk_limits;
        let limits = BlockLimits {
            write_bandwidth: Some(wanted.write_bandwidth),
            read_bandwidth: wanted.read_bandwidth,
            flushes: Some(wanted.flushes.into()),
        };
        let parts: Vec<DiskPart> =
            launch.image.iter().zip(image).map(|(offset, file)| DiskPart { offset: *offset, file }).collect();
        let block = |backing: Backing, name, read_only, volatile, id: &str| {
            Block::new(backing, BlockConfig { read_only, volatile, id: id.to_owned(), limits })
                .map_err(|error| DevicesError::Disk(name, error))
        };
        Ok(Self {
            image: block(parts.into(), "root image", true, true, "image")?,
            disk: block(disk.into(), "writable disk", false, !launch.persistent, "disk")?,
            network: launch.network,
        })
    }

    /// How many devices there are.
    pub fn count(&self) -> usize {
        COUNT + usize::from(self.network)
    }
}

/// All devices of a guest.
pub struct Devices {
    image: Port<Block>,
    disk: Port<Block>,
    control: Port<Console>,
    entropy: Port<Entropy>,
    network: Option<Port<Net>>,
    /// The host's errors that were reported already.
    reported_errors: Vec<io::ErrorKind>,
}

/// The guest's ends of the devices' sockets, in the order of [`bathy_uml::guest::DEVICES`].
pub struct GuestEnds(Vec<OwnedFd>);

impl GuestEnds {
    /// The descriptors to hand to the guest.
    pub fn iter(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(AsFd::as_fd)
    }
}

/// The first token of a device.
fn token(index: u64) -> u64 {
    FIRST_TOKEN + index * TOKENS_EACH
}

impl Devices {
    /// Connects each device to a socket whose other end the guest is given.
    pub fn on_sockets(
        models: Models,
        ram: &Arc<GuestRam>,
        epoll: &Rc<OwnedFd>,
    ) -> Result<(Self, GuestEnds), DevicesError> {
        let (image_socket, image_end) = pair()?;
        let (disk_socket, disk_end) = pair()?;
        let (control_socket, control_end) = pair()?;
        let (entropy_socket, entropy_end) = pair()?;
        let (ram, epoll) = (|| Arc::clone(ram), || Rc::clone(epoll));
        let image = Backend::new(models.image, image_socket, ram(), epoll(), token(0))?;
        let disk = Backend::new(models.disk, disk_socket, ram(), epoll(), token(1))?;
        let control = Backend::new(Console::new(), control_socket, ram(), epoll(), token(2))?;
        let entropy = Backend::new(Entropy::new(), entropy_socket, ram(), epoll(), token(3))?;
        let mut ends = vec![image_end, disk_end, control_end, entropy_end];
        let mut network = None;
        if models.network {
            let (socket, end) = pair()?;
            network = Some(Port::Socket(Backend::new(nic(), socket, ram(), epoll(), token(4))?));
            ends.push(end);
        }
        let devices = Self {
            image: Port::Socket(image),
            disk: Port::Socket(disk),
            control: Port::Socket(control),
            entropy: Port::Socket(entropy),
            network,
            reported_errors: Vec::new(),
        };
        Ok((devices, GuestEnds(ends)))
    }

    /// Puts each device into its place in a virtual machine, whose processors reach its registers there.
    pub fn on_bus(
        models: Models,
        machine: &Machine,
        ram: &Arc<GuestRam>,
        epoll: &OwnedFd,
    ) -> Result<(Self, Vec<Arc<dyn Registers>>), DevicesError> {
        let wiring = Wiring { machine, ram, epoll };
        let image = Arc::new(Slot::new(models.image, 0, token(0), &wiring)?);
        let disk = Arc::new(Slot::new(models.disk, 1, token(1), &wiring)?);
        let control = Arc::new(Slot::new(Console::new(), 2, token(2), &wiring)?);
        let entropy = Arc::new(Slot::new(Entropy::new(), 3, token(3), &wiring)?);
        let mut registers: Vec<Arc<dyn Registers>> =
            vec![image.clone(), disk.clone(), control.clone(), entropy.clone()];
        let mut network = None;
        if models.network {
            let slot = Arc::new(Slot::new(nic(), 4, token(4), &wiring)?);
            registers.push(slot.clone());
            network = Some(Port::Bus(slot));
        }
        let devices = Self {
            image: Port::Bus(image),
            disk: Port::Bus(disk),
            control: Port::Bus(control),
            entropy: Port::Bus(entropy),
            network,
            reported_errors: Vec::new(),
        };
        Ok((devices, registers))
    }

    /// An event for a device.
    pub fn on_event(&mut self, token: u64) -> Result<Outcome, PortError> {
        match token.saturating_sub(FIRST_TOKEN) / TOKENS_EACH {
            0 => self.image.on_event(token),
            1 => self.disk.on_event(token),
            2 => self.control.on_event(token),
            3 => self.entropy.on_event(token),
            _ => self
                .network
                .as_mut()
                .map_or_else(|| Ok(Outcome::default()), |network| network.on_event(token)),
        }
    }

    /// Continues work that an earlier outcome left.
    pub fn service(&mut self) -> Result<Outcome, PortError> {
        let disks = self.image.service()?.merge(self.disk.service()?);
        let others = self.control.service()?.merge(self.entropy.service()?);
        Ok(disks.merge(others).merge(self.service_network()?))
    }

    /// Looks at the network device, if there is one, or changes it; to be followed by [`Self::service_network`].
    pub fn with_network<R>(&mut self, work: impl FnOnce(&mut Net) -> R) -> Option<R> {
        self.network.as_mut().map(|network| network.with(work))
    }

    /// Lets the network device move what the host's side changed.
    pub fn service_network(&mut self) -> Result<Outcome, PortError> {
        self.network.as_mut().map_or_else(|| Ok(Outcome::default()), Port::service)
    }

    /// How often the agent has opened its port.
    pub fn agent_sessions(&mut self) -> u64 {
        self.control.with(|control| control.sessions())
    }

    /// Bytes from the agent; to be followed by [`Self::service_control`], which refills the buffer.
    pub fn take_from_agent(&mut self, most: usize) -> Vec<u8> {
        self.control.with(|control| control.take(most))
    }

    /// Bytes for the agent; returns how many were taken. To be followed by [`Self::service_control`].
    pub fn send_to_agent(&mut self, bytes: &[u8]) -> usize {
        if bytes.is_empty() { 0 } else { self.control.with(|control| control.send(bytes)) }
    }

    /// Lets the control channel move what the host's side changed.
    pub fn service_control(&mut self) -> Result<Outcome, PortError> {
        self.control.service()
    }

    /// Bytes that the disks have moved, and those that the writable one occupies on the host.
    pub fn disk_usage(&mut self) -> Usage {
        let image = self.image.with(|image| image.traffic());
        let (disk, occupied) = self.disk.with(|disk| (disk.traffic(), disk.occupied()));
        Usage {
            disk: occupied,
            disk_read: image.read.saturating_add(disk.read),
            disk_written: disk.written,
            ..Usage::default()
        }
    }

    /// Whether any disk has limits.
    #[cfg(test)]
    pub fn are_disks_limited(&mut self) -> bool {
        let unlimited = BlockLimits::default();
        [&mut self.image, &mut self.disk]
            .into_iter()
            .any(|disk| disk.with(|disk| disk.save().throttle.limits) != unlimited)
    }

    /// Takes the limits of the disks off, for good; to be followed by [`Self::service`].
    pub fn lift_disk_limits(&mut self) {
        self.image.with(Block::lift_limits);
        self.disk.with(Block::lift_limits);
    }

    /// The host's reason for failing a request of the guest's disks. Each is returned once: a guest can provoke them as
    /// often as it likes.
    pub fn take_new_disk_error(&mut self) -> Option<io::ErrorKind> {
        let error =
            self.disk.with(Block::take_host_error).or_else(|| self.image.with(Block::take_host_error));
        let new = error.filter(|kind| !self.reported_errors.contains(kind));
        self.reported_errors.extend(new);
        new
    }
}

fn nic() -> Net {
    Net::new(GUEST_MAC)
}

fn pair() -> Result<(OwnedFd, OwnedFd), DevicesError> {
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|error| DevicesError::Socket(error.into()))?;
    rustix::io::ioctl_fionbio(&ours, true).map_err(|error| DevicesError::Socket(error.into()))?;
    Ok((ours, theirs))
}
