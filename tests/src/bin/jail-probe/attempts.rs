//! Ways out, one system call each (J3).

use std::ffi::CStr;

use libc::{AT_EMPTY_PATH, AT_FDCWD, ENOENT, EPERM, O_CREAT, O_RDWR};

use crate::report::Report;
use crate::sys::{self, Args, Fate, address, lasting, number};

/// A way out of the jail.
struct Attempt {
    name: String,
    call: i64,
    args: Args,
    /// The error that means that it is closed.
    error: i32,
    /// Whether it does no harm where it succeeds.
    harmless: bool,
}

/// Host paths that every machine has.
const PRESENT: [&CStr; 6] =
    [c"/etc/passwd", c"/proc/1/root", c"/proc/self", c"/dev/null", c"/tmp", c"/../etc/passwd"];
/// Host paths that a machine may have.
const POSSIBLE: [&CStr; 5] = [
    c"/dev/kvm",
    c"/run/docker.sock",
    c"/run/containerd/containerd.sock",
    c"/run/systemd/private",
    c"/root/.cache",
];

/// Tries everything; outside a jail only what does no harm there.
pub fn run(report: &mut Report, jailed: bool) {
    let all =
        [paths(), sockets(), processes(), namespaces(), kernel_parts(), memory(), privileges(), machine()];
    for Attempt { name, call, args, error, harmless } in all.into_iter().flatten() {
        if jailed || harmless {
            let fate = sys::attempt(number(call), args);
            report.add(fate == Fate::Error(error), &name, || format!("{fate:?} and not error {error}"));
        }
    }
}

/// Refused by the filter; does no harm outside.
fn refused(name: impl Into<String>, call: i64, args: &[u64]) -> Attempt {
    let mut all = [0; 6];
    for (slot, arg) in all.iter_mut().zip(args) {
        *slot = *arg;
    }
    Attempt { name: name.into(), call, args: all, error: EPERM, harmless: true }
}

/// Refused by the filter; only tried inside.
fn harmful(name: &str, call: i64, args: &[u64]) -> Attempt {
    Attempt { harmless: false, ..refused(name, call, args) }
}

fn value(argument: i32) -> u64 {
    i64::from(argument).cast_unsigned()
}

