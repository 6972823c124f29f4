//! One interpreter process: its pipes and its channel.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use bathy_protocol::cell::{Language, Surroundings};
use bathy_protocol::{Exec, Exit, RefusalKind, Refused};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionbio, ioctl_fionread};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::rand::{GetRandomFlags, getrandom};

use super::Means;
use super::languages::{Driver, length_prefixed, write_all_at_start, zero_ended};
use crate::processes::Processes;
use crate::read_throttle::ReadThrottle;
use crate::spawn::{Launching, bad_request};

/// How long an interpreter may take to become ready, on a machine where many start at once.
const READY_WITHIN: Duration = Duration::from_secs(60);

/// How long after its channel was closed a process is assumed to be exiting.
const CLOSED_PAUSE: Duration = Duration::from_millis(300);

/// How many packets of an ended process are read. More than fit into the channel can only come from another
/// process.
const LAST_PACKETS: usize = 1024;

/// The most bytes of a packet that are read.
pub const MAX_PACKET: usize = 60_000;

const TOKEN_LENGTH: usize = 32;

/// Records that wait until the output before them is forwarded.
pub enum Held {
    /// A value or an error, or a piece of one: its kind byte and its JSON.
    Value(u8, Vec<u8>),
    /// The cell has ended, with the driver's report.
    Finished(Vec<u8>),
    /// The process has ended.
    Ended(ProcessEnd),
}

/// Why a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessEnd {
    /// It exited, or a process in the guest killed it.
    Died(Exit),
    /// Its program could not be executed.
    NotExecuted,
    /// We killed it: a cell did not react to an interrupt.
    Stuck,
    /// We killed it: it did not become ready.
    NotReady,
    /// We killed it: its channel was closed.
    ChannelClosed,
    /// We killed it: a restart or removal was requested.
    Unwanted,
}

impl ProcessEnd {
    /// Explains to the user why the state was lost.
    pub fn why(self, program: &str) -> String {
        match self {
            Self::Died(Exit::Code(code)) => format!("the interpreter ended with code {code}"),
            Self::Died(Exit::Signal(signal)) => format!("the interpreter was killed by signal {signal}"),
            Self::NotExecuted => format!("{program} was not executed"),
            Self::Stuck => "a cell did not end when it was interrupted, and was killed".to_owned(),
            Self::NotReady => format!("{program} was not ready within {} s", READY_WITHIN.as_secs()),
            Self::ChannelClosed => "a cell closed the interpreter's own channel".to_owned(),
            Self::Unwanted => "the context was restarted".to_owned(),
        }
    }
}

/// The result of reading the channel.
pub enum ChannelRead {
    Nothing,
    /// A packet without the token.
    Stray,
    /// A packet: its kind byte and the rest.
    Packet(u8, Vec<u8>),
}

/// An interpreter process and its data in flight.
pub struct InterpreterProcess {
    /// The pid, which is also its session and process group.
    pub pid: u32,
    /// Its launch, until the program is executed.
    pub launching: Option<Launching>,
    /// Why its program was not executed.
    pub refused: Option<Refused>,
    pub ready: bool,
    /// The deadline for becoming ready.
    pub ready_by: Instant,
    /// How many cells it has received.
    pub cells: u64,
    /// The kernel's count of out-of-memory kills when it was last read.
    pub memory_kills: u64,
    /// Why it ended, if it did.
    pub end: Option<ProcessEnd>,
    /// A record that waits for the output before it.
    pub held: Option<Held>,
    /// How many bytes of each output come before that record.
    pub owed: [usize; 2],
    outputs: [Option<OwnedFd>; 2],
    breathers: [ReadThrottle; 2],
    requests: Option<OwnedFd>,
    request: Vec<u8>,
    written: usize,
    replies: OwnedFd,
    /// Since when its channel is closed for reading.
    unreadable_since: Option<Instant>,
    /// Since when its channel is closed for writing.
    unwritable_since: Option<Instant>,
    last_packets: usize,
    file: Option<OwnedFd>,
    token: [u8; TOKEN_LENGTH],
}

