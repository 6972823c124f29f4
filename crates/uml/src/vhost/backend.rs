//! One device on one connection: the order of messages, and what each of them may change.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use bathy_devices::{DeviceError, GuestRam, Outcome, Queue, ServedQueue, VirtioDevice};
use rustix::event::epoll::{self, EventData, EventFlags};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::message::{self, Region, Request};
use super::socket::{Frame, Socket, SocketError};
use super::vring::{Vring, VringError, VringState, check_stream_socket};

/// Feature bit of the transport: there are protocol features to be negotiated.
const F_PROTOCOL_FEATURES: u64 = 1 << 30;
const F_VERSION_1: u64 = 1 << 32;
const F_EVENT_IDX: u64 = 1 << 29;

const PROTOCOL_REPLY_ACK: u64 = 1 << 3;
const PROTOCOL_BACKEND_REQ: u64 = 1 << 5;
const PROTOCOL_CONFIG: u64 = 1 << 9;
/// What is offered: everything that the driver needs. In-band notifications are left out because they would turn
/// every kick and interrupt into a message.
const PROTOCOL_FEATURES: u64 = PROTOCOL_REPLY_ACK | PROTOCOL_BACKEND_REQ | PROTOCOL_CONFIG;

/// The most messages that are handled before others get their turn.
const MAX_MESSAGES: usize = 64;

