//! Runs a copy over the connection to a sandbox.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use bathy_protocol::{Cause, CopyDirection, Exit, MAX_PAYLOAD, Refused, Request, StdChannel, Transfer, Work};
use rustix::event::PollFlags;
use rustix::process::Signal;
use thiserror::Error;

use super::direct::DirectError;
use super::{PackError, Packer, Summary, UnpackError, Unpacker};
use crate::connection::{Connection, ConnectionError};
use crate::stream::{Fired, Stream, StreamEvent};

/// How much of the guest's error message is stored.
const MAX_ERROR_TEXT: usize = 4096;
/// How much is packed at once.
const BATCH: usize = 64 * 1024;
/// How long a guest may take to clean up after an aborted copy.
const CLEAN_UP: Duration = Duration::from_secs(1);

#[derive(Debug, Error)]
pub enum TransferError {
    /// The connection to the sandbox failed.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// The host's files cannot be read.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// What arrived cannot be written.
    #[error(transparent)]
    Unpack(#[from] UnpackError),
    /// A direct read, write or listing failed.
    #[error(transparent)]
    Direct(#[from] DirectError),
    /// The copy was refused. Controlled by the guest: escape it before printing.
    #[error("{}", .0.message)]
    Refused(Refused),
    /// The copy failed in the guest, with this message. Controlled by the guest: escape it before printing.
    #[error("{0}")]
    Failed(String),
    /// The copy failed in the guest without a message.
    #[error("The copy failed in the sandbox with exit code {0}")]
    FailedSilently(u8),
    /// The guest reported success before everything was sent.
    #[error("The sandbox called the copy complete before all of it was sent")]
    Incomplete,
    /// The copy made no progress.
    #[error("The sandbox does not answer")]
    Stalled,
    /// The interrupt descriptor became readable.
    #[error("The copy was interrupted")]
    Interrupted,
    #[error("The sandbox ended during the copy")]
    SandboxEnded {
        cause: Cause,
        /// The last lines of the guest kernel's console. Controlled by the guest: escape it before printing.
        console: String,
    },
}

/// The client's side of a copy.
pub struct TransferOptions<'a> {
    /// Called with the bytes copied and, if known, the total.
    pub progress: &'a mut dyn FnMut(u64, Option<u64>),
    /// Becomes readable when the copy should stop.
    pub interrupt: Option<BorrowedFd<'a>>,
    /// How long the copy may make no progress. A guest that flushes a large copy to disk sends nothing
    /// meanwhile.
    pub stall: Duration,
}

/// Produces the archive that is sent to the guest.
pub(super) trait Source {
    /// Appends whole records to `out`, about `max` bytes. Returns whether there are more.
    fn fill(&mut self, out: &mut Vec<u8>, max: usize) -> Result<bool, TransferError>;
    /// How many bytes of content were packed.
    fn done(&self) -> u64;
    /// How many bytes there are in total, if known.
    fn total(&self) -> Option<u64>;
    fn into_summary(self) -> Summary;
}

/// Consumes the guest's output.
pub(super) trait Sink {
    /// The result of the whole output.
    type Whole;
    /// Consumes bytes that arrived.
    fn take(&mut self, bytes: &[u8]) -> Result<(), TransferError>;
    /// How many bytes of content were consumed.
    fn done(&self) -> u64;
    /// How many bytes there are in total, if known.
    fn total(&self) -> Option<u64>;
    /// Called when the output is complete.
    fn finish(self) -> Result<Self::Whole, TransferError>;
}

/// Copies what `packer` reads into the guest.
pub fn into_guest(session: TransferSession<'_, '_>, packer: Packer) -> Result<Summary, TransferError> {
    send(session, packer)
}

/// Copies from the guest to where `unpacker` writes.
pub fn out_of_guest(session: TransferSession<'_, '_>, unpacker: Unpacker) -> Result<Summary, TransferError> {
    receive(session, unpacker)
}

/// Sends everything from a source.
pub(super) fn send<S: Source>(
    mut session: TransferSession<'_, '_>,
    mut source: S,
) -> Result<Summary, TransferError> {
    let mut feed = Feed { pending: Vec::new(), start: 0, more: true, closed: false };
    loop {
        let fed = feed.offer(&mut source, &mut session);
        let arrivals = match fed.and_then(|()| session.wait()) {
            Ok(arrivals) => arrivals,
            Err(error) => {
                session.abort(&error, &Request::CloseStdin);
                return Err(error);
            }
        };
        match arrivals.exit {
            Some(exit) => {
                session.check(exit)?;
                return if feed.closed { Ok(source.into_summary()) } else { Err(TransferError::Incomplete) };
            }
            None => session.check_stall()?,
        }
    }
}

/// Receives everything into a sink.
pub(super) fn receive<S: Sink>(
    mut session: TransferSession<'_, '_>,
    mut sink: S,
) -> Result<S::Whole, TransferError> {
    loop {
        let outcome = session.wait().and_then(|arrivals| {
            for bytes in &arrivals.content {
                sink.take(bytes)?;
                session.stream.consumed(StdChannel::Stdout, bytes.len())?;
                session.moved = Instant::now();
            }
            (session.progress)(sink.done(), sink.total());
            Ok(arrivals.exit)
        });
        match outcome {
            Ok(Some(exit)) => {
                session.check(exit)?;
                return sink.finish();
            }
            Ok(None) => session.check_stall()?,
            Err(error) => {
                session.abort(&error, &Request::Signal(Signal::KILL.as_raw()));
                return Err(error);
            }
        }
    }
}

/// Packed bytes that are not sent yet.
struct Feed {
    pending: Vec<u8>,
    start: usize,
    more: bool,
    closed: bool,
}

impl Feed {
    /// Queues as much as the guest's window accepts.
    fn offer<S: Source>(
        &mut self,
        source: &mut S,
        session: &mut TransferSession<'_, '_>,
    ) -> Result<(), TransferError> {
        while !self.closed && session.stream.input_window() > 0 {
            if self.start == self.pending.len() {
                self.pending.clear();
                self.start = 0;
                if !self.more {
                    session.stream.queue(&Request::CloseStdin)?;
                    self.closed = true;
                    break;
                }
                self.more = source.fill(&mut self.pending, BATCH)?;
                (session.progress)(source.done(), source.total());
            }
            let rest = self.pending.get(self.start..).unwrap_or_default();
            let count = rest.len().min(session.stream.input_window()).min(MAX_PAYLOAD as usize);
            session.stream.input(rest.get(..count).unwrap_or_default());
            self.start += count;
        }
        Ok(())
    }
}

/// What arrived in one round of waiting.
#[derive(Default)]
struct Arrivals {
    content: Vec<Vec<u8>>,
    exit: Option<Exit>,
}

/// One transfer that the guest was asked for.
pub struct TransferSession<'c, 'o> {
    stream: Stream<'c>,
    progress: &'o mut dyn FnMut(u64, Option<u64>),
    interrupt: Option<BorrowedFd<'o>>,
    stall: Duration,
    /// When the copy last made progress.
    moved: Instant,
    /// The deadline of the whole copy.
    deadline: Option<Instant>,
    error_text: Vec<u8>,
    /// Whether the guest's output is the archive.
    outward: bool,
}

impl<'c, 'o> TransferSession<'c, 'o> {
    /// Requests a transfer on an unused stream of `connection`.
    ///
    /// # Errors
    /// The request cannot be encoded.
    pub fn start(
        connection: &'c mut Connection,
        stream: u32,
        transfer: Transfer,
        tag: u64,
        options: TransferOptions<'o>,
    ) -> Result<Self, TransferError> {
        let outward = transfer.direction == CopyDirection::OutOfGuest;
        let request = Request::Start { work: Work::Transfer(transfer), tag, job: None };
        Ok(Self {
            stream: Stream::open(connection, stream, &request)?,
            progress: options.progress,
            interrupt: options.interrupt,
            stall: options.stall,
            moved: Instant::now(),
            deadline: None,
            error_text: Vec::new(),
            outward,
        })
    }

