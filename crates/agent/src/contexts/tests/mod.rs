//! Contexts with the interpreters of this machine, driven by a simplified copy of the server's loop.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test reports")]

mod cells;
mod failures;
mod registry;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use bathy_protocol::cell::{CellEnded, CellStarted, Records, take_message};
use bathy_protocol::{Channel, Decoder, StdChannel, ToHost};
use rustix::event::{PollFd, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, WaitOptions, waitpid};

use super::*;
use crate::server::exit_of;

const OUTBOX: usize = 256 * 1024;

/// Longer than any wait of a test takes, even on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What the host received on a stream.
#[derive(Default)]
pub struct Seen {
    pub refused: Option<String>,
    pub records: Vec<(RecordKind, Vec<u8>)>,
    pub exit: Option<Exit>,
    reader: Records,
}

impl Seen {
    pub fn bytes(&self, wanted: RecordKind) -> Vec<u8> {
        let wanted = self.records.iter().filter(|(kind, _)| *kind == wanted);
        wanted.flat_map(|(_, payload)| payload.clone()).collect()
    }

    pub fn text(&self, wanted: RecordKind) -> String {
        String::from_utf8(self.bytes(wanted)).unwrap()
    }

    pub fn started(&self) -> CellStarted {
        take_message(&self.bytes(RecordKind::Started)).unwrap()
    }

    pub fn ended(&self) -> CellEnded {
        let (kind, payload) = self.records.last().unwrap();
        assert_eq!(*kind, RecordKind::Ended);
        take_message(payload).unwrap()
    }

    pub fn kinds(&self) -> Vec<RecordKind> {
        self.records.iter().map(|(kind, _)| *kind).collect()
    }
}

/// The agent's contexts, and a simulated host.
pub struct Guest {
    pub contexts: Contexts,
    pub seen: BTreeMap<u32, Seen>,
    /// Whether the host grants more window.
    pub grants: bool,
    launcher: Launcher,
    processes: Processes,
    outbox: Vec<u8>,
    decoder: Decoder,
    pids: BTreeSet<u32>,
    next: u32,
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.collect_pids();
        for pid in &self.pids {
            self.processes.end_session(*pid);
            let _ = waitpid(Some(raw(*pid)), WaitOptions::empty());
        }
    }
}

impl Guest {
    pub fn new() -> Self {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let own_program = rustix::fs::open("/proc/self/exe", flags, Mode::empty()).unwrap();
        Self {
            contexts: Contexts::default(),
            seen: BTreeMap::new(),
            grants: true,
            launcher: Launcher { restricted: None, own_program },
            processes: Processes::open().unwrap(),
            outbox: Vec::new(),
            decoder: Decoder::new(1024 * 1024),
            pids: BTreeSet::new(),
            next: 1,
        }
    }

    /// Requests a cell and returns its stream.
    pub fn ask(&mut self, cell: Cell) -> u32 {
        let stream = self.next;
        self.next += 1;
        self.seen.insert(stream, Seen::default());
        if let Err(refused) = self.contexts.run(stream, cell) {
            self.seen.get_mut(&stream).unwrap().refused = Some(refused.message);
        }
        stream
    }

    /// Runs a cell to its end.
    pub fn run(&mut self, cell: Cell) -> &Seen {
        let stream = self.ask(cell);
        self.finish(stream)
    }

    /// Waits for the end of a stream.
    pub fn finish(&mut self, stream: u32) -> &Seen {
        self.until(|guest| {
            let seen = &guest.seen[&stream];
            seen.exit.is_some() || seen.refused.is_some()
        });
        &self.seen[&stream]
    }

    /// Sends a request about contexts. Returns the list or the refusal.
    pub fn change(&mut self, request: ContextsRequest) -> Result<Vec<ContextInfo>, String> {
        let stream = self.next;
        self.next += 1;
        self.seen.insert(stream, Seen::default());
        let tools = Tools { launcher: &self.launcher, processes: &self.processes };
        self.contexts.change(stream, request, tools).map_err(|refused| refused.message)?;
        let seen = self.finish(stream);
        if let Some(refused) = &seen.refused {
            return Err(refused.clone());
        }
        assert_eq!(seen.exit, Some(Exit::Code(0)));
        Ok(take_message(&seen.bytes(RecordKind::Contexts)).unwrap())
    }

