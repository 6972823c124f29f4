//! One interpreter process: its pipes, and its channel.

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
use crate::breather::Breather;
use crate::processes::Processes;
use crate::spawn::{Launching, bad_request};

/// How long an interpreter may take to get ready, on a machine where many of them start at once.
const READY_WITHIN: Duration = Duration::from_secs(60);

/// How long after its channel was closed a process is still taken to be about to end.
const CLOSED_PAUSE: Duration = Duration::from_millis(300);

/// How many packets of an ended process are read. More than fit into the channel can only come from somebody else.
const LAST_PACKETS: usize = 1024;

/// The most bytes of one packet that are looked at.
pub const MAX_PACKET: usize = 60_000;

const TOKEN_LENGTH: usize = 32;

/// What comes to be said once the output before it is out.
pub enum Held {
    /// A value or an error, or a piece of one: its kind byte and its JSON.
    Said(u8, Vec<u8>),
    /// The cell is over, in the interpreter's own words.
    Finished(Vec<u8>),
    /// The process is over.
    Ended(End),
}

/// How a process came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By itself, or by somebody in the guest.
    Died(Exit),
    /// Its program was not executed.
    NotExecuted,
    /// We killed it: a cell did not end.
    Stuck,
    /// We killed it: it did not get ready.
    NotReady,
    /// We killed it: it cannot be talked to any more.
    ChannelClosed,
    /// We killed it: somebody wants a new one, or none.
    Unwanted,
}

impl End {
    /// For people who ask why the state is gone.
    pub fn why(self, program: &str) -> String {
        match self {
            Self::Died(Exit::Code(code)) => format!("the interpreter ended with code {code}"),
            Self::Died(Exit::Signal(signal)) => format!("the interpreter was ended by signal {signal}"),
            Self::NotExecuted => format!("{program} was not executed"),
            Self::Stuck => "a cell did not end when it was interrupted, and was killed".to_owned(),
            Self::NotReady => format!("{program} did nothing for {} s", READY_WITHIN.as_secs()),
            Self::ChannelClosed => "a cell closed the interpreter's own channel".to_owned(),
            Self::Unwanted => "the context was restarted".to_owned(),
        }
    }
}

/// What came on the channel.
pub enum Received {
    Nothing,
    /// Something without the token.
    Stray,
    /// A packet: its kind byte and the rest.
    Packet(u8, Vec<u8>),
}

/// A process and what is in flight to and from it.
pub struct Process {
    /// Its number; also its session and process group.
    pub pid: u32,
    /// Its launch, until its program is executed.
    pub launching: Option<Launching>,
    /// Why its program was not executed.
    pub refused: Option<Refused>,
    pub ready: bool,
    /// When it has to have answered.
    pub ready_by: Instant,
    /// How many cells were put to it.
    pub cells: u64,
    /// How many processes had been ended for want of memory when it was last looked at.
    pub memory_kills: u64,
    /// How it ended, if it did.
    pub end: Option<End>,
    /// What waits for the output before it.
    pub held: Option<Held>,
    /// How many bytes of each output come before that.
    pub owed: [usize; 2],
    outputs: [Option<OwnedFd>; 2],
    breathers: [Breather; 2],
    requests: Option<OwnedFd>,
    request: Vec<u8>,
    written: usize,
    replies: OwnedFd,
    /// Since when nothing can come from it.
    closed: Option<Instant>,
    /// Since when nothing can be told it.
    deaf: Option<Instant>,
    last_packets: usize,
    file: Option<OwnedFd>,
    token: [u8; TOKEN_LENGTH],
}

impl Process {
    /// Starts an interpreter and greets it.
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
            closed: None,
            deaf: None,
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

