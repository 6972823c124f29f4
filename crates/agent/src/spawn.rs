//! Starts processes for the host's requests.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use bathy_protocol::{CopyDirection, Exec, RefusalKind, Refused, Restriction, Transfer};
use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, kill_process};

use crate::sys::{self, Child, Confinement, Executable, MountLimits, Program, Step};
use crate::terminal::Terminal;
use crate::transfer;
use crate::users::{self, User};

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// How long a program may take to be executed. Shorter than the host's timeout for an answer (30 s), so that
/// the host learns the reason.
const EXECUTED_WITHIN: Duration = Duration::from_secs(20);

/// A started process that may not have executed its program yet: processes of the same user can delay it.
pub struct Launching {
    child: Child,
    name: Vec<u8>,
    cwd: CString,
    user: String,
    until: Instant,
}

impl Launching {
    /// The pid; also its session and process group, once the program is executed.
    pub fn pid(&self) -> u32 {
        self.child.pid
    }

    /// Becomes readable when the outcome is known.
    pub fn decided(&self) -> Option<BorrowedFd<'_>> {
        self.child.decided()
    }

    pub fn deadline(&self) -> Instant {
        self.until
    }

    /// Whether the program was executed, or why not; `None` while that is unknown.
    pub fn outcome(&mut self, now: Instant) -> Option<Result<(), Refused>> {
        match self.child.outcome() {
            Some(outcome) => Some(outcome.map_err(|(step, error)| self.refusal(step, &error))),
            None if now < self.until => None,
            None => {
                self.signal(Signal::KILL);
                Some(Err(bad_request(&format!(
                    "{}: not executed within {} s: a process in the sandbox blocks it",
                    String::from_utf8_lossy(&self.name),
                    EXECUTED_WITHIN.as_secs()
                ))))
            }
        }
    }

    /// Sends a signal to the process alone, because it may not have its group yet. It must not have been
    /// reaped.
    pub fn signal(&self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.child.pid).ok().and_then(Pid::from_raw) {
            // Fails only if it has already exited.
            let _ = kill_process(pid, signal);
        }
    }

    fn refusal(&self, step: Step, error: &io::Error) -> Refused {
        refusal(step, error, &self.name, &self.cwd, &self.user)
    }
}

/// A started command and our ends of its pipes.
pub struct Started {
    pub launching: Launching,
    /// The write end of its standard input, if it has one.
    pub stdin: Option<OwnedFd>,
    /// The read end of its standard output.
    pub stdout: OwnedFd,
    /// The read end of its standard error, unless it has a terminal.
    pub stderr: Option<OwnedFd>,
    /// Whether standard input and output are our side of a terminal.
    pub terminal: bool,
}

/// Starts processes under the sandbox's restrictions.
pub struct Launcher {
    /// The restriction of every command. The sandbox's mounts are already restricted.
    pub restricted: Option<Restriction>,
    /// This program, which is also the program that copies files.
    pub own_program: OwnedFd,
}

impl Launcher {
    /// Starts a command or refuses it.
    pub fn exec(&self, request: &Exec) -> Result<Started, Refused> {
        self.exec_with(request, &[])
    }

