//! What the guest kernel's process, and the processes that run guest programs for it, may ask of the host's kernel.
//!
//! Our kernel patches make it live on inherited descriptors alone: there is no call here that names a path or reaches
//! beyond what the keeper gave it. Guest programs' own system calls do not get to these tables: in seccomp mode they are
//! trapped by their address, in ptrace mode the tracer replaces them. A guest program that jumps into the stub's page gets to
//! the stub's table.

use libc::{
    AF_UNIX, AT_EMPTY_PATH, CLONE_NEWCGROUP, CLONE_NEWIPC, CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWPID,
    CLONE_NEWUSER, CLONE_NEWUTS, F_ADD_SEALS, F_GETFL, F_SETFD, F_SETFL, F_SETOWN, FUTEX_WAIT, FUTEX_WAKE,
    MAP_ANONYMOUS, MAP_FIXED, MAP_POPULATE, MAP_PRIVATE, MAP_SHARED, MAP_TYPE, PR_SET_NAME,
    PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, PROT_WRITE, PTRACE_CONT, PTRACE_GETREGS, PTRACE_GETREGSET,
    PTRACE_GETSIGINFO, PTRACE_KILL, PTRACE_PEEKUSER, PTRACE_POKEUSER, PTRACE_SETOPTIONS, PTRACE_SETREGS,
    PTRACE_SETREGSET, PTRACE_SYSCALL, PTRACE_SYSEMU, PTRACE_SYSEMU_SINGLESTEP, PTRACE_TRACEME,
};

use seccompiler::BpfProgram;

use super::{
    ByAddress, Condition, Filter, FilterError, Group, KERNEL_TEXT, Otherwise, Test, UNCOUNTED, is, without,
};

const NEW_NAMESPACES: i32 =
    CLONE_NEWCGROUP | CLONE_NEWIPC | CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUSER | CLONE_NEWUTS;

/// The argument of `personality` that changes nothing and returns the present one.
const ASK: i32 = -1;

/// Thread-local storage of a guest program.
const ARCH_SET_GS: i32 = 0x1001;
const ARCH_SET_FS: i32 = 0x1002;

/// Which signal announces input.
const F_SETSIG: i32 = 10;

/// The kind of a mapping is in the low bits of its flags.
const PRIVATE: Test =
    Test::Masked { mask: (MAP_TYPE | UNCOUNTED).cast_unsigned(), value: MAP_PRIVATE.cast_unsigned() };

/// The address is in the 16 MiB that the guest kernel's program is in.
const IN_THE_PROGRAM: Condition =
    Condition { argument: 0, test: Test::Wide { mask: !0xff_ffff, value: KERNEL_TEXT.start as u64 } };
/// The length is below 64 KiB.
const LESS_THAN_64_KIB: Condition = Condition { argument: 1, test: Test::Wide { mask: !0xffff, value: 0 } };

const MEMORY: Group = Group {
    purpose: "arrange guest memory, which is the one file it was given",
    rules: &[
        // Anonymous memory that is shared, or grows like a stack, is counted by no limit (attack U6).
        only!(
            SYS_mmap,
            &[&[without(3, UNCOUNTED | MAP_ANONYMOUS)], &[Condition { argument: 3, test: PRIVATE }]],
        ),
        any!(SYS_munmap),
        // A limit of the address space keeps the host's kernel from counting memory that becomes writable after it was mapped
        // (attack U6), so only what is in the guest kernel's program may.
        only!(SYS_mprotect, &[&[without(2, PROT_WRITE)], &[IN_THE_PROGRAM, LESS_THAN_64_KIB]]),
        any!(SYS_madvise),
        any!(SYS_brk),
    ],
};

const EVENTS: Group = Group {
    purpose: "wait, and keep time",
    rules: &[
        any!(SYS_futex),
        any!(SYS_poll),
        any!(SYS_epoll_create),
        any!(SYS_epoll_create1),
        any!(SYS_epoll_ctl),
        any!(SYS_epoll_wait),
        any!(SYS_eventfd2),
        any!(SYS_signalfd4),
        any!(SYS_timer_create),
        any!(SYS_timer_settime),
        any!(SYS_clock_gettime),
        any!(SYS_clock_nanosleep),
        any!(SYS_sched_yield),
    ],
};

const DESCRIPTORS: Group = Group {
    purpose: "use inherited descriptors: console, initramfs, the keeper's devices",
    rules: &[
        any!(SYS_read),
        any!(SYS_write),
        any!(SYS_pread64),
        any!(SYS_lseek),
        any!(SYS_close),
        any!(SYS_close_range),
        any!(SYS_dup2),
        any!(SYS_sendmsg),
        any!(SYS_recvmsg),
        any!(SYS_fstat),
        only!(SYS_newfstatat, &[&[is(3, AT_EMPTY_PATH)]]),
        only!(SYS_socketpair, &[&[is(0, AF_UNIX)]]),
        only!(
            SYS_fcntl,
            &[
                &[is(1, F_SETFD)],
                &[is(1, F_GETFL)],
                &[is(1, F_SETFL)],
                &[is(1, F_SETOWN)],
                &[is(1, F_SETSIG)],
                &[is(1, F_ADD_SEALS)],
            ],
        ),
    ],
};

