//! One command, connected to the caller's own standard input, output and error.

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
use crate::stream::{Event, Fired, Stream};
use keys::DetachKeys;
use output::Output;
pub use output::{Filter, Sink};

/// The stream of the only command.
const STREAM: u32 = 1;
/// A pipe that is ready takes at least this much without blocking.
const ATOMIC_WRITE: usize = 4096;

/// How long a guest may take to say that it has started a command, or why not.
const ANSWER: Duration = Duration::from_secs(30);

/// How long a guest may take to be ready, if its keeper does not say that it took too long.
const READY: Duration = Duration::from_secs(60);

/// How many warnings are kept.
const MAX_WARNINGS: usize = 16;

/// The command's connection failed.
#[derive(Debug, Error)]
pub enum AttachError {
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// The command's output could not be passed on.
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
    /// The caller's interrupt descriptor became readable.
    Interrupted,
    /// Nobody reads the command's output any more.
    BrokenPipe,
    /// The job goes on without us: the caller left, or never wanted to stay.
    Detached,
    /// Another client took the job over.
    TakenOver,
    /// The guest did not say in time that it has started the command.
    NoAnswer,
    /// The sandbox ended under it.
    SandboxEnded {
        cause: Cause,
        /// The guest kernel's last lines.
        console: String,
    },
}

#[derive(Debug, Default)]
pub struct Times {
    /// What the keeper reported.
    pub timeline: Timeline,
    /// The first byte of output, in wall clock nanoseconds; 0 if there was none.
    pub first_byte: u64,
    pub exited: u64,
}

/// What to run, or to join.
#[derive(Clone, Debug)]
pub enum What {
    Start {
        exec: Exec,
        /// The caller's number for it.
        tag: u64,
        /// The number of a job, which outlives us.
        job: Option<u32>,
        /// Leave as soon as it runs.
        leave: bool,
    },
    /// A job that runs already.
    Join {
        job: u32,
    },
}

/// A command being run.
pub struct Attach<'c, 'a> {
    stream: Stream<'c>,
    stdin: Option<BorrowedFd<'a>>,
    outputs: [Output<'a>; 2],
    interrupt: Option<BorrowedFd<'a>>,
    terminal: Option<Terminal<'a>>,
    keys: Option<DetachKeys>,
    leave: bool,
    timeout: Option<Duration>,
    deadline: Option<Instant>,
    /// When the guest has to have answered; nothing once it has.
    answer: Option<Instant>,
    ready: bool,
    times: Times,
    warnings: Vec<String>,
}

#[derive(Clone, Copy, Debug)]
pub struct Terminal<'a> {
    pub fd: BorrowedFd<'a>,
    /// Becomes readable when the size has changed.
    pub resized: BorrowedFd<'a>,
}

impl Terminal<'_> {
    pub fn size(&self) -> Option<TerminalSize> {
        let size = rustix::termios::tcgetwinsize(self.fd).ok()?;
        Some(TerminalSize { rows: size.ws_row, columns: size.ws_col })
    }
}

/// What is left when a command is done.
pub struct Finished<'a> {
    pub outcome: Outcome,
    pub times: Times,
    /// What the keeper warned of.
    pub warnings: Vec<String>,
    pub stdout: Sink<'a>,
    pub stderr: Sink<'a>,
}

/// The caller's side of a command.
pub struct Stdio<'a> {
    /// Standard input; none means end-of-file at once.
    pub stdin: Option<BorrowedFd<'a>>,
    /// Where standard output goes.
    pub stdout: Sink<'a>,
    /// Where standard error goes.
    pub stderr: Sink<'a>,
    /// Becomes readable when the caller wants to stop.
    pub interrupt: Option<BorrowedFd<'a>>,
    /// The caller's terminal, whose size the command's follows.
    pub terminal: Option<Terminal<'a>>,
    /// Whether Ctrl-P Ctrl-Q leaves the command running.
    pub detach_keys: bool,
}

impl<'c, 'a> Attach<'c, 'a> {
    /// Asks for something to be run, or joined; it begins as soon as the guest is ready. `timeout` counts from then.
    pub fn start(
        connection: &'c mut Connection,
        what: What,
        timeout: Option<Duration>,
        stdio: Stdio<'a>,
    ) -> Result<Self, AttachError> {
        let (request, leave) = match what {
            What::Start { exec, tag, job, leave } => {
                (Request::Start { work: Work::Exec(exec), tag, job }, leave)
            }
            What::Join { job } => (Request::Attach { job }, false),
        };
        Ok(Self {
            stream: Stream::open(connection, STREAM, &request)?,
            stdin: stdio.stdin.filter(|_| !leave),
            outputs: [
                Output::new(StdChannel::Stdout, stdio.stdout),
                Output::new(StdChannel::Stderr, stdio.stderr),
            ],
            interrupt: stdio.interrupt,
            terminal: stdio.terminal,
            keys: stdio.detach_keys.then(DetachKeys::default),
            leave,
            timeout,
            deadline: None,
            // Until the sandbox is ready, and then until it has answered. A new guest has a time limit of its own.
            answer: Instant::now().checked_add(READY + ANSWER),
            ready: false,
            times: Times::default(),
            warnings: Vec::new(),
        })
    }

