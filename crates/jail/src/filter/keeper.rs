//! What the keeper may ask of the host's kernel once it is confined: work on descriptors that it already has.
//!
//! Nothing opens, connects, executes, or names a path. A keeper of the kvm engine has threads that run the guest: each
//! has a table of its own, by far the shortest of all.

use libc::{
    AT_EMPTY_PATH, F_GETFD, F_GETFL, MAP_ANONYMOUS, MAP_PRIVATE, MAP_TYPE, PROT_EXEC, SIGABRT, SIGUSR1,
    SO_DOMAIN, SO_TYPE, SOL_SOCKET,
};

use super::{Condition, Filter, Group, Otherwise, Test, UNCOUNTED, is, without};

/// The signal that takes a virtual processor's thread out of the guest.
pub const KICK_SIGNAL: i32 = SIGUSR1;

/// The one request to KVM that is left once a guest is set up: to enter it.
const KVM_RUN: i32 = 0xae80;

pub(super) const WAIT: Group = Group {
    purpose: "wait for events",
    rules: &[any!(SYS_epoll_wait), any!(SYS_epoll_pwait), any!(SYS_epoll_pwait2), any!(SYS_epoll_ctl)],
};

const TALK: Group = Group {
    purpose: "talk to clients and to the guest's drivers",
    rules: &[
        any!(SYS_read),
        any!(SYS_write),
        any!(SYS_recvmsg),
        any!(SYS_recvfrom),
        any!(SYS_sendmsg),
        any!(SYS_sendto),
        any!(SYS_shutdown),
        any!(SYS_close),
    ],
};

const SIZES: Group = Group {
    purpose: "see how much of the host a file occupies, and what a file is",
    rules: &[
        any!(SYS_fstat),
        only!(SYS_newfstatat, &[&[is(3, AT_EMPTY_PATH)]]),
        only!(SYS_fcntl, &[&[is(1, F_GETFL)], &[is(1, F_GETFD)]]),
    ],
};

const GUESTS_DESCRIPTORS: Group = Group {
    purpose: "look at a socket that the guest sent",
    rules: &[only!(
        SYS_getsockopt,
        &[&[is(1, SOL_SOCKET), is(2, SO_DOMAIN)], &[is(1, SOL_SOCKET), is(2, SO_TYPE)]],
    )],
};

const DISKS: Group = Group {
    purpose: "serve the guest's disks",
    rules: &[
        any!(SYS_preadv),
        any!(SYS_pwritev),
        any!(SYS_pread64),
        any!(SYS_pwrite64),
        any!(SYS_fallocate),
        any!(SYS_fdatasync),
    ],
};

const PARKING: Group =
    Group { purpose: "find what a paused guest's memory occupies", rules: &[any!(SYS_lseek)] };

pub(super) const MEMORY: Group = Group {
    purpose: "manage memory, none of it executable",
    rules: &[
        any!(SYS_brk),
        any!(SYS_munmap),
        any!(SYS_mremap),
        any!(SYS_madvise),
        only!(
            SYS_mmap,
            &[&[
                without(2, PROT_EXEC),
                Condition {
                    argument: 3,
                    // Of the kinds that its limit counts (attack U6).
                    test: Test::Masked {
                        mask: (MAP_ANONYMOUS | MAP_TYPE | UNCOUNTED).cast_unsigned(),
                        value: (MAP_ANONYMOUS | MAP_PRIVATE).cast_unsigned(),
                    },
                },
            ]],
        ),
        only!(SYS_mprotect, &[&[without(2, PROT_EXEC)]]),
    ],
};

const GUESTS_END: Group = Group { purpose: "learn how the guest ended", rules: &[any!(SYS_waitid)] };

pub(super) const TIME_AND_CHANCE: Group = Group {
    purpose: "tell the time, draw random numbers",
    rules: &[any!(SYS_clock_gettime), any!(SYS_getrandom)],
};

pub(super) const RUN: Group = Group {
    purpose: "run at all",
    rules: &[
        any!(SYS_futex),
        any!(SYS_rt_sigreturn),
        any!(SYS_rt_sigprocmask),
        any!(SYS_restart_syscall),
        any!(SYS_sched_yield),
        any!(SYS_getpid),
        any!(SYS_gettid),
    ],
};

pub(super) const END: Group = Group {
    purpose: "end",
    rules: &[any!(SYS_rt_sigaction), any!(SYS_sigaltstack), any!(SYS_exit), any!(SYS_exit_group)],
};

pub(super) const ABORT: Group = Group {
    purpose: "end at once after a mistake of its own",
    rules: &[only!(SYS_tgkill, &[&[is(2, SIGABRT)]])],
};

const KICK: Group = Group {
    purpose: "take a virtual processor out of the guest, or end at once after a mistake of its own",
    rules: &[only!(SYS_tgkill, &[&[is(2, KICK_SIGNAL)], &[is(2, SIGABRT)]])],
};

/// The keeper's filter, if the guest is a process of its own.
pub const KEEPER: Filter = Filter {
    name: "keeper",
    otherwise: Otherwise::Kill,
    groups: &[
        WAIT,
        TALK,
        SIZES,
        GUESTS_DESCRIPTORS,
        DISKS,
        PARKING,
        MEMORY,
        GUESTS_END,
        TIME_AND_CHANCE,
        RUN,
        END,
        ABORT,
    ],
};

/// The filter of the keeper's own thread, if the guest is a virtual machine. KVM is not asked for anything any more.
pub const KEEPER_KVM: Filter = Filter {
    name: "keeper-kvm",
    otherwise: Otherwise::Kill,
    groups: &[WAIT, TALK, SIZES, DISKS, PARKING, MEMORY, TIME_AND_CHANCE, RUN, END, KICK],
};

/// The filter of a virtual processor's thread.
pub const VCPU: Filter = Filter {
    name: "vcpu",
    otherwise: Otherwise::Kill,
    groups: &[
        Group { purpose: "enter the guest", rules: &[only!(SYS_ioctl, &[&[is(1, KVM_RUN)]])] },
        Group { purpose: "tell the keeper's thread, and the log", rules: &[any!(SYS_write)] },
        MEMORY,
        RUN,
        ABORT,
        Group { purpose: "end all of the keeper with it", rules: &[any!(SYS_exit_group)] },
    ],
};