    /// Sets a deadline for the whole copy.
    pub(super) fn within(mut self, time: Duration) -> Self {
        self.deadline = Some(Instant::now() + time);
        self
    }

    /// The time until the next timeout.
    fn remaining(&self) -> Duration {
        let stall = self.stall.saturating_sub(self.moved.elapsed());
        let rest = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        rest.map_or(stall, |rest| rest.min(stall))
    }

    /// Sends what is queued, waits for an event or a timeout, and receives what has arrived.
    fn wait(&mut self) -> Result<Arrivals, TransferError> {
        let interrupt = self.interrupt.map(|fd| (fd, PollFlags::IN));
        let deadline = Instant::now() + self.remaining();
        let Fired { arrived, others: [interrupted] } = self.stream.wait(true, [interrupt], Some(deadline))?;
        if interrupted {
            return Err(TransferError::Interrupted);
        }
        let mut arrivals = Arrivals::default();
        if arrived {
            for event in self.stream.receive()? {
                // The first end counts: the sandbox may end right after the copy.
                if arrivals.exit.is_none() {
                    self.take(event, &mut arrivals)?;
                }
            }
        }
        Ok(arrivals)
    }

    fn take(&mut self, event: StreamEvent, arrivals: &mut Arrivals) -> Result<(), TransferError> {
        match event {
            StreamEvent::SandboxEnded { cause, console } => {
                return Err(TransferError::SandboxEnded { cause, console });
            }
            StreamEvent::Refused(refused) => return Err(TransferError::Refused(refused)),
            StreamEvent::Exited(exit) => arrivals.exit = Some(exit),
            StreamEvent::Granted(bytes) => {
                if bytes > 0 {
                    self.moved = Instant::now();
                }
            }
            StreamEvent::Output(StdChannel::Stdout, bytes) if self.outward && !bytes.is_empty() => {
                arrivals.content.push(bytes);
            }
            StreamEvent::Output(channel, bytes) => {
                if channel == StdChannel::Stderr {
                    let space = MAX_ERROR_TEXT.saturating_sub(self.error_text.len()).min(bytes.len());
                    self.error_text.extend_from_slice(bytes.get(..space).unwrap_or_default());
                }
                self.stream.consumed(channel, bytes.len())?;
            }
            StreamEvent::Ready(_)
            | StreamEvent::Warning(_)
            | StreamEvent::Started
            | StreamEvent::Attached
            | StreamEvent::TakenOver => {}
        }
        Ok(())
    }

