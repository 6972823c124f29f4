//! A running command: its pipes, its flow-control windows and its end.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use bathy_protocol::frame;
use bathy_protocol::message::encode;
use bathy_protocol::{Channel, Exit, ReceiveWindow, SendWindow, StdChannel, ToGuest, ToHost, WindowError};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::processes::Processes;
use crate::read_throttle::ReadThrottle;
use crate::spawn::{Launching, Started};
use crate::terminal;

/// One output of a command.
pub struct OutputPipe {
    pub which: StdChannel,
    /// The read end of its pipe; none after end of file.
    pub pipe: Option<OwnedFd>,
    /// How much the host still accepts.
    pub window: SendWindow,
    /// Decides when it is read again.
    pub throttle: ReadThrottle,
    /// After the command's end: how much of its output is still in the pipe. OutputPipe that its children write
    /// later is not awaited, however much it is.
    left: Option<usize>,
}

/// A command and the data in flight.
pub struct Command {
    pub stream: u32,
    pub pid: u32,
    /// Its process until the program is executed. Until then the host does not know it and nothing is
    /// forwarded.
    pub launching: Option<Launching>,
    /// The host has received the refusal.
    pub refused: bool,
    /// The write end of its standard input, or our side of its terminal, until it is closed.
    pub stdin: Option<OwnedFd>,
    pub outputs: [OutputPipe; 2],
    /// Its exit status, which is reported once its output is sent.
    pub exit: Option<Exit>,
    /// Whether the present session knows it.
    pub attached: bool,
    /// The client has left: only its end is still reported.
    pub abandoned: bool,
    /// Whether its input and output are a terminal.
    pub terminal: bool,
    input: VecDeque<u8>,
    input_window: ReceiveWindow,
    input_ended: bool,
}

impl Command {
    /// Takes over a process that was just started for `stream`.
    pub fn new(stream: u32, started: Started) -> Self {
        let output = |which, pipe| OutputPipe {
            which,
            pipe,
            window: SendWindow::default(),
            throttle: ReadThrottle::default(),
            left: None,
        };
        Self {
            stream,
            pid: started.launching.pid(),
            launching: Some(started.launching),
            refused: false,
            stdin: started.stdin,
            outputs: [
                output(StdChannel::Stdout, Some(started.stdout)),
                output(StdChannel::Stderr, started.stderr),
            ],
            exit: None,
            attached: true,
            abandoned: false,
            terminal: started.terminal,
            input: VecDeque::new(),
            input_window: ReceiveWindow::default(),
            input_ended: false,
        }
    }

    /// Reports to the host whether the program was executed, once that is known.
    pub fn settle(&mut self, now: Instant, outbox: &mut Vec<u8>) {
        let Some(outcome) = self.launching.as_mut().and_then(|launching| launching.outcome(now)) else {
            return;
        };
        self.launching = None;
        self.refused = outcome.is_err();
        if self.attached {
            let message = outcome.map_or_else(ToHost::Refused, |()| ToHost::Started { pid: self.pid });
            send_message(self.stream, &message, outbox);
        }
        if !self.refused {
            self.write_input(outbox);
        }
    }

    /// Whether input is queued for the command.
    pub fn wants_to_write(&self) -> bool {
        self.stdin.is_some() && !self.input.is_empty() && self.launching.is_none()
    }

