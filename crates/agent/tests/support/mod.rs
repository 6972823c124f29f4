//! Starts a language driver the way the agent does (descriptors 0 to 5, in a new session) and speaks its
//! protocol.

#![allow(dead_code, reason = "each driver's tests use what they need")]
#![allow(clippy::panic, reason = "a panic is how a test reports")]

pub mod bash;
pub mod json;
pub mod node;
pub mod python;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{fcntl_dupfd_cloexec, read};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, kill_process_group};

pub use json::{Json, Look};

/// The token of the test harness.
pub const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// Longer than any wait of a test takes, even on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(30);

/// When the agent repeats an interrupt: half of a cell's default grace period.
const AGAIN: Duration = Duration::from_millis(1500);

/// How requests are sent to the driver.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Requests {
    /// Length-prefixed fields on descriptor 3; descriptor 5 is the driver's source (python, node).
    Stream,
    /// Fields ended by NUL in the file of descriptor 5, announced by a newline on descriptor 3 (bash).
    File,
}

/// One reply packet, joined from its pieces.
#[derive(Debug)]
pub struct Reply {
    /// `y`, `d`, `r`, `e` or `f`.
    pub kind: char,
    pub json: Json,
    /// Size of the payload.
    pub bytes: usize,
    /// How many packets carried it.
    pub packets: usize,
}

/// The result of one cell.
#[derive(Debug, Default)]
pub struct Cell {
    /// All replies in order, the last being `f` unless the process ended.
    pub replies: Vec<Reply>,
    /// What was written to descriptor 1 until then.
    pub stdout: String,
    /// What was written to descriptor 2 until then.
    pub stderr: String,
    /// Packets without the token.
    pub garbage: usize,
    /// The exit status of the process, if it ended.
    pub ended: Option<ExitStatus>,
    /// The time from the request to `f`.
    pub took: Duration,
}

impl Cell {
    /// The replies of one kind.
    pub fn all(&self, kind: char) -> Vec<&Json> {
        self.replies.iter().filter(|reply| reply.kind == kind).map(|reply| &reply.json).collect()
    }

    /// The only reply of this kind; fails if there are none or several.
    pub fn one(&self, kind: char) -> &Json {
        let all = self.all(kind);
        assert_eq!(all.len(), 1, "expected one {kind:?} in {self:#?}");
        all[0]
    }

    /// `text/plain` of the last expression, if it had a value.
    pub fn value(&self) -> Option<&str> {
        self.all('r').first().map(|json| json["data"]["text/plain"].text())
    }

    /// The error's name, if there was an error.
    pub fn error(&self) -> Option<&str> {
        self.all('e').first().map(|json| json["name"].text())
    }

    /// The error's traceback as one text.
    pub fn traceback(&self) -> String {
        let lines = self.one('e')["traceback"].items();
        lines.iter().map(Look::text).collect::<Vec<_>>().join("\n")
    }

    /// The status in `f`.
    pub fn status(&self) -> &str {
        self.one('f')["status"].text()
    }

    /// The execution count in `f`.
    pub fn count(&self) -> f64 {
        self.one('f')["count"].number()
    }
}

pub struct Driver {
    child: Child,
    requests: Option<File>,
    replies: OwnedFd,
    stdout: OwnedFd,
    stderr: OwnedFd,
    file: File,
    kind: Requests,
    sent: Instant,
}