fn paths() -> Vec<Attempt> {
    let here = value(AT_FDCWD);
    let empty_path = value(AT_EMPTY_PATH);
    let how = lasting([0u64; 3]);
    let stat = lasting([0u64; 32]);
    let handle = lasting([128u32; 64]);
    let mut all = Vec::new();
    for path in PRESENT.into_iter().chain(POSSIBLE).chain([c"/", c"."]) {
        let name = |call: &str| format!("{call} {}", path.to_string_lossy());
        let at = address(path);
        all.push(refused(name("open"), libc::SYS_open, &[at, 0]));
        all.push(refused(name("openat"), libc::SYS_openat, &[here, at, 0]));
        all.push(refused(name("openat2"), libc::SYS_openat2, &[here, at, how, 24]));
        all.push(refused(name("readlink"), libc::SYS_readlink, &[at, stat, 256]));
        all.push(refused(name("access"), libc::SYS_access, &[at, 0]));
        all.push(refused(
            name("name_to_handle_at"),
            libc::SYS_name_to_handle_at,
            &[here, at, handle, stat, 0],
        ));
        all.push(refused(name("inotify"), libc::SYS_inotify_add_watch, &[value(-1), at, 1]));
    }
    // These two calls must be allowed for their empty-path form, and the filter cannot see the path: only the empty
    // root keeps them from finding anything.
    for path in PRESENT.into_iter().chain(POSSIBLE) {
        let named = |call: &str, number, args: &[u64], harmless| Attempt {
            name: format!("{call} {}", path.to_string_lossy()),
            error: ENOENT,
            harmless: harmless && PRESENT.contains(&path),
            ..refused("", number, args)
        };
        let at = address(path);
        all.push(named("stat", libc::SYS_newfstatat, &[here, at, stat, empty_path], true));
        all.push(named("execveat", libc::SYS_execveat, &[here, at, 0, 0, empty_path], true));
    }
    let program = address(c"/bin/true");
    all.push(refused("execve", libc::SYS_execve, &[program, 0, 0]));
    all.push(refused("execveat by path", libc::SYS_execveat, &[here, program, 0, 0, 0]));
    let run = refused("execveat /bin/true", libc::SYS_execveat, &[here, program, 0, 0, empty_path]);
    all.push(Attempt { error: ENOENT, ..run });
    all.push(refused("open_by_handle_at", libc::SYS_open_by_handle_at, &[here, handle, 0]));
    let file = address(c"/tmp/jail-probe-was-here");
    all.push(harmful("creat", libc::SYS_creat, &[file, 0o600]));
    all.push(harmful("open to write", libc::SYS_open, &[file, value(O_CREAT | O_RDWR), 0o600]));
    all.push(harmful("mkdir", libc::SYS_mkdir, &[file, 0o700]));
    all.push(harmful("mknod", libc::SYS_mknod, &[file, 0o20_600, 0x103]));
    all.push(harmful("symlink", libc::SYS_symlink, &[address(c"/"), file]));
    all.push(refused("getdents64", libc::SYS_getdents64, &[0, stat, 256]));
    all.push(refused("getcwd", libc::SYS_getcwd, &[stat, 256]));
    all.push(refused("chdir", libc::SYS_chdir, &[address(c"/")]));
    all.push(refused("fchdir", libc::SYS_fchdir, &[3]));
    all.push(refused("statfs", libc::SYS_statfs, &[address(c"/"), stat]));
    all.push(refused("ioctl", libc::SYS_ioctl, &[0, 0x5401, stat]));
    all.push(refused("memfd_create", libc::SYS_memfd_create, &[address(c"attack"), 0]));
    all.push(refused("fanotify_init", libc::SYS_fanotify_init, &[0, 0]));
    all.push(refused("inotify_init1", libc::SYS_inotify_init1, &[0]));
    all
}

fn sockets() -> Vec<Attempt> {
    let families = [
        ("AF_UNIX", libc::AF_UNIX, libc::SOCK_STREAM, 0),
        ("AF_INET", libc::AF_INET, libc::SOCK_STREAM, 0),
        ("AF_INET6", libc::AF_INET6, libc::SOCK_DGRAM, 0),
        ("AF_INET raw", libc::AF_INET, libc::SOCK_RAW, 1),
        ("AF_NETLINK", libc::AF_NETLINK, libc::SOCK_RAW, 0),
        ("AF_PACKET", libc::AF_PACKET, libc::SOCK_RAW, 0),
        ("AF_VSOCK", libc::AF_VSOCK, libc::SOCK_STREAM, 0),
        ("AF_ALG", libc::AF_ALG, libc::SOCK_SEQPACKET, 0),
        ("AF_XDP", libc::AF_XDP, libc::SOCK_RAW, 0),
    ];
    let mut all = Vec::new();
    for (name, family, kind, protocol) in families {
        let args = [value(family), value(kind), value(protocol)];
        all.push(refused(format!("socket {name}"), libc::SYS_socket, &args));
    }
    let pair = lasting([0i32; 2]);
    let others = [libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK, libc::AF_TIPC];
    for family in others {
        let name = format!("socketpair {family}");
        all.push(refused(name, libc::SYS_socketpair, &[value(family), value(libc::SOCK_STREAM), 0, pair]));
    }
    let docker = lasting(*b"\x01\0/run/docker.sock\0");
    let abstract_name = lasting(*b"\x01\0\0bathysphere-attack-target");
    for fd in 6..10 {
        all.push(refused(format!("connect {fd} to a path"), libc::SYS_connect, &[fd, docker, 19]));
        all.push(refused(
            format!("connect {fd} to an abstract name"),
            libc::SYS_connect,
            &[fd, abstract_name, 28],
        ));
    }
    all.push(harmful("bind", libc::SYS_bind, &[6, abstract_name, 28]));
    all.push(harmful("listen", libc::SYS_listen, &[6, 1]));
    all.push(refused("accept", libc::SYS_accept, &[6, 0, 0]));
    all.push(refused("sendto", libc::SYS_sendto, &[6, docker, 1, 0, docker, 19]));
    all.push(harmful("setsockopt", libc::SYS_setsockopt, &[6, 1, 32, pair, 4]));
    all
}

