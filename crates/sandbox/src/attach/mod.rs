//! One command, connected to the caller's own standard input, output and error.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use bathy_image::ImageConfig;
use bathy_protocol::{
    Cause, Channel, Exec, Exit, FromKeeper, ReceiveWindow, Refused, SendWindow, StdChannel, Timeline,
    ToGuest, ToHost,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use thiserror::Error;

use crate::connection::{Arrival, Connection, ConnectionError};
use crate::launch::unix_ns;
use crate::spec::CommandSpec;

/// The stream of the only command.
const STREAM: u32 = 1;
/// A pipe that is ready takes at least this much without blocking.
const ATOMIC_WRITE: usize = 4096;

/// How many warnings are kept.
const MAX_WARNINGS: usize = 16;

/// The command's connection failed.
#[derive(Debug, Error)]
pub enum AttachError {
    /// The sandbox.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// The command's output could not be passed on.
    #[error("Cannot write the command's output")]
    Output(#[source] io::Error),
    /// Waiting failed.
    #[error("Cannot wait for the sandbox")]
    Wait(#[source] io::Error),
}

/// How it went.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The command ended.
    Exited(Exit),
    /// The command was not started.
    Refused(Refused),
    /// The command took too long.
    TimedOut,
    /// The caller's interrupt descriptor became readable.
    Interrupted,
    /// Nobody reads the command's output any more.
    BrokenPipe,
    /// The sandbox ended under it.
    SandboxEnded {
        /// Why.
        cause: Cause,
        /// The guest kernel's last lines.
        console: String,
    },
}

/// Where output goes.
#[derive(Debug)]
pub enum Sink<'a> {
    /// To a descriptor, as it comes.
    Descriptor(BorrowedFd<'a>),
    /// Into memory, up to a limit; the rest is counted.
    Memory {
        /// What came.
        kept: Vec<u8>,
        /// The most to keep.
        limit: usize,
        /// How much came in all.
        total: u64,
    },
}

impl Sink<'_> {
    /// Keeps at most `limit` bytes in memory.
    pub fn memory(limit: usize) -> Self {
        Self::Memory { kept: Vec::new(), limit, total: 0 }
    }
}

/// What happened when.
#[derive(Debug, Default)]
pub struct Times {
    /// What the keeper reported.
    pub timeline: Timeline,
    /// The first byte of output, in wall clock nanoseconds; 0 if there was none.
    pub first_byte: u64,
    /// The command's end.
    pub exited: u64,
}

/// One output on its way to the caller.
struct Output<'a> {
    which: StdChannel,
    sink: Sink<'a>,
    window: ReceiveWindow,
    pending: VecDeque<u8>,
}

/// A command being run.
pub struct Attach<'c, 'a> {
    connection: &'c mut Connection,
    stdin: Option<BorrowedFd<'a>>,
    stdin_window: SendWindow,
    outputs: [Output<'a>; 2],
    interrupt: Option<BorrowedFd<'a>>,
    timeout: Option<Duration>,
    deadline: Option<Instant>,
    times: Times,
    warnings: Vec<String>,
}

/// What is left when a command is done.
pub struct Finished<'a> {
    /// How it went.
    pub outcome: Outcome,
    /// When.
    pub times: Times,
    /// What the keeper warned of.
    pub warnings: Vec<String>,
    /// Standard output's sink.
    pub stdout: Sink<'a>,
    /// Standard error's sink.
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
}

