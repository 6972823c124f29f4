//! The loop with real devices, against a guest that is played by the test: its drivers speak vhost-user, and its agent
//! the protocol of the control channel.

mod clients;
mod fake_guest;
mod guest;
mod parking;
mod silence;

use std::io::{Read as _, Write as _};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use bathy_devices::testing::TestClock;
use bathy_logs::{LogRecord, Reader};
use bathy_protocol::launch::{DiskLimits, Engine, UmlMode};
use bathy_protocol::message::{decode, encode};
use bathy_protocol::{Answer, CONNECTION, Channel, Decoder, Exec, MAX_REQUEST, Request, ToKeeper, Work};
use bathy_uml::vhost::testing;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};
use serde::Serialize;

use super::*;
use crate::devices::Models;
use fake_guest::{AgentReceived, FakeGuest, RAM};

const READY_TIMEOUT: Duration = Duration::from_secs(30);
const LOG_CAPACITY: u64 = 1 << 20;
/// More turns than any test takes: a loop that is never done fails a test instead of hanging it.
const MANY_TURNS: usize = 100_000;

/// What a client received.
#[derive(Debug, PartialEq)]
enum Received {
    Keeper(FromKeeper),
    Answer(u32, Answer),
    Bytes(u32, Channel, Vec<u8>),
}

/// The client's end of a connection.
struct TestClient {
    socket: UnixStream,
    decoder: Decoder,
}

impl TestClient {
    /// A client, and the keeper's end of its connection.
    fn new() -> (Self, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (Self { socket: ours, decoder: Decoder::new(MAX_REQUEST) }, theirs)
    }

    fn send<M: Serialize>(&mut self, stream: u32, message: &M) {
        let mut wire = Vec::new();
        encode(stream, message, &mut wire).unwrap();
        self.socket.write_all(&wire).unwrap();
    }

    /// Everything that has arrived.
    fn receive(&mut self) -> Vec<Received> {
        let mut bytes = vec![0; 1 << 20];
        while let Ok(count @ 1..) = self.socket.read(&mut bytes) {
            self.decoder.push(&bytes[..count]);
        }
        let mut received = Vec::new();
        while let Some(frame) = self.decoder.next_frame().unwrap() {
            received.push(match (frame.stream, frame.channel) {
                (CONNECTION, _) => Received::Keeper(decode(frame.payload).unwrap()),
                (stream, Channel::Control) => Received::Answer(stream, decode(frame.payload).unwrap()),
                (stream, channel) => Received::Bytes(stream, channel, frame.payload.to_vec()),
            });
        }
        received
    }

    /// Whether the keeper has ended the connection, and everything before that was received.
    fn is_disconnected(&mut self) -> bool {
        self.receive();
        matches!(self.socket.read(&mut [0]), Ok(0))
    }
}

/// A keeper, its owner and its guest.
struct Bench {
    keeper: Keeper,
    owner: TestClient,
    guest: FakeGuest,
    /// The end of the console that the guest kernel writes to.
    console: std::fs::File,
    gateway: Option<UnixStream>,
    clock: TestClock,
    begin: Instant,
    output_log: PathBuf,
    _folder: tempfile::TempDir,
}

fn launch(persistent: bool) -> Launch {
    Launch {
        engine: Engine::Uml { cpu: 0, mode: UmlMode::Seccomp },
        memory: RAM,
        processes: 10,
        ready_timeout_ms: READY_TIMEOUT.as_millis().try_into().unwrap(),
        guest_user: false,
        persistent,
        log_capacity: LOG_CAPACITY,
        disk_limits: DiskLimits { write_bandwidth: 1 << 30, read_bandwidth: None, flushes: 100 },
        restricted: None,
        network: true,
        image: vec![0],
    }
}

/// An empty file of the size of the guest's memory, as a disk or anything else.
fn file() -> std::fs::File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(RAM).unwrap();
    file
}