    /// Moves bytes until the command, or the sandbox, or the caller's patience ends.
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
                self.stream.tell(&Request::Detach)?;
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

    fn take(&mut self, event: Event) -> Result<Option<Outcome>, AttachError> {
        match event {
            // Only once: a keeper that a guest has taken over must not move the deadline.
            Event::Ready(timeline) => {
                if !std::mem::replace(&mut self.ready, true) {
                    self.times.timeline = timeline;
                    self.deadline = self.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
                    self.answer = Instant::now().checked_add(ANSWER);
                }
            }
            Event::Warning(text) => {
                if self.warnings.len() < MAX_WARNINGS {
                    self.warnings.push(text);
                }
            }
            Event::Started => {
                self.answer = None;
                if self.leave {
                    self.stream.tell(&Request::Detach)?;
                    return Ok(Some(Outcome::Detached));
                }
            }
            Event::Attached => {
                self.answer = None;
                // Not again while the last one was not taken: a keeper may repeat itself.
                if self.stream.is_sent() {
                    self.resize()?;
                }
            }
            Event::Output(channel, bytes) => {
                if self.times.first_byte == 0 {
                    self.times.first_byte = unix_ns();
                }
                let index = usize::from(channel == StdChannel::Stderr);
                let Some(output) = self.outputs.get_mut(index) else { return Ok(None) };
                let done = output.take(&bytes);
                self.stream.consumed(channel, done)?;
            }
            Event::Exited(exit) => {
                self.times.exited = unix_ns();
                return Ok(Some(Outcome::Exited(exit)));
            }
            Event::Refused(refused) => return Ok(Some(Outcome::Refused(refused))),
            Event::TakenOver => return Ok(Some(Outcome::TakenOver)),
            Event::SandboxEnded { cause, console } => {
                return Ok(Some(Outcome::SandboxEnded { cause, console }));
            }
            Event::Granted(_) => {}
        }
        Ok(None)
    }

    /// Tells the command's terminal the size of the caller's.
    fn resize(&mut self) -> Result<(), AttachError> {
        let Some(terminal) = self.terminal else { return Ok(()) };
        // Signals merge: the descriptor only tells that there was one.
        let mut drain = [0u8; 512];
        let _ = rustix::io::read(terminal.resized, &mut drain);
        match terminal.size() {
            Some(size) => Ok(self.stream.tell(&Request::Resize(size))?),
            None => Ok(()),
        }
    }

    /// Passes one ready chunk on; `false` if nobody reads.
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

    /// Passes input on; `true` if the caller typed the keys that leave.
    fn read_stdin(&mut self) -> Result<bool, AttachError> {
        let Some(stdin) = self.stdin else { return Ok(false) };
        let mut buffer = [0u8; 16 * 1024];
        // A key that was held back may come on top.
        let room = self.stream.input_room().saturating_sub(1).min(buffer.len());
        match rustix::io::read(stdin, buffer.get_mut(..room).unwrap_or_default()) {
            Ok(count @ 1..) => {
                let bytes = buffer.get(..count).unwrap_or_default();
                let typed = self.keys.as_mut().map(|keys| keys.take(bytes));
                let bytes = typed.as_ref().map_or(bytes, |typed| &typed.bytes);
                self.stream.input(bytes);
                return Ok(typed.is_some_and(|typed| typed.leave));
            }
            Err(Errno::INTR | Errno::AGAIN) => {}
            // An input that fails is an input that ended.
            Ok(_) | Err(_) => {
                self.stdin = None;
                self.stream.tell(&Request::CloseStdin)?;
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
            running && self.answer.is_none() && self.stream.input_room() > 1 && self.stream.is_sent();
        let stdin = self.stdin.filter(|_| takes_input).map(readable);
        let resized = self.terminal.map(|terminal| readable(terminal.resized));
        let others = [self.interrupt.map(readable), resized, stdout, stderr, stdin];
        let deadline = self.deadline.into_iter().chain(self.answer).min().filter(|_| running);
        let Fired { arrived, others } = self.stream.wait(running, others, deadline)?;
        let [interrupt, resized, stdout, stderr, stdin] = others;
        Ok(Ready { interrupt, resized, outputs: [stdout, stderr], stdin, arrived })
    }
}

/// What can be done without waiting.
struct Ready {
    interrupt: bool,
    resized: bool,
    outputs: [bool; 2],
    stdin: bool,
    arrived: bool,
}