impl<'c, 'a> Attach<'c, 'a> {
    /// Asks for `command` to be run; it will be started as soon as the guest is ready.
    pub fn start(
        connection: &'c mut Connection,
        command: &CommandSpec,
        image: &ImageConfig,
        stdio: Stdio<'a>,
    ) -> Result<Self, AttachError> {
        connection.tell(STREAM, &ToGuest::Exec(request(command, image, stdio.stdin.is_some())))?;
        let output =
            |which, sink| Output { which, sink, window: ReceiveWindow::default(), pending: VecDeque::new() };
        Ok(Self {
            connection,
            stdin: stdio.stdin,
            stdin_window: SendWindow::default(),
            outputs: [output(StdChannel::Stdout, stdio.stdout), output(StdChannel::Stderr, stdio.stderr)],
            interrupt: stdio.interrupt,
            timeout: command.timeout,
            deadline: None,
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
            self.connection.send()?;
            let drained = self.outputs.iter().all(|output| output.pending.is_empty());
            if let Some(outcome) = outcome.take_if(|_| drained) {
                return Ok(outcome);
            }
            let ready = self.wait(outcome.is_none())?;
            if ready.interrupt {
                return Ok(Outcome::Interrupted);
            }
            if outcome.is_none() && self.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Ok(Outcome::TimedOut);
            }
            for (index, writable) in ready.outputs.into_iter().enumerate() {
                if writable && !self.write_output(index)? {
                    return Ok(Outcome::BrokenPipe);
                }
            }
            if ready.stdin {
                self.read_stdin()?;
            }
            if ready.connection {
                for arrival in self.connection.receive()? {
                    // The first end counts: a sandbox may end right after its command.
                    let end = self.take(arrival)?;
                    outcome = outcome.or(end);
                }
            }
        }
    }

    fn take(&mut self, arrival: Arrival) -> Result<Option<Outcome>, AttachError> {
        match arrival {
            // Only once: a keeper that a guest has taken over must not move the deadline.
            Arrival::Keeper(FromKeeper::Ready(timeline)) => {
                if self.times.timeline.ready == 0 {
                    self.times.timeline = timeline;
                    self.deadline = self.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
                }
            }
            Arrival::Keeper(FromKeeper::Warning(text)) => {
                if self.warnings.len() < MAX_WARNINGS {
                    self.warnings.push(text);
                }
            }
            Arrival::Keeper(FromKeeper::Ended { cause, console }) => {
                return Ok(Some(Outcome::SandboxEnded { cause, console }));
            }
            Arrival::Message(_, ToHost::Exited(exit)) => {
                self.times.exited = unix_ns();
                return Ok(Some(Outcome::Exited(exit)));
            }
            Arrival::Message(_, ToHost::Refused(refused)) => return Ok(Some(Outcome::Refused(refused))),
            Arrival::Message(_, ToHost::Grant { bytes }) => {
                self.stdin_window.grant(bytes).map_err(ConnectionError::from)?;
            }
            Arrival::Message(_, ToHost::Started { .. } | ToHost::Eof(_) | ToHost::Ready(_)) => {}
            Arrival::Output(_, channel, bytes) => {
                if self.times.first_byte == 0 {
                    self.times.first_byte = unix_ns();
                }
                let index = usize::from(channel == Channel::Stderr);
                let Some(output) = self.outputs.get_mut(index) else { return Ok(None) };
                output.window.received(bytes.len()).map_err(ConnectionError::from)?;
                if let Sink::Memory { kept, limit, total } = &mut output.sink {
                    let room = limit.saturating_sub(kept.len()).min(bytes.len());
                    kept.extend_from_slice(bytes.get(..room).unwrap_or_default());
                    *total += bytes.len() as u64;
                    self.grant(index, bytes.len())?;
                } else {
                    output.pending.extend(bytes);
                }
            }
        }
        Ok(None)
    }

    /// Passes one ready chunk on; `false` if nobody reads.
    fn write_output(&mut self, index: usize) -> Result<bool, AttachError> {
        let Some(output) = self.outputs.get_mut(index) else { return Ok(true) };
        let Sink::Descriptor(fd) = &output.sink else { return Ok(true) };
        let (chunk, _) = output.pending.as_slices();
        let chunk = chunk.get(..ATOMIC_WRITE.min(chunk.len())).unwrap_or_default();
        match rustix::io::write(fd, chunk) {
            Ok(count) => {
                output.pending.drain(..count);
                self.grant(index, count)?;
                Ok(true)
            }
            Err(Errno::INTR | Errno::AGAIN) => Ok(true),
            Err(Errno::PIPE) => Ok(false),
            Err(error) => Err(AttachError::Output(error.into())),
        }
    }

