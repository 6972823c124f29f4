//! Starting a program in namespaces of its own.
//!
//! The keeper is started by [`keeper`], the gateway by [`gateway`], and the process that unpacks a layer by [`unpacker`], from a
//! process that may have many threads and is not confined. The guest is started by [`guest`] from the keeper, which has one thread and is already inside its own empty root.

use std::convert::Infallible;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};
use thiserror::Error;

use crate::cgroup::Entrance;
use crate::filter::{Filter, GuestFilter, KEEPER, KERNEL_TEXT, KILLS};
use crate::limits::{self, Limit};
use crate::newborn::{Newborn, Plan, fail, newborn};
use crate::sys::{self, Gate, Side, Transition};
use crate::{FilterError, LimitsError, PrivilegesError, privileges};

const NAMESPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP;

/// The first descriptor number used for copies, above all numbers that a program is given, unless these are more.
const FIRST_COPY: RawFd = 64;

/// The first number for copies if a program is given `count` descriptors.
fn first_copy(count: usize) -> RawFd {
    RawFd::try_from(count).map_or(RawFd::MAX, |count| count.max(FIRST_COPY))
}

/// Why a process did not start.
#[derive(Debug, Error)]
pub enum SpawnError {
    /// The kernel refuses user namespaces.
    #[error(
        "This machine does not let us create user namespaces, which every sandbox needs. As root: sysctl -w user.max_user_namespaces=100000; on Debian also kernel.unprivileged_userns_clone=1, on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0"
    )]
    NoNamespaces(#[source] io::Error),
    /// The new namespace's users could not be set.
    #[error("Cannot map the sandbox's users: {0}")]
    Map(#[source] io::Error),
    /// A pipe or descriptor could not be made.
    #[error("Cannot prepare the process: {0}")]
    Prepare(#[source] io::Error),
    /// A step that has to be done first, such as entering a control group.
    #[error("Cannot put the process under its limits: {0}")]
    BeforeStart(#[source] io::Error),
    /// Limits could not be set.
    #[error(transparent)]
    Limits(#[from] LimitsError),
    /// Privileges could not be dropped.
    #[error(transparent)]
    Privileges(#[from] PrivilegesError),
    /// The filter could not be installed.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// The child failed before its program ran.
    #[error("The new process could not {0}")]
    Child(String),
}

/// A process that was started, and may have ended since.
#[derive(Debug)]
pub struct Spawned {
    /// Its number, as seen by the process that started it.
    pub pid: u32,
    /// Refers to exactly this process, even if its number is reused.
    pub pidfd: OwnedFd,
    report: OwnedFd,
}

impl Spawned {
    /// A process that writes to `report` why its program did not start.
    pub fn new(pid: u32, pidfd: OwnedFd, report: OwnedFd) -> Self {
        Self { pid, pidfd, report }
    }

    /// The error of a child whose program did not start. Waits until the program runs or the child has exited.
    pub fn failure(&self) -> Option<String> {
        let mut message = [0u8; 1024];
        // Without a readable message, the exit status is still reported.
        let count = rustix::io::read(&self.report, &mut message).unwrap_or(0);
        (count > 0).then(|| String::from_utf8_lossy(message.get(..count).unwrap_or_default()).into_owned())
    }
}

/// Which host users a process's namespace consists of: the first is uid 0 inside, the second, if any, uid 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identity {
    /// An ordinary user can only map itself.
    Own {
        /// The user id that is mapped to uid 0.
        uid: u32,
        /// The group id that is mapped to gid 0.
        gid: u32,
    },
    /// Root gives the keeper and the guest two otherwise unused numbers.
    Pair {
        /// The keeper's user and group; the guest has the next number.
        first: u32,
    },
    /// Root gives a gateway or an unpacker an otherwise unused number.
    One {
        /// Its user and group.
        id: u32,
    },
    /// An ordinary user gives numbers that the system set aside for it in /etc/subuid and /etc/subgid.
    Subordinate {
        /// The first of the user ids.
        uid: u32,
        /// The first of the group ids.
        gid: u32,
        /// How many of each: two for a keeper and its guest, one for a gateway.
        count: u32,
    },
}

/// A program to start as a keeper, a gateway or an unpacker.
pub struct Program<'a> {
    /// The executable, which is started by its descriptor.
    pub program: BorrowedFd<'a>,
    /// The program's arguments, its name among them.
    pub args: &'a [CString],
    /// Its descriptors from 3 on; 0, 1 and 2 are /dev/null.
    pub descriptors: &'a [BorrowedFd<'a>],
    /// The users of the process's namespace.
    pub identity: Identity,
    /// The control groups that it is in from its first instruction on.
    pub entrance: Option<&'a Entrance>,
    /// Called with its number before its first instruction. If that fails, the process ends without having run.
    pub before_start: Option<&'a dyn Fn(u32) -> io::Result<()>>,
}

/// Starts a keeper in its own user, mount, pid, net, ipc, uts and cgroup namespaces, as that namespace's root.
pub fn keeper(program: &Program<'_>) -> Result<Spawned, SpawnError> {
    start(program, NAMESPACES)
}

/// Starts an unpacker in the same namespaces as a keeper.
pub fn unpacker(program: &Program<'_>) -> Result<Spawned, SpawnError> {
    start(program, NAMESPACES)
}

/// Starts a gateway in the same namespaces but one: it dials out of the host's network, over which it has no privilege.
pub fn gateway(program: &Program<'_>) -> Result<Spawned, SpawnError> {
    start(program, NAMESPACES & !libc::CLONE_NEWNET)
}

fn start(process: &Program<'_>, namespaces: i32) -> Result<Spawned, SpawnError> {
    if !KILLS {
        eprintln!(
            "bathy: WARNING: built with log-filter: this sandbox is NOT CONFINED by its system call filters"
        );
    }
    let null =
        fs::OpenOptions::new().read(true).write(true).open("/dev/null").map_err(SpawnError::Prepare)?;
    let first = first_copy(process.descriptors.len() + 3);
    let mut copies = Vec::with_capacity(process.descriptors.len() + 3);
    for fd in [null.as_fd(); 3].iter().chain(process.descriptors) {
        copies.push(copy(*fd, first)?);
    }
    let descriptors: Vec<_> = copies.iter().map(AsRawFd::as_raw_fd).collect();
    let program = copy(process.program, first)?;
    let (argv, envp) = (sys::pointers(process.args), sys::pointers(&[] as &[CString]));
    let transition = Transition { program: program.as_fd(), argv: &argv, envp: &envp };
    let tasks: Vec<_> =
        process.entrance.iter().flat_map(|entrance| entrance.v1()).map(|fd| fd.as_raw_fd()).collect();
    let plan = Plan { namespaces, tasks: &tasks, descriptors: &descriptors, first, transition: &transition };

    let v2 = process.entrance.and_then(Entrance::v2);
    let (newborn, is_in_v2) = match v2.map(|group| newborn(&plan, Some(group))) {
        Some(Ok(newborn)) => (newborn, true),
        // Kernels before 5.7 create none in a group; one with a full pids.max refuses new processes, and not those that are moved;
        // and some kernels kill it at birth if the caller's own group was killed before.
        Some(Err(_)) | None => (newborn(&plan, None)?, false),
    };
    let move_v2 = || {
        process.entrance.filter(|_| !is_in_v2).map_or(Ok(()), |entrance| entrance.move_v2(newborn.child.pid))
    };
    let result = move_v2()
        .map_err(SpawnError::BeforeStart)
        .and_then(|()| let_go(process, newborn.child.pid, &newborn.go));
    let Newborn { child, go, report } = newborn;
    if result.is_err() {
        // The child exits when its pipe closes without the go-ahead. It is not left as a zombie.
        drop(go);
        let _ = waitid(WaitId::PidFd(child.pidfd.as_fd()), WaitIdOptions::EXITED);
    }
    result.map(|()| Spawned::new(child.pid, child.pidfd, report))
}

fn let_go(process: &Program<'_>, pid: u32, go: &OwnedFd) -> Result<(), SpawnError> {
    map_users(pid, process.identity).map_err(SpawnError::Map)?;
    if let Some(prepare) = process.before_start {
        prepare(pid).map_err(SpawnError::BeforeStart)?;
    }
    rustix::io::write(go, &[1]).map_err(|error| SpawnError::Prepare(error.into()))?;
    Ok(())
}

fn map_users(pid: u32, identity: Identity) -> io::Result<()> {
    let write = |file: &str, text: String| fs::write(format!("/proc/{pid}/{file}"), text);
    match identity {
        Identity::Own { uid, gid } => {
            // The kernel wants this promise of an ordinary user before it may map a group.
            write("setgroups", "deny".to_owned())?;
            write("uid_map", format!("0 {uid} 1\n"))?;
            write("gid_map", format!("0 {gid} 1\n"))
        }
        Identity::Pair { first } => {
            write("uid_map", format!("0 {first} 2\n"))?;
            write("gid_map", format!("0 {first} 2\n"))
        }
        Identity::One { id } => {
            write("uid_map", format!("0 {id} 1\n"))?;
            write("gid_map", format!("0 {id} 1\n"))
        }
        Identity::Subordinate { uid, gid, count } => {
            map_subordinate("newgidmap", pid, gid, count)?;
            map_subordinate("newuidmap", pid, uid, count)
        }
    }
}

/// Has the system's privileged helpers map subordinate ids, which belong to this user by /etc/subuid and /etc/subgid.
fn map_subordinate(helper: &str, pid: u32, first: u32, count: u32) -> io::Result<()> {
    let words = [pid, 0, first, count].map(|word| word.to_string());
    let output = Command::new(helper).args(words).stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let reason = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("{helper}: {}", reason.trim())))
}

