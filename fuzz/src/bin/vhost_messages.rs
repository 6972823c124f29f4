//! The vhost-user server: whatever a client sends, in whatever order, nothing breaks and no descriptor is left open.
#![no_main]

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use bathy_devices::block::{Block, BlockConfig};
use bathy_devices::console::Console;
use bathy_devices::net::Net;
use bathy_devices::testing::Driver;
use bathy_devices::{GuestRam, Outcome, VirtioDevice};
use bathy_fuzz::{Input, RAM, drive, ram};
use bathy_uml::vhost::{Backend, VhostError};
use libfuzzer_sys::fuzz_target;
use rustix::event::epoll::{self, CreateFlags, Event};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    recv, sendmsg, socketpair,
};
use rustix::pipe::{PipeFlags, pipe_with};

const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
const RING: u64 = 0x1000;
const MAX_STEPS: usize = 100;

fuzz_target!(|data: &[u8]| {
    let ram = ram();
    let mut input = Input::new(data);
    let lowest = lowest_free_descriptor(&ram);
    match input.u8() % 3 {
        0 => {
            let disk = memfd_create("disk", MemfdFlags::CLOEXEC).expect("a memory file");
            rustix::fs::ftruncate(&disk, 8192).expect("a size");
            let disk = Block::new(std::fs::File::from(disk), BlockConfig::default()).expect("a disk");
            Client::new(disk, &ram).run(&mut input);
        }
        1 => Client::new(Console::new(), &ram).run(&mut input),
        _ => Client::new(Net::new([2, 0, 0, 0, 0, 1]), &ram).run(&mut input),
    }
    assert_eq!(lowest_free_descriptor(&ram), lowest, "a descriptor was left open");
});

fn lowest_free_descriptor(ram: &GuestRam) -> i32 {
    ram.fd().try_clone_to_owned().expect("a descriptor").as_raw_fd()
}

/// What a client might attach to a message.
struct Palette {
    stream: (OwnedFd, OwnedFd),
    datagram: (OwnedFd, OwnedFd),
    pipe: (OwnedFd, OwnedFd),
    counter: OwnedFd,
    memory: OwnedFd,
}

struct Client<'ram, D: VirtioDevice> {
    ram: &'ram Arc<GuestRam>,
    peer: OwnedFd,
    epoll: Rc<OwnedFd>,
    backend: Backend<D>,
    palette: Palette,
}

