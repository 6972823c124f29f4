//! One stream of a connection: its request, its flow-control windows, and receiving what arrives on it.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use bathy_protocol::{
    Answer, Cause, Channel, Exit, FromKeeper, ReceiveWindow, Refused, Request, SendWindow, StdChannel,
    Timeline,
};
use rustix::event::{PollFd, PollFlags};

use crate::connection::{Arrival, Connection, ConnectionError};
use crate::wait::poll_until;

/// An event that concerns a stream.
#[derive(Debug, PartialEq, Eq)]
pub enum StreamEvent {
    Ready(Timeline),
    Warning(String),
    SandboxEnded {
        cause: Cause,
        /// The last lines of the guest kernel's console.
        console: String,
    },
    Started,
    /// This stream is now attached to the job.
    Attached,
    /// The work was not started, or there is no such job.
    Refused(Refused),
    /// The guest can accept this many more bytes of input.
    Granted(u32),
    /// Output; report it as [consumed](Stream::consumed) when it has been dealt with.
    Output(StdChannel, Vec<u8>),
    Exited(Exit),
    /// Another client took over the job.
    TakenOver,
}

/// Which descriptors became ready.
#[derive(Clone, Copy, Debug)]
pub struct Fired<const N: usize> {
    /// The keeper sent something: call [`Stream::receive`].
    pub arrived: bool,
    /// The other descriptors that were passed in.
    pub others: [bool; N],
}

/// A stream with its request.
#[derive(Debug)]
pub struct Stream<'c> {
    connection: &'c mut Connection,
    number: u32,
    input: SendWindow,
    outputs: [ReceiveWindow; 2],
}

impl<'c> Stream<'c> {
    /// Sends a request on an unused stream of `connection`.
    ///
    /// # Errors
    /// The request cannot be encoded.
    pub fn open(
        connection: &'c mut Connection,
        number: u32,
        request: &Request,
    ) -> Result<Self, ConnectionError> {
        connection.queue(number, request)?;
        Ok(Self { connection, number, input: SendWindow::default(), outputs: Default::default() })
    }

    /// Queues another request about the same work.
    ///
    /// # Errors
    /// The request cannot be encoded.
    pub fn queue(&mut self, request: &Request) -> Result<(), ConnectionError> {
        self.connection.queue(self.number, request)
    }

    /// Sends as much as the keeper accepts without blocking.
    ///
    /// # Errors
    /// The connection fails.
    pub fn send(&mut self) -> Result<(), ConnectionError> {
        self.connection.send()
    }

    pub fn is_sent(&self) -> bool {
        self.connection.unsent() == 0
    }

    /// How many bytes of input the guest's window still accepts.
    pub fn input_window(&self) -> usize {
        self.input.open()
    }

    /// Queues input, at most what the window accepts.
    pub fn input(&mut self, bytes: &[u8]) {
        self.input.sent(bytes.len());
        if !bytes.is_empty() {
            self.connection.input(self.number, bytes);
        }
    }

    /// Grants the guest new window space for consumed output.
    ///
    /// # Errors
    /// The request cannot be encoded.
    pub fn consumed(&mut self, channel: StdChannel, count: usize) -> Result<(), ConnectionError> {
        match self.window(channel).consumed(count) {
            Some(bytes) => self.queue(&Request::Grant { channel, bytes }),
            None => Ok(()),
        }
    }

    /// Sends what is queued, then waits for arrivals (if wanted), other descriptors or the deadline.
    ///
    /// # Errors
    /// The connection fails.
    pub fn wait<const N: usize>(
        &mut self,
        wants_arrivals: bool,
        others: [Option<(BorrowedFd<'_>, PollFlags)>; N],
        deadline: Option<Instant>,
    ) -> Result<Fired<N>, ConnectionError> {
        self.send()?;
        let flags = if self.is_sent() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
        let mut fds = Vec::with_capacity(N + 1);
        // After the end nothing more is read, and the hang-up would only wake us.
        fds.extend(wants_arrivals.then(|| PollFd::from_borrowed_fd(self.connection.fd(), flags)));
        fds.extend(others.iter().flatten().map(|(fd, flags)| PollFd::from_borrowed_fd(*fd, *flags)));
        poll_until(&mut fds, deadline).map_err(|error| ConnectionError::Socket(error.into()))?;
        let mut fired = fds.iter().map(|fd| !(fd.revents() - PollFlags::OUT).is_empty());
        let arrived = wants_arrivals && fired.next() == Some(true);
        let mut fired = fds.iter().skip(usize::from(wants_arrivals)).map(|fd| !fd.revents().is_empty());
        let others = others.map(|other| other.is_some() && fired.next() == Some(true));
        Ok(Fired { arrived, others })
    }

    /// Receives what has arrived for this stream or for all streams.
    ///
    /// # Errors
    /// The connection fails or the keeper violates the protocol.
    pub fn receive(&mut self) -> Result<Vec<StreamEvent>, ConnectionError> {
        let mut events = Vec::new();
        for arrival in self.connection.receive()? {
            match arrival {
                Arrival::Keeper(message) => events.extend(of_keeper(message)),
                Arrival::Answer(number, answer) if number == self.number => {
                    events.extend(self.on_answer(answer)?);
                }
                Arrival::Output(number, channel, bytes) if number == self.number => {
                    let channel =
                        if channel == Channel::Stderr { StdChannel::Stderr } else { StdChannel::Stdout };
                    self.window(channel).received(bytes.len())?;
                    events.push(StreamEvent::Output(channel, bytes));
                }
                // Leftovers of an earlier stream.
                Arrival::Answer(..) | Arrival::Output(..) => {}
            }
        }
        Ok(events)
    }

    fn on_answer(&mut self, answer: Answer) -> Result<Option<StreamEvent>, ConnectionError> {
        Ok(Some(match answer {
            Answer::Started { .. } => StreamEvent::Started,
            Answer::Attached { input } => {
                self.input = SendWindow::with(input);
                StreamEvent::Attached
            }
            Answer::Refused(refused) => StreamEvent::Refused(refused),
            Answer::Grant { bytes } => {
                self.input.grant(bytes)?;
                StreamEvent::Granted(bytes)
            }
            Answer::Exited(exit) => StreamEvent::Exited(exit),
            Answer::TakenOver => StreamEvent::TakenOver,
            Answer::Eof(_) => return Ok(None),
        }))
    }

    fn window(&mut self, channel: StdChannel) -> &mut ReceiveWindow {
        let [stdout, stderr] = &mut self.outputs;
        match channel {
            StdChannel::Stdout => stdout,
            StdChannel::Stderr => stderr,
        }
    }
}

fn of_keeper(message: FromKeeper) -> Option<StreamEvent> {
    match message {
        FromKeeper::Ready(timeline) => Some(StreamEvent::Ready(timeline)),
        FromKeeper::Warning(text) => Some(StreamEvent::Warning(text)),
        FromKeeper::Ended { cause, console } => Some(StreamEvent::SandboxEnded { cause, console }),
        // Only the sandbox's owner needs these.
        _ => None,
    }
}