/// Whether this machine lets us create the namespaces that a keeper needs: tried, and undone.
pub fn try_namespaces() -> Result<(), SpawnError> {
    // SAFETY: the child only ends itself.
    match unsafe { sys::fork_into(NAMESPACES | libc::CLONE_NEWUSER, None) }
        .map_err(SpawnError::NoNamespaces)?
    {
        Side::Child => sys::exit_now(0),
        Side::Parent(child) => {
            waitid(WaitId::PidFd(child.pidfd.as_fd()), WaitIdOptions::EXITED)
                .map_err(|error| SpawnError::Prepare(error.into()))?;
            Ok(())
        }
    }
}

/// What became of a filter that was tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tried {
    /// The kernel installed the filter.
    Installed,
    /// The kernel refused it.
    Refused,
    /// The kernel did not return from installing it.
    Stuck,
}

/// Installs a filter in a child. A kernel whose memory for filters is blocked returns neither from that nor from killing the
/// child (attack U11), so the child has no descriptor that another process could wait for, and is abandoned after `limit`.
pub fn try_filter(limit: Duration) -> Result<Tried, SpawnError> {
    let program = KEEPER.compile()?;
    try_in_child(limit, || Filter::install(&program).is_ok())
}

/// The work makes nothing but system calls.
fn try_in_child(limit: Duration, work: impl FnOnce() -> bool) -> Result<Tried, SpawnError> {
    let prepare = |error: rustix::io::Errno| SpawnError::Prepare(error.into());
    // SAFETY: the child only makes system calls, as required of a process with many threads.
    match unsafe { sys::fork_into(0, None) }.map_err(SpawnError::Prepare)? {
        Side::Child => {
            sys::close_all();
            sys::exit_now(i32::from(!work()))
        }
        Side::Parent(child) => {
            let limit = Timespec::try_from(limit)
                .map_err(|_| SpawnError::Prepare(io::ErrorKind::InvalidInput.into()))?;
            let mut ended = [PollFd::new(&child.pidfd, PollFlags::IN)];
            if retry_on_intr(|| poll(&mut ended, Some(&limit))).map_err(prepare)? == 0 {
                // Has no effect before the call returns.
                let _ = pidfd_send_signal(&child.pidfd, Signal::KILL);
                return Ok(Tried::Stuck);
            }
            let status =
                waitid(WaitId::PidFd(child.pidfd.as_fd()), WaitIdOptions::EXITED).map_err(prepare)?;
            let installed = status.and_then(|status| status.exit_status()) == Some(0);
            Ok(if installed { Tried::Installed } else { Tried::Refused })
        }
    }
}