impl<'ram, D: VirtioDevice> Client<'ram, D> {
    fn new(device: D, ram: &'ram Arc<GuestRam>) -> Self {
        let pair = |kind| {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            socketpair(AddressFamily::UNIX, kind, flags, None).expect("two sockets")
        };
        let epoll = Rc::new(epoll::create(CreateFlags::CLOEXEC).expect("an epoll"));
        let (peer, served) = pair(SocketType::STREAM);
        let backend = Backend::new(device, served, Arc::clone(ram), Rc::clone(&epoll), 7).expect("a server");
        let palette = Palette {
            stream: pair(SocketType::STREAM),
            datagram: pair(SocketType::DGRAM),
            pipe: pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).expect("a pipe"),
            counter: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a counter"),
            memory: memfd_create("other", MemfdFlags::CLOEXEC).expect("a memory file"),
        };
        Self { ram, peer, epoll, backend, palette }
    }

    fn run(mut self, input: &mut Input<'_>) {
        let mut drivers = [0, 1, 2, 3].map(|i| Driver::new(self.ram.memory(), RING * (i + 1), 16));
        if input.u8() & 3 != 0 && self.get_going(&drivers, input.u8()).is_err() {
            panic!("the driver's own conversation fails");
        }
        for _ in 0..MAX_STEPS {
            if input.is_empty() {
                return;
            }
            let result = match input.u8() % 8 {
                0..3 => self.any_message(input),
                3 => {
                    self.send(input.take(40), &[]);
                    self.pump()
                }
                4 | 5 => {
                    let queue = usize::from(input.u8() % 4);
                    drive(input, self.ram, &mut drivers[queue]);
                    let _ = rustix::io::write(&self.palette.counter, &1_u64.to_ne_bytes());
                    self.pump()
                }
                6 => self.backend.service().map(|_| ()),
                _ => self.backend.run_queue(usize::from(input.u8() % 5)).map(|_| ()),
            };
            if result.is_err() {
                assert!(self.backend.is_ended());
                assert_eq!(self.backend.service().expect("an ended server is silent"), Outcome::default());
                assert_eq!(self.backend.on_event(7).expect("an ended server is silent"), Outcome::default());
                return;
            }
            let _ = self.backend.save();
            let _ = recv(&self.peer, &mut [0; 4096], RecvFlags::DONTWAIT);
        }
    }

    /// The driver's own conversation, up to some point.
    fn get_going(&mut self, drivers: &[Driver<'_>; 4], how_far: u8) -> Result<(), VhostError> {
        let features = self.backend.device().features() | 1 << 30;
        let table = [&words(&[1, 0])[..], &longs(&[0x800, RAM - 0x800, 0x800, 0x800])].concat();
        let mut script: Vec<(u32, Vec<u8>, u8)> = vec![
            (3, vec![], 0),
            (1, vec![], 0),
            (15, vec![], 0),
            (16, longs(&[1 << 3 | 1 << 5 | 1 << 9]), 0),
            (21, vec![], 2),
            (2, longs(&[features]), 0),
            (5, table, 1),
        ];
        let queues = u32::try_from(self.backend.device().queue_count()).expect("few queues");
        for (queue, driver) in (0..queues).zip(drivers) {
            let rings = [driver.descriptor_table(), driver.used_ring(), driver.available_ring(), 0];
            script.push((13, longs(&[queue.into()]), 2));
            script.push((8, words(&[queue, 16]), 0));
            script.push((10, words(&[queue, 0]), 0));
            script.push((9, [words(&[queue, 0]), longs(&rings)].concat(), 0));
            script.push((12, longs(&[queue.into()]), 3));
            script.push((18, words(&[queue, 1]), 0));
        }
        let steps = if how_far < 128 { script.len() } else { usize::from(how_far - 128) };
        for (request, payload, fd) in script.into_iter().take(steps) {
            self.message(request, 1, &payload, fd);
            self.pump()?;
            let _ = recv(&self.peer, &mut [0; 4096], RecvFlags::DONTWAIT);
        }
        Ok(())
    }

    /// One message, whose parts may or may not fit together.
    fn any_message(&mut self, input: &mut Input<'_>) -> Result<(), VhostError> {
        let request = match input.u8() {
            0..230 => input.choose(&[1, 2, 3, 5, 8, 9, 10, 11, 12, 13, 15, 16, 18, 21, 24, 25]),
            _ => input.u32(),
        };
        let queue = u32::from(input.u8() % 5);
        let payload = match (request, input.u8()) {
            (_, 240..) => {
                let count = usize::from(input.u8());
                input.take(count).to_vec()
            }
            (1 | 3 | 15 | 21, _) => vec![],
            (2 | 16, _) => longs(&[input.u64()]),
            (5, _) => {
                let start = input.address();
                [words(&[1, 0]), longs(&[start, input.address(), start, start])].concat()
            }
            (9, _) => {
                [words(&[queue, 0]), longs(&[input.address(), input.address(), input.address(), 0])].concat()
            }
            (12 | 13, kind) => longs(&[u64::from(queue) | u64::from(kind & 1) << 8]),
            (24 | 25, _) => {
                let bytes = input.length() % 300;
                let filler = vec![0; usize::try_from(bytes).expect("short")];
                [words(&[input.u32(), bytes, 0]), filler].concat()
            }
            (18, kind) => words(&[queue, u32::from(kind & 1)]),
            (8, _) => words(&[queue, input.choose(&[0, 1, 2, 16, 128, 255, 256, 512, 65536, u32::MAX])]),
            _ => words(&[queue, input.u32()]),
        };
        let flags = input.choose(&[1, 1, 1, 9, 9, 9, 0, 5, u32::MAX]);
        self.message(request, flags, &payload, input.u8());
        self.pump()
    }

    fn message(&self, request: u32, flags: u32, payload: &[u8], fd: u8) {
        let Palette { stream, datagram, pipe, counter, memory } = &self.palette;
        let fds: &[BorrowedFd<'_>] = match fd % 10 {
            0 => &[],
            1 => &[self.ram.fd()],
            2 => &[stream.0.as_fd()],
            3 => &[counter.as_fd()],
            4 => &[datagram.0.as_fd()],
            5 => &[pipe.1.as_fd()],
            6 => &[memory.as_fd()],
            7 => &[self.epoll.as_fd()],
            8 => &[self.peer.as_fd()],
            _ => &[stream.1.as_fd(), self.ram.fd()],
        };
        let length = u32::try_from(payload.len()).expect("short");
        self.send(&[&words(&[request, flags, length])[..], payload].concat(), fds);
    }

    fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        if bytes.is_empty() {
            return;
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let _ = sendmsg(
            &self.peer,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
        );
    }

    /// Delivers events, for as long as an event loop would in one go.
    fn pump(&mut self) -> Result<(), VhostError> {
        for _ in 0..8 {
            let mut events: Vec<Event> = Vec::with_capacity(16);
            epoll::wait(&*self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&NOW))
                .expect("events");
            if events.is_empty() {
                break;
            }
            for event in events {
                self.backend.on_event(event.data.u64())?;
            }
        }
        Ok(())
    }
}

fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn longs(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}
