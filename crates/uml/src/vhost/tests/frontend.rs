//! A vhost-user frontend that can send any message.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use bathy_devices::testing::Driver;
use bathy_devices::{GuestRam, Outcome, VirtioDevice};
use rustix::event::epoll::{self, CreateFlags, Event};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};

use super::super::testing::{
    self, GET_FEATURES, GET_PROTOCOL_FEATURES, NEED_REPLY, PROTOCOL_FEATURES_BIT, SET_BACKEND_REQ_FD,
    SET_FEATURES, SET_MEM_TABLE, SET_OWNER, SET_PROTOCOL_FEATURES, SET_VRING_ADDR, SET_VRING_BASE,
    SET_VRING_CALL, SET_VRING_ENABLE, SET_VRING_KICK, SET_VRING_NUM, VERSION, longs, message, region, words,
};
use super::super::{Backend, VhostError};

pub(super) const ACCEPTED_PROTOCOL: u64 = 1 << 3 | 1 << 5 | 1 << 9;

pub(super) const RAM: u64 = 4 << 20;
/// The driver's own program is at the start of its memory and not part of the table.
pub(super) const RESERVED: u64 = 0x10000;
const TOKEN: u64 = 1000;

/// One queue as the client holds it.
pub(super) struct ClientQueue {
    pub(super) kick: OwnedFd,
    pub(super) call: OwnedFd,
}

/// A client, and the server that it talks to.
pub(super) struct Frontend<D: VirtioDevice> {
    pub(super) ram: Arc<GuestRam>,
    pub(super) peer: OwnedFd,
    pub(super) backend: Backend<D>,
    pub(super) queues: Vec<ClientQueue>,
    epoll: Rc<OwnedFd>,
    pub(super) request_end: Option<OwnedFd>,
}

pub(super) fn sockets(kind: SocketType) -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap()
}