    /// Takes note of whether its program was executed, if that is known by now.
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
        self.end.get_or_insert(End::NotExecuted);
    }

    /// Ends it with its session.
    pub fn kill(&self, processes: &Processes) {
        if let Some(launching) = &self.launching {
            launching.signal(Signal::KILL);
        }
        // Also while it is launching: it may have been executed, and have started others, before that is known here.
        processes.end_session(self.pid);
    }

    /// Puts a request to the interpreter, which has answered the one before.
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

    /// Writes as much of the request as the interpreter takes.
    pub fn write_request(&mut self) {
        while let (Some(requests), Some(rest)) =
            (&self.requests, self.request.get(self.written..).filter(|rest| !rest.is_empty()))
        {
            match rustix::io::write(requests, rest) {
                Ok(0) | Err(Errno::AGAIN) => return,
                Ok(count) => self.written += count,
                Err(Errno::INTR) => {}
                // It does not read any more. If it does not end either, there is nobody to talk to.
                Err(_) => {
                    self.requests = None;
                    self.deaf = Some(Instant::now());
                }
            }
        }
        self.request = Vec::new();
        self.written = 0;
    }

    /// Whether a part of the request has still to be written.
    pub fn is_writing(&self) -> bool {
        !self.request.is_empty()
    }

    /// Where requests are written.
    pub fn requests(&self) -> Option<BorrowedFd<'_>> {
        self.requests.as_ref().map(AsFd::as_fd)
    }

    /// Where packets come from, until they do not.
    pub fn replies(&self) -> Option<BorrowedFd<'_>> {
        self.closed.is_none().then(|| self.replies.as_fd())
    }

    /// Where standard output (0) or error (1) is read.
    pub fn output(&self, number: usize) -> Option<BorrowedFd<'_>> {
        self.outputs.get(number)?.as_ref().map(AsFd::as_fd)
    }

    /// When the closed channel is taken for a broken one.
    pub fn closed_until(&self) -> Option<Instant> {
        let since = [self.closed, self.deaf].into_iter().flatten().min();
        since.filter(|_| self.end.is_none()).map(|since| since + CLOSED_PAUSE)
    }

    pub fn receive(&mut self, buffer: &mut [u8]) -> Received {
        if self.end.is_some() {
            self.last_packets = self.last_packets.saturating_sub(1);
        }
        if self.closed.is_some() || self.last_packets == 0 {
            return Received::Nothing;
        }
        match recv(&self.replies, &mut *buffer, RecvFlags::TRUNC) {
            Ok((_, 0)) if self.is_closed() => {
                self.closed = Some(Instant::now());
                Received::Nothing
            }
            Ok((_, length)) if length <= MAX_PACKET => {
                let packet = buffer.get(..length).unwrap_or_default();
                match packet.strip_prefix(&self.token).and_then(<[u8]>::split_first) {
                    Some((kind, payload)) => Received::Packet(*kind, payload.to_vec()),
                    None => Received::Stray,
                }
            }
            Ok(_) => Received::Stray,
            Err(Errno::AGAIN | Errno::INTR) => Received::Nothing,
            Err(_) => {
                self.closed = Some(Instant::now());
                Received::Nothing
            }
        }
    }

    /// Whether reading nothing meant the end, and not an empty packet.
    fn is_closed(&self) -> bool {
        let mut fds = [PollFd::new(&self.replies, PollFlags::RDHUP)];
        let looked = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        let hung_up = fds.iter().any(|fd| fd.revents().intersects(PollFlags::RDHUP | PollFlags::HUP));
        // An empty packet may have others behind it.
        looked.is_err() || hung_up && ioctl_fionread(&self.replies).unwrap_or(0) == 0
    }

    /// How many bytes of an output can be read now.
    pub fn waiting(&self, number: usize) -> usize {
        let count = self.output(number).and_then(|pipe| ioctl_fionread(pipe).ok());
        count.and_then(|count| usize::try_from(count).ok()).unwrap_or(0)
    }

    /// What is said next waits for the output that was written before it.
    pub fn hold(&mut self, held: Held) {
        self.owed = [self.waiting(0), self.waiting(1)];
        self.held = Some(held);
    }

    /// Until when an output is left alone: not if something waits for what is in it.
    pub fn rests(&self, number: usize, now: Instant) -> Option<Instant> {
        self.breathers.get(number).filter(|_| self.held.is_none())?.rests(now)
    }

    /// Reads an output once, and not beyond what is owed if something is held. `None` if there is nothing.
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
                self.breathers.get_mut(number)?.took(count);
                return part.get(..count);
            }
            Err(Errno::INTR) => return None,
            // Somebody else may have read what was there.
            Err(Errno::AGAIN) => {}
            Err(_) => *pipe = None,
        }
        *owed = 0;
        None
    }

    /// Interrupts whatever runs in it.
    pub fn interrupt(&self) {
        if let (Some(group), None) = (self.group(), self.end) {
            // Fails only if the group is gone already.
            let _ = kill_process_group(group, Signal::INT);
        }
    }

    fn group(&self) -> Option<Pid> {
        i32::try_from(self.pid).ok().and_then(Pid::from_raw)
    }
}

/// The pipes and sockets beyond the standard ones; what is not ours is closed once the process has it.
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

/// What tells the interpreter's packets from whatever its code writes. No secret: the code could find it.
fn make_token() -> io::Result<[u8; TOKEN_LENGTH]> {
    let mut random = [0u8; TOKEN_LENGTH / 2];
    // Never waits, however young the guest is.
    getrandom(&mut random, GetRandomFlags::INSECURE)?;
    let mut token = [0u8; TOKEN_LENGTH];
    for (pair, byte) in token.chunks_exact_mut(2).zip(random) {
        for (digit, value) in pair.iter_mut().zip([byte >> 4, byte & 15]) {
            *digit = if value < 10 { b'0' + value } else { b'a' + value - 10 };
        }
    }
    Ok(token)
}
