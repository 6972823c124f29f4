//! One command, connected to local standard input, output and error.

mod keys;
mod output;

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use bathy_protocol::{
    Cause, Exec, Exit, Refused, Request, StdChannel, TerminalSize, Timeline, Work, unix_ns,
};
use rustix::event::PollFlags;
use rustix::io::Errno;
use thiserror::Error;

use crate::connection::{Connection, ConnectionError};
use crate::stream::{Fired, Stream, StreamEvent};
use keys::DetachKeys;
use output::OutputWriter;
pub use output::{Filter, Sink};

/// The stream of the only command.
const STREAM: u32 = 1;
/// A pipe that polls as writable accepts at least this much without blocking.
const ATOMIC_WRITE: usize = 4096;

/// How long a guest may take to start a command or refuse it.
const ANSWER: Duration = Duration::from_secs(30);

/// How long a guest may take to be ready, if its keeper reports no timeout.
const READY: Duration = Duration::from_secs(60);

/// The most warnings that are collected.
const MAX_WARNINGS: usize = 16;

/// The command's connection failed.
#[derive(Debug, Error)]
pub enum AttachError {
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// The command's output could not be written.
    #[error("Cannot write the command's output")]
    Output(#[source] io::Error),
}

#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    Exited(Exit),
    /// The command was not started.
    Refused(Refused),
    /// The command took too long.
    TimedOut,
    /// The interrupt descriptor became readable.
    Interrupted,
    /// The reader of the command's output closed it.
    BrokenPipe,
    /// The job keeps running: the user detached, or it was started detached.
    Detached,
    /// Another client took over the job.
    TakenOver,
    /// The guest did not confirm in time that it had started the command.
    NoAnswer,
    /// The sandbox ended before the command did.
    SandboxEnded {
        cause: Cause,
        /// The last lines of the guest kernel's console.
        console: String,
    },
}

#[derive(Debug, Default)]
pub struct Times {
    /// The timeline that the keeper reported.
    pub timeline: Timeline,
    /// When the first byte of output arrived, in nanoseconds since 1970; 0 if there was none.
    pub first_byte: u64,
    pub exited: u64,
}

/// The command to start or the job to join.
#[derive(Clone, Debug)]
pub enum AttachRequest {
    Start {
        exec: Exec,
        /// The tag of the command, chosen by the client.
        tag: u64,
        /// The job number. A job outlives its client.
        job: Option<u32>,
        /// Whether to detach as soon as it is running.
        leave: bool,
    },
    /// Joins a running job.
    Join { job: u32 },
}

/// A command in progress.
pub struct Attach<'c, 'a> {
    stream: Stream<'c>,
    stdin: Option<BorrowedFd<'a>>,
    outputs: [OutputWriter<'a>; 2],
    interrupt: Option<BorrowedFd<'a>>,
    terminal: Option<LocalTerminal<'a>>,
    keys: Option<DetachKeys>,
    leave: bool,
    timeout: Option<Duration>,
    deadline: Option<Instant>,
    /// The deadline for the guest's answer; none once it has answered.
    answer: Option<Instant>,
    ready: bool,
    times: Times,
    warnings: Vec<String>,
}

#[derive(Clone, Copy, Debug)]
pub struct LocalTerminal<'a> {
    pub fd: BorrowedFd<'a>,
    /// Becomes readable when the size has changed.
    pub resized: BorrowedFd<'a>,
}

impl LocalTerminal<'_> {
    pub fn size(&self) -> Option<TerminalSize> {
        let size = rustix::termios::tcgetwinsize(self.fd).ok()?;
        Some(TerminalSize { rows: size.ws_row, columns: size.ws_col })
    }
}

/// The result of a command.
pub struct Finished<'a> {
    pub outcome: Outcome,
    pub times: Times,
    /// Warnings of the keeper.
    pub warnings: Vec<String>,
    pub stdout: Sink<'a>,
    pub stderr: Sink<'a>,
}

/// The local side of a command.
pub struct Stdio<'a> {
    /// Standard input; none means end of file at once.
    pub stdin: Option<BorrowedFd<'a>>,
    /// The sink of standard output.
    pub stdout: Sink<'a>,
    /// The sink of standard error.
    pub stderr: Sink<'a>,
    /// Becomes readable when the command should be interrupted.
    pub interrupt: Option<BorrowedFd<'a>>,
    /// The local terminal, whose size the command's terminal follows.
    pub terminal: Option<LocalTerminal<'a>>,
    /// Whether Ctrl-P Ctrl-Q detaches.
    pub detach_keys: bool,
}