impl InterpreterProcess {
    /// Starts an interpreter and sends the greeting.
    pub fn start(language: Language, with: &Surroundings, means: &mut Means<'_>) -> Result<Self, Refused> {
        let driver = Driver::of(language);
        let failed =
            |error: io::Error| bad_request(&format!("cannot make the interpreter's channels: {error}"));
        let token = make_token().map_err(failed)?;
        let fifth = means.sources.fifth(language, means.processes).map_err(failed)?;
        let channels = Channels::make().map_err(|error| failed(error.into()))?;
        let request = Exec {
            argv: driver.argv.iter().map(|word| word.as_bytes().to_vec()).collect(),
            env: with.env.clone(),
            cwd: with.cwd.clone(),
            user: with.user.clone(),
            restricted: with.restricted,
            ..Exec::default()
        };
        let extra = [channels.request_end.as_fd(), channels.reply_end.as_fd(), fifth.theirs.as_fd()];
        let started = means.launcher.exec_with(&request, &extra)?;
        let mut process = Self {
            pid: started.launching.pid(),
            launching: Some(started.launching),
            refused: None,
            ready: false,
            ready_by: Instant::now() + READY_WITHIN,
            cells: 0,
            memory_kills: means.processes.out_of_memory_kills(),
            end: None,
            held: None,
            owed: [0; 2],
            outputs: [Some(started.stdout), started.stderr],
            breathers: Default::default(),
            requests: Some(channels.requests),
            request: Vec::new(),
            written: 0,
            replies: channels.replies,
            unreadable_since: None,
            unwritable_since: None,
            last_packets: LAST_PACKETS,
            file: fifth.requests,
            token,
        };
        if let Err(error) = process.send(&[b"hello", &token]) {
            process.kill(means.processes);
            return Err(failed(error));
        }
        Ok(process)
    }

    /// Records whether its program was executed, once that is known.
    pub fn settle(&mut self, language: Language, now: Instant) {
        let Some(outcome) = self.launching.as_mut().and_then(|launching| launching.outcome(now)) else {
            return;
        };
        self.launching = None;
        let Err(mut refused) = outcome else { return };
        if refused.kind == RefusalKind::NotFound {
            let program = Driver::of(language).program();
            refused.message = format!("{program} is not in this image: {} needs it", language.as_str());
        }
        self.refused = Some(refused);
        self.end.get_or_insert(ProcessEnd::NotExecuted);
    }

    /// Kills it with its session.
    pub fn kill(&self, processes: &Processes) {
        if let Some(launching) = &self.launching {
            launching.signal(Signal::KILL);
        }
        // Also during the launch: it may have been executed, and have started others, before we know.
        processes.end_session(self.pid);
    }

    /// Sends a request to the interpreter, which must have answered the previous one.
    pub fn send(&mut self, fields: &[&[u8]]) -> io::Result<()> {
        match &self.file {
            Some(file) => {
                rustix::fs::ftruncate(file, 0)?;
                write_all_at_start(file, &zero_ended(fields))?;
                self.request = vec![b'\n'];
            }
            None => self.request = length_prefixed(fields),
        }
        self.written = 0;
        self.write_request();
        Ok(())
    }

    /// Writes as much of the request as the interpreter reads.
    pub fn write_request(&mut self) {
        while let (Some(requests), Some(rest)) =
            (&self.requests, self.request.get(self.written..).filter(|rest| !rest.is_empty()))
        {
            match rustix::io::write(requests, rest) {
                Ok(0) | Err(Errno::AGAIN) => return,
                Ok(count) => self.written += count,
                Err(Errno::INTR) => {}
                // It has closed the channel. If it does not exit either, it is unusable.
                Err(_) => {
                    self.requests = None;
                    self.unwritable_since = Some(Instant::now());
                }
            }
        }
        self.request = Vec::new();
        self.written = 0;
    }

    /// Whether a part of the request is not written yet.
    pub fn is_writing(&self) -> bool {
        !self.request.is_empty()
    }