/// Why a connection was ended.
#[derive(Debug, Error)]
pub enum VhostError {
    #[error("The device's connection ended")]
    Socket(#[from] SocketError),
    /// A queue was set up wrongly.
    #[error("The guest set queue {queue} up wrongly")]
    Vring {
        queue: u32,
        #[source]
        source: VringError,
    },
    #[error("The device stopped")]
    Device(#[from] DeviceError),
    /// A message at a moment when it makes no sense.
    #[error("The guest sent a message out of order: {0}")]
    Order(&'static str),
    /// A feature that was not offered, or one missing that is needed.
    #[error("The guest accepted features {accepted:#x} of {offered:#x}")]
    Features {
        /// The features that the guest accepts.
        accepted: u64,
        offered: u64,
    },
    /// A memory table that is not the guest's own memory.
    #[error("The guest's memory table is not its memory: {0}")]
    Memory(&'static str),
    /// A descriptor for requests to the guest that could block.
    #[error("The guest's request descriptor is not a UNIX stream socket")]
    RequestDescriptor,
    /// An event for something that the device does not have.
    #[error("There is no event {0} for this device")]
    Token(u64),
    /// The host's kernel refused to watch a descriptor.
    #[error("Cannot watch a descriptor for events")]
    Epoll(#[source] io::Error),
}

/// A connection's state, as plain numbers; the device's own state is separate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackendState {
    /// What the driver accepted of the device's features.
    pub features: u64,
    /// What the driver accepted of the protocol's features.
    pub protocol_features: u64,
    pub queues: Vec<VringState>,
}

/// A device, served to one guest over one socket.
///
/// The owner runs the event loop: it calls [`on_event`](Self::on_event) for every token that epoll reports between
/// `token_base` and `token_base + queue count`, and [`service`](Self::service) after it used
/// [`device_mut`](Self::device_mut) and whenever an [`Outcome`] asked for more work.
#[derive(Debug)]
pub struct Backend<D: VirtioDevice> {
    device: D,
    /// `None` once an error has ended the connection.
    socket: Option<Socket>,
    ram: Arc<GuestRam>,
    epoll: Rc<OwnedFd>,
    token_base: u64,
    vrings: Vec<Vring>,
    owned: bool,
    features: Option<u64>,
    protocol_features: u64,
    table: Option<Region>,
    /// Held open: the driver takes its closing for the end of the device.
    request_fd: Option<OwnedFd>,
}

impl<D: VirtioDevice> Backend<D> {
    /// Serves `device` on an already connected socket, and registers it with `epoll`.
    ///
    /// # Errors
    /// When the socket cannot be watched.
    pub fn new(
        device: D,
        socket: OwnedFd,
        ram: Arc<GuestRam>,
        epoll: Rc<OwnedFd>,
        token_base: u64,
    ) -> Result<Self, VhostError> {
        let vrings = (0..device.queue_count())
            .map(|_| Vring::new())
            .collect::<Result<_, _>>()
            .map_err(|source| VhostError::Vring { queue: 0, source })?;
        watch(&epoll, &socket, token_base, EventFlags::IN)?;
        Ok(Self {
            device,
            socket: Some(Socket::new(socket)),
            ram,
            epoll,
            token_base,
            vrings,
            owned: false,
            features: None,
            protocol_features: 0,
            table: None,
            request_fd: None,
        })
    }

    pub fn device(&self) -> &D {
        &self.device
    }

    /// The device, to be followed by [`service`](Self::service).
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Whether an error has ended the connection.
    pub fn is_ended(&self) -> bool {
        self.socket.is_none()
    }

    pub fn save(&self) -> BackendState {
        BackendState {
            features: self.features.unwrap_or(0),
            protocol_features: self.protocol_features,
            queues: self.vrings.iter().map(Vring::state).collect(),
        }
    }

    /// Handles an event that epoll reported.
    ///
    /// # Errors
    /// When the guest broke the protocol or closed the connection. The first error ends the connection; after that,
    /// nothing happens and nothing is reported.
    pub fn on_event(&mut self, token: u64) -> Result<Outcome, VhostError> {
        self.guarded(|backend| match token.checked_sub(backend.token_base) {
            Some(0) => backend.on_socket(),
            Some(number) => {
                let queue = usize::try_from(number - 1).map_err(|_| VhostError::Token(token))?;
                if queue >= backend.vrings.len() {
                    return Err(VhostError::Token(token));
                }
                backend.work(Some(queue))
            }
            None => Err(VhostError::Token(token)),
        })
    }

    /// Works on one queue, because the host's side of it made progress possible.
    ///
    /// # Errors
    /// As for [`on_event`](Self::on_event).
    pub fn run_queue(&mut self, queue: usize) -> Result<Outcome, VhostError> {
        self.guarded(|backend| backend.work(Some(queue)))
    }

    /// Works on all queues that have something left to do.
    ///
    /// # Errors
    /// As for [`on_event`](Self::on_event).
    pub fn service(&mut self) -> Result<Outcome, VhostError> {
        self.guarded(|backend| backend.work(None))
    }

    fn guarded(
        &mut self,
        act: impl FnOnce(&mut Self) -> Result<Outcome, VhostError>,
    ) -> Result<Outcome, VhostError> {
        if self.is_ended() {
            return Ok(Outcome::default());
        }
        let outcome = act(self);
        if outcome.is_err() {
            self.end();
        }
        outcome
    }

    /// Closes everything, and stops watching everything: the guest holds its own copies of the descriptors, so that
    /// closing ours alone would not take them out of epoll.
    fn end(&mut self) {
        if let Some(socket) = self.socket.take() {
            let _ = epoll::delete(&*self.epoll, socket.fd());
        }
        for vring in &mut self.vrings {
            vring.stop();
            if let Some(kick) = vring.take_kick() {
                let _ = epoll::delete(&*self.epoll, &kick);
            }
            let _ = vring.set_call(None);
        }
        self.request_fd = None;
    }

    /// Works on the queue `first`, or on what is left over from before, and on what follows from that.
    fn work(&mut self, first: Option<usize>) -> Result<Outcome, VhostError> {
        bathy_devices::work(&mut self.device, &mut self.vrings, self.ram.memory(), first)
    }

    fn on_socket(&mut self) -> Result<Outcome, VhostError> {
        let mut total = Outcome::default();
        for _ in 0..MAX_MESSAGES {
            let Some(socket) = &mut self.socket else { return Ok(total) };
            let Some(frame) = socket.receive()? else { return Ok(total) };
            total = total.merge(self.on_message(frame)?);
        }
        // The socket is watched for its level: what is left there will be reported again.
        Ok(total)
    }

    fn on_message(&mut self, frame: Frame) -> Result<Outcome, VhostError> {
        let Frame { header, payload, mut descriptors } = frame;
        let request = Request::parse(header, &payload, descriptors.len()).map_err(SocketError::from)?;
        if !self.owned && request != Request::SetOwner {
            return Err(VhostError::Order("the first has to be SET_OWNER"));
        }
        let mut outcome = Outcome::default();
        let mut answer: Option<Vec<u8>> = None;
        let fd = descriptors.pop();
        match request {
            Request::SetOwner if self.owned => return Err(VhostError::Order("SET_OWNER comes once")),
            Request::SetOwner => self.owned = true,
            Request::GetFeatures => answer = Some(self.offered().to_ne_bytes().into()),
            Request::SetFeatures(accepted) => self.set_features(accepted)?,
            Request::GetProtocolFeatures => answer = Some(PROTOCOL_FEATURES.to_ne_bytes().into()),
            Request::SetProtocolFeatures(accepted) => {
                if accepted & !PROTOCOL_FEATURES != 0 {
                    return Err(VhostError::Features { accepted, offered: PROTOCOL_FEATURES });
                }
                self.protocol_features = accepted;
            }
            Request::SetMemTable(region) => self.set_mem_table(region, fd)?,
            Request::SetVringNum { queue, entries } => self.vring(queue, |v| v.set_entries(entries))?,
            Request::SetVringAddr { queue, address } => {
                if self.table.is_none() {
                    return Err(VhostError::Order("SET_VRING_ADDR before SET_MEM_TABLE"));
                }
                self.vring(queue, |vring| vring.set_address(address))?;
            }
            Request::SetVringBase { queue, base } => self.vring(queue, |v| v.set_base(base))?,
            Request::GetVringBase { queue } => {
                let base = self.stop_vring(queue)?;
                answer = Some(message::vring_state(queue, base.into()).into());
            }
            Request::SetVringKick { queue } => self.set_kick(queue, fd)?,
            Request::SetVringCall { queue, has_fd: _ } => self.vring(queue, |vring| vring.set_call(fd))?,
            Request::SetVringEnable { queue, on: true } => outcome = self.start_vring(queue)?,
            Request::SetVringEnable { queue, on: false } => self.vring(queue, |vring| {
                vring.stop();
                Ok(())
            })?,
            Request::SetBackendReqFd => self.set_request_fd(fd)?,
            Request::GetConfig { offset, bytes } => {
                self.need_protocol(PROTOCOL_CONFIG, "GET_CONFIG was not negotiated")?;
                let mut data = vec![0; bytes as usize];
                self.device.read_config(offset, &mut data);
                answer = Some(message::config(offset, &data));
            }
            Request::SetConfig { offset, data } => {
                self.need_protocol(PROTOCOL_CONFIG, "SET_CONFIG was not negotiated")?;
                self.device.write_config(offset, &data);
            }
        }
        if header.need_reply && answer.is_none() {
            self.need_protocol(PROTOCOL_REPLY_ACK, "an acknowledgement was not negotiated")?;
            answer = Some(0_u64.to_ne_bytes().into());
        }
        if let (Some(payload), Some(socket)) = (answer, &self.socket) {
            socket.answer(&message::reply(header.request, &payload))?;
        }
        Ok(outcome)
    }

    fn offered(&self) -> u64 {
        self.device.features() | F_PROTOCOL_FEATURES
    }

    fn need_protocol(&self, feature: u64, otherwise: &'static str) -> Result<(), VhostError> {
        if self.protocol_features & feature != 0 { Ok(()) } else { Err(VhostError::Order(otherwise)) }
    }

    fn any_running(&self) -> bool {
        self.vrings.iter().any(Vring::is_running)
    }

    fn set_features(&mut self, accepted: u64) -> Result<(), VhostError> {
        let offered = self.offered();
        if accepted & !offered != 0 || accepted & F_VERSION_1 == 0 {
            return Err(VhostError::Features { accepted, offered });
        }
        if self.any_running() {
            return Err(VhostError::Order("SET_FEATURES while a queue runs"));
        }
        if self.features.is_some() {
            // The driver was unbound and comes back.
            self.device.reset();
        }
        self.features = Some(accepted);
        self.device.set_features(accepted & !F_PROTOCOL_FEATURES);
        Ok(())
    }

    fn set_mem_table(&mut self, region: Region, fd: Option<OwnedFd>) -> Result<(), VhostError> {
        if self.any_running() {
            return Err(VhostError::Order("SET_MEM_TABLE while a queue runs"));
        }
        if !fd.is_some_and(|fd| self.ram.is_same_file(fd)) {
            return Err(VhostError::Memory("it is another file"));
        }
        if region.guest != region.offset || region.guest != region.user {
            return Err(VhostError::Memory("its addresses differ from its place in the file"));
        }
        match region.guest.checked_add(region.bytes) {
            Some(end) if region.bytes > 0 && end <= self.ram.size() => {}
            _ => return Err(VhostError::Memory("it reaches beyond the file")),
        }
        self.table = Some(region);
        self.vrings.iter_mut().for_each(Vring::forget_address);
        Ok(())
    }

    fn set_request_fd(&mut self, fd: Option<OwnedFd>) -> Result<(), VhostError> {
        self.need_protocol(PROTOCOL_BACKEND_REQ, "SET_BACKEND_REQ_FD was not negotiated")?;
        let fd = fd.ok_or(VhostError::RequestDescriptor)?;
        check_stream_socket(&fd).map_err(|()| VhostError::RequestDescriptor)?;
        self.request_fd = Some(fd);
        Ok(())
    }

    fn vring<T>(
        &mut self,
        queue: u32,
        change: impl FnOnce(&mut Vring) -> Result<T, VringError>,
    ) -> Result<T, VhostError> {
        usize::try_from(queue)
            .ok()
            .and_then(|index| self.vrings.get_mut(index))
            .ok_or(VringError::NoSuchQueue(queue))
            .and_then(change)
            .map_err(|source| VhostError::Vring { queue, source })
    }

    fn set_kick(&mut self, queue: u32, fd: Option<OwnedFd>) -> Result<(), VhostError> {
        let (epoll, token) = (Rc::clone(&self.epoll), self.token_base + 1 + u64::from(queue));
        self.vring(queue, |vring| {
            if let Some(old) = vring.set_kick(fd.ok_or(VringError::Kick)?)? {
                let _ = epoll::delete(&*epoll, &old);
            }
            let kick = vring.kick().ok_or(VringError::Kick)?;
            watch(&epoll, kick, token, EventFlags::IN | EventFlags::ET).map_err(|_| VringError::Kick)
        })
    }

    fn start_vring(&mut self, queue: u32) -> Result<Outcome, VhostError> {
        let (Some(features), Some(table)) = (self.features, self.table) else {
            return Err(VhostError::Order("a queue is started before features and memory are known"));
        };
        let ram = Arc::clone(&self.ram);
        self.vring(queue, |vring| vring.start(ram.memory(), table, features & F_EVENT_IDX != 0))?;
        // A kick may have come before the start, and it will not be reported twice.
        self.work(usize::try_from(queue).ok())
    }

    fn stop_vring(&mut self, queue: u32) -> Result<u16, VhostError> {
        let epoll = Rc::clone(&self.epoll);
        self.vring(queue, |vring| {
            vring.stop();
            if let Some(kick) = vring.take_kick() {
                let _ = epoll::delete(&*epoll, &kick);
            }
            Ok(vring.state().next_available)
        })
    }
}

impl ServedQueue for Vring {
    type Error = VhostError;

    fn running(&mut self) -> Option<&mut Queue> {
        self.running_queue()
    }

    fn unfinished(&mut self) -> &mut bool {
        &mut self.unfinished
    }

    fn interrupt(&self, number: usize) -> Result<(), VhostError> {
        let queue = u32::try_from(number).unwrap_or(u32::MAX);
        self.call().map_err(|source| VhostError::Vring { queue, source })
    }
}

impl<D: VirtioDevice> Drop for Backend<D> {
    fn drop(&mut self) {
        self.end();
    }
}

fn watch(epoll: &OwnedFd, fd: &OwnedFd, token: u64, flags: EventFlags) -> Result<(), VhostError> {
    epoll::add(epoll, fd, EventData::new_u64(token), flags).map_err(|e| VhostError::Epoll(e.into()))
}