    /// Starts a command with additional descriptors at 3 and above.
    pub fn exec_with(&self, request: &Exec, extra: &[BorrowedFd<'_>]) -> Result<Started, Refused> {
        let user = self.user(&request.user, request.restricted.is_some())?;
        let Some(name) = request.argv.first().filter(|name| !name.is_empty()) else {
            return Err(bad_request("the command is empty"));
        };
        let candidates = candidates(name, &request.env)?;
        let start = Start {
            executable: Executable::Paths(candidates),
            name,
            argv: c_strings(&request.argv)?,
            env: c_strings(&environment(request, &user))?,
            cwd: c_string(request.cwd.as_deref().unwrap_or(user.home.as_bytes()))?,
            user: &user,
            extra,
            confinement: self.confinement(request.restricted),
        };
        match request.terminal {
            Some(size) => {
                let failed = |error| match error {
                    Errno::NOSPC => bad_request("all terminals of the sandbox are in use"),
                    error => bad_request(&format!("cannot make the command's terminal: {error}")),
                };
                let terminal = Terminal::open(size, user.uid).map_err(failed)?;
                let stdin = rustix::io::fcntl_dupfd_cloexec(&terminal.master, 0).map_err(failed)?;
                let launching = start.run([terminal.slave.as_fd(); 3], true)?;
                let (stdin, stdout) = (Some(stdin), terminal.master);
                Ok(Started { launching, stdin, stdout, stderr: None, terminal: true })
            }
            None => start.with_pipes(request.stdin),
        }
    }

    /// Starts the program that copies files, as the files' user.
    pub fn transfer(&self, request: &Transfer) -> Result<Started, Refused> {
        let user = self.user(&request.user, false)?;
        let direction = match request.direction {
            CopyDirection::IntoGuest => transfer::PUT,
            CopyDirection::OutOfGuest => transfer::GET,
        };
        let arguments = [transfer::PROGRAM.as_bytes(), direction.as_bytes(), &request.path, &request.name];
        let start = Start {
            executable: Executable::Open(self.own_program.as_fd()),
            name: transfer::PROGRAM.as_bytes(),
            argv: arguments.into_iter().map(c_string).collect::<Result<_, _>>()?,
            env: Vec::new(),
            cwd: c"/".to_owned(),
            user: &user,
            extra: &[],
            confinement: self.confinement(None),
        };
        start.with_pipes(request.direction == CopyDirection::IntoGuest)
    }

    /// Looks up a user and refuses root where that is not allowed.
    fn user(&self, wanted: &str, restricted: bool) -> Result<User, Refused> {
        let user = users::find(wanted).map_err(|message| bad_request(&message))?;
        match restriction_broken(&user, self.restricted.is_some(), restricted) {
            Some(message) => Err(bad_request(message)),
            None => Ok(user),
        }
    }

    fn confinement(&self, requested: Option<Restriction>) -> Confinement {
        // A separate mount namespace is needed only if the request is stricter than the sandbox.
        let mounts = match (self.restricted, requested) {
            (_, None) => None,
            (None, Some(restriction)) => Some(MountLimits { read_only_root: !restriction.writable_root }),
            (Some(sandbox), Some(command)) => (sandbox.writable_root && !command.writable_root)
                .then_some(MountLimits { read_only_root: true }),
        };
        Confinement { no_privileges: self.restricted.is_some() || requested.is_some(), mounts }
    }
}

/// Why a restricted command cannot run as `user`, if so.
fn restriction_broken(user: &User, sandbox: bool, command: bool) -> Option<&'static str> {
    let root = user.uid == 0;
    let group = user.gid == 0 || user.groups.contains(&0);
    match (root, group) {
        (true, _) if sandbox => Some("this sandbox is restricted: commands cannot run as root"),
        (true, _) if command => Some("a restricted command cannot run as root"),
        (_, true) if sandbox => Some(
            "this sandbox is restricted: commands cannot run in root's group; name another, like 1234:1234",
        ),
        (_, true) if command => {
            Some("a restricted command cannot run in root's group; name another, like 1234:1234")
        }
        _ => None,
    }
}

/// A process to be started.
struct Start<'a> {
    executable: Executable<'a>,
    name: &'a [u8],
    argv: Vec<CString>,
    env: Vec<CString>,
    cwd: CString,
    user: &'a User,
    extra: &'a [BorrowedFd<'a>],
    confinement: Confinement,
}

impl Start<'_> {
    fn with_pipes(self, stdin: bool) -> Result<Started, Refused> {
        let failed = |error: Errno| bad_request(&format!("cannot make the command's pipes: {error}"));
        let (stdin_read, stdin_write) = if stdin {
            let (read, write) = pipe_with(PipeFlags::CLOEXEC).map_err(failed)?;
            (read, Some(write))
        } else {
            let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
                .map_err(failed)?;
            (null, None)
        };
        let (stdout_read, stdout_write) = pipe_with(PipeFlags::CLOEXEC).map_err(failed)?;
        let (stderr_read, stderr_write) = pipe_with(PipeFlags::CLOEXEC).map_err(failed)?;
        // Programs may reopen their outputs through /dev/stdout and the like, which only the owner can.
        let (uid, gid) = (Uid::from_raw(self.user.uid), Gid::from_raw(self.user.gid));
        let theirs = [stdin_write.as_ref().map(|_| &stdin_read), Some(&stdout_write), Some(&stderr_write)];
        for pipe in theirs.into_iter().flatten() {
            rustix::fs::fchown(pipe, Some(uid), Some(gid)).map_err(failed)?;
        }
        // Only our ends may be non-blocking: the flag belongs to the open file description, and programs
        // expect theirs to block.
        for ours in [Some(&stdout_read), Some(&stderr_read), stdin_write.as_ref()].into_iter().flatten() {
            rustix::io::ioctl_fionbio(ours, true).map_err(failed)?;
        }
        let launching = self.run([stdin_read.as_fd(), stdout_write.as_fd(), stderr_write.as_fd()], false)?;
        let (stdin, stdout, stderr) = (stdin_write, stdout_read, Some(stderr_read));
        Ok(Started { launching, stdin, stdout, stderr, terminal: false })
    }

    fn run(self, stdio: [BorrowedFd<'_>; 3], terminal: bool) -> Result<Launching, Refused> {
        let (name, user) = (self.name, &self.user.name);
        let cwd = self.cwd.clone();
        let program = Program {
            executable: self.executable,
            argv: self.argv,
            env: self.env,
            cwd: self.cwd,
            uid: self.user.uid,
            gid: self.user.gid,
            groups: self.user.groups.clone(),
            stdio,
            extra: self.extra,
            terminal,
            confinement: self.confinement,
        };
        match sys::start(program) {
            Ok(child) => {
                let until = Instant::now() + EXECUTED_WITHIN;
                Ok(Launching { child, name: name.to_vec(), cwd, user: user.clone(), until })
            }
            Err((step, error)) => Err(refusal(step, &error, name, &cwd, user)),
        }
    }
}