    /// The descriptor that requests are written to.
    pub fn requests(&self) -> Option<BorrowedFd<'_>> {
        self.requests.as_ref().map(AsFd::as_fd)
    }

    /// The descriptor that packets are read from, until it is closed.
    pub fn replies(&self) -> Option<BorrowedFd<'_>> {
        self.unreadable_since.is_none().then(|| self.replies.as_fd())
    }

    /// The descriptor of standard output (0) or error (1).
    pub fn output(&self, number: usize) -> Option<BorrowedFd<'_>> {
        self.outputs.get(number)?.as_ref().map(AsFd::as_fd)
    }

    /// When a closed channel counts as broken.
    pub fn closed_until(&self) -> Option<Instant> {
        let since = [self.unreadable_since, self.unwritable_since].into_iter().flatten().min();
        since.filter(|_| self.end.is_none()).map(|since| since + CLOSED_PAUSE)
    }

    pub fn receive(&mut self, buffer: &mut [u8]) -> ChannelRead {
        if self.end.is_some() {
            self.last_packets = self.last_packets.saturating_sub(1);
        }
        if self.unreadable_since.is_some() || self.last_packets == 0 {
            return ChannelRead::Nothing;
        }
        match recv(&self.replies, &mut *buffer, RecvFlags::TRUNC) {
            Ok((_, 0)) if self.is_closed() => {
                self.unreadable_since = Some(Instant::now());
                ChannelRead::Nothing
            }
            Ok((_, length)) if length <= MAX_PACKET => {
                let packet = buffer.get(..length).unwrap_or_default();
                match packet.strip_prefix(&self.token).and_then(<[u8]>::split_first) {
                    Some((kind, payload)) => ChannelRead::Packet(*kind, payload.to_vec()),
                    None => ChannelRead::Stray,
                }
            }
            Ok(_) => ChannelRead::Stray,
            Err(Errno::AGAIN | Errno::INTR) => ChannelRead::Nothing,
            Err(_) => {
                self.unreadable_since = Some(Instant::now());
                ChannelRead::Nothing
            }
        }
    }

    /// Whether reading nothing means end of file, rather than an empty packet.
    fn is_closed(&self) -> bool {
        let mut fds = [PollFd::new(&self.replies, PollFlags::RDHUP)];
        let looked = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        let hung_up = fds.iter().any(|fd| fd.revents().intersects(PollFlags::RDHUP | PollFlags::HUP));
        // There may be more packets behind an empty one.
        looked.is_err() || hung_up && ioctl_fionread(&self.replies).unwrap_or(0) == 0
    }

    /// How many bytes of an output can be read now.
    pub fn waiting(&self, number: usize) -> usize {
        let count = self.output(number).and_then(|pipe| ioctl_fionread(pipe).ok());
        count.and_then(|count| usize::try_from(count).ok()).unwrap_or(0)
    }

    /// Holds a record until the output that was written before it is forwarded.
    pub fn hold(&mut self, held: Held) {
        self.owed = [self.waiting(0), self.waiting(1)];
        self.held = Some(held);
    }

    /// Until when an output is not read. It is read at once if a record waits for it.
    pub fn paused_until(&self, number: usize, now: Instant) -> Option<Instant> {
        self.breathers.get(number).filter(|_| self.held.is_none())?.paused_until(now)
    }

    /// Reads an output once, at most up to the held record. `None` if there is nothing.
    pub fn read_output<'b>(&mut self, number: usize, buffer: &'b mut [u8]) -> Option<&'b [u8]> {
        let (pipe, owed) = (self.outputs.get_mut(number)?, self.owed.get_mut(number)?);
        let most = if self.held.is_some() { (*owed).min(buffer.len()) } else { buffer.len() };
        let (Some(open), Some(part)) = (&*pipe, buffer.get_mut(..most).filter(|part| !part.is_empty()))
        else {
            *owed = 0;
            return None;
        };
        match rustix::io::read(open, &mut *part) {
            Ok(0) => *pipe = None,
            Ok(count) => {
                *owed = owed.saturating_sub(count);
                self.breathers.get_mut(number)?.on_read(count);
                return part.get(..count);
            }
            Err(Errno::INTR) => return None,
            // Another process may have read the data.
            Err(Errno::AGAIN) => {}
            Err(_) => *pipe = None,
        }
        *owed = 0;
        None
    }

    /// Sends SIGINT to its process group.
    pub fn interrupt(&self) {
        if let (Some(group), None) = (self.group(), self.end) {
            // Fails only if the group has exited.
            let _ = kill_process_group(group, Signal::INT);
        }
    }

    fn group(&self) -> Option<Pid> {
        i32::try_from(self.pid).ok().and_then(Pid::from_raw)
    }
}

/// The pipes and sockets beyond the standard ones. The interpreter's ends are closed once it has them.
struct Channels {
    requests: OwnedFd,
    request_end: OwnedFd,
    replies: OwnedFd,
    reply_end: OwnedFd,
}

impl Channels {
    fn make() -> Result<Self, Errno> {
        let (request_end, requests) = pipe_with(PipeFlags::CLOEXEC)?;
        let (replies, reply_end) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        // Only our ends: the interpreter expects its own to block.
        ioctl_fionbio(&requests, true)?;
        ioctl_fionbio(&replies, true)?;
        Ok(Self { requests, request_end, replies, reply_end })
    }
}

/// Distinguishes the driver's packets from other writes of the process. It is no secret: the code could find it.
fn make_token() -> io::Result<[u8; TOKEN_LENGTH]> {
    let mut random = [0u8; TOKEN_LENGTH / 2];
    // Does not block, even early after boot.
    getrandom(&mut random, GetRandomFlags::INSECURE)?;
    let mut token = [0u8; TOKEN_LENGTH];
    for (pair, byte) in token.chunks_exact_mut(2).zip(random) {
        for (digit, value) in pair.iter_mut().zip([byte >> 4, byte & 15]) {
            *digit = if value < 10 { b'0' + value } else { b'a' + value - 10 };
        }
    }
    Ok(token)
}