impl<'c, 'a> Attach<'c, 'a> {
    /// Requests to start or join a command; it begins as soon as the guest is ready. `timeout` counts from
    /// then.
    pub fn start(
        connection: &'c mut Connection,
        what: AttachRequest,
        timeout: Option<Duration>,
        stdio: Stdio<'a>,
    ) -> Result<Self, AttachError> {
        let (request, leave) = match what {
            AttachRequest::Start { exec, tag, job, leave } => {
                (Request::Start { work: Work::Exec(exec), tag, job }, leave)
            }
            AttachRequest::Join { job } => (Request::Attach { job }, false),
        };
        Ok(Self {
            stream: Stream::open(connection, STREAM, &request)?,
            stdin: stdio.stdin.filter(|_| !leave),
            outputs: [
                OutputWriter::new(StdChannel::Stdout, stdio.stdout),
                OutputWriter::new(StdChannel::Stderr, stdio.stderr),
            ],
            interrupt: stdio.interrupt,
            terminal: stdio.terminal,
            keys: stdio.detach_keys.then(DetachKeys::default),
            leave,
            timeout,
            deadline: None,
            // Covers both booting and the answer. A new guest has a boot timeout of its own.
            answer: Instant::now().checked_add(READY + ANSWER),
            ready: false,
            times: Times::default(),
            warnings: Vec::new(),
        })
    }