const SIGNALS: Group = Group {
    purpose: "handle signals, which are the guest's interrupts and faults",
    rules: &[
        any!(SYS_rt_sigaction),
        any!(SYS_rt_sigprocmask),
        any!(SYS_rt_sigreturn),
        any!(SYS_sigaltstack),
        any!(SYS_restart_syscall),
        // Only processes of its own pid namespace can be named.
        any!(SYS_kill),
        any!(SYS_tgkill),
    ],
};

const PROCESSES: Group = Group {
    purpose: "run guest programs in host processes of its own",
    rules: &[
        only!(SYS_clone, &[&[without(0, NEW_NAMESPACES)]]),
        only!(SYS_execveat, &[&[is(4, AT_EMPTY_PATH)]]),
        any!(SYS_wait4),
        any!(SYS_exit),
        any!(SYS_exit_group),
        only!(SYS_prctl, &[&[is(0, PR_SET_PDEATHSIG)], &[is(0, PR_SET_NAME)], &[is(0, PR_SET_NO_NEW_PRIVS)]]),
        any!(SYS_arch_prctl),
    ],
};

const STUB: Group = Group {
    purpose: "run a guest program: hand over to the kernel and back, and map what it says",
    rules: &[
        // Nothing but the one file of guest memory.
        only!(SYS_mmap, &[&[is(3, MAP_SHARED | MAP_FIXED | MAP_POPULATE)]]),
        any!(SYS_munmap),
        only!(SYS_futex, &[&[is(1, FUTEX_WAKE)], &[is(1, FUTEX_WAIT)]]),
        only!(SYS_arch_prctl, &[&[is(0, ARCH_SET_FS)], &[is(0, ARCH_SET_GS)]]),
        any!(SYS_rt_sigreturn),
    ],
};

const START: Group = Group {
    purpose: "start up",
    rules: &[
        any!(SYS_set_tid_address),
        any!(SYS_set_robust_list),
        any!(SYS_getpid),
        any!(SYS_gettid),
        any!(SYS_getrandom),
        // Limits are already hard: they can be read, or lowered.
        any!(SYS_prlimit64),
        only!(SYS_personality, &[&[is(0, ASK)]]),
    ],
};

/// A request of a tracer.
const fn request(number: u32) -> Condition {
    Condition { argument: 0, test: Test::Is(number) }
}

const TRACING: Group = Group {
    purpose: "stop guest programs by tracing them: its own children only, for there is neither attach nor seize",
    rules: &[
        // Asked for once, by the kernel's own check that a tracer can replace a system call.
        any!(SYS_getppid),
        only!(
            SYS_ptrace,
            &[
                &[request(PTRACE_TRACEME)],
                &[request(PTRACE_CONT)],
                &[request(PTRACE_KILL)],
                &[request(PTRACE_SYSCALL)],
                &[request(PTRACE_SYSEMU)],
                &[request(PTRACE_SYSEMU_SINGLESTEP)],
                &[request(PTRACE_SETOPTIONS)],
                &[request(PTRACE_GETSIGINFO)],
                &[request(PTRACE_PEEKUSER)],
                &[request(PTRACE_POKEUSER)],
                &[request(PTRACE_GETREGS)],
                &[request(PTRACE_SETREGS)],
                &[request(PTRACE_GETREGSET)],
                &[request(PTRACE_SETREGSET)],
            ],
        ),
    ],
};

/// A guest's filter, for its kernel and for the host processes that run its programs.
#[derive(Clone, Copy, Debug)]
pub enum GuestFilter {
    /// By the address that a call comes from.
    ByAddress(ByAddress),
    /// The same wherever a call comes from.
    Everywhere(Filter),
}

impl GuestFilter {
    /// What the guest kernel's own code may do.
    pub fn kernel(&self) -> &Filter {
        match self {
            Self::ByAddress(tables) => &tables.kernel,
            Self::Everywhere(table) => table,
        }
    }

    /// The filter as a program for the kernel.
    pub fn compile(&self) -> Result<BpfProgram, FilterError> {
        match self {
            Self::ByAddress(tables) => tables.compile(),
            Self::Everywhere(table) => table.compile(),
        }
    }
}

/// The guest's filter in the default mode. It is the only one: that the guest could add others, whose memory no limit of the
/// sandbox's counts, was attack U11.
pub const GUEST_SECCOMP: GuestFilter = GuestFilter::ByAddress(ByAddress {
    kernel: Filter {
        name: "guest (seccomp mode)",
        otherwise: Otherwise::Refuse,
        groups: &[MEMORY, EVENTS, DESCRIPTORS, SIGNALS, PROCESSES, START],
    },
    stub: Filter { name: "stub", otherwise: Otherwise::Refuse, groups: &[STUB] },
});

/// The guest's filter in ptrace mode.
pub const GUEST_PTRACE: GuestFilter = GuestFilter::Everywhere(Filter {
    name: "guest (ptrace mode)",
    otherwise: Otherwise::Refuse,
    groups: &[MEMORY, EVENTS, DESCRIPTORS, SIGNALS, PROCESSES, START, TRACING],
});
