//! The agent's event loop: the control port, the commands' pipes, ended children.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::thread::sleep;
use std::time::{Duration, Instant};

use bathy_protocol::message::decode;
use bathy_protocol::{
    CONNECTION, Decoder, Exit, FrameError, Hello, MAX_REQUEST, MessageError, Ready, Refused, ToGuest, ToHost,
    VERSION, WindowError, unix_ns,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, wait};
use thiserror::Error;

use crate::boot::{self, BootError};
use crate::command::{Command, is_input, send_message};
use crate::contexts::{ContextPart, Contexts, Tools};
use crate::processes::Processes;
use crate::shutdown::Shutdown;
use crate::spawn::{Launcher, Started, bad_request};
use crate::sys;

/// The most concurrent commands, copies and cells. Each takes three of our usual 1024 descriptors.
const MAX_COMMANDS: usize = 256;

/// The commands' output is not read while this much is queued for the host (backpressure).
const OUTBOX_LIMIT: usize = 256 * 1024;
const BUFFER: usize = 32 * 1024;
/// The polling interval while the host's side of the port is closed.
const HOST_POLL: Duration = Duration::from_micros(500);

/// The agent cannot continue.
#[derive(Debug, Error)]
pub enum ServerError {
    #[error("The control port failed: {0}")]
    Port(#[from] io::Error),
    #[error("{0}")]
    Frame(#[from] FrameError),
    #[error("{0}")]
    Message(#[from] MessageError),
    #[error("{0}")]
    Window(#[from] WindowError),
    #[error("{0}")]
    Reopen(#[from] BootError),
    #[error("The host speaks version {0} of the protocol, this agent {VERSION}")]
    Version(u16),
}

/// When the steps of the boot were completed.
pub struct BootTimes {
    pub pid1_unix_ns: u64,
    pub mounted_unix_ns: u64,
}

impl BootTimes {
    /// Corrects the times after the clock was set.
    fn shift(&mut self, nanoseconds: i64) {
        for time in [&mut self.pid1_unix_ns, &mut self.mounted_unix_ns] {
            *time = time.saturating_add_signed(nanoseconds);
        }
    }
}

/// The inputs of the server.
pub struct AgentResources {
    /// The open control port.
    pub port: OwnedFd,
    pub launcher: Launcher,
    pub processes: Processes,
}

/// The state of the agent.
pub struct Server {
    port: OwnedFd,
    launcher: Launcher,
    processes: Processes,
    /// Whether the host has opened its side since the port was opened, which is proved by a successful write.
    /// Received data proves nothing, because it may overtake the notification that the host has opened its
    /// side.
    connected: bool,
    children: OwnedFd,
    boot: BootTimes,
    decoder: Decoder,
    outbox: Vec<u8>,
    commands: Vec<Command>,
    contexts: Contexts,
    shutdown: Option<Shutdown>,
}

/// What a polled descriptor belongs to.
#[derive(Clone, Copy)]
enum Source {
    Port,
    Children,
    Launch(usize),
    Input(usize),
    Output(usize, usize),
    Context(usize, ContextPart),
}

impl Server {
    /// A server on the open control port.
    pub fn new(resources: AgentResources, boot: BootTimes) -> Result<Self, ServerError> {
        Ok(Self {
            port: resources.port,
            launcher: resources.launcher,
            processes: resources.processes,
            connected: false,
            children: sys::child_signals()?,
            boot,
            decoder: Decoder::new(MAX_REQUEST),
            outbox: Vec::new(),
            commands: Vec::new(),
            contexts: Contexts::default(),
            shutdown: None,
        })
    }

    /// Serves until the host requests a power-off and all processes had time to end.
    pub fn run(&mut self) -> Result<(), ServerError> {
        let mut buffer = vec![0u8; BUFFER];
        loop {
            for (source, events) in self.wait()? {
                match source {
                    Source::Port => self.serve_port(events, &mut buffer)?,
                    Source::Children => self.reap(),
                    Source::Launch(index) => {
                        if let Some(command) = self.commands.get_mut(index) {
                            command.settle(Instant::now(), &mut self.outbox);
                        }
                    }
                    Source::Input(index) => {
                        if let Some(command) = self.commands.get_mut(index) {
                            command.write_input(&mut self.outbox);
                        }
                    }
                    Source::Output(index, output) => {
                        if let Some(command) = self.commands.get_mut(index) {
                            command.read_output(output, &mut buffer, &mut self.outbox);
                        }
                    }
                    Source::Context(index, part) => self.contexts.serve(index, part),
                }
            }
            self.refuse_late();
            self.drain_finished(&mut buffer);
            let tools = Tools { launcher: &self.launcher, processes: &self.processes };
            self.contexts.advance(tools, &mut self.outbox, OUTBOX_LIMIT);
            self.flush()?;
            let all_said = self.outbox.is_empty()
                && self.contexts.len() == 0
                && !self.commands.iter().any(|command| command.attached);
            if self.shutdown.as_mut().is_some_and(|shutdown| shutdown.is_over(&self.processes, all_said)) {
                return Ok(());
            }
        }
    }

    fn wait(&self) -> Result<Vec<(Source, PollFlags)>, ServerError> {
        let mut sources = vec![Source::Port, Source::Children];
        let port = if self.outbox.is_empty() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
        let mut fds = vec![
            PollFd::from_borrowed_fd(self.port.as_fd(), port),
            PollFd::from_borrowed_fd(self.children.as_fd(), PollFlags::IN),
        ];
        let now = Instant::now();
        let mut rests = None;
        let mut watch = |source, fd, flags| {
            sources.push(source);
            fds.push(PollFd::from_borrowed_fd(fd, flags));
        };
        for (index, command) in self.commands.iter().enumerate() {
            if let Some(launching) = &command.launching {
                rests = earlier(rests, launching.deadline());
                if let Some(decided) = launching.decided() {
                    watch(Source::Launch(index), decided, PollFlags::IN);
                }
                continue;
            }
            if let Some(stdin) = command.stdin.as_ref().filter(|_| command.wants_to_write()) {
                watch(Source::Input(index), stdin.as_fd(), PollFlags::OUT);
            }
            for (number, output) in command.outputs.iter().enumerate() {
                let wanted = command.attached && output.window.open() > 0 && self.outbox.len() < OUTBOX_LIMIT;
                let Some(pipe) = output.pipe.as_ref().filter(|_| wanted) else { continue };
                match output.throttle.paused_until(now) {
                    Some(until) => rests = earlier(rests, until),
                    None => watch(Source::Output(index, number), pipe.as_fd(), PollFlags::IN),
                }
            }
        }
        self.contexts.watch(now, |index, part, fd, flags| watch(Source::Context(index, part), fd, flags));
        let deadline = self.contexts.deadline(now).into_iter().chain(rests).min();
        let deadline = deadline.map(|at| at.saturating_duration_since(now));
        let pause = [deadline, self.shutdown.as_ref().map(Shutdown::pause)].into_iter().flatten().min();
        let pause = pause.and_then(|pause| Timespec::try_from(pause).ok());
        match poll(&mut fds, pause.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
        let events = sources.into_iter().zip(fds.iter().map(PollFd::revents));
        Ok(events.filter(|(_, events)| !events.is_empty()).collect())
    }

    fn serve_port(&mut self, events: PollFlags, buffer: &mut [u8]) -> Result<(), ServerError> {
        if !events.intersects(PollFlags::IN | PollFlags::HUP) {
            return Ok(());
        }
        let count = match rustix::io::read(&self.port, &mut *buffer) {
            // The host's side is not open.
            Ok(0) => return self.await_host(),
            Ok(count) => count,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(error) => return Err(io::Error::from(error).into()),
        };
        self.decoder.push(buffer.get(..count).unwrap_or_default());
        // Taken out, so that frames can borrow it while the server changes.
        let mut decoder = std::mem::replace(&mut self.decoder, Decoder::new(MAX_REQUEST));
        while let Some(frame) = decoder.next_frame()? {
            if is_input(frame.channel) {
                // Input for a command that ended meanwhile is dropped.
                if let Some(command) = self.commands.iter_mut().find(|command| command.stream == frame.stream)
                {
                    command.feed(frame.payload)?;
                    command.write_input(&mut self.outbox);
                }
            } else {
                self.on_message(frame.stream, decode(frame.payload)?)?;
            }
        }
        self.decoder = decoder;
        Ok(())
    }

    fn on_message(&mut self, stream: u32, message: ToGuest) -> Result<(), ServerError> {
        match message {
            ToGuest::Hello(hello) => self.greet(&hello),
            ToGuest::PowerOff { grace_ms } => {
                self.power_off(Duration::from_millis(grace_ms.into()));
                Ok(())
            }
            ToGuest::Ping => {
                send_message(CONNECTION, &ToHost::Pong, &mut self.outbox);
                Ok(())
            }
            ToGuest::Exec(request) => {
                self.start(stream, |launcher| launcher.exec(&request));
                Ok(())
            }
            ToGuest::Transfer(request) => {
                self.start(stream, |launcher| launcher.transfer(&request));
                Ok(())
            }
            ToGuest::Cell(cell) => {
                let started = self.check_capacity(stream).and_then(|()| self.contexts.run(stream, cell));
                self.answer(stream, started);
                Ok(())
            }
            ToGuest::Contexts(request) => {
                let tools = Tools { launcher: &self.launcher, processes: &self.processes };
                let started = match self.check_capacity(stream) {
                    Ok(()) => self.contexts.change(stream, request, tools),
                    Err(refused) => Err(refused),
                };
                if let Some(answer) = started.transpose() {
                    self.answer(stream, answer);
                }
                Ok(())
            }
            other => match self.commands.iter_mut().find(|command| command.stream == stream) {
                Some(command) if other == ToGuest::Abandon => {
                    command.abandon(&self.processes);
                    Ok(())
                }
                Some(command) => Ok(command.request(&other)?),
                // The stream is a cell's, or has ended meanwhile.
                None => Ok(self.contexts.request(stream, &other)?),
            },
        }
    }

    fn greet(&mut self, hello: &Hello) -> Result<(), ServerError> {
        if hello.version != VERSION {
            return Err(ServerError::Version(hello.version));
        }
        self.end_conversation();
        self.boot.shift(hello.now_unix_ns.cast_signed().saturating_sub(unix_ns().cast_signed()));
        if let Err(error) = sys::set_clock(hello.now_unix_ns) {
            eprintln!("bathysphere agent: cannot set the clock: {error}");
        }
        let ready = Ready {
            version: VERSION,
            epoch: hello.epoch,
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            pid1_unix_ns: self.boot.pid1_unix_ns,
            mounted_unix_ns: self.boot.mounted_unix_ns,
            running: self.commands.iter().map(|command| command.stream).collect(),
        };
        send_message(CONNECTION, &ToHost::Ready(ready), &mut self.outbox);
        Ok(())
    }

    fn start(&mut self, stream: u32, start: impl FnOnce(&Launcher) -> Result<Started, Refused>) {
        match self.check_capacity(stream).and_then(|()| start(&self.launcher)) {
            // Answered once its program is executed.
            Ok(started) => self.commands.push(Command::new(stream, started)),
            Err(refused) => self.answer(stream, Err(refused)),
        }
    }

    /// Refuses programs that were not executed in time.
    fn refuse_late(&mut self) {
        let now = Instant::now();
        let late = |command: &&mut Command| command.launching.as_ref().is_some_and(|it| it.deadline() <= now);
        for command in self.commands.iter_mut().filter(late) {
            command.settle(now, &mut self.outbox);
        }
    }

    fn answer(&mut self, stream: u32, started: Result<u32, Refused>) {
        let message = started.map_or_else(ToHost::Refused, |pid| ToHost::Started { pid });
        send_message(stream, &message, &mut self.outbox);
    }

    /// Whether something may be started on this stream.
    fn check_capacity(&self, stream: u32) -> Result<(), Refused> {
        let used = self.commands.iter().any(|command| command.stream == stream) || self.contexts.has(stream);
        if stream == CONNECTION || used {
            Err(bad_request("the stream is in use"))
        } else if self.shutdown.is_some() {
            Err(bad_request("the sandbox is shutting down"))
        } else if self.commands.len() + self.contexts.len() >= MAX_COMMANDS {
            Err(bad_request(&format!(
                "{MAX_COMMANDS} commands run in this sandbox already, which is the most"
            )))
        } else {
            Ok(())
        }
    }

    fn power_off(&mut self, grace: Duration) {
        if let Some(shutdown) = &mut self.shutdown {
            shutdown.shorten_grace(grace);
            return;
        }
        self.shutdown = Some(Shutdown::begin(grace));
        self.contexts.close();
        if grace.is_zero() {
            return;
        }
        // Interactive shells ignore SIGTERM, but exit when their terminal hangs up.
        for command in self.commands.iter().filter(|command| command.terminal && command.exit.is_none()) {
            if let Some(pid) = i32::try_from(command.pid).ok().and_then(Pid::from_raw) {
                // Fails only if it has already exited.
                let _ = kill_process(pid, Signal::HUP);
            }
        }
    }

    /// Reaps every ended child: commands, interpreters and orphans.
    fn reap(&mut self) {
        // Only drains the descriptor. Signals merge, so the ended children are queried below.
        let mut drain = [0u8; 1024];
        while rustix::io::read(&self.children, &mut drain).is_ok_and(|count| count > 0) {}
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
            let pid = u32::try_from(pid.as_raw_nonzero().get()).unwrap_or(0);
            if let Some(command) =
                self.commands.iter_mut().find(|command| command.pid == pid && command.exit.is_none())
            {
                // The launch is decided at the latest now, because the process has ended.
                command.settle(Instant::now(), &mut self.outbox);
                command.ended(exit_of(status));
                continue;
            }
            let tools = Tools { launcher: &self.launcher, processes: &self.processes };
            self.contexts.reaped(pid, exit_of(status), tools);
        }
    }

    /// Reads what ended commands left in their pipes, and reports complete ones.
    fn drain_finished(&mut self, buffer: &mut [u8]) {
        let outbox = &mut self.outbox;
        for command in self.commands.iter_mut().filter(|command| command.exit.is_some() && command.attached) {
            for index in 0..command.outputs.len() {
                while outbox.len() < OUTBOX_LIMIT
                    && command.outputs.get(index).is_some_and(|o| o.pipe.is_some() && o.window.open() > 0)
                {
                    command.read_output(index, buffer, outbox);
                }
            }
        }
        self.commands.retain(|command| match command.finished() {
            _ if command.refused => false,
            Some(exit) => {
                send_message(command.stream, &ToHost::Exited(exit), outbox);
                false
            }
            None => true,
        });
    }

    fn flush(&mut self) -> Result<(), ServerError> {
        let mut sent = 0;
        while let Some(rest) = self.outbox.get(sent..).filter(|rest| !rest.is_empty()) {
            match rustix::io::write(&self.port, rest) {
                Ok(0) | Err(Errno::AGAIN) => break,
                Ok(count) => {
                    self.connected = true;
                    sent += count;
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
        self.outbox.drain(..sent);
        Ok(())
    }

    /// Waits for the host to connect, possibly in another process, with a new greeting.
    fn await_host(&mut self) -> Result<(), ServerError> {
        if std::mem::take(&mut self.connected) {
            self.end_conversation();
            // The port can be opened only once: a placeholder replaces the old descriptor for a moment.
            self.port = sys::child_signals()?;
            self.port = boot::open_port()?;
        }
        sleep(HOST_POLL);
        Ok(())
    }

    fn end_conversation(&mut self) {
        self.decoder.reset();
        self.outbox.clear();
        // The new session does not know abandoned commands. They are reaped without a report.
        self.commands.retain(|command| !command.abandoned);
        self.commands.iter_mut().for_each(Command::detach);
        self.contexts.end_conversation();
    }
}

/// The earlier of two deadlines.
fn earlier(one: Option<Instant>, other: Instant) -> Option<Instant> {
    Some(one.map_or(other, |one| one.min(other)))
}

/// Converts a wait status for the host.
pub fn exit_of(status: WaitStatus) -> Exit {
    let byte = |number: i32| u8::try_from(number & 0xff).unwrap_or(u8::MAX);
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => Exit::Code(byte(code)),
        (None, Some(signal)) => Exit::Signal(byte(signal)),
        (None, None) => Exit::Code(u8::MAX),
    }
}