    fn check(&self, exit: Exit) -> Result<(), TransferError> {
        if exit == Exit::Code(0) {
            return Ok(());
        }
        match String::from_utf8_lossy(&self.error_text).trim() {
            "" => Err(TransferError::FailedSilently(exit.shell_code())),
            error_text => Err(TransferError::Failed(error_text.to_owned())),
        }
    }

    /// Only transferred content counts as progress; other messages do not.
    fn check_stall(&self) -> Result<(), TransferError> {
        if self.remaining().is_zero() { Err(TransferError::Stalled) } else { Ok(()) }
    }

    /// Aborts the copy in the guest and lets it clean up, if it still serves this stream.
    fn abort(&mut self, error: &TransferError, request: &Request) {
        let ours = matches!(
            error,
            TransferError::Pack(_)
                | TransferError::Unpack(_)
                | TransferError::Direct(_)
                | TransferError::Interrupted
        );
        if !ours || self.stream.queue(request).is_err() {
            return;
        }
        // A user who interrupted the copy does not wait for anything else.
        self.interrupt = None;
        self.stall = CLEAN_UP;
        self.deadline = None;
        self.outward = false;
        let end = Instant::now() + CLEAN_UP;
        self.moved = Instant::now();
        while Instant::now() < end {
            match self.wait() {
                Ok(Arrivals { exit: None, .. }) => {}
                _ => return,
            }
        }
    }
}