impl Driver {
    /// Starts `argv` in `home` with `env` added to this process's environment. `descriptor5` is the initial
    /// content of descriptor 5: the driver's source, or nothing for [`Requests::File`].
    pub fn start(
        argv: &[&str],
        descriptor5: &str,
        kind: Requests,
        home: &Path,
        env: &[(&str, &str)],
    ) -> Self {
        let (request_end, requests) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let (replies, reply_end) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let (stdout, stdout_end) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let (stderr, stderr_end) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let mut file = File::from(memfd_create("driver", MemfdFlags::CLOEXEC).unwrap());
        file.write_all(descriptor5.as_bytes()).unwrap();
        let shown = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();

        // Moved above 3 to 5, so that placing one does not close another.
        let ends =
            [&request_end, &reply_end, &OwnedFd::from(shown)].map(|fd| fcntl_dupfd_cloexec(fd, 20).unwrap());
        let numbers = ends.each_ref().map(AsRawFd::as_raw_fd);
        let mut command = Command::new(argv[0]);
        command.args(&argv[1..]).current_dir(home).envs(env.iter().copied());
        command.stdin(Stdio::null()).stdout(stdout_end).stderr(stderr_end);
        // SAFETY: the closure runs between fork and exec and only makes system calls that are safe there.
        unsafe {
            command.pre_exec(move || {
                libc::setsid();
                // Tests that were started in the background ignore SIGINT, and shells keep ignored signals
                // ignored.
                libc::signal(libc::SIGINT, libc::SIG_DFL);
                for (target, number) in (3..).zip(numbers) {
                    if libc::dup2(number, target) < 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        let requests = Some(File::from(requests));
        Self { child, requests, replies, stdout, stderr, file, kind, sent: Instant::now() }
    }

    /// The pid, which is also the process group.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Sends the greeting and returns the payload of its `y`.
    pub fn hello(&mut self) -> Json {
        self.send(&["hello", TOKEN]);
        let cell = self.collect('y');
        assert_eq!(cell.replies.len(), 1, "more than one reply to hello: {cell:#?}");
        assert_eq!((cell.stdout.as_str(), cell.stderr.as_str()), ("", ""), "output before any cell");
        cell.replies.into_iter().next().unwrap().json
    }

    /// Runs a cell to its end.
    pub fn execute(&mut self, code: &str) -> Cell {
        self.execute_with(code, "", "", &[])
    }

    /// Runs a cell with its own working directory, flags and environment (`NAME=value`).
    pub fn execute_with(&mut self, code: &str, cwd: &str, flags: &str, env: &[&str]) -> Cell {
        self.begin(code, cwd, flags, env);
        self.finish()
    }

    /// Starts a cell without waiting.
    pub fn begin(&mut self, code: &str, cwd: &str, flags: &str, env: &[&str]) {
        let mut fields = vec!["execute", code, cwd, flags];
        fields.extend(env);
        self.send(&fields);
    }

    /// Waits for the cell that [`Self::begin`] started.
    pub fn finish(&mut self) -> Cell {
        self.collect('f')
    }

    /// Waits until the running cell has written `text` to its standard output, and returns all it wrote.
    pub fn wait_for_output(&mut self, text: &str) -> String {
        let mut cell = Cell::default();
        let started = Instant::now();
        while !cell.stdout.contains(text) {
            assert!(started.elapsed() < TIMEOUT, "no {text:?} in {cell:#?}");
            wait(&[&self.stdout], Duration::from_millis(100));
            self.drain(&mut cell);
        }
        cell.stdout
    }

    /// What was written to standard output and error while no cell ran.
    pub fn background(&mut self) -> (String, String) {
        let mut cell = Cell::default();
        self.drain(&mut cell);
        (cell.stdout, cell.stderr)
    }

    /// Sends SIGINT to the whole group, as the agent does.
    pub fn interrupt(&self) {
        kill_process_group(self.pid(), Signal::INT).unwrap();
    }

    /// Interrupts the running cell as the agent does and waits for its end. The interrupt is repeated once,
    /// because a child that was just being started may miss the first.
    pub fn finish_interrupted(&mut self) -> Cell {
        self.interrupt();
        if !wait(&[&self.replies], AGAIN) {
            self.interrupt();
        }
        self.finish()
    }

    /// Whether all processes that could reply have exited; waits briefly for that.
    pub fn channel_closed(&self) -> bool {
        wait(&[&self.replies], Duration::from_millis(900)) && read(&self.replies, &mut [0; 64]) == Ok(0)
    }

    /// Closes the requests and waits until the process has exited.
    pub fn close(&mut self) -> ExitStatus {
        self.requests = None;
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(started.elapsed() < TIMEOUT, "the driver goes on without requests");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn send(&mut self, fields: &[&str]) {
        self.sent = Instant::now();
        // The driver may be slow or have exited; its replies show that.
        let requests = self.requests.as_mut().unwrap();
        match self.kind {
            Requests::Stream => {
                let mut body = Vec::new();
                for field in fields {
                    body.extend(u32::try_from(field.len()).unwrap().to_le_bytes());
                    body.extend(field.as_bytes());
                }
                let mut frame = u32::try_from(body.len()).unwrap().to_le_bytes().to_vec();
                frame.extend(body);
                let _ = requests.write_all(&frame);
            }
            Requests::File => {
                let body: Vec<u8> =
                    fields.iter().flat_map(|field| [field.as_bytes(), b"\0"].concat()).collect();
                self.file.set_len(0).unwrap();
                self.file.write_all_at(&body, 0).unwrap();
                let _ = requests.write_all(b"\n");
            }
        }
    }

    fn collect(&mut self, last: char) -> Cell {
        let mut cell = Cell::default();
        let mut pieces = Vec::new();
        let mut packets = 0;
        let mut packet = vec![0; 1 << 16];
        let started = Instant::now();
        loop {
            assert!(started.elapsed() < TIMEOUT, "no {last:?} yet: {cell:#?}");
            wait(&[&self.replies, &self.stdout, &self.stderr], Duration::from_millis(100));
            self.drain(&mut cell);
            if !wait(&[&self.replies], Duration::ZERO) {
                cell.ended = self.child.try_wait().unwrap();
                if cell.ended.is_some() && !wait(&[&self.replies], Duration::ZERO) {
                    return cell;
                }
                continue;
            }
            let size = read(&self.replies, packet.as_mut_slice()).unwrap_or(0);
            if size == 0 {
                cell.ended = Some(self.child.wait().unwrap());
                self.drain(&mut cell);
                return cell;
            }
            assert!(size <= 60_000, "a packet of {size} bytes");
            let Some(rest) = packet[..size].strip_prefix(TOKEN.as_bytes()) else {
                cell.garbage += 1;
                continue;
            };
            let kind = char::from(rest[0]);
            pieces.extend_from_slice(&rest[1..]);
            packets += 1;
            if kind == 'p' {
                continue;
            }
            let payload = String::from_utf8(std::mem::take(&mut pieces)).unwrap();
            let json = serde_json::from_str(&payload).unwrap_or_else(|error| panic!("{error}: {payload}"));
            cell.replies.push(Reply {
                kind,
                json,
                bytes: payload.len(),
                packets: std::mem::take(&mut packets),
            });
            if kind == last {
                cell.took = self.sent.elapsed();
                self.drain(&mut cell);
                return cell;
            }
        }
    }

    /// Reads what the output pipes hold now.
    fn drain(&self, cell: &mut Cell) {
        let mut buffer = vec![0; 1 << 16];
        for (fd, text) in [(&self.stdout, &mut cell.stdout), (&self.stderr, &mut cell.stderr)] {
            while wait(&[fd], Duration::ZERO) {
                let size = read(fd, buffer.as_mut_slice()).unwrap_or(0);
                if size == 0 {
                    break;
                }
                text.push_str(&String::from_utf8_lossy(&buffer[..size]));
            }
        }
    }
}

impl Drop for Driver {
    /// Also kills what the cells left in the background.
    fn drop(&mut self) {
        let _ = kill_process_group(self.pid(), Signal::KILL);
        let _ = self.child.wait();
    }
}

/// A system program rather than a version manager's wrapper of the same name, which would be timed too.
pub fn system_program(name: &str) -> String {
    let path = format!("/usr/bin/{name}");
    if Path::new(&path).exists() { path } else { name.to_owned() }
}

/// Whether one of the descriptors becomes readable in time.
fn wait(fds: &[&OwnedFd], time: Duration) -> bool {
    let mut set: Vec<PollFd> = fds.iter().map(|fd| PollFd::new(*fd, PollFlags::IN)).collect();
    let time = Timespec { tv_sec: 0, tv_nsec: i64::from(time.subsec_nanos()) };
    poll(&mut set, Some(&time)).unwrap();
    set.iter().any(|fd| fd.revents().contains(PollFlags::IN))
}

/// Reads a whole file, for tests that let a cell write one.
pub fn read_text(path: &Path) -> String {
    let mut text = String::new();
    File::open(path).unwrap().read_to_string(&mut text).unwrap();
    text
}