    fn grant(&mut self, index: usize, count: usize) -> Result<(), AttachError> {
        if let Some(output) = self.outputs.get_mut(index)
            && let Some(bytes) = output.window.consumed(count)
        {
            self.connection.tell(STREAM, &ToGuest::Grant { channel: output.which, bytes })?;
        }
        Ok(())
    }

    fn read_stdin(&mut self) -> Result<(), AttachError> {
        let Some(stdin) = self.stdin else { return Ok(()) };
        let mut buffer = [0u8; 16 * 1024];
        let room = self.stdin_window.open().min(buffer.len());
        match rustix::io::read(stdin, buffer.get_mut(..room).unwrap_or_default()) {
            Ok(count @ 1..) => {
                self.stdin_window.sent(count);
                self.connection.input(STREAM, buffer.get(..count).unwrap_or_default());
            }
            Err(Errno::INTR | Errno::AGAIN) => {}
            // An input that fails is an input that ended.
            Ok(_) | Err(_) => {
                self.stdin = None;
                self.connection.tell(STREAM, &ToGuest::CloseStdin)?;
            }
        }
        Ok(())
    }

    fn wait(&self, running: bool) -> Result<Ready, AttachError> {
        let mut fds = Vec::with_capacity(5);
        let mut watch = |fd, flags| {
            fds.push(PollFd::from_borrowed_fd(fd, flags));
            fds.len() - 1
        };
        let interrupt = self.interrupt.map(|fd| watch(fd, PollFlags::IN));
        let outputs = self.outputs.each_ref().map(|output| match output.sink {
            Sink::Descriptor(fd) if !output.pending.is_empty() => Some(watch(fd, PollFlags::OUT)),
            _ => None,
        });
        let takes_input = running && self.stdin_window.open() > 0 && self.connection.unsent() == 0;
        let stdin = self.stdin.filter(|_| takes_input).map(|fd| watch(fd, PollFlags::IN));
        // After the end there is nothing more to read, and the hang-up would only wake us.
        let connection = running.then(|| {
            let out = if self.connection.unsent() > 0 { PollFlags::OUT } else { PollFlags::empty() };
            watch(self.connection.fd(), PollFlags::IN | out)
        });
        let timeout = self.deadline.map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(AttachError::Wait(error.into())),
        }
        let fired = |index: Option<usize>| {
            index.and_then(|index| fds.get(index)).is_some_and(|fd| !fd.revents().is_empty())
        };
        Ok(Ready {
            interrupt: fired(interrupt),
            outputs: outputs.map(fired),
            stdin: fired(stdin),
            connection: fired(connection),
        })
    }
}

/// What can be done without waiting.
struct Ready {
    interrupt: bool,
    outputs: [bool; 2],
    stdin: bool,
    connection: bool,
}

fn request(command: &CommandSpec, image: &ImageConfig, stdin: bool) -> Exec {
    let mut env: std::collections::BTreeMap<&str, &[u8]> =
        image.env.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
    env.extend(command.env.iter().map(|(name, value)| (name.as_str(), value.as_slice())));
    Exec {
        argv: command.argv.clone(),
        env: env.into_iter().map(|(name, value)| [name.as_bytes(), b"=", value].concat()).collect(),
        // The image's folder belongs to the image's user; another user starts at home.
        cwd: command.cwd.clone().or_else(|| command.user.is_none().then(|| image.cwd.clone().into_bytes())),
        user: command.user.clone().unwrap_or_else(|| image.user.clone()),
        stdin,
    }
}