fn refusal(step: Step, error: &io::Error, name: &[u8], cwd: &CString, user: &str) -> Refused {
    let name = String::from_utf8_lossy(name);
    let (kind, message) = match (step, error.raw_os_error()) {
        (Step::Exec, Some(libc::ENOENT)) => (RefusalKind::NotFound, format!("{name}: no such program")),
        (Step::Exec, Some(libc::E2BIG)) => {
            (RefusalKind::NotExecutable, format!("{name}: the arguments and environment are too long"))
        }
        (Step::Exec, Some(libc::EAGAIN | libc::ENOMEM)) => {
            (RefusalKind::BadRequest, format!("{name}: the sandbox is out of processes or memory: {error}"))
        }
        (Step::Exec, _) => (RefusalKind::NotExecutable, format!("{name}: {error}")),
        (Step::Chdir, _) => {
            (RefusalKind::BadRequest, format!("working directory {}: {error}", cwd.to_string_lossy()))
        }
        (Step::Identity, _) => (RefusalKind::BadRequest, format!("cannot become user {user}: {error}")),
        (Step::Confinement, _) => {
            (RefusalKind::BadRequest, format!("the command cannot be restricted: {error}"))
        }
        (Step::Stdio, _) => (RefusalKind::BadRequest, format!("cannot connect the command's pipes: {error}")),
    };
    Refused { kind, message }
}

/// A refusal because of an invalid request.
pub fn bad_request(message: &str) -> Refused {
    Refused { kind: RefusalKind::BadRequest, message: message.to_owned() }
}

fn c_string(bytes: &[u8]) -> Result<CString, Refused> {
    CString::new(bytes).map_err(|_| {
        bad_request(&format!(
            "{:?} contains a zero byte, which no program can be given",
            String::from_utf8_lossy(bytes)
        ))
    })
}

fn c_strings(list: &[Vec<u8>]) -> Result<Vec<CString>, Refused> {
    list.iter().map(|bytes| c_string(bytes)).collect()
}

/// The request's environment plus the variables that every program expects.
fn environment(request: &Exec, user: &User) -> Vec<Vec<u8>> {
    let mut env = request.env.clone();
    let terminal = request.terminal.map(|_| ("TERM", "xterm"));
    let usual = [
        ("HOME", user.home.as_str()),
        ("USER", &user.name),
        ("LOGNAME", &user.name),
        ("SHELL", &user.shell),
        ("PATH", DEFAULT_PATH),
    ];
    for (name, value) in usual.into_iter().chain(terminal) {
        if variable(&request.env, name).is_none() {
            env.push(format!("{name}={value}").into_bytes());
        }
    }
    env
}

fn variable<'a>(env: &'a [Vec<u8>], name: &str) -> Option<&'a [u8]> {
    env.iter().rev().find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
}

