//! One stream of a connection: its request, its windows, and waiting for what comes on it.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use bathy_protocol::{
    Answer, Cause, Channel, Exit, FromKeeper, ReceiveWindow, Refused, Request, SendWindow, StdChannel,
    Timeline,
};
use rustix::event::{PollFd, PollFlags};

use crate::connection::{Arrival, Connection, ConnectionError};
use crate::wait::poll_until;

/// Something that concerns a stream.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// The sandbox is ready.
    Ready(Timeline),
    Warning(String),
    SandboxEnded {
        cause: Cause,
        /// The guest kernel's last lines.
        console: String,
    },
    /// The work was started.
    Started,
    /// The job is this stream's now.
    Attached,
    /// The work was not started, or there is no such job.
    Refused(Refused),
    /// The guest has room for this much more input.
    Granted(u32),
    /// Output, which has to be [given back](Stream::consumed) when it was dealt with.
    Output(StdChannel, Vec<u8>),
    Exited(Exit),
    /// Another client took the job over.
    TakenOver,
}

/// What a wait was for, and is there.
#[derive(Clone, Copy, Debug)]
pub struct Fired<const N: usize> {
    /// Something arrived from the keeper: [`Stream::receive`].
    pub arrived: bool,
    /// The caller's own descriptors.
    pub others: [bool; N],
}

/// A stream with a request.
#[derive(Debug)]
pub struct Stream<'c> {
    connection: &'c mut Connection,
    number: u32,
    input: SendWindow,
    outputs: [ReceiveWindow; 2],
}

impl<'c> Stream<'c> {
    /// Makes a request on a stream of `connection` that is not in use.
    ///
    /// # Errors
    /// When the request cannot be encoded.
    pub fn open(
        connection: &'c mut Connection,
        number: u32,
        request: &Request,
    ) -> Result<Self, ConnectionError> {
        connection.tell(number, request)?;
        Ok(Self { connection, number, input: SendWindow::default(), outputs: Default::default() })
    }

    /// Queues another request about the same work.
    ///
    /// # Errors
    /// When it cannot be encoded.
    pub fn tell(&mut self, request: &Request) -> Result<(), ConnectionError> {
        self.connection.tell(self.number, request)
    }

    /// Sends what is queued, as far as the keeper takes it now.
    ///
    /// # Errors
    /// When the connection fails.
    pub fn send(&mut self) -> Result<(), ConnectionError> {
        self.connection.send()
    }

    /// Whether all that was queued is sent.
    pub fn is_sent(&self) -> bool {
        self.connection.unsent() == 0
    }

    /// How many bytes of input the guest has room for.
    pub fn input_room(&self) -> usize {
        self.input.open()
    }

    /// Queues input, no more than there is room for.
    pub fn input(&mut self, bytes: &[u8]) {
        self.input.sent(bytes.len());
        if !bytes.is_empty() {
            self.connection.input(self.number, bytes);
        }
    }

    /// Gives the guest room again for output that was dealt with.
    ///
    /// # Errors
    /// When the request cannot be encoded.
    pub fn consumed(&mut self, channel: StdChannel, count: usize) -> Result<(), ConnectionError> {
        match self.window(channel).consumed(count) {
            Some(bytes) => self.tell(&Request::Grant { channel, bytes }),
            None => Ok(()),
        }
    }

    /// Sends what is queued, and waits for arrivals if they are wanted, for other descriptors, or for the deadline.
    ///
    /// # Errors
    /// When the connection fails.
    pub fn wait<const N: usize>(
        &mut self,
        wants_arrivals: bool,
        others: [Option<(BorrowedFd<'_>, PollFlags)>; N],
        deadline: Option<Instant>,
    ) -> Result<Fired<N>, ConnectionError> {
        self.send()?;
        let flags = if self.is_sent() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
        let mut fds = Vec::with_capacity(N + 1);
        // After the end there is nothing more to read, and the hang-up would only wake us.
        fds.extend(wants_arrivals.then(|| PollFd::from_borrowed_fd(self.connection.fd(), flags)));
        fds.extend(others.iter().flatten().map(|(fd, flags)| PollFd::from_borrowed_fd(*fd, *flags)));
        poll_until(&mut fds, deadline).map_err(|error| ConnectionError::Socket(error.into()))?;
        let mut fired = fds.iter().map(|fd| !(fd.revents() - PollFlags::OUT).is_empty());
        let arrived = wants_arrivals && fired.next() == Some(true);
        let mut fired = fds.iter().skip(usize::from(wants_arrivals)).map(|fd| !fd.revents().is_empty());
        let others = others.map(|other| other.is_some() && fired.next() == Some(true));
        Ok(Fired { arrived, others })
    }

    /// Takes what has arrived on this stream, or for all of them.
    ///
    /// # Errors
    /// When the connection fails, or the keeper does not keep to the protocol.
    pub fn receive(&mut self) -> Result<Vec<Event>, ConnectionError> {
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
                    events.push(Event::Output(channel, bytes));
                }
                // What is left of another stream.
                Arrival::Answer(..) | Arrival::Output(..) => {}
            }
        }
        Ok(events)
    }

    fn on_answer(&mut self, answer: Answer) -> Result<Option<Event>, ConnectionError> {
        Ok(Some(match answer {
            Answer::Started { .. } => Event::Started,
            Answer::Attached { input } => {
                self.input = SendWindow::with(input);
                Event::Attached
            }
            Answer::Refused(refused) => Event::Refused(refused),
            Answer::Grant { bytes } => {
                self.input.grant(bytes)?;
                Event::Granted(bytes)
            }
            Answer::Exited(exit) => Event::Exited(exit),
            Answer::TakenOver => Event::TakenOver,
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

fn of_keeper(message: FromKeeper) -> Option<Event> {
    match message {
        FromKeeper::Ready(timeline) => Some(Event::Ready(timeline)),
        FromKeeper::Warning(text) => Some(Event::Warning(text)),
        FromKeeper::Ended { cause, console } => Some(Event::SandboxEnded { cause, console }),
        // What only a sandbox's owner cares about.
        _ => None,
    }
}