fn processes() -> Vec<Attempt> {
    let own = sys::own_number();
    let vector = lasting([lasting([0u64; 2]), 8]);
    let attach = u64::from(libc::PTRACE_ATTACH);
    let seize = u64::from(libc::PTRACE_SEIZE);
    let clone3 = lasting([0u64, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0]);
    vec![
        harmful("ptrace attach", libc::SYS_ptrace, &[attach, own]),
        refused("ptrace seize", libc::SYS_ptrace, &[seize, own]),
        refused("ptrace peek", libc::SYS_ptrace, &[u64::from(libc::PTRACE_PEEKDATA), own]),
        refused("process_vm_readv", libc::SYS_process_vm_readv, &[own, vector, 1, vector, 1, 0]),
        refused("process_vm_writev", libc::SYS_process_vm_writev, &[own, vector, 1, vector, 1, 0]),
        refused("process_madvise", libc::SYS_process_madvise, &[value(-1), vector, 1, 4, 0]),
        refused("kcmp", libc::SYS_kcmp, &[own, own, 0, 0, 0]),
        refused("pidfd_open", libc::SYS_pidfd_open, &[own, 0]),
        refused("pidfd_getfd", libc::SYS_pidfd_getfd, &[0, 0, 0]),
        refused("pidfd_send_signal", libc::SYS_pidfd_send_signal, &[0, 0, 0, 0]),
        refused("rt_sigqueueinfo", libc::SYS_rt_sigqueueinfo, &[own, 0, 0]),
        refused("tkill", libc::SYS_tkill, &[own, 0]),
        refused("setpgid", libc::SYS_setpgid, &[0, 0]),
        // Each session is a group of its own for the host's scheduler (U8).
        refused("setsid", libc::SYS_setsid, &[]),
        refused("clone3", libc::SYS_clone3, &[clone3, 88]),
        refused("sched_setaffinity", libc::SYS_sched_setaffinity, &[0, 8, lasting(u64::MAX)]),
        refused("sched_setscheduler", libc::SYS_sched_setscheduler, &[0, 1, lasting(1i32)]),
        refused("setpriority", libc::SYS_setpriority, &[0, 0, value(-5)]),
        refused("ioprio_set", libc::SYS_ioprio_set, &[1, 0, 0]),
        refused("move_pages", libc::SYS_move_pages, &[0, 0, 0, 0, 0, 0]),
        refused("membarrier", libc::SYS_membarrier, &[0, 0, 0]),
        refused("rseq", libc::SYS_rseq, &[0, 0, 0, 0]),
    ]
}

fn namespaces() -> Vec<Attempt> {
    let kinds = [
        ("user", libc::CLONE_NEWUSER),
        ("mount", libc::CLONE_NEWNS),
        ("pid", libc::CLONE_NEWPID),
        ("net", libc::CLONE_NEWNET),
        ("ipc", libc::CLONE_NEWIPC),
        ("uts", libc::CLONE_NEWUTS),
        ("cgroup", libc::CLONE_NEWCGROUP),
    ];
    let mut all = Vec::new();
    for (name, flag) in kinds {
        all.push(refused(format!("unshare {name}"), libc::SYS_unshare, &[value(flag)]));
        all.push(refused(format!("clone {name}"), libc::SYS_clone, &[value(flag | libc::SIGCHLD)]));
    }
    let nowhere = address(c"/nonexistent/place");
    all.extend([
        refused("unshare time", libc::SYS_unshare, &[0x80]),
        refused("setns", libc::SYS_setns, &[0, 0]),
        refused("mount", libc::SYS_mount, &[nowhere, nowhere, address(c"tmpfs"), 0, 0]),
        refused("umount", libc::SYS_umount2, &[nowhere, 0]),
        refused("pivot_root", libc::SYS_pivot_root, &[nowhere, nowhere]),
        refused("chroot", libc::SYS_chroot, &[nowhere]),
        refused("fsopen", libc::SYS_fsopen, &[address(c"tmpfs"), 0]),
        refused("fsmount", libc::SYS_fsmount, &[0, 0, 0]),
        refused("open_tree", libc::SYS_open_tree, &[value(AT_FDCWD), address(c"/"), 0]),
        refused("move_mount", libc::SYS_move_mount, &[0, nowhere, 0, nowhere, 0]),
        refused("mount_setattr", libc::SYS_mount_setattr, &[0, nowhere, 0, 0, 0]),
    ]);
    all
}