    /// Forwards bytes until the command ends, the sandbox ends or the timeout passes.
    pub fn run(mut self) -> Result<Finished<'a>, AttachError> {
        let outcome = self.run_to_outcome()?;
        let [stdout, stderr] = self.outputs;
        Ok(Finished {
            outcome,
            times: self.times,
            warnings: self.warnings,
            stdout: stdout.sink,
            stderr: stderr.sink,
        })
    }

    fn run_to_outcome(&mut self) -> Result<Outcome, AttachError> {
        let mut outcome = None;
        loop {
            self.stream.send()?;
            let drained = self.outputs.iter().all(|output| output.pending.is_empty());
            if let Some(outcome) = outcome.take_if(|_| drained) {
                return Ok(outcome);
            }
            let ready = self.wait(outcome.is_none())?;
            if ready.interrupt {
                return Ok(Outcome::Interrupted);
            }
            let passed = |at: Option<Instant>| at.is_some_and(|at| at <= Instant::now());
            if outcome.is_none() && passed(self.deadline) {
                return Ok(Outcome::TimedOut);
            }
            if outcome.is_none() && passed(self.answer) {
                return Ok(Outcome::NoAnswer);
            }
            if ready.resized {
                self.resize()?;
            }
            for (index, writable) in ready.outputs.into_iter().enumerate() {
                if writable && !self.write_output(index)? {
                    return Ok(Outcome::BrokenPipe);
                }
            }
            if ready.stdin && self.read_stdin()? {
                self.stream.queue(&Request::Detach)?;
                self.stream.send()?;
                return Ok(Outcome::Detached);
            }
            if ready.arrived {
                for event in self.stream.receive()? {
                    // The first end counts: a sandbox may end right after its command.
                    let end = self.take(event)?;
                    outcome = outcome.or(end);
                }
            }
        }
    }

    fn take(&mut self, event: StreamEvent) -> Result<Option<Outcome>, AttachError> {
        match event {
            // Only once: a compromised keeper must not move the deadline.
            StreamEvent::Ready(timeline) => {
                if !std::mem::replace(&mut self.ready, true) {
                    self.times.timeline = timeline;
                    self.deadline = self.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
                    self.answer = Instant::now().checked_add(ANSWER);
                }
            }
            StreamEvent::Warning(text) => {
                if self.warnings.len() < MAX_WARNINGS {
                    self.warnings.push(text);
                }
            }
            StreamEvent::Started => {
                self.answer = None;
                if self.leave {
                    self.stream.queue(&Request::Detach)?;
                    return Ok(Some(Outcome::Detached));
                }
            }
            StreamEvent::Attached => {
                self.answer = None;
                // Only when the last one was sent: a compromised keeper may repeat itself.
                if self.stream.is_sent() {
                    self.resize()?;
                }
            }
            StreamEvent::Output(channel, bytes) => {
                if self.times.first_byte == 0 {
                    self.times.first_byte = unix_ns();
                }
                let index = usize::from(channel == StdChannel::Stderr);
                let Some(output) = self.outputs.get_mut(index) else { return Ok(None) };
                let done = output.take(&bytes);
                self.stream.consumed(channel, done)?;
            }
            StreamEvent::Exited(exit) => {
                self.times.exited = unix_ns();
                return Ok(Some(Outcome::Exited(exit)));
            }
            StreamEvent::Refused(refused) => return Ok(Some(Outcome::Refused(refused))),
            StreamEvent::TakenOver => return Ok(Some(Outcome::TakenOver)),
            StreamEvent::SandboxEnded { cause, console } => {
                return Ok(Some(Outcome::SandboxEnded { cause, console }));
            }
            StreamEvent::Granted(_) => {}
        }
        Ok(None)
    }

    /// Sends the size of the local terminal to the command's terminal.
    fn resize(&mut self) -> Result<(), AttachError> {
        let Some(terminal) = self.terminal else { return Ok(()) };
        // Signals merge: the descriptor only shows that there was at least one.
        let mut drain = [0u8; 512];
        let _ = rustix::io::read(terminal.resized, &mut drain);
        match terminal.size() {
            Some(size) => Ok(self.stream.queue(&Request::Resize(size))?),
            None => Ok(()),
        }
    }

    /// Writes one ready chunk. False if the reader closed the output.
    fn write_output(&mut self, index: usize) -> Result<bool, AttachError> {
        let Some(output) = self.outputs.get_mut(index) else { return Ok(true) };
        let Some(fd) = output.sink.fd() else { return Ok(true) };
        let (chunk, _) = output.pending.as_slices();
        let chunk = chunk.get(..ATOMIC_WRITE.min(chunk.len())).unwrap_or_default();
        match rustix::io::write(fd, chunk) {
            Ok(count) => {
                let (which, done) = (output.which, output.written(count));
                self.stream.consumed(which, done)?;
                Ok(true)
            }
            Err(Errno::INTR | Errno::AGAIN) => Ok(true),
            Err(Errno::PIPE) => Ok(false),
            Err(error) => Err(AttachError::Output(error.into())),
        }
    }

    /// Forwards input. True if the user pressed the keys that detach.
    fn read_stdin(&mut self) -> Result<bool, AttachError> {
        let Some(stdin) = self.stdin else { return Ok(false) };
        let mut buffer = [0u8; 16 * 1024];
        // A key that was held back may be added.
        let window = self.stream.input_window().saturating_sub(1).min(buffer.len());
        match rustix::io::read(stdin, buffer.get_mut(..window).unwrap_or_default()) {
            Ok(count @ 1..) => {
                let bytes = buffer.get(..count).unwrap_or_default();
                let typed = self.keys.as_mut().map(|keys| keys.take(bytes));
                let bytes = typed.as_ref().map_or(bytes, |typed| &typed.bytes);
                self.stream.input(bytes);
                return Ok(typed.is_some_and(|typed| typed.leave));
            }
            Err(Errno::INTR | Errno::AGAIN) => {}
            // A read error counts as end of file.
            Ok(_) | Err(_) => {
                self.stdin = None;
                self.stream.queue(&Request::CloseStdin)?;
            }
        }
        Ok(false)
    }

    fn wait(&mut self, running: bool) -> Result<Ready, AttachError> {
        let readable = |fd| (fd, PollFlags::IN);
        let [stdout, stderr] = self.outputs.each_ref().map(|output| match output.sink.fd() {
            Some(fd) if !output.pending.is_empty() => Some((fd, PollFlags::OUT)),
            _ => None,
        });
        let takes_input =
            running && self.answer.is_none() && self.stream.input_window() > 1 && self.stream.is_sent();
        let stdin = self.stdin.filter(|_| takes_input).map(readable);
        let resized = self.terminal.map(|terminal| readable(terminal.resized));
        let others = [self.interrupt.map(readable), resized, stdout, stderr, stdin];
        let deadline = self.deadline.into_iter().chain(self.answer).min().filter(|_| running);
        let Fired { arrived, others } = self.stream.wait(running, others, deadline)?;
        let [interrupt, resized, stdout, stderr, stdin] = others;
        Ok(Ready { interrupt, resized, outputs: [stdout, stderr], stdin, arrived })
    }
}

/// What can be done without blocking.
struct Ready {
    interrupt: bool,
    resized: bool,
    outputs: [bool; 2],
    stdin: bool,
    arrived: bool,
}