impl Bench {
    /// A guest whose kernel has not found its devices yet.
    fn new(persistent: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let output_log = folder.path().join("output");
        let launch = launch(persistent);
        let epolls = Epolls::new().unwrap();
        let ram = Arc::new(GuestRam::create(RAM).unwrap());
        let models = Models::new(vec![file()], file(), &launch).unwrap();
        let (devices, ends) = Devices::on_sockets(models, &ram, &epolls.running).unwrap();
        let (guest, process) = FakeGuest::new(&ram, &ends);
        let (console, console_write) = pipe_with(PipeFlags::NONBLOCK | PipeFlags::CLOEXEC).unwrap();
        let (owner, owner_socket) = TestClient::new();
        let gateway = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::NONBLOCK | SocketFlags::CLOEXEC,
            None,
        );
        let (gateway, link) = gateway.unwrap();
        let ring = |name: &str| {
            let file = bathy_logs::create(&folder.path().join(name), LOG_CAPACITY).unwrap();
            Ring::writer(file, LOG_CAPACITY).unwrap()
        };
        let resources = KeeperResources {
            epolls,
            guest: Guest::Process(process),
            devices,
            ram,
            console,
            owner: owner_socket.into(),
            link: Some(link),
            slot: file().into(),
            persistent: persistent.then(|| Persistent {
                life: file().into(),
                output: ring("output"),
                console: ring("console"),
                parking: file(),
            }),
        };
        let mut keeper = Keeper::new(resources, &launch, Timeline::default()).unwrap();
        let (clock, begin) = (TestClock::default(), Instant::now());
        let time = clock.clone();
        keeper.clock = Box::new(move || begin + time.get());
        let (console, gateway) = (console_write.into(), Some(gateway.into()));
        Self { keeper, owner, guest, console, gateway, clock, begin, output_log, _folder: folder }
    }

    /// A guest whose agent has answered the greeting. Nothing is left to be received from that.
    fn ready(persistent: bool) -> Self {
        let mut bench = Self::new(persistent);
        bench.guest.find_devices();
        bench.settle();
        bench.guest.open_port();
        bench.settle();
        let greeting = bench.guest.receive();
        let [AgentReceived::Message(CONNECTION, bathy_protocol::ToGuest::Hello(hello))] = &greeting[..]
        else {
            panic!("{greeting:?}")
        };
        bench.guest.send(CONNECTION, &fake_guest::answer(hello));
        bench.settle();
        let received = bench.owner.receive();
        assert!(matches!(received[..], [Received::Keeper(FromKeeper::Ready(_))]), "{received:?}");
        bench
    }

    /// Takes one turn of the loop with the events that there are now.
    fn turn(&mut self) -> Result<usize, End> {
        let events = wait(&self.keeper.epoll, Some(Duration::ZERO)).unwrap();
        let count = events.len();
        self.keeper.turn(events).map(|()| count)
    }

    /// Takes turns until there is nothing more to do at the present time.
    fn run(&mut self) -> Result<(), End> {
        for _ in 0..MANY_TURNS {
            let count = self.turn()?;
            let due = self.keeper.timers.next().is_some_and(|at| at <= self.now());
            if count == 0 && !due {
                return Ok(());
            }
        }
        panic!("the loop is never done");
    }

    /// As [`run`](Self::run), for a sandbox that goes on.
    fn settle(&mut self) {
        self.run().unwrap();
    }

    fn now(&self) -> Instant {
        self.begin + self.clock.get()
    }

    /// Lets time pass, and the loop notice it.
    fn pass(&mut self, time: Duration) -> Result<(), End> {
        self.clock.set(self.clock.get() + time);
        self.run()
    }

    /// How the sandbox ends with the next turns.
    fn end(&mut self) -> End {
        self.run().expect_err("the sandbox ends")
    }

    /// The violation, or other cause, that ends the sandbox with the next turns.
    fn cause(&mut self) -> Cause {
        match self.end() {
            End::Because(cause) => cause,
            end => panic!("{end:?}"),
        }
    }

    /// Connects a client that receives that the guest is ready.
    fn connect(&mut self) -> TestClient {
        let mut client = self.connect_unheeded();
        self.settle();
        let received = client.receive();
        assert!(matches!(received[..], [Received::Keeper(FromKeeper::Ready(_))]), "{received:?}");
        client
    }

    /// Announces a client, and takes no turn yet.
    fn connect_unheeded(&mut self) -> TestClient {
        let (client, socket) = TestClient::new();
        self.announce(&ToKeeper::Client, &socket);
        client
    }

    fn announce(&mut self, message: &ToKeeper, socket: impl AsFd) {
        let mut wire = Vec::new();
        encode(CONNECTION, message, &mut wire).unwrap();
        testing::send(&self.owner.socket, &wire, &[socket.as_fd()]);
    }

    /// What the owner received, as the keeper's own messages.
    fn sent_to_owner(&mut self) -> Vec<FromKeeper> {
        let own = |received| match received {
            Received::Keeper(message) => Some(message),
            _ => None,
        };
        self.owner.receive().into_iter().filter_map(own).collect()
    }

    /// What was written to the log of jobs.
    fn logged(&self) -> Vec<LogRecord> {
        let mut reader = Reader::open(&self.output_log).unwrap();
        std::iter::from_fn(|| reader.next().unwrap()).collect()
    }
}

/// A request to run a command.
fn start(tag: u64, job: Option<u32>) -> Request {
    Request::Start { work: Work::Exec(Exec::default()), tag, job }
}