fn kernel_parts() -> Vec<Attempt> {
    let zeroes = lasting([0u64; 32]);
    let name = address(c"attack");
    vec![
        refused("bpf", libc::SYS_bpf, &[0, zeroes, 128]),
        refused("io_uring_setup", libc::SYS_io_uring_setup, &[1, zeroes]),
        refused("io_uring_enter", libc::SYS_io_uring_enter, &[0, 0, 0, 0, 0, 0]),
        refused("io_uring_register", libc::SYS_io_uring_register, &[0, 0, 0, 0]),
        refused("io_setup", libc::SYS_io_setup, &[1, zeroes]),
        refused("keyctl", libc::SYS_keyctl, &[0, value(-3), 0]),
        refused("add_key", libc::SYS_add_key, &[address(c"user"), name, name, 1, value(-1)]),
        refused("request_key", libc::SYS_request_key, &[address(c"user"), name, 0, 0]),
        refused("perf_event_open", libc::SYS_perf_event_open, &[zeroes, 0, value(-1), value(-1), 0]),
        refused("userfaultfd", libc::SYS_userfaultfd, &[0]),
        refused("mq_open", libc::SYS_mq_open, &[address(c"attack"), value(O_RDWR), 0, 0]),
        refused("shmget", libc::SYS_shmget, &[0x1234, 4096, 0]),
        refused("semget", libc::SYS_semget, &[0, 0, 0]),
        refused("msgget", libc::SYS_msgget, &[0x1234, 0]),
        refused("memfd_secret", libc::SYS_memfd_secret, &[value(-1)]),
        refused("modify_ldt", libc::SYS_modify_ldt, &[0, zeroes, 8]),
        refused("pipe2", libc::SYS_pipe2, &[zeroes, 0]),
        refused("splice", libc::SYS_splice, &[0, 0, 1, 0, 1, 0]),
        refused("vmsplice", libc::SYS_vmsplice, &[1, zeroes, 0, 0]),
        harmful("ftruncate", libc::SYS_ftruncate, &[3, 0]),
        harmful("fallocate", libc::SYS_fallocate, &[4, 0, 0, 1 << 30]),
        refused("landlock_create_ruleset", libc::SYS_landlock_create_ruleset, &[0, 0, 1]),
    ]
}

/// Memory that no limit counts (U6).
fn memory() -> Vec<Attempt> {
    let writable = value(libc::PROT_READ | libc::PROT_WRITE);
    let map = |name: &str, flags| {
        refused(
            name,
            libc::SYS_mmap,
            &[0, 2 << 20, writable, value(libc::MAP_ANONYMOUS | flags), value(-1), 0],
        )
    };
    let huge = libc::MAP_PRIVATE | libc::MAP_HUGETLB;
    vec![
        map("mmap that grows", libc::MAP_PRIVATE | libc::MAP_GROWSDOWN),
        // The host may have no such pages to give: refused there as well, but not for our reason.
        Attempt { harmless: false, ..map("mmap of huge pages", huge) },
        map("shared mmap", libc::MAP_SHARED),
    ]
}

