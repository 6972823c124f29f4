//! The processes and namespaces of a world.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::marker::PhantomData;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, geteuid, pidfd_open, pidfd_send_signal};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::Deserialize;

use super::PYTHON;
use crate::kept::all_processes;
use crate::patience;

/// Time limit for a world's start, and for its answers.
const START: Duration = Duration::from_secs(10);
/// Time limit for its shutdown.
const END: Duration = Duration::from_secs(3);

/// A side of the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The host, where the product runs.
    Inside,
    Outside,
}

/// The standard streams of the servers.
#[derive(Debug)]
struct Conversation {
    /// The servers end with it.
    input: Option<ChildStdin>,
    lines: Receiver<String>,
}

/// A network namespace, by its inode number. The namespace is held open, because its number is reused once it is removed, and
/// processes in it are killed by that number.
#[derive(Debug)]
struct Network {
    name: PathBuf,
    _held: File,
}

impl Network {
    fn of(pid: u32) -> Self {
        let path = format!("/proc/{pid}/ns/net");
        let held = File::open(&path).expect("our own process");
        Self { name: fs::read_link(path).expect("our own process"), _held: held }
    }
}

/// The servers of both sides.
#[derive(Debug)]
pub(super) struct Servers {
    inside: Child,
    outside: u32,
    conversation: Mutex<Conversation>,
    networks: Vec<Network>,
}

impl Servers {
    /// Starts the servers and waits until they are ready. The message of a failure has their errors.
    #[track_caller]
    pub(super) fn start(folder: &Path, program: &Path) -> Self {
        let complaints = folder.join("errors.txt");
        let mut command = Command::new("unshare");
        if !geteuid().is_root() {
            command.args(["--user", "--map-root-user"]);
        }
        command.args(["--net", "--", PYTHON, "-B", "-E", "-s"]).arg(program).arg(folder);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command.stderr(File::create(&complaints).expect("our own folder"));
        let mut inside = command.spawn().expect("unshare can be started; it is in util-linux");
        let output = inside.stdout.take().expect("its output is a pipe");
        let (sender, lines) = mpsc::channel();
        // Ends with the servers, or when the receiver is dropped.
        std::thread::spawn(move || {
            BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        let input = inside.stdin.take();
        let mut servers = Self {
            inside,
            outside: 0,
            conversation: Mutex::new(Conversation { input, lines }),
            networks: Vec::new(),
        };
        let complain = || fs::read_to_string(&complaints).unwrap_or_default();
        // Should this fail, then the value goes, and everything with it.
        servers.outside = servers.line().and_then(|line| line.parse().ok()).unwrap_or_default();
        let ready = servers.line();
        assert!(ready.as_deref() == Some("ready"), "the world is not ready ({ready:?}): {}", complain());
        let networks = vec![Network::of(servers.inside.id()), Network::of(servers.outside)];
        let own = fs::read_link("/proc/self/ns/net").expect("every process has a network");
        assert!(networks.iter().all(|network| network.name != own), "this is the machine's own network");
        servers.networks = networks;
        servers
    }

    /// Waits until everything that has arrived so far is in the log.
    pub(super) fn mark(&self) {
        let mut conversation = self.conversation.lock().unwrap_or_else(PoisonError::into_inner);
        let input = conversation.input.as_mut().expect("it is there until the end");
        input.write_all(b"\n").expect("the servers run until the end");
        let said = conversation.lines.recv_timeout(patience(START)).ok();
        assert!(said.as_deref() == Some("marked"), "the servers do not answer: {said:?}");
    }

    /// A command on one of the sides.
    pub(super) fn command(&self, side: Side, program: &OsStr) -> Command {
        let mut command = Command::new("nsenter");
        if !geteuid().is_root() {
            let user = format!("--user=/proc/{}/ns/user", self.pid(side));
            command.args([user.as_str(), "--preserve-credentials"]);
        }
        command.arg(format!("--net={}", self.network(side))).arg("--").arg(program);
        command
    }

    /// Moves the calling thread to the host.
    pub(super) fn enter(&self) -> Inside<'_> {
        let back = File::open("/proc/thread-self/ns/net").expect("every thread has a network");
        let inside = File::open(self.network(Side::Inside)).expect("our own process");
        move_into_link_name_space(inside.as_fd(), Some(LinkNameSpaceType::Network))
            .expect("only root can move a thread: use World::command");
        Inside { back: back.into(), world: PhantomData }
    }

    /// All processes in one of the two networks, but this one.
    pub(super) fn processes(&self) -> BTreeSet<u32> {
        all_processes().filter(|pid| *pid != std::process::id() && self.holds(*pid)).collect()
    }

    fn holds(&self, pid: u32) -> bool {
        fs::read_link(format!("/proc/{pid}/ns/net"))
            .is_ok_and(|name| self.networks.iter().any(|network| network.name == name))
    }

    fn line(&self) -> Option<String> {
        let conversation = self.conversation.lock().unwrap_or_else(PoisonError::into_inner);
        conversation.lines.recv_timeout(patience(START)).ok()
    }

    fn pid(&self, side: Side) -> u32 {
        match side {
            Side::Inside => self.inside.id(),
            Side::Outside => self.outside,
        }
    }

    fn network(&self, side: Side) -> String {
        format!("/proc/{}/ns/net", self.pid(side))
    }

    /// Kills all processes in our networks, which contain no others. A reused process id is not killed, because the network is
    /// checked again once the process is held by a descriptor.
    fn kill(&self, pid: u32) {
        let held = Pid::from_raw(pid.cast_signed()).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        if let Some(process) = held.filter(|_| self.holds(pid)) {
            let _ = pidfd_send_signal(process, Signal::KILL);
        }
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        // Its end is the sign: the servers of both sides follow it.
        self.conversation.get_mut().unwrap_or_else(PoisonError::into_inner).input.take();
        let deadline = Instant::now() + patience(END);
        while Instant::now() < deadline && !matches!(self.inside.try_wait(), Ok(Some(_))) {
            sleep(Duration::from_millis(10));
        }
        let _ = self.inside.kill();
        let _ = self.inside.wait();
        for pid in self.processes() {
            self.kill(pid);
        }
        let deadline = Instant::now() + patience(END);
        while Instant::now() < deadline && !self.processes().is_empty() {
            sleep(Duration::from_millis(10));
        }
    }
}

/// Until this is dropped, the thread that created it is on the host of a world.
#[derive(Debug)]
pub struct Inside<'world> {
    back: OwnedFd,
    /// A thread can move only itself, so this is not `Send`. The world has to outlive it.
    world: PhantomData<(&'world (), *const ())>,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        move_into_link_name_space(self.back.as_fd(), Some(LinkNameSpaceType::Network))
            .expect("a process that entered the namespace can leave it");
    }
}