/// Whether the other end of `fd` is closed.
pub(super) fn is_abandoned(fd: impl AsFd) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::empty())];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
    polled[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

impl<D: VirtioDevice> Frontend<D> {
    pub(super) fn new(device: D) -> Self {
        let ram = Arc::new(GuestRam::create(RAM).unwrap());
        let epoll = Rc::new(epoll::create(CreateFlags::CLOEXEC).unwrap());
        let (ours, theirs) = sockets(SocketType::STREAM);
        let backend = Backend::new(device, theirs, Arc::clone(&ram), Rc::clone(&epoll), TOKEN).unwrap();
        Self { ram, peer: ours, backend, queues: Vec::new(), epoll, request_end: None }
    }

    pub(super) fn send_raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        testing::send(&self.peer, bytes, fds);
    }

    /// Delivers all events that there are to the server.
    pub(super) fn pump(&mut self) -> Result<Outcome, VhostError> {
        let mut total = Outcome::default();
        for _ in 0..100 {
            let mut events: Vec<Event> = Vec::with_capacity(16);
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            epoll::wait(&*self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&now)).unwrap();
            if events.is_empty() {
                return Ok(total);
            }
            for event in events {
                total = total.merge(self.backend.on_event(event.data.u64())?);
            }
        }
        panic!("the server is never done");
    }

    /// How many events wait for the server.
    pub(super) fn pending_events(&self) -> usize {
        let mut events: Vec<Event> = Vec::with_capacity(16);
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        epoll::wait(&*self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&now)).unwrap()
    }

    pub(super) fn request(
        &mut self,
        request: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), VhostError> {
        self.send_raw(&message(request, VERSION, payload), fds);
        self.pump().map(|_| ())
    }

    /// Sends a request the way the driver does: it wants an acknowledgement.
    pub(super) fn request_acked(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        self.send_raw(&message(request, VERSION | NEED_REPLY, payload), fds);
        self.pump().unwrap();
        assert_eq!(self.receive(), message(request, VERSION | 4, &longs(&[0])));
    }

    pub(super) fn ask(&mut self, request: u32, payload: &[u8]) -> Vec<u8> {
        self.request(request, payload, &[]).unwrap();
        let answer = self.receive();
        assert_eq!(answer[..8], words(&[request, VERSION | 4]));
        answer[12..].to_vec()
    }

    /// Everything that the server has sent.
    pub(super) fn receive(&self) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        match recv(&self.peer, bytes.as_mut_slice(), RecvFlags::DONTWAIT) {
            Ok((_, count)) => bytes.truncate(count),
            Err(_) => bytes.clear(),
        }
        bytes
    }

    /// The part of the conversation that comes before the queues, as Linux has it.
    pub(super) fn negotiate(&mut self) {
        self.request(SET_OWNER, &[], &[]).unwrap();
        let features = u64::from_ne_bytes(self.ask(GET_FEATURES, &[]).try_into().unwrap());
        assert_ne!(features & PROTOCOL_FEATURES_BIT, 0);
        let protocol = u64::from_ne_bytes(self.ask(GET_PROTOCOL_FEATURES, &[]).try_into().unwrap());
        assert_eq!(protocol, ACCEPTED_PROTOCOL);
        self.request_acked(SET_PROTOCOL_FEATURES, &longs(&[protocol]), &[]);
        let (ours, theirs) = sockets(SocketType::STREAM);
        self.request_acked(SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
        self.request_end = Some(ours);
        self.request_acked(SET_FEATURES, &longs(&[features]), &[]);
    }

    pub(super) fn share_memory(&mut self) {
        let ram = Arc::clone(&self.ram);
        self.request_acked(SET_MEM_TABLE, &region(RESERVED, RAM - RESERVED, RESERVED, RESERVED), &[ram.fd()]);
    }

    /// Describes a queue to the server, without starting it.
    pub(super) fn describe_queue(&mut self, queue: u32, driver: &Driver<'_>) {
        let (ours, theirs) = sockets(SocketType::STREAM);
        self.request_acked(SET_VRING_CALL, &longs(&[queue.into()]), &[theirs.as_fd()]);
        self.request_acked(SET_VRING_NUM, &words(&[queue, 256]), &[]);
        self.request_acked(SET_VRING_BASE, &words(&[queue, 0]), &[]);
        self.request_acked(SET_VRING_ADDR, &testing::ring_addresses(queue, driver), &[]);
        let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        self.queues.push(ClientQueue { kick, call: ours });
    }

    pub(super) fn start_queue(&mut self, queue: u32) {
        let kick = self.queues[usize::try_from(queue).unwrap()].kick.try_clone().unwrap();
        self.request_acked(SET_VRING_KICK, &longs(&[queue.into()]), &[kick.as_fd()]);
        self.request_acked(SET_VRING_ENABLE, &words(&[queue, 1]), &[]);
    }

    /// The whole conversation up to running queues.
    pub(super) fn set_up(&mut self, drivers: &[Driver<'_>]) {
        self.negotiate();
        self.share_memory();
        for (queue, driver) in (0..).zip(drivers) {
            self.describe_queue(queue, driver);
        }
        for (queue, _) in (0..).zip(drivers) {
            self.start_queue(queue);
        }
    }

    pub(super) fn kick(&mut self, queue: usize) -> Result<Outcome, VhostError> {
        rustix::io::write(&self.queues[queue].kick, &1_u64.to_ne_bytes()).unwrap();
        self.pump()
    }

    /// How often the guest was interrupted since the last call.
    pub(super) fn interrupts(&self, queue: usize) -> usize {
        let mut bytes = [0; 4096];
        let count = match recv(&self.queues[queue].call, bytes.as_mut_slice(), RecvFlags::DONTWAIT) {
            Ok((_, count)) => count,
            Err(_) => 0,
        };
        assert_eq!(count % 8, 0);
        count / 8
    }
}
