//! A copy over the connection to a sandbox, until it is complete, or fails, or the caller has had enough.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use bathy_protocol::{Cause, Direction, Exit, MAX_PAYLOAD, Refused, Request, StdChannel, Transfer, Work};
use rustix::event::PollFlags;
use rustix::process::Signal;
use thiserror::Error;

use super::direct::DirectError;
use super::{PackError, Packer, Summary, UnpackError, Unpacker};
use crate::connection::{Connection, ConnectionError};
use crate::stream::{Event, Fired, Stream};

/// How much of the guest's complaint is kept.
const MAX_COMPLAINT: usize = 4096;
/// How much is packed at once.
const BATCH: usize = 64 * 1024;
/// How long a guest may take to clean up after a copy that ends early.
const CLEAN_UP: Duration = Duration::from_secs(1);

#[derive(Debug, Error)]
pub enum TransferError {
    /// The sandbox cannot be spoken to.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// The host's files cannot be read.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// What came cannot be written.
    #[error(transparent)]
    Unpack(#[from] UnpackError),
    /// A file cannot be read, written or listed directly.
    #[error(transparent)]
    Direct(#[from] DirectError),
    /// The copy was not started. Guest-controlled text: escape before showing.
    #[error("{}", .0.message)]
    Refused(Refused),
    /// The copy failed in the guest, which says why. Guest-controlled text: escape before showing.
    #[error("{0}")]
    Failed(String),
    /// The copy failed in the guest without a word.
    #[error("The copy failed in the sandbox with exit code {0}")]
    FailedSilently(u8),
    /// The guest claims to have what was not sent yet.
    #[error("The sandbox called the copy complete before all of it was sent")]
    Incomplete,
    /// Nothing moves any more.
    #[error("The sandbox does not answer")]
    Stalled,
    /// The caller's interrupt descriptor became readable.
    #[error("The copy was interrupted")]
    Interrupted,
    /// The sandbox ended under the copy.
    #[error("The sandbox ended during the copy")]
    SandboxEnded {
        cause: Cause,
        /// The guest kernel's last lines. Guest-controlled text: escape before showing.
        console: String,
    },
}

/// The caller's side of a copy.
pub struct Options<'a> {
    /// Is told how many bytes of content are done, and how many there are if that is known.
    pub progress: &'a mut dyn FnMut(u64, Option<u64>),
    /// Becomes readable when the caller wants to stop.
    pub interrupt: Option<BorrowedFd<'a>>,
    /// For so long nothing may move. A guest that is told to keep a large copy safe says nothing meanwhile.
    pub stall: Duration,
}

/// Where an archive for the guest comes from.
pub(super) trait Source {
    /// Appends whole records to `out`, about `room` bytes of them. Returns whether there are more.
    fn fill(&mut self, out: &mut Vec<u8>, room: usize) -> Result<bool, TransferError>;
    /// How many bytes of content were packed.
    fn done(&self) -> u64;
    /// How many there are, if that is known.
    fn total(&self) -> Option<u64>;
    fn into_summary(self) -> Summary;
}

/// Where the guest's output goes.
pub(super) trait Sink {
    /// What the whole output comes to.
    type Whole;
    /// Takes bytes that arrived.
    fn take(&mut self, bytes: &[u8]) -> Result<(), TransferError>;
    /// How many bytes of content are done.
    fn done(&self) -> u64;
    /// How many there are, if that is known.
    fn total(&self) -> Option<u64>;
    /// There is nothing more to come.
    fn finish(self) -> Result<Self::Whole, TransferError>;
}

/// Copies what `packer` reads into the guest. `transfer` says where to.
pub fn into_guest(
    connection: &mut Connection,
    stream: u32,
    packer: Packer,
    transfer: Transfer,
    tag: u64,
    options: Options<'_>,
) -> Result<Summary, TransferError> {
    send(Session::start(connection, stream, transfer, tag, options)?, packer)
}

/// Copies out of the guest what `transfer` names, to where `unpacker` writes it.
pub fn out_of_guest(
    connection: &mut Connection,
    stream: u32,
    unpacker: Unpacker,
    transfer: Transfer,
    tag: u64,
    options: Options<'_>,
) -> Result<Summary, TransferError> {
    receive(Session::start(connection, stream, transfer, tag, options)?, unpacker)
}

/// Sends all of a source.
pub(super) fn send<S: Source>(mut session: Session<'_, '_>, mut source: S) -> Result<Summary, TransferError> {
    let mut feed = Feed { pending: Vec::new(), start: 0, more: true, closed: false };
    loop {
        let fed = feed.offer(&mut source, &mut session);
        let news = match fed.and_then(|()| session.wait()) {
            Ok(news) => news,
            Err(error) => {
                session.give_up(&error, &Request::CloseStdin);
                return Err(error);
            }
        };
        match news.exit {
            Some(exit) => {
                session.check(exit)?;
                return if feed.closed { Ok(source.into_summary()) } else { Err(TransferError::Incomplete) };
            }
            None => session.check_stall()?,
        }
    }
}

/// Receives all that a sink takes.
pub(super) fn receive<S: Sink>(mut session: Session<'_, '_>, mut sink: S) -> Result<S::Whole, TransferError> {
    loop {
        let outcome = session.wait().and_then(|news| {
            for bytes in &news.content {
                sink.take(bytes)?;
                session.stream.consumed(StdChannel::Stdout, bytes.len())?;
                session.moved = Instant::now();
            }
            (session.progress)(sink.done(), sink.total());
            Ok(news.exit)
        });
        match outcome {
            Ok(Some(exit)) => {
                session.check(exit)?;
                return sink.finish();
            }
            Ok(None) => session.check_stall()?,
            Err(error) => {
                session.give_up(&error, &Request::Signal(Signal::KILL.as_raw()));
                return Err(error);
            }
        }
    }
}

/// Packed bytes on their way.
struct Feed {
    pending: Vec<u8>,
    start: usize,
    more: bool,
    closed: bool,
}

impl Feed {
    /// Queues as much as the guest's window takes.
    fn offer<S: Source>(
        &mut self,
        source: &mut S,
        session: &mut Session<'_, '_>,
    ) -> Result<(), TransferError> {
        while !self.closed && session.stream.input_room() > 0 {
            if self.start == self.pending.len() {
                self.pending.clear();
                self.start = 0;
                if !self.more {
                    session.stream.tell(&Request::CloseStdin)?;
                    self.closed = true;
                    break;
                }
                self.more = source.fill(&mut self.pending, BATCH)?;
                (session.progress)(source.done(), source.total());
            }
            let rest = self.pending.get(self.start..).unwrap_or_default();
            let count = rest.len().min(session.stream.input_room()).min(MAX_PAYLOAD as usize);
            session.stream.input(rest.get(..count).unwrap_or_default());
            self.start += count;
        }
        Ok(())
    }
}

/// What one round of waiting brought.
#[derive(Default)]
struct News {
    content: Vec<Vec<u8>>,
    exit: Option<Exit>,
}

pub(super) struct Session<'c, 'o> {
    stream: Stream<'c>,
    progress: &'o mut dyn FnMut(u64, Option<u64>),
    interrupt: Option<BorrowedFd<'o>>,
    stall: Duration,
    /// When something moved last.
    moved: Instant,
    /// When patience ends, whatever moves.
    deadline: Option<Instant>,
    complaint: Vec<u8>,
    /// Whether what the guest prints is the copy itself.
    outward: bool,
}

impl<'c, 'o> Session<'c, 'o> {
    pub(super) fn start(
        connection: &'c mut Connection,
        stream: u32,
        transfer: Transfer,
        tag: u64,
        options: Options<'o>,
    ) -> Result<Self, TransferError> {
        let outward = transfer.direction == Direction::OutOfGuest;
        let request = Request::Start { work: Work::Transfer(transfer), tag, job: None };
        Ok(Self {
            stream: Stream::open(connection, stream, &request)?,
            progress: options.progress,
            interrupt: options.interrupt,
            stall: options.stall,
            moved: Instant::now(),
            deadline: None,
            complaint: Vec::new(),
            outward,
        })
    }

