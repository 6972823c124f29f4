//! A guest without a kernel: a driver for the control channel, an agent behind it, and a process that can exit.

use std::io::Write as _;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use bathy_devices::console::{CONTROL_RX_QUEUE, CONTROL_TX_QUEUE, RX_QUEUE, TX_QUEUE};
use bathy_devices::testing::{Driver, readable, writable};
use bathy_devices::{GuestMemory, GuestRam};
use bathy_jail::Spawned;
use bathy_protocol::message::{decode, encode};
use bathy_protocol::{Channel, Decoder, Hello, MAX_REQUEST, Ready, ToGuest, ToHost, frame};
use bathy_uml::vhost::testing::{
    self, SET_FEATURES, SET_MEM_TABLE, SET_OWNER, SET_VRING_ADDR, SET_VRING_BASE, SET_VRING_CALL,
    SET_VRING_ENABLE, SET_VRING_KICK, SET_VRING_NUM, VERSION, longs, message, region, ring_addresses, words,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::Serialize;
use vm_memory::{Bytes, GuestAddress};

use crate::devices::GuestEnds;

pub const RAM: u64 = 8 << 20;
/// The kernel's own program is at the start of its memory and not part of the table.
const RESERVED: u64 = 0x10000;
const RINGS: u64 = 0x20000;
const RING_SPACE: u64 = 0x4000;
const BUFFERS: u64 = 1 << 20;
const BUFFER: u32 = 4096;
const ENTRIES: u16 = 256;
/// How many buffers the driver posts for bytes from the host.
const POSTED: usize = 32;

/// The driver accepts VIRTIO_F_VERSION_1 and VIRTIO_CONSOLE_F_MULTIPORT.
const FEATURES: u64 = 1 << 32 | 1 << 1;

const DEVICE_READY: u16 = 0;
const PORT_READY: u16 = 3;
const PORT_OPEN: u16 = 6;

/// Which of the guest's sockets is the control channel's.
const CONTROL: usize = 2;

/// One queue of the control channel.
struct Queue {
    driver: Driver<'static>,
    kick: OwnedFd,
    _call: OwnedFd,
    /// How many buffers were posted in all.
    posted: u64,
    /// Where the first buffer is.
    buffers: u64,
}

impl Queue {
    fn address(&self, buffer: u64) -> u64 {
        self.buffers + buffer % u64::from(ENTRIES) * u64::from(BUFFER)
    }

    fn kick(&self) {
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
    }
}

/// What the agent received.
#[derive(Debug, PartialEq)]
pub enum AgentReceived {
    Message(u32, ToGuest),
    Stdin(u32, usize),
}

/// The guest's side of everything.
pub struct FakeGuest {
    ram: &'static GuestRam,
    sockets: Vec<OwnedFd>,
    queues: Vec<Queue>,
    decoder: Decoder,
    process: Option<GuestProcess>,
}

/// The agent's answer to a greeting.
pub fn answer(hello: &Hello) -> ToHost {
    ToHost::Ready(Ready {
        version: hello.version,
        epoch: hello.epoch,
        kernel: "test".to_owned(),
        pid1_unix_ns: 1,
        mounted_unix_ns: 2,
        running: Vec::new(),
    })
}

impl FakeGuest {
    /// A guest that has found nothing yet, and its process as the keeper sees it.
    pub fn new(ram: &Arc<GuestRam>, ends: &GuestEnds) -> (Self, Spawned) {
        // A driver borrows the memory, and lives as long as the test's process.
        let ram: &'static GuestRam = Box::leak(Box::new(Arc::clone(ram)));
        let sockets = ends.iter().map(|end| end.try_clone_to_owned().unwrap()).collect();
        let process =
            Command::new("sh").args(["-c", "read code; exit $code"]).stdin(Stdio::piped()).spawn().unwrap();
        let pid = Pid::from_child(&process);
        let report = std::fs::File::open("/dev/null").unwrap();
        let spawned =
            Spawned::new(process.id(), pidfd_open(pid, PidfdFlags::empty()).unwrap(), report.into());
        let (queues, decoder) = (Vec::new(), Decoder::new(MAX_REQUEST));
        let guest = Self { ram, sockets, queues, decoder, process: Some(GuestProcess(process)) };
        (guest, spawned)
    }

    /// Sends a vhost-user message on the control channel's socket.
    pub fn vhost(&self, request: u32, payload: &[u8], fds: &[std::os::fd::BorrowedFd<'_>]) {
        testing::send(&self.sockets[CONTROL], &message(request, VERSION, payload), fds);
    }

    /// What the kernel does up to running queues.
    pub fn find_devices(&mut self) {
        self.vhost(SET_OWNER, &[], &[]);
        self.vhost(SET_FEATURES, &longs(&[FEATURES]), &[]);
        let table = region(RESERVED, RAM - RESERVED, RESERVED, RESERVED);
        self.vhost(SET_MEM_TABLE, &table, &[self.ram.fd()]);
        for index in 0..4 {
            let number = u64::from(index);
            let driver = Driver::new(self.ram.memory(), RINGS + number * RING_SPACE, ENTRIES);
            let (call, their_call) =
                socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
            let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            self.vhost(SET_VRING_CALL, &longs(&[number]), &[their_call.as_fd()]);
            self.vhost(SET_VRING_NUM, &words(&[index, ENTRIES.into()]), &[]);
            self.vhost(SET_VRING_BASE, &words(&[index, 0]), &[]);
            self.vhost(SET_VRING_ADDR, &ring_addresses(index, &driver), &[]);
            self.vhost(SET_VRING_KICK, &longs(&[number]), &[kick.as_fd()]);
            self.vhost(SET_VRING_ENABLE, &words(&[index, 1]), &[]);
            let buffers = BUFFERS * (number + 1);
            self.queues.push(Queue { driver, kick, _call: call, posted: 0, buffers });
        }
        (0..POSTED).for_each(|_| self.post(RX_QUEUE));
        (0..POSTED).for_each(|_| self.post(CONTROL_RX_QUEUE));
        self.control(DEVICE_READY);
    }

    /// The agent opens its port.
    pub fn open_port(&mut self) {
        self.control(PORT_READY);
        self.control(PORT_OPEN);
    }

    fn control(&mut self, event: u16) {
        let bytes = [&[0; 4], &event.to_le_bytes()[..], &[1, 0]].concat();
        assert!(self.push(CONTROL_TX_QUEUE, &bytes));
        self.queues[CONTROL_TX_QUEUE].kick();
    }

    /// Posts a buffer for the host to write to.
    fn post(&mut self, queue: usize) {
        let queue = &mut self.queues[queue];
        queue.driver.push(&[writable(queue.address(queue.posted), BUFFER)]);
        queue.posted += 1;
        queue.kick();
    }

    /// Queues bytes for the host, unless the queue is full.
    fn push(&mut self, queue: usize, bytes: &[u8]) -> bool {
        let queue = &mut self.queues[queue];
        let pending = queue.driver.available_index().wrapping_sub(queue.driver.used_index());
        if pending == ENTRIES {
            return false;
        }
        let address = queue.address(queue.posted);
        self.ram.memory().write_slice(bytes, GuestAddress(address)).unwrap();
        queue.driver.push(&[readable(address, bytes.len().try_into().unwrap())]);
        queue.posted += 1;
        true
    }

    /// Sends bytes as the agent, as far as the queue has buffers; returns how many.
    pub fn write(&mut self, bytes: &[u8]) -> usize {
        let mut written = 0;
        for chunk in bytes.chunks(BUFFER as usize) {
            if !self.push(TX_QUEUE, chunk) {
                break;
            }
            written += chunk.len();
        }
        self.queues[TX_QUEUE].kick();
        written
    }

    /// Sends a message of the agent.
    pub fn send<M: Serialize>(&mut self, stream: u32, message: &M) {
        let mut wire = Vec::new();
        encode(stream, message, &mut wire).unwrap();
        assert_eq!(self.write(&wire), wire.len());
    }

    /// Sends output of a command.
    pub fn output(&mut self, stream: u32, channel: Channel, bytes: &[u8]) {
        let mut wire = Vec::new();
        frame::encode(stream, channel, bytes, &mut wire);
        assert_eq!(self.write(&wire), wire.len());
    }

    /// What the agent has received so far. Its driver posts the buffers again.
    pub fn receive(&mut self) -> Vec<AgentReceived> {
        let queue = &mut self.queues[RX_QUEUE];
        let used = queue.driver.take_used();
        for (descriptor, length) in &used {
            let mut bytes = vec![0; *length as usize];
            let address = GuestAddress(queue.address((*descriptor).into()));
            self.ram.memory().read_slice(&mut bytes, address).unwrap();
            self.decoder.push(&bytes);
        }
        used.iter().for_each(|_| self.post(RX_QUEUE));
        let mut received = Vec::new();
        while let Some(frame) = self.decoder.next_frame().unwrap() {
            received.push(match frame.channel {
                Channel::Control => AgentReceived::Message(frame.stream, decode(frame.payload).unwrap()),
                _ => AgentReceived::Stdin(frame.stream, frame.payload.len()),
            });
        }
        received
    }

    /// The messages among what the agent has received.
    pub fn messages(&mut self) -> Vec<(u32, ToGuest)> {
        let message = |received| match received {
            AgentReceived::Message(stream, message) => Some((stream, message)),
            AgentReceived::Stdin(..) => None,
        };
        self.receive().into_iter().filter_map(message).collect()
    }

    /// Closes all sockets of the guest's devices.
    pub fn close_sockets(&mut self) {
        self.sockets.clear();
    }

    /// The guest's process exits, and has exited when this returns.
    pub fn exit(&mut self, code: u8) {
        self.take_process().exit(code);
    }

    /// The guest's process, to be ended from another thread.
    pub fn take_process(&mut self) -> GuestProcess {
        self.process.take().expect("it exits once")
    }

    pub fn memory(&self) -> &GuestMemory {
        self.ram.memory()
    }
}

/// The host process in place of the guest kernel.
pub struct GuestProcess(Child);

impl GuestProcess {
    /// Exits with this code, and has exited when this returns.
    pub fn exit(mut self, code: u8) {
        let mut input = self.0.stdin.take().expect("a pipe");
        writeln!(input, "{code}").unwrap();
        drop(input);
        let pidfd = pidfd_open(Pid::from_child(&self.0), PidfdFlags::empty()).unwrap();
        let mut polled = [PollFd::new(&pidfd, PollFlags::IN)];
        poll(&mut polled, None).unwrap();
    }
}