    /// Queues bytes for standard input.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), WindowError> {
        self.input_window.received(bytes.len())?;
        if self.stdin.is_some() {
            self.input.extend(bytes);
        }
        Ok(())
    }

    /// Writes queued input as far as the command reads it, and grants the host that much new window.
    pub fn write_input(&mut self, outbox: &mut Vec<u8>) {
        if self.launching.is_some() {
            return;
        }
        while let (Some(stdin), (chunk, _)) = (&self.stdin, self.input.as_slices()) {
            if chunk.is_empty() {
                break;
            }
            match rustix::io::write(stdin, chunk) {
                Ok(0) => break,
                Ok(written) => {
                    self.input.drain(..written);
                    if let Some(bytes) = self.input_window.consumed(written) {
                        send_message(self.stream, &ToHost::Grant { bytes }, outbox);
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                // The command has closed its input.
                Err(_) => {
                    self.stdin = None;
                    self.input.clear();
                }
            }
        }
        if self.input_ended && self.input.is_empty() {
            self.stdin = None;
        }
    }

    /// Reads one output once and frames the data. The read is limited by `buffer` and the window.
    pub fn read_output(&mut self, index: usize, buffer: &mut [u8], outbox: &mut Vec<u8>) {
        let Some(output) = self.outputs.get_mut(index) else { return };
        let Some(pipe) = &output.pipe else { return };
        if output.left == Some(0) {
            output.pipe = None;
            return;
        }
        let space = output.window.open().min(buffer.len()).min(output.left.unwrap_or(usize::MAX));
        let Some(buffer) = buffer.get_mut(..space).filter(|buffer| !buffer.is_empty()) else { return };
        match rustix::io::read(pipe, &mut *buffer) {
            // A terminal without any open descriptor on the other side fails instead of returning end of
            // file.
            Ok(0) | Err(Errno::IO) => {
                output.pipe = None;
                if self.terminal {
                    self.stdin = None;
                    self.input.clear();
                }
                send_message(self.stream, &ToHost::Eof(output.which), outbox);
            }
            Ok(count) => {
                output.window.sent(count);
                output.throttle.on_read(count);
                output.left = output.left.map(|left| left.saturating_sub(count));
                frame::encode(
                    self.stream,
                    output.which.channel(),
                    buffer.get(..count).unwrap_or_default(),
                    outbox,
                );
            }
            Err(Errno::AGAIN) if self.exit.is_some() => output.pipe = None,
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => output.pipe = None,
        }
    }

    pub fn ended(&mut self, exit: Exit) {
        self.exit = Some(exit);
        for output in &mut self.outputs {
            let waiting = output.pipe.as_ref().and_then(|pipe| rustix::io::ioctl_fionread(pipe).ok());
            let waiting = waiting.and_then(|count| usize::try_from(count).ok()).unwrap_or(0);
            // For a terminal only data that has reached our side can be counted.
            output.left = Some(if self.terminal { terminal::CAPACITY } else { waiting });
        }
    }

    /// The exit status to report, once everything before it is sent.
    pub fn finished(&self) -> Option<Exit> {
        let drained = self.outputs.iter().all(|output| output.pipe.is_none());
        self.exit.filter(|_| drained && self.attached)
    }

    /// Handles a message of the host for this command.
    pub fn request(&mut self, message: &ToGuest) -> Result<(), WindowError> {
        match message {
            ToGuest::Signal(number) => {
                if let (Some(signal), None) = (Signal::from_named_raw(*number), self.exit) {
                    self.signal(signal);
                }
                Ok(())
            }
            // A terminal's input does not end: programs see a control character instead.
            ToGuest::CloseStdin if self.terminal => Ok(()),
            ToGuest::CloseStdin => {
                self.input_ended = true;
                if self.input.is_empty() {
                    self.stdin = None;
                }
                Ok(())
            }
            ToGuest::Grant { channel, bytes } => {
                match self.outputs.iter_mut().find(|output| output.which == *channel) {
                    Some(output) => output.window.grant(*bytes),
                    None => Ok(()),
                }
            }
            ToGuest::Attach => {
                self.attached = true;
                for output in &mut self.outputs {
                    output.window = SendWindow::default();
                }
                self.input_window = ReceiveWindow::default();
                self.input.clear();
                Ok(())
            }
            ToGuest::Resize(size) => {
                if let Some(master) = self.stdin.as_ref().filter(|_| self.terminal) {
                    // Fails only if the terminal is already closed.
                    let _ = terminal::resize(master.as_fd(), *size);
                }
                Ok(())
            }
            ToGuest::Hello(_)
            | ToGuest::Ping
            | ToGuest::PowerOff { .. }
            | ToGuest::Exec(_)
            | ToGuest::Transfer(_)
            | ToGuest::Cell(_)
            | ToGuest::Contexts(_)
            | ToGuest::Abandon => Ok(()),
        }
    }

    fn signal(&self, signal: Signal) {
        let group = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        // The program may have been executed, and have started others, before we know. Fails if the group has
        // ended or does not exist yet.
        let is_sent = group.is_some_and(|group| kill_process_group(group, signal).is_ok());
        if let Some(launching) = self.launching.as_ref().filter(|_| !is_sent) {
            launching.signal(signal);
        }
    }

    /// The client has left: kills the command, so that only its end is reported.
    pub fn abandon(&mut self, processes: &Processes) {
        self.abandoned = true;
        if let Some(launching) = &self.launching {
            launching.signal(Signal::KILL);
        }
        // Also during the launch: it may have been executed, and have started others, before we know.
        if self.exit.is_none() {
            processes.end_session(self.pid);
        }
        // Programs on a terminal get a hang-up from this.
        self.stdin = None;
        self.input.clear();
        for output in &mut self.outputs {
            output.pipe = None;
        }
    }

    /// The session that started it has ended: it keeps running and can be attached to.
    pub fn detach(&mut self) {
        self.attached = false;
    }
}

/// Queues one message for the host.
pub fn send_message(stream: u32, message: &ToHost, outbox: &mut Vec<u8>) {
    if encode(stream, message, outbox).is_err() {
        eprintln!("bathysphere agent: a message for stream {stream} could not be encoded");
    }
}

/// Whether a channel carries data from the host.
pub fn is_input(channel: Channel) -> bool {
    channel == Channel::Stdin
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

    use std::fs::File;
    use std::io::{BufRead, BufReader};
    use std::thread::sleep;
    use std::time::Duration;

    use bathy_protocol::Exec;
    use rustix::process::{WaitOptions, test_kill_process, waitpid};

    use super::*;
    use crate::spawn::Launcher;

    fn pid(number: u32) -> Pid {
        Pid::from_raw(number.cast_signed()).unwrap()
    }

    /// A shell in a session of its own, and its child: it has been executed, but the command does not know
    /// yet.
    fn just_executed(processes: &Processes) -> (Command, Pid) {
        let own_program = File::open("/proc/self/exe").unwrap().into();
        let launcher = Launcher { restricted: None, own_program };
        // In a process group of its own, like a shell's background command.
        let argv = ["/bin/bash", "-c", "set -m; sleep 1000 & echo $!; wait"];
        let argv = argv.map(|part| part.as_bytes().to_vec()).to_vec();
        let (user, cwd) = (rustix::process::getuid().as_raw().to_string(), Some(b"/".to_vec()));
        let started = launcher.exec(&Exec { argv, user, cwd, ..Exec::default() }).unwrap();
        let mut command = Command::new(1, started);
        let output = command.outputs[0].pipe.take().unwrap();
        rustix::io::ioctl_fionbio(&output, false).unwrap();
        let mut line = String::new();
        BufReader::new(File::from(output)).read_line(&mut line).unwrap();
        let below = pid(line.trim().parse().unwrap());
        assert!(command.launching.is_some() && processes.any_left());
        (command, below)
    }

    #[test]
    fn a_command_that_is_abandoned_before_it_is_known_to_run_ends_with_what_it_started() {
        let processes = Processes::open().unwrap();
        let (mut command, below) = just_executed(&processes);
        command.abandon(&processes);
        let ended = waitpid(Some(pid(command.pid)), WaitOptions::empty()).unwrap().unwrap().1;
        assert_eq!(ended.terminating_signal(), Some(Signal::KILL.as_raw()));
        let deadline = Instant::now() + Duration::from_secs(60);
        let is_alive = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", below.as_raw_nonzero()));
            test_kill_process(below).is_ok() && stat.is_ok_and(|stat| !stat.contains(") Z "))
        };
        while is_alive() {
            assert!(Instant::now() < deadline, "what the command started is still running");
            sleep(Duration::from_millis(5));
        }
    }
}