/// A guest kernel to start from inside the keeper's jail.
pub struct GuestProgram<'a> {
    /// The executable, which is started by its descriptor.
    pub program: BorrowedFd<'a>,
    /// The program's arguments, its name among them.
    pub args: &'a [CString],
    /// All its descriptors, from 0 on.
    pub descriptors: &'a [BorrowedFd<'a>],
    /// Its limits, besides the common ones.
    pub limits: &'a [Limit],
    /// The system call filter, installed before the program starts.
    pub filter: &'a GuestFilter,
    /// The one processor it may use.
    pub cpu: u32,
    /// Whether it becomes uid 1 of the keeper's namespace.
    pub own_user: bool,
}

/// A guest that is confined and waits for the word to execute its program.
pub struct Waiting {
    spawned: Spawned,
    go: OwnedFd,
}

impl Waiting {
    /// The keeper is confined too: let the guest's first instruction run.
    pub fn release(self) -> Result<Spawned, SpawnError> {
        rustix::io::write(&self.go, &[1]).map_err(|error| SpawnError::Prepare(error.into()))?;
        Ok(self.spawned)
    }
}

/// Starts a guest in namespaces that the keeper's user namespace owns, and then in a user namespace below that in
/// which no user is mapped: whatever privilege it found there would be privilege over nothing.
///
/// The caller has one thread, is in its empty root and still holds its namespace's privileges.
pub fn guest(guest: &GuestProgram<'_>) -> Result<Waiting, SpawnError> {
    let first = first_copy(guest.descriptors.len());
    let (go_read, go_write) = high_pipe(first)?;
    let (report_read, report_write) = high_pipe(first)?;
    // SAFETY: this process has a single thread (see the function's contract), so the child may do what it likes.
    match unsafe { sys::fork_into(NAMESPACES, None) }.map_err(SpawnError::NoNamespaces)? {
        Side::Child => {
            drop(go_write);
            let words = match guest_child(guest, &go_read, &report_write) {
                Ok(never) => match never {},
                Err(error) => error.to_string(),
            };
            sys::write_report(report_write.as_raw_fd(), words.as_bytes());
            sys::exit_now(125)
        }
        Side::Parent(child) => {
            let spawned = Spawned::new(child.pid, child.pidfd, report_read);
            Ok(Waiting { spawned, go: go_write })
        }
    }
}

