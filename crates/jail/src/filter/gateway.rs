//! What a gateway may ask of the host's kernel: sockets of IP, and nothing else that reaches out of it.
//!
//! Nothing opens a file, executes, or makes a socket of another family: not even the host's own services, which listen on
//! sockets in the file system or in its abstract name space, can be reached. It binds nothing either: published ports are bound
//! before it starts.

use libc::{
    AF_INET, AF_INET6, F_GETFD, IP_MTU, IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, IPPROTO_UDP, IPV6_MTU,
    SO_ERROR, SO_LINGER, SO_SNDBUF, SOCK_CLOEXEC, SOCK_DGRAM, SOCK_NONBLOCK, SOCK_STREAM, SOL_SOCKET,
    TCP_NODELAY, TCP_USER_TIMEOUT,
};

use super::keeper::{ABORT, END, MEMORY, RUN, TIME_AND_CHANCE, WAIT};
use super::{Condition, Filter, Group, Otherwise, is};

const fn socket(family: i32, kind: i32, protocol: i32) -> [Condition; 3] {
    [is(0, family), is(1, kind | SOCK_CLOEXEC | SOCK_NONBLOCK), is(2, protocol)]
}

const DIAL: Group = Group {
    purpose: "dial out",
    rules: &[
        only!(
            SYS_socket,
            &[
                &socket(AF_INET, SOCK_STREAM, IPPROTO_TCP),
                &socket(AF_INET6, SOCK_STREAM, IPPROTO_TCP),
                &socket(AF_INET, SOCK_DGRAM, IPPROTO_UDP),
                &socket(AF_INET6, SOCK_DGRAM, IPPROTO_UDP),
            ],
        ),
        any!(SYS_connect),
        any!(SYS_getsockname),
        // Queries whether a connection that was ended is closed.
        any!(SYS_getpeername),
        only!(
            SYS_getsockopt,
            &[
                &[is(1, SOL_SOCKET), is(2, SO_ERROR)],
                // Query whether an address is the host's own.
                &[is(1, IPPROTO_IP), is(2, IP_MTU)],
                &[is(1, IPPROTO_IPV6), is(2, IPV6_MTU)],
            ],
        ),
        only!(
            SYS_setsockopt,
            &[
                &[is(1, IPPROTO_TCP), is(2, TCP_NODELAY)],
                &[is(1, SOL_SOCKET), is(2, SO_LINGER)],
                // What the host keeps of what was sent, and for how long (R14).
                &[is(1, SOL_SOCKET), is(2, SO_SNDBUF)],
                &[is(1, IPPROTO_TCP), is(2, TCP_USER_TIMEOUT)],
            ],
        ),
    ],
};

const ANSWER: Group = Group {
    purpose: "answer at published ports",
    rules: &[only!(SYS_accept4, &[&[is(3, SOCK_CLOEXEC | SOCK_NONBLOCK)]])],
};

const MOVE: Group = Group {
    purpose: "move frames, bytes and messages",
    rules: &[
        any!(SYS_recvfrom),
        any!(SYS_sendto),
        any!(SYS_shutdown),
        any!(SYS_close),
        // Builds with assertions look at what they close.
        only!(SYS_fcntl, &[&[is(1, F_GETFD)]]),
    ],
};

/// The filter of the gateway's process, which has one thread.
pub const GATEWAY: Filter = Filter {
    name: "gateway",
    otherwise: Otherwise::Kill,
    groups: &[WAIT, DIAL, ANSWER, MOVE, MEMORY, TIME_AND_CHANCE, RUN, END, ABORT],
};