fn privileges() -> Vec<Attempt> {
    let header = lasting([0x2008_0522u32, 0]);
    let sets = lasting([u32::MAX; 6]);
    let group = lasting([0u32; 2]);
    // One instruction: everything is allowed.
    let program = lasting([1, lasting([0x7fff_0000_0000_0006u64])]);
    vec![
        refused("setuid", libc::SYS_setuid, &[0]),
        refused("setgid", libc::SYS_setgid, &[0]),
        refused("setreuid", libc::SYS_setreuid, &[0, 0]),
        refused("setresuid", libc::SYS_setresuid, &[0, 0, 0]),
        refused("setgroups", libc::SYS_setgroups, &[1, group]),
        harmful("capset", libc::SYS_capset, &[header, sets]),
        refused("prctl dumpable", libc::SYS_prctl, &[value(libc::PR_SET_DUMPABLE), 1]),
        refused("prctl bounding set", libc::SYS_prctl, &[value(libc::PR_CAPBSET_READ), 0]),
        refused("prctl ambient", libc::SYS_prctl, &[value(libc::PR_CAP_AMBIENT), 1, 0, 0, 0]),
        refused("prctl keep caps", libc::SYS_prctl, &[value(libc::PR_SET_KEEPCAPS), 0]),
        refused("prctl ptracer", libc::SYS_prctl, &[value(libc::PR_SET_PTRACER), 0]),
        refused("prctl no speculation control", libc::SYS_prctl, &[value(libc::PR_GET_SPECULATION_CTRL), 0]),
        refused("personality", libc::SYS_personality, &[0]),
        refused("seccomp strict", libc::SYS_seccomp, &[3, 0, 0]),
        // A filter like any other, of which there could be thousands (U11).
        refused("seccomp", libc::SYS_seccomp, &[1, 0, program]),
        // A filter that writes to the host's log, and one that asks another process (U10).
        refused("seccomp with a log", libc::SYS_seccomp, &[1, 2, program]),
        refused("seccomp with a listener", libc::SYS_seccomp, &[1, 8, program]),
        refused("umask", libc::SYS_umask, &[0]),
        refused("setrlimit", libc::SYS_setrlimit, &[value(-1), 0]),
    ]
}

/// Arguments are such that even the machine's administrator would change nothing.
fn machine() -> Vec<Attempt> {
    let nowhere = address(c"/nonexistent/place");
    let minus = value(-1);
    vec![
        refused("init_module", libc::SYS_init_module, &[0, 0, nowhere]),
        refused("finit_module", libc::SYS_finit_module, &[minus, nowhere, 0]),
        refused("delete_module", libc::SYS_delete_module, &[nowhere, 0]),
        refused("kexec_load", libc::SYS_kexec_load, &[0, 17, 0, minus]),
        refused("kexec_file_load", libc::SYS_kexec_file_load, &[minus, minus, 0, 0, minus]),
        refused("reboot", libc::SYS_reboot, &[0, 0, 0, 0]),
        refused("swapon", libc::SYS_swapon, &[nowhere, 0]),
        refused("swapoff", libc::SYS_swapoff, &[nowhere]),
        refused("acct", libc::SYS_acct, &[nowhere]),
        refused("quotactl", libc::SYS_quotactl, &[0, nowhere, 0, 0]),
        refused("settimeofday", libc::SYS_settimeofday, &[8, 0]),
        refused("clock_settime", libc::SYS_clock_settime, &[0, 8]),
        refused("adjtimex", libc::SYS_adjtimex, &[8]),
        refused("sethostname", libc::SYS_sethostname, &[nowhere, minus]),
        refused("setdomainname", libc::SYS_setdomainname, &[nowhere, minus]),
        refused("ioperm", libc::SYS_ioperm, &[0x80, 0, 0]),
        refused("iopl", libc::SYS_iopl, &[9]),
        refused("syslog", libc::SYS_syslog, &[10, 0, 0]),
        harmful("vhangup", libc::SYS_vhangup, &[]),
        refused("uname", libc::SYS_uname, &[lasting([0u64; 64])]),
        refused("sysinfo", libc::SYS_sysinfo, &[lasting([0u64; 16])]),
        refused("lookup_dcookie", libc::SYS_lookup_dcookie, &[0, 0, 0]),
        refused("nfsservctl", libc::SYS_nfsservctl, &[0]),
    ]
}