    /// All of it has to be done within this time.
    pub(super) fn within(mut self, time: Duration) -> Self {
        self.deadline = Some(Instant::now() + time);
        self
    }

    /// How long may still be waited for the next sign.
    fn patience(&self) -> Duration {
        let stall = self.stall.saturating_sub(self.moved.elapsed());
        let rest = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        rest.map_or(stall, |rest| rest.min(stall))
    }

    /// Sends what is queued, waits until something can be done or patience ends, and takes what has arrived.
    fn wait(&mut self) -> Result<News, TransferError> {
        let interrupt = self.interrupt.map(|fd| (fd, PollFlags::IN));
        let deadline = Instant::now() + self.patience();
        let Fired { arrived, others: [interrupted] } = self.stream.wait(true, [interrupt], Some(deadline))?;
        if interrupted {
            return Err(TransferError::Interrupted);
        }
        let mut news = News::default();
        if arrived {
            for event in self.stream.receive()? {
                // The first end counts: the sandbox may end right after the copy.
                if news.exit.is_none() {
                    self.take(event, &mut news)?;
                }
            }
        }
        Ok(news)
    }

    fn take(&mut self, event: Event, news: &mut News) -> Result<(), TransferError> {
        match event {
            Event::SandboxEnded { cause, console } => {
                return Err(TransferError::SandboxEnded { cause, console });
            }
            Event::Refused(refused) => return Err(TransferError::Refused(refused)),
            Event::Exited(exit) => news.exit = Some(exit),
            Event::Granted(bytes) => {
                if bytes > 0 {
                    self.moved = Instant::now();
                }
            }
            Event::Output(StdChannel::Stdout, bytes) if self.outward && !bytes.is_empty() => {
                news.content.push(bytes);
            }
            Event::Output(channel, bytes) => {
                if channel == StdChannel::Stderr {
                    let room = MAX_COMPLAINT.saturating_sub(self.complaint.len()).min(bytes.len());
                    self.complaint.extend_from_slice(bytes.get(..room).unwrap_or_default());
                }
                self.stream.consumed(channel, bytes.len())?;
            }
            Event::Ready(_) | Event::Warning(_) | Event::Started | Event::Attached | Event::TakenOver => {}
        }
        Ok(())
    }