/// The paths to try for a program of this name.
fn candidates(name: &[u8], env: &[Vec<u8>]) -> Result<Vec<CString>, Refused> {
    if name.contains(&b'/') {
        return Ok(vec![c_string(name)?]);
    }
    let path = variable(env, "PATH").unwrap_or(DEFAULT_PATH.as_bytes());
    path.split(|byte| *byte == b':')
        .map(|folder| {
            let folder = if folder.is_empty() { b".".as_slice() } else { folder };
            c_string(&[folder, b"/", name].concat())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_name_is_looked_up_along_the_given_path() {
        let env = vec![b"PATH=/a::/b".to_vec()];
        let found = candidates(b"tool", &env).unwrap();
        let found: Vec<_> = found.iter().map(|path| path.to_str().unwrap()).collect();
        assert_eq!(found, ["/a/tool", "./tool", "/b/tool"]);
    }

    #[test]
    fn a_path_is_taken_as_it_is() {
        assert_eq!(candidates(b"./x", &[]).unwrap(), [c"./x".to_owned()]);
    }

    #[test]
    fn a_zero_byte_is_refused_and_named() {
        let refused = c_strings(&[b"a\0b".to_vec()]).unwrap_err();
        assert_eq!(refused.kind, RefusalKind::BadRequest);
        assert!(refused.message.contains("zero byte"));
    }

    fn user(uid: u32, gid: u32, groups: &[u32]) -> User {
        let (name, home, shell) = ("u".into(), "/h".into(), "/bin/sh".into());
        User { name, uid, gid, groups: groups.to_vec(), home, shell }
    }

    fn launcher(restricted: Option<Restriction>) -> Launcher {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let own_program = rustix::fs::open("/proc/self/exe", flags, Mode::empty()).unwrap();
        Launcher { restricted, own_program }
    }

    #[test]
    fn restricted_commands_are_neither_root_nor_in_its_group() {
        for (sandbox, command) in [(true, false), (false, true), (true, true)] {
            for root in [user(0, 1, &[1]), user(1, 0, &[0]), user(1, 1, &[1, 0]), user(0, 0, &[])] {
                assert!(restriction_broken(&root, sandbox, command).is_some(), "{root:?}");
            }
            assert_eq!(restriction_broken(&user(1, 1, &[1, 27]), sandbox, command), None);
        }
        assert_eq!(restriction_broken(&user(0, 0, &[0]), false, false), None);
        let said = launcher(Some(Restriction::default())).user("0:0", false).unwrap_err();
        assert_eq!(said.message, "this sandbox is restricted: commands cannot run as root");
    }

    #[test]
    fn a_restricted_sandbox_restricts_whatever_is_asked() {
        let (writable, read_only) = (Restriction { writable_root: true }, Restriction::default());
        let of = |sandbox, command| launcher(sandbox).confinement(command);
        assert_eq!(of(None, None), Confinement::default());
        assert_eq!(of(Some(read_only), None), Confinement { no_privileges: true, mounts: None });
        assert_eq!(of(Some(read_only), Some(writable)).mounts, None);
        let stricter = Some(MountLimits { read_only_root: true });
        assert_eq!(of(Some(writable), Some(read_only)).mounts, stricter);
        assert_eq!(of(None, Some(read_only)), Confinement { no_privileges: true, mounts: stricter });
        assert_eq!(of(None, Some(writable)).mounts, Some(MountLimits { read_only_root: false }));
    }

    #[test]
    fn further_descriptors_are_found_in_their_order() {
        let (one, two) = ("printf one >&3; printf two >&4", rustix::process::getuid().as_raw());
        let (argv, user) = ([b"sh".to_vec(), b"-c".to_vec(), one.into()].to_vec(), two.to_string());
        let request = Exec { argv, user, cwd: Some(b"/".to_vec()), ..Exec::default() };
        let pipes = [(); 2].map(|()| pipe_with(PipeFlags::CLOEXEC).unwrap());
        let extra = pipes.each_ref().map(|(_, write)| write.as_fd());
        let started = launcher(None).exec_with(&request, &extra).unwrap();
        let pid = i32::try_from(started.launching.pid()).ok().and_then(Pid::from_raw);
        rustix::process::waitpid(pid, rustix::process::WaitOptions::empty()).unwrap();
        for ((read, _), wanted) in pipes.iter().zip([b"one", b"two"]) {
            let mut got = [0u8; 3];
            assert_eq!(rustix::io::read(read, &mut got).unwrap(), 3);
            assert_eq!(&got, wanted);
        }
    }

    #[test]
    fn a_terminal_has_a_type_unless_the_request_says_which() {
        let size = bathy_protocol::TerminalSize { rows: 1, columns: 1 };
        let mut request = Exec { terminal: Some(size), ..Exec::default() };
        assert_eq!(variable(&environment(&request, &user(1, 1, &[])), "TERM"), Some(b"xterm".as_slice()));
        request.env = vec![b"TERM=vt100".to_vec()];
        assert_eq!(variable(&environment(&request, &user(1, 1, &[])), "TERM"), Some(b"vt100".as_slice()));
        request = Exec::default();
        assert_eq!(variable(&environment(&request, &user(1, 1, &[])), "TERM"), None);
    }

    #[test]
    fn the_request_wins_over_the_usual_environment() {
        let user = user(1, 1, &[]);
        let request = Exec { env: vec![b"HOME=/elsewhere".to_vec()], ..Exec::default() };
        let env = environment(&request, &user);
        assert_eq!(env.iter().filter(|entry| entry.starts_with(b"HOME=")).count(), 1);
        assert_eq!(variable(&env, "USER"), Some(b"u".as_slice()));
    }
}