fn guest_child(guest: &GuestProgram<'_>, go: &OwnedFd, report: &OwnedFd) -> Result<Infallible, SpawnError> {
    let prepare = |error: rustix::io::Errno| SpawnError::Prepare(error.into());
    let first = first_copy(guest.descriptors.len());
    let copies = guest.descriptors.iter().map(|fd| copy(*fd, first)).collect::<Result<Vec<_>, _>>()?;
    let descriptors: Vec<_> = copies.iter().map(AsRawFd::as_raw_fd).collect();
    let kernel = copy(guest.program, first)?;
    let (argv, envp) = (sys::pointers(guest.args), sys::pointers(&[] as &[CString]));
    let from_errno = |errno| SpawnError::Prepare(io::Error::from_raw_os_error(errno));
    // Before there are limits of memory.
    let gate = Gate::open(KERNEL_TEXT.start).map_err(SpawnError::Prepare)?;

    rustix::process::setsid().map_err(prepare)?;
    rustix::system::sethostname(b"sandbox").map_err(prepare)?;
    let mut cpus = rustix::thread::CpuSet::new();
    cpus.set(usize::try_from(guest.cpu).unwrap_or(usize::MAX));
    rustix::thread::sched_setaffinity(None, &cpus).map_err(prepare)?;
    sys::fix_addresses().map_err(SpawnError::Prepare)?;
    limits::apply(limits::COMMON)?;
    limits::apply(guest.limits)?;
    if guest.own_user {
        sys::become_user(1).map_err(from_errno)?;
    }
    sys::unshare(libc::CLONE_NEWUSER).map_err(SpawnError::NoNamespaces)?;
    privileges::drop_all()?;
    let program = guest.filter.compile()?;
    sys::arrange(&descriptors).map_err(from_errno)?;
    if !sys::wait_for_byte(go.as_raw_fd()) {
        return Err(SpawnError::Child("start: its keeper has exited".to_owned()));
    }
    sys::reset_signals();
    Filter::install(&program)?;
    // From here on only the gate's calls are not trapped.
    let errno = gate.become_program(&Transition { program: kernel.as_fd(), argv: &argv, envp: &envp });
    fail("execute the guest kernel", errno, |words| gate.write_report(report.as_raw_fd(), words));
    gate.exit_now(125)
}