    fn check(&self, exit: Exit) -> Result<(), TransferError> {
        if exit == Exit::Code(0) {
            return Ok(());
        }
        match String::from_utf8_lossy(&self.complaint).trim() {
            "" => Err(TransferError::FailedSilently(exit.shell_code())),
            complaint => Err(TransferError::Failed(complaint.to_owned())),
        }
    }

    /// Only what was moved counts, not whatever else a guest may say to pass the time.
    fn check_stall(&self) -> Result<(), TransferError> {
        if self.patience().is_zero() { Err(TransferError::Stalled) } else { Ok(()) }
    }

    /// Tells the guest that the copy ends early, and lets it clean up, if it is still there and still ours.
    fn give_up(&mut self, error: &TransferError, request: &Request) {
        let ours = matches!(
            error,
            TransferError::Pack(_)
                | TransferError::Unpack(_)
                | TransferError::Direct(_)
                | TransferError::Interrupted
        );
        if !ours || self.stream.tell(request).is_err() {
            return;
        }
        // Who wants to stop waits for nothing else.
        self.interrupt = None;
        self.stall = CLEAN_UP;
        self.deadline = None;
        self.outward = false;
        let end = Instant::now() + CLEAN_UP;
        self.moved = Instant::now();
        while Instant::now() < end {
            match self.wait() {
                Ok(News { exit: None, .. }) => {}
                _ => return,
            }
        }
    }
}
