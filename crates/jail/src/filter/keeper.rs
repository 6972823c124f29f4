//! What the keeper may ask of the host's kernel once it is confined: work on descriptors that it already has.
//!
//! Nothing opens, connects, executes, or names a path.

use libc::{
    AT_EMPTY_PATH, F_GETFD, F_GETFL, MAP_ANONYMOUS, MAP_PRIVATE, PROT_EXEC, SIGABRT, SO_DOMAIN, SO_TYPE,
    SOL_SOCKET, SYS_brk, SYS_clock_gettime, SYS_close, SYS_epoll_ctl, SYS_epoll_pwait, SYS_epoll_pwait2,
    SYS_epoll_wait, SYS_exit, SYS_exit_group, SYS_fallocate, SYS_fcntl, SYS_fdatasync, SYS_fstat, SYS_futex,
    SYS_getpid, SYS_getrandom, SYS_getsockopt, SYS_gettid, SYS_lseek, SYS_madvise, SYS_mmap, SYS_mprotect,
    SYS_mremap, SYS_munmap, SYS_newfstatat, SYS_pread64, SYS_preadv, SYS_pwrite64, SYS_pwritev, SYS_read,
    SYS_recvfrom, SYS_recvmsg, SYS_restart_syscall, SYS_rt_sigaction, SYS_rt_sigprocmask, SYS_rt_sigreturn,
    SYS_sched_yield, SYS_sendmsg, SYS_sendto, SYS_shutdown, SYS_sigaltstack, SYS_tgkill, SYS_waitid,
    SYS_write,
};

use super::{Condition, Filter, Group, Otherwise, Test, any, is, only, without};

/// The keeper's filter.
pub const KEEPER: Filter = Filter {
    name: "keeper",
    otherwise: Otherwise::Kill,
    groups: &[
        Group {
            purpose: "wait for devices, clients and the guest",
            rules: &[any(SYS_epoll_wait), any(SYS_epoll_pwait), any(SYS_epoll_pwait2), any(SYS_epoll_ctl)],
        },
        Group {
            purpose: "talk to clients and to the guest's drivers",
            rules: &[
                any(SYS_read),
                any(SYS_write),
                any(SYS_recvmsg),
                any(SYS_recvfrom),
                any(SYS_sendmsg),
                any(SYS_sendto),
                any(SYS_shutdown),
                any(SYS_close),
            ],
        },
        Group {
            purpose: "look at a descriptor that the guest sent",
            rules: &[
                any(SYS_fstat),
                only(
                    SYS_getsockopt,
                    &[&[is(1, SOL_SOCKET), is(2, SO_DOMAIN)], &[is(1, SOL_SOCKET), is(2, SO_TYPE)]],
                ),
                only(SYS_newfstatat, &[&[is(3, AT_EMPTY_PATH)]]),
                only(SYS_fcntl, &[&[is(1, F_GETFL)], &[is(1, F_GETFD)]]),
            ],
        },
        Group {
            purpose: "serve the guest's disks",
            rules: &[
                any(SYS_preadv),
                any(SYS_pwritev),
                any(SYS_pread64),
                any(SYS_pwrite64),
                any(SYS_fallocate),
                any(SYS_fdatasync),
            ],
        },
        Group { purpose: "find what a paused guest's memory occupies", rules: &[any(SYS_lseek)] },
        Group {
            purpose: "manage memory, none of it executable",
            rules: &[
                any(SYS_brk),
                any(SYS_munmap),
                any(SYS_mremap),
                any(SYS_madvise),
                only(
                    SYS_mmap,
                    &[&[
                        without(2, PROT_EXEC),
                        Condition {
                            argument: 3,
                            test: Test::Masked {
                                mask: (MAP_ANONYMOUS | MAP_PRIVATE).cast_unsigned(),
                                value: (MAP_ANONYMOUS | MAP_PRIVATE).cast_unsigned(),
                            },
                        },
                    ]],
                ),
                only(SYS_mprotect, &[&[without(2, PROT_EXEC)]]),
            ],
        },
        Group { purpose: "learn how the guest ended", rules: &[any(SYS_waitid)] },
        Group {
            purpose: "tell the time, draw random numbers for the guest",
            rules: &[any(SYS_clock_gettime), any(SYS_getrandom)],
        },
        Group {
            purpose: "run at all, and end",
            rules: &[
                any(SYS_futex),
                any(SYS_rt_sigreturn),
                any(SYS_rt_sigprocmask),
                any(SYS_rt_sigaction),
                any(SYS_sigaltstack),
                any(SYS_restart_syscall),
                any(SYS_sched_yield),
                any(SYS_getpid),
                any(SYS_gettid),
                only(SYS_tgkill, &[&[is(2, SIGABRT)]]),
                any(SYS_exit),
                any(SYS_exit_group),
            ],
        },
    ],
};