    pub fn send(&mut self, stream: u32, message: &ToGuest) {
        self.contexts.request(stream, message).unwrap();
    }

    /// Runs the loop until a condition holds.
    pub fn until(&mut self, so: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + TIMEOUT;
        while !so(self) {
            assert!(Instant::now() < deadline, "it does not happen");
            self.turn();
        }
    }

    /// Runs the loop for this long.
    pub fn idle(&mut self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            self.turn();
        }
    }

    fn turn(&mut self) {
        // New requests begin at once, as in the server.
        self.advance();
        let (mut sources, mut fds) = (Vec::new(), Vec::new());
        let now = Instant::now();
        self.contexts.watch(now, |index, part, fd, flags| {
            sources.push((index, part));
            fds.push(PollFd::from_borrowed_fd(fd, flags));
        });
        let pause = self.contexts.deadline(now).map(|at| at.saturating_duration_since(now));
        // Children are polled, because a signal would be shared by all tests.
        let pause = pause.unwrap_or(Duration::MAX).min(Duration::from_millis(5));
        poll(&mut fds, Some(&Timespec::try_from(pause).unwrap())).unwrap();
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        for ((index, part), _) in sources.into_iter().zip(ready).filter(|(_, ready)| *ready) {
            self.contexts.serve(index, part);
        }
        self.reap();
        self.advance();
        self.read_outbox();
    }

    fn advance(&mut self) {
        let tools = Tools { launcher: &self.launcher, processes: &self.processes };
        self.contexts.advance(tools, &mut self.outbox, OUTBOX);
        self.collect_pids();
    }

    fn reap(&mut self) {
        for pid in self.pids.clone() {
            if let Some((_, status)) = waitpid(Some(raw(pid)), WaitOptions::NOHANG).unwrap() {
                self.pids.remove(&pid);
                let tools = Tools { launcher: &self.launcher, processes: &self.processes };
                self.contexts.reaped(pid, exit_of(status), tools);
            }
        }
    }

    fn collect_pids(&mut self) {
        self.pids.extend(self.contexts.contexts.iter().filter_map(Context::pid));
    }

    fn read_outbox(&mut self) {
        self.decoder.push(&std::mem::take(&mut self.outbox));
        let mut grants = Vec::new();
        while let Some(frame) = self.decoder.next_frame().unwrap() {
            let seen = self.seen.get_mut(&frame.stream).unwrap();
            assert_eq!(seen.exit, None, "something came after the end");
            if frame.channel == Channel::Control {
                match bathy_protocol::message::decode(frame.payload).unwrap() {
                    ToHost::Exited(exit) => seen.exit = Some(exit),
                    ToHost::Refused(refused) => seen.refused = Some(refused.message),
                    ToHost::Started { .. } => assert!(seen.records.is_empty()),
                    other => panic!("{other:?}"),
                }
                continue;
            }
            assert_eq!(frame.channel, Channel::Stdout);
            grants.push((frame.stream, u32::try_from(frame.payload.len()).unwrap()));
            seen.reader.push(frame.payload);
            while let Some((kind, payload)) = seen.reader.next_record().unwrap() {
                seen.records.push((kind, payload.to_vec()));
            }
        }
        for (stream, bytes) in grants.into_iter().filter(|_| self.grants) {
            self.contexts.request(stream, &ToGuest::Grant { channel: StdChannel::Stdout, bytes }).unwrap();
        }
    }

    /// How many bytes are queued for the host in total.
    pub fn waiting_bytes(&self) -> usize {
        let tasks = self.contexts.contexts.iter().flat_map(Context::tasks);
        tasks.map(|task| task.stream.waiting()).sum()
    }
}

fn raw(pid: u32) -> Pid {
    Pid::from_raw(i32::try_from(pid).unwrap()).unwrap()
}

pub fn surroundings() -> Surroundings {
    let user = rustix::process::getuid().as_raw().to_string();
    Surroundings { user, cwd: Some(b"/".to_vec()), ..Surroundings::default() }
}

/// A Python cell for the default context.
pub fn python(code: &str) -> Cell {
    Cell {
        context: "python".into(),
        language: Language::Python,
        make: Some(surroundings()),
        restricted: None,
        code: code.into(),
        env: Vec::new(),
        cwd: None,
        timeout_ms: 0,
        grace_ms: 5000,
        max_output: 1024 * 1024,
    }
}