/// A copy of `fd` whose number no program is given.
fn copy(fd: BorrowedFd<'_>, first: RawFd) -> Result<OwnedFd, SpawnError> {
    rustix::io::fcntl_dupfd_cloexec(fd, first).map_err(|error| SpawnError::Prepare(error.into()))
}

/// A pipe whose numbers are `first` or above.
pub(crate) fn high_pipe(first: RawFd) -> Result<(OwnedFd, OwnedFd), SpawnError> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC).map_err(|error| SpawnError::Prepare(error.into()))?;
    Ok((copy(read.as_fd(), first)?, copy(write.as_fd(), first)?))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::thread;
    use std::time::Instant;

    use super::*;

    type Start = fn(&Program<'_>) -> Result<Spawned, SpawnError>;

    fn start_as(
        start: Start,
        program: &str,
        before_start: &dyn Fn(u32) -> io::Result<()>,
    ) -> Result<Spawned, SpawnError> {
        let uid = rustix::process::geteuid();
        let gid = rustix::process::getegid().as_raw();
        let program = fs::File::open(program).unwrap();
        start(&Program {
            program: program.as_fd(),
            args: &[CString::from(c"true")],
            descriptors: &[],
            identity: Identity::Own { uid: uid.as_raw(), gid },
            entrance: None,
            before_start: Some(before_start),
        })
    }

    fn start(before_start: &dyn Fn(u32) -> io::Result<()>) -> Result<Spawned, SpawnError> {
        start_as(keeper, "/bin/true", before_start)
    }

    fn exit_status(spawned: &Spawned) -> Option<i32> {
        let ended = waitid(WaitId::PidFd(spawned.pidfd.as_fd()), WaitIdOptions::EXITED).unwrap();
        ended.unwrap().exit_status()
    }

    #[test]
    fn the_hook_sees_a_process_that_has_not_begun() {
        let ours = fs::read_link("/proc/self/exe").unwrap();
        let seen = Cell::new(0);
        let spawned = start(&|pid| {
            assert_eq!(fs::read_link(format!("/proc/{pid}/exe"))?, ours);
            seen.set(pid);
            Ok(())
        });
        let spawned = spawned.unwrap();
        assert_eq!(seen.get(), spawned.pid);
        assert_eq!(spawned.failure(), None);
        assert_eq!(exit_status(&spawned), Some(0));
    }

    /// The namespaces that a process shares with this one.
    fn shared_namespaces(pid: u32) -> Vec<&'static str> {
        let kinds = ["user", "mnt", "pid_for_children", "net", "ipc", "uts", "cgroup"];
        let of = |process: &str, kind: &str| fs::read_link(format!("/proc/{process}/ns/{kind}")).unwrap();
        let pid = pid.to_string();
        kinds.into_iter().filter(|kind| of(&pid, kind) == of("self", kind)).collect()
    }

    #[test]
    fn a_keeper_shares_no_namespace_and_a_gateway_only_the_network() {
        let table: [(Start, &[&str]); 2] = [(keeper, &[]), (gateway, &["net"])];
        for (start, expected) in table {
            let shared = Cell::new(Vec::new());
            let look = |pid| {
                shared.set(shared_namespaces(pid));
                Ok(())
            };
            let spawned = start_as(start, "/bin/true", &look).unwrap();
            assert_eq!(exit_status(&spawned), Some(0));
            assert_eq!(shared.take(), expected);
        }
    }

    #[test]
    fn a_keeper_begins_with_its_own_descriptors_user_and_signals_and_no_environment() {
        let uid = rustix::process::geteuid().as_raw();
        let gid = rustix::process::getegid().as_raw();
        let (program, given) = (fs::File::open("/bin/sleep").unwrap(), fs::File::open("/dev/zero").unwrap());
        let spawned = keeper(&Program {
            program: program.as_fd(),
            args: &[CString::from(c"sleep"), CString::from(c"100")],
            descriptors: &[given.as_fd()],
            identity: if uid == 0 { Identity::Pair { first: 70_000 } } else { Identity::Own { uid, gid } },
            entrance: None,
            before_start: None,
        });
        let spawned = spawned.unwrap();
        assert_eq!(spawned.failure(), None);
        let file = |name: &str| format!("/proc/{}/{name}", spawned.pid);
        let status = fs::read_to_string(file("status")).unwrap();
        let line = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim();
        let descriptors = || -> Vec<_> {
            (0..100).filter_map(|fd| fs::read_link(file(&format!("fd/{fd}"))).ok()).collect()
        };
        let expected = ["/dev/null", "/dev/null", "/dev/null", "/dev/zero"].map(std::path::PathBuf::from);
        // The program's loader opens its libraries for a moment; what was left open would stay.
        let begin = Instant::now();
        while descriptors() != expected && begin.elapsed() < Duration::from_secs(10) {
            thread::sleep(Duration::from_millis(1));
        }
        let descriptors = descriptors();
        let environment = fs::read(file("environ")).unwrap();
        pidfd_send_signal(&spawned.pidfd, Signal::KILL).unwrap();
        exit_status(&spawned);

        assert_eq!(descriptors, expected);
        assert_eq!(environment, b"");
        assert_eq!(line("SigBlk:"), "0000000000000000");
        let ignored = u64::from_str_radix(line("SigIgn:"), 16).unwrap();
        assert_eq!(ignored & 1 << (libc::SIGPIPE - 1), 0, "this program ignores it, another one does not");
        // Only root may give it other users than its own.
        let expected = if uid == 0 { [70_000; 2] } else { [uid, gid] };
        let ids = [line("Uid:"), line("Gid:")].map(str::to_owned);
        assert_eq!(ids, expected.map(|id| vec![id.to_string(); 4].join("\t")));
    }

    #[test]
    fn a_program_can_be_given_more_descriptors_than_an_image_has_files() {
        let (program, given) = (fs::File::open("/bin/sleep").unwrap(), fs::File::open("/dev/zero").unwrap());
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let spawned = keeper(&Program {
            program: program.as_fd(),
            args: &[CString::from(c"sleep"), CString::from(c"100")],
            descriptors: &[given.as_fd(); 150],
            identity: Identity::Own { uid, gid },
            entrance: None,
            before_start: None,
        });
        let spawned = spawned.unwrap();
        assert_eq!(spawned.failure(), None);
        let link = |fd: u32| fs::read_link(format!("/proc/{}/fd/{fd}", spawned.pid));
        let zeros = (3..153).filter(|fd| link(*fd).is_ok_and(|path| path.ends_with("zero"))).count();
        pidfd_send_signal(&spawned.pidfd, Signal::KILL).unwrap();
        exit_status(&spawned);
        assert_eq!(zeros, 150);
    }

    #[test]
    fn u11_a_filter_is_tried_and_a_kernel_that_does_not_return_is_noticed() {
        assert_eq!(try_filter(Duration::from_secs(60)).unwrap(), Tried::Installed);
        assert_eq!(try_in_child(Duration::from_secs(60), || false).unwrap(), Tried::Refused);
        let never = || {
            thread::sleep(Duration::from_secs(1000));
            true
        };
        assert_eq!(try_in_child(Duration::from_millis(100), never).unwrap(), Tried::Stuck);
    }

    #[test]
    fn a_process_that_cannot_become_its_program_reports_so() {
        let spawned = start_as(keeper, "/etc/passwd", &|_| Ok(())).unwrap();
        assert_eq!(spawned.failure().as_deref(), Some("execute its program: error 13"));
        assert_eq!(exit_status(&spawned), Some(125));
    }

    #[test]
    fn a_process_whose_hook_fails_never_begins_and_leaves_no_trace() {
        let seen = Cell::new(0);
        let result = start(&|pid| {
            seen.set(pid);
            Err(io::Error::other("no room"))
        });
        assert!(matches!(result, Err(SpawnError::BeforeStart(why)) if why.to_string() == "no room"));
        assert!(!fs::exists(format!("/proc/{}", seen.get())).unwrap(), "not even a zombie");
    }
}
